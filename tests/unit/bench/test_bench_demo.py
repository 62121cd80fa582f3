import importlib
import io
import json
import sys
from array import array
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("aiohttp")

from kvxfer.bench import command, demo, marks, verdict
from kvxfer.bench.client import Completion
from kvxfer.bench.counts import Moved
from kvxfer.bench.demo import Demo, _Progress
from kvxfer.bench.machine import machine, versions
from kvxfer.bench.process import ServerError

ANSWER = Completion(token_ids=(1, 2, 3, 4, 5), text="x", seconds=0.5, ttft=0.25, tpot=0.0125)
MOVED = Moved("a", 300, 10, 2_621_440, 40, 1, ("LIBFABRIC",), ("done",))


def row(**fields):
    base = {
        "prompt_tokens": 300, "reference": (1, 2, 3, 4, 5), "answer": (1, 2, 3, 4, 5), "bytes_expected": 10,
        "bytes_moved": 10, "descriptors": 3, "backends": ("LIBFABRIC",),
    }  # fmt: skip
    return verdict.Row(**base | fields)


def new_demo(tmp_path):
    return Demo(Console(file=io.StringIO()), tmp_path, sys.executable)


def test_the_report_has_what_readers_look_for_and_is_json(tmp_path):
    one = new_demo(tmp_path)
    one.outcome.rows = {"push": [row(), row(answer=(9,), bytes_moved=11)], "pull": [row(backends=("UCX",)), row()]}
    one.outcome.sensitivity = verdict.Sensitivity((1,), (1,), (2,), (3,), (3,))
    demo.write_json(tmp_path / "deep" / "out.json", one.report(["no"]))
    report = json.loads((tmp_path / "deep" / "out.json").read_text())
    push, pull = report["modes"]["push"], report["modes"]["pull"]
    assert (push["requests"], push["identical"], push["bytes"], push["expected_bytes"]) == (2, 1, 21, 20)
    assert (push["backend"], push["descriptors"], pull["backend"]) == ("LIBFABRIC", 6, "LIBFABRIC+UCX")
    sensitivity = report["sensitivity"]
    assert sensitivity["misplaced_differs"] is True
    assert sensitivity["placed_identical"] is True
    assert sensitivity["early_token_differs"] is False
    assert (report["passed"], report["complaints"]) == (False, ["no"])
    assert report["versions"]["python"].startswith("3.")
    assert report["machine"]["cores"] >= 1


def test_a_run_cut_short_has_a_report_too(tmp_path):
    assert json.dumps(new_demo(tmp_path).report(["died"]))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_every_row_on_a_terminal_and_in_a_file(terminal):
    out = io.StringIO()
    with _Progress(Console(file=out, force_terminal=terminal, width=120), "push: a pair") as progress:
        progress.add(300, ANSWER, MOVED, identical=True)
        progress.add(1000, ANSWER, MOVED, identical=False)
        progress.add(31, ANSWER, None, None)
    for text in ("push: a pair", "1,000", "2.62 MB", "40", "250 ms", "12.5 ms", "yes", "NO", "reference"):
        assert text in out.getvalue()


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(execute):
        monkeypatch.setattr(Demo, "execute", execute)
        app = typer.Typer()
        command.register(app)
        out = tmp_path / "out.json"
        result = CliRunner().invoke(app, ["demo", "--json", str(out), "--logs", str(tmp_path / "logs")])
        return result, json.loads(out.read_text())

    return run


def test_the_command_succeeds_when_nothing_is_wrong(run):
    result, report = run(lambda _self: [])
    assert result.exit_code == 0
    assert "passed" in result.output
    assert report["passed"] is True


def test_the_command_fails_and_says_why(run):
    result, report = run(lambda _self: ["push: [12] bytes are missing"])
    assert result.exit_code == 1
    assert "push: [12] bytes are missing" in result.output
    assert report["complaints"] == ["push: [12] bytes are missing"]


def test_the_command_reports_an_engine_that_died(run):
    def execute(_self):
        raise ServerError(
            "push-prefill ended with status 1 before it was ready; the end of its log: [red]out of memory"
        )

    result, report = run(execute)
    assert result.exit_code == 1
    assert "[red]out of memory" in result.output
    assert report["passed"] is False


def test_bench_has_its_commands_and_says_what_is_wrong():
    app = typer.Typer()
    command.register(app)
    assert {one.name or one.callback.__name__ for one in command.bench.registered_commands} >= {"idle", "model"}
    result = CliRunner().invoke(app, ["bench", "idle", "--connectors", "none,tcp"])
    assert result.exit_code == 1
    assert "'tcp' is none of none, push, pull" in result.output


def test_versions_and_machine_are_known():
    assert versions()["kvxfer"]
    assert machine()["memory_bytes"] > 2**28


def test_the_misplacing_connector_misplaces_marked_requests_only(monkeypatch):
    # In place of the module that imports vLLM.
    connectors = SimpleNamespace(KvxferPushConnector=type("KvxferPushConnector", (), {}))
    monkeypatch.setitem(sys.modules, "kvxfer.connector.connectors", connectors)
    monkeypatch.delitem(sys.modules, marks.MODULE, raising=False)
    misplace = importlib.import_module(marks.MODULE)
    monkeypatch.delitem(sys.modules, marks.MODULE)
    half = object.__new__(getattr(misplace, marks.CONNECTOR).scheduler_half)
    ids = array("i", [7, 8, 9])
    assert half.registered_blocks("cmpl-4f1d-0-0a1b2c3d", ids) == ids
    assert half.registered_blocks(f"cmpl-{marks.MISPLACED}-4f1d-0-0a1b2c3d", ids) == array("i", [9, 8, 7])
