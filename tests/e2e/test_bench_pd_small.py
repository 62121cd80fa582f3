"""``kvxfer bench pd --small`` with real engines: what it says of them agrees with itself, and every token with one engine alone."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from typer.testing import CliRunner

from kvxfer.bench import engines, results
from kvxfer.bench.command import bench
from kvxfer.bench.model import Recipe, build
from kvxfer.bench.process import free_ports, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PYTHON = os.environ.get("KVXFER_E2E_PYTHON", sys.executable)


@pytest.mark.slow
def test_push_and_pull_beside_one_engine_alone(tmp_path) -> None:
    out = tmp_path / "pd.json"
    done = CliRunner().invoke(
        bench,
        ["pd", "--small", "--arms", "alone,push,pull", "--inputs", "200,700", "--repeats", "2", "--output", "8",
         "--load", "300@4x6", "--trace", "mixed", "--verify", "3", "--crowd", "6", "--longest", "1500", "--verify-output", "16",
         "--budget", "512", "--python", PYTHON, "--json", str(out), "--logs", str(tmp_path)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = results.read(out, "pd")
    assert found["complaints"] == []
    assert [point["name"] for point in found["points"]] == ["200", "700", "mixed300@4"]
    per_token = Recipe().kv_bytes_per_token()
    for point, requests in zip(found["points"], (2, 2, 6), strict=True):
        assert set(point["arms"]) == {"alone", "push", "pull"}
        for label, arm in point["arms"].items():
            assert (arm["requests"], arm["failed"], arm["prefix_hits"]) == (requests, 0, 0)
            assert arm["ttft_ms"]["n"] == requests
            gaps = sum(len(sample.get("gaps", ())) for sample in arm["samples"])  # none where all came in one event
            assert (arm["itl_ms"] or {"n": 0})["n"] == gaps
            if label == "alone":
                continue
            handoffs = arm["handoffs"]
            assert (handoffs["recorded"], handoffs["outcomes"], handoffs["backends"]) == (
                requests,
                ["done"],
                ["LIBFABRIC"],
            )
            # Whole blocks of 32 positions move, all but the last token's.
            blocks = sum(-(-(sample["input"] - 1) // 32) for sample in arm["samples"])
            assert 0 < handoffs["bytes"] <= blocks * 32 * per_token
            assert handoffs["bytes"] >= (blocks - requests) * 32 * per_token
            assert handoffs["fence_to_report_ms"]["n"] == requests
            assert handoffs["fence_to_report_ms"]["least"] > 0
            for sample in arm["samples"]:
                assert sample["ttft"] >= sample["transfer"]["fence_to_report"]
            if label == "pull":
                assert all(sample["ttft"] > sample["prefill"] for sample in arm["samples"])
    told = found["verified"]
    assert told["reference"]["changed_by_an_early_token"] == 3
    for label in ("push", "pull"):
        assert told["arms"][label]["one_by_one"]["identical"] == 3
        assert told["arms"][label]["crowd"]["identical"] == 6
    assert found["arms"]["push"]["layouts"] == ["layer-major"], "all that vLLM's attention on a CPU has"


def test_a_pair_that_runs_already_is_measured_by_its_addresses(tmp_path) -> None:
    out, ports = tmp_path / "pd.json", free_ports(4)
    specs = engines.pair_specs("push", build(), python=PYTHON, max_model_len=2048, num_blocks=200)
    prefill, decode = (
        engines.make_engine(spec, tmp_path, ports[at : at + 2]) for spec, at in zip(specs, (0, 2), strict=True)
    )
    control = f"{prefill.spec.name}@127.0.0.1:{prefill.control_port},127.0.0.1:{decode.control_port}"
    with running(prefill.server, decode.server):
        done = CliRunner().invoke(
            bench,
            ["pd", "--small", "--running", f"push@{prefill.url},{decode.url},{control}", "--running", f"alone@{prefill.url}",
             "--served-model-name", engines.MODEL_NAME, "--inputs", "300", "--repeats", "3", "--output", "4", "--verify", "2",
             "--longest", "600", "--json", str(out)],
        )  # fmt: skip
        assert prefill.server.running(), "whoever started it ends it"
    assert done.exit_code == 0, done.output
    (point,) = results.read(out, "pd")["points"]
    assert point["arms"]["push"]["handoffs"]["outcomes"] == ["done"]
    for sample in point["arms"]["push"]["samples"]:
        assert sum(sample["stages"].values()) == pytest.approx(sample["ttft"])
        assert list(sample["stages"])[-1] == "decode's first token"
