import contextlib
import importlib
import io
import json
import sys
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("aiohttp")

from kvxfer.bench import command, demo, marks, results, verdict
from kvxfer.bench.client import Completion
from kvxfer.bench.counts import Moved
from kvxfer.bench.demo import Demo, _Progress
from kvxfer.bench.machine import machine, versions
from kvxfer.bench.model import Recipe
from kvxfer.bench.process import ServerError
from kvxfer.layout.tables import Shape, Tables, packed

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
    results.write(tmp_path / "deep" / "out.json", one.report(["no"]))
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
    assert versions()["python"].startswith("3.")
    assert machine()["memory_bytes"] > 2**28


def test_the_misplacing_connector_misplaces_marked_requests_only(monkeypatch):
    # In place of the module that imports vLLM.
    connectors = SimpleNamespace(KvxferPushConnector=type("KvxferPushConnector", (), {}))
    monkeypatch.setitem(sys.modules, "kvxfer.connector.connectors", connectors)
    monkeypatch.delitem(sys.modules, marks.MODULE, raising=False)
    misplace = importlib.import_module(marks.MODULE)
    monkeypatch.delitem(sys.modules, marks.MODULE)
    half = object.__new__(getattr(misplace, marks.CONNECTOR).scheduler_half)
    half._tables = Tables([Shape(16)])
    of = [[7, 8, 9]], 0, 40
    assert half.registered_blocks("cmpl-4f1d-0-0a1b2c3d", *of) == packed([7, 8, 9])
    assert half.registered_blocks(f"cmpl-{marks.MISPLACED}-4f1d-0-0a1b2c3d", *of) == packed([9, 8, 7])


class FakePair:
    """A reference and two pairs whose answers and records are made up; ``spoil`` changes what a pair does."""

    def __init__(self, monkeypatch, spoil=lambda _kind, value: value):
        self.spoil = spoil
        self.asked = []
        monkeypatch.setattr(demo, "build", lambda _recipe: "model")
        monkeypatch.setattr(demo, "running", lambda *servers: contextlib.nullcontext([1.0] * len(servers)))
        monkeypatch.setattr(demo, "make_engine", lambda _spec, _logs: self.engine("reference"))
        monkeypatch.setattr(demo, "make_pair", self.make_pair)
        monkeypatch.setattr(demo, "Client", lambda url: FakeClient(self, url))
        monkeypatch.setattr(demo, "Counters", lambda *_: FakeCounters(self))

    def engine(self, name):
        spec = SimpleNamespace(name=name)
        return SimpleNamespace(url=name, server=name, spec=spec, control_host="127.0.0.1", control_port=7)

    def make_pair(self, mode, prefill, decode, _logs):
        self.specs = {**getattr(self, "specs", {}), mode: (prefill, decode)}
        return self.engine("prefill"), self.engine("decode"), SimpleNamespace(url="router")


class FakeClient:
    def __init__(self, pair, url):
        self.pair, self.url = pair, url

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def complete(self, prompt, max_tokens, **more):
        self.pair.asked.append((self.url, len(prompt), more))
        tokens = tuple((sum(prompt) * 31 + len(prompt) * 7 + step * 11) % 1021 for step in range(max_tokens))
        if "misplaced" in more.get("headers", {}).get("X-Request-Id", ""):
            tokens = (*tokens[:-1], tokens[-1] + 1)
        if self.url != "reference":
            tokens = self.pair.spoil("tokens", tokens)
        self.pair.last = len(prompt)
        return Completion(token_ids=tokens, text="", seconds=0.1, ttft=0.1, tpot=0.01)


class FakeCounters:
    def __init__(self, pair):
        self.pair = pair
        block_bytes = Recipe().kv_bytes_per_token() * 32
        bytes_for = lambda start, end: -(-(end - start) // 32) * block_bytes  # noqa: E731
        self.caches = (SimpleNamespace(block_bytes=block_bytes, bytes_for=bytes_for),)

    def next_moved(self):
        blocks = -(-(self.pair.last - 1) // 32)  # the last token is decode's own
        moved = self.pair.spoil("bytes", blocks * self.caches[0].block_bytes)
        return Moved(
            "x", self.pair.last, blocks, moved, blocks, 1, (self.pair.spoil("backend", "LIBFABRIC"),), ("done",)
        )


def test_a_whole_run_passes_and_asks_what_it_should(tmp_path, monkeypatch):
    pair = FakePair(monkeypatch)
    one = new_demo(tmp_path)
    assert one.execute() == []
    for url in ("reference", "router"):
        lengths = [length for asked, length, _ in pair.asked if asked == url]
        assert [n for n in lengths if n != 8][: len(demo.PROMPTS)] == list(demo.PROMPTS)
    report = one.report([])
    assert {mode: (r["requests"], r["identical"]) for mode, r in report["modes"].items()} == {
        "push": (12, 12), "pull": (12, 12),
    }  # fmt: skip
    assert report["start_seconds"].keys() == {"reference", "push", "pull"}
    assert pair.specs["push"][1].connector_module == marks.MODULE
    assert pair.specs["push"][0].connector_module == pair.specs["pull"][1].connector_module == "kvxfer.connector"
    by_hand = [(url, more) for url, _, more in pair.asked if "headers" in more]
    assert [url for url, _ in by_hand] == ["prefill", "decode"] * 2
    for _, more in by_hand:
        assert more["extra"]["kv_transfer_params"]["transfer_id"] == more["headers"]["X-Request-Id"]
    sink = by_hand[1][1]["extra"]["kv_transfer_params"]
    assert (sink["remote_engine_id"], sink["remote_host"], sink["remote_port"]) == ("prefill", "127.0.0.1", 7)


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("tokens", lambda tokens: (*tokens[:-1], tokens[-1] + 1), "differs from the reference"),
        ("bytes", lambda moved: moved - 1, "bytes were moved"),
        ("backend", lambda _: "UCX", "not by LIBFABRIC"),
    ],
)
def test_a_whole_run_fails_for_one_wrong_thing(tmp_path, monkeypatch, kind, change, text):
    FakePair(monkeypatch, lambda seen, value: change(value) if seen == kind else value)
    complaints = new_demo(tmp_path).execute()
    assert len([one for one in complaints if text in one]) >= 24
