"""Each version of vLLM whose sources are at hand: the contract tests once more, with that version's own classes.

Its base class, schedulers, block pool, and both runners' hooks are Python, and run beside any recent torch without vLLM's
compiled kernels. ``scripts/fetch_vllm_sources.sh`` unpacks versions; ``KVXFER_VLLM_SOURCES`` names the directory with one folder each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.contract.recorded_doubles import read
from tests.contract.test_recorded_versions import recorder

pytestmark = [pytest.mark.contract, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("KVXFER_VLLM_SOURCES")
FOUND = sorted(path.parent for path in Path(SOURCES).glob("*/vllm")) if SOURCES else []

if not FOUND:
    pytest.skip("KVXFER_VLLM_SOURCES names no directory with versions of vLLM", allow_module_level=True)

each = pytest.mark.parametrize("sources", FOUND, ids=lambda path: path.name)

SUITES = (
    "test_hooks.py",
    "test_async_scheduling.py",
    "test_without_features.py",
    "test_pins.py",
    "test_streaming.py",
    "test_quiet_steps.py",
    "test_counted.py",
    "test_plugin.py",
    "test_neuron_engine.py",
    "test_scheduler_modes.py",
)


@each
def test_it_is_as_it_was_recorded(sources) -> None:
    assert recorder().record(sources) == read(sources.name)


@each
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", SUITES)
def test_the_contract_tests_pass_on_it(sources, suite) -> None:
    path = [str(sources), str(ROOT), str(ROOT / "platforms"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    where = subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('vllm').origin)"],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(sources), "another vLLM came first"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/contract/{suite}"],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b\d+ passed", done.stdout)
