"""The reproduction scripts in small, for real: engines, router, vLLM's own load, results, pictures and the page. Some minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.bench import results

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(directory: Path, *command: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHON": sys.executable, "LOCAL": "1", "RESULTS_DIR": str(directory), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def processes() -> set[str]:
    """vLLM engines and routers that use the scripts' ports."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(f"--port {port}" in line for port in (18100, 18200, 18000)):
            found.add(line)
    return found


def test_a_sweep_of_both_modes_its_plot_and_its_page(tmp_path) -> None:
    small = {"QPS_LIST": "1 2", "INPUT_LENS": "300", "OUTPUT_LENS": "8", "NUM_PROMPTS": "4"}
    for mode in ("pull", "push"):
        run(tmp_path, "bash", str(SCRIPTS / "run_sweep.sh"), MODE=mode, **small)
        assert processes() == set(), "everything that was started has ended"
    for mode in ("pull", "push"):
        for qps in (1, 2):
            found = results.read(tmp_path / f"{mode}_qps{qps}_in300_out8_iter1.json", "sweep")
            (point,) = found["points"]
            assert (point["input"], point["output"], point["qps"]) == (300, 8, qps)
            arm = point["arms"][mode]
            assert (arm["requests"], arm["failed"], arm["prefix_hits"], arm["ttft_ms"]["n"]) == (4, 0, 0, 4)
            assert arm["handoffs"]["recorded"] >= 4
            assert (arm["handoffs"]["outcomes"], arm["handoffs"]["backends"]) == (["done"], ["LIBFABRIC"])
            assert found["complaints"] == []
    run(tmp_path, sys.executable, "-m", "kvxfer.cli", "report", str(tmp_path), "-o", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert 'data-point="300@2" data-arm="push"' in page


def test_conversations_without_and_with_reuse(tmp_path) -> None:
    small = {"CONVERSATIONS": "2", "TURNS": "3", "FIRST_TOKENS": "300", "TURN_TOKENS": "100", "ANSWER_TOKENS": "8"}
    lengths = [300 + turn * 108 for turn in range(3)]
    turns = {}
    for leg in ("off", "on"):
        run(tmp_path, "bash", str(SCRIPTS / "run_multiturn_sweep.sh"), LEG=leg, **small)
        assert processes() == set()
        turns[leg] = results.read(tmp_path / f"multiturn_{leg}_iter1.json", "multiturn")["turns"]
        assert [turn["prompt_tokens"]["median"] for turn in turns[leg]] == lengths
    # Prefill's prefix cache is off, and without reuse it takes nothing back: it computes every prompt whole.
    assert [turn["tokens_computed"] for turn in turns["off"]] == [2 * length for length in lengths]
    assert [turn["tokens_taken_back"] for turn in turns["off"]] == [0, 0, 0]
    # With it every later turn takes back what decode holds of the one before, in whole blocks of 32, and computes the rest.
    assert turns["on"][0]["tokens_taken_back"] == 0
    for turn, before in zip(turns["on"][1:], lengths, strict=False):
        assert turn["tokens_taken_back"] >= 2 * (before // 32 * 32 - 32)
    for turn, length in zip(turns["on"], lengths, strict=True):
        assert turn["tokens_computed"] + turn["tokens_taken_back"] == 2 * length
    for leg in ("off", "on"):
        assert (tmp_path / f"multiturn_{leg}_iter1.log").exists()
