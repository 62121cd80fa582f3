"""``kvxfer trace``: what it says of handoffs in flight and of those that ended, and when it says it again."""

from __future__ import annotations

import io
import json
from collections import deque

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from kvxfer.errors import TransportError
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.messages import ReportAsk
from kvxfer.transport import command, query, trace
from kvxfer.transport.query import EngineReport, RankReport, fetch_records
from kvxfer.transport.records import MOST_MOMENTS, HandoffRecord, Times
from kvxfer.transport.twin import TwinFabric
from tests.support.ranks import Rank, wait_until


def report(*records: HandoffRecord, now: float = 20.0) -> EngineReport:
    return EngineReport("e", [RankReport(0, None, "LIBFABRIC", {}, list(records), now)])


def sink(name: str = "s", outcome: str = "open", reason: str = "", **times: float) -> HandoffRecord:
    return HandoffRecord(name, "r", "sink", 0, "push", outcome=outcome, reason=reason, times=Times(**times))


def source(name: str = "p", mode: str = "push", outcome: str = "open", **times: float) -> HandoffRecord:
    return HandoffRecord(name, "r", "source", 0, mode, outcome=outcome, times=Times(**times))


@pytest.mark.parametrize(
    ("record", "stage", "seconds"),
    [
        (sink(expected=19.0), "registering", 1.0),
        (sink(expected=19.0, allocated=19.1, registered=19.2), "wait for KV", 1.0),
        (sink(expected=19.0, registered=19.2, notified=19.5), "transfer", 1.0),
        (sink(expected=19.0, registered=19.2, released=19.5, outcome="done"), "done", 0.5),
        (sink(expected=19.0, released=19.5, outcome="failed", reason="gone"), "failed: gone", 0.5),
        (sink(expected=19.0, outcome="fencing", reason="lost"), "ending, fencing: lost", 1.0),
        (sink(), "registering", None),
        (source(expected=19.0), "registration wait", 1.0),
        (source(expected=19.0, registered=19.5), "prefill", 1.0),
        (source(expected=19.0, registered=19.5, sealed=19.7, mode="pull"), "wait for the read", 1.0),
        (source(expected=19.0, registered=19.5, first_post=19.7), "transfer", 1.0),
        (source(expected=21.0), "registration wait", None),
    ],
)
def test_what_a_handoff_waits_for(record, stage, seconds) -> None:
    (one,) = trace.seen(report(record))
    assert (one.stage, one.seconds if one.seconds is None else round(one.seconds, 6)) == (stage, seconds)


def test_a_handoff_is_said_when_it_is_new_and_when_its_stage_changes_only() -> None:
    first, moving, over = (
        sink(expected=1.0),
        sink(expected=1.0, registered=2.0),
        sink(expected=1.0, registered=2.0, released=3.0, outcome="done"),
    )
    again = sink(expected=9.0)  # the same id once more
    looks = iter([report(), report(first), report(first), report(moving), report(over), report(over, again)])
    assert [one.stage for one in trace.changes(looks)] == ["registering", "wait for KV", "done", "registering"]


def run(monkeypatch, *arguments: str, answers=None):
    answers = iter(answers or [report(sink(expected=19.0), sink("old", expected=10.0, released=11.0, outcome="done"))])

    def fetch(host, port, **options):
        one = next(answers)
        if isinstance(one, BaseException):
            raise one
        return one

    monkeypatch.setattr(query, "fetch_records", fetch)
    monkeypatch.setattr(trace.time, "sleep", lambda _seconds: None)
    for name in ("KVXFER_SECRET", "KVXFER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    app = typer.Typer()
    command.register(app)
    return CliRunner().invoke(app, ["trace", *arguments])


def test_once_prints_a_line_a_handoff_the_open_ones_last(monkeypatch) -> None:
    result = run(monkeypatch, "h:1", "--once")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == ["old", "s"]
    assert "registering 1,000.0 ms" in result.output


def test_json_is_one_object_a_line(monkeypatch) -> None:
    result = run(monkeypatch, "h:1", "--once", "--json")
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [(one["handoff"], one["stage"], one["seconds"]) for one in lines] == [
        ("old", "done", 1.0),
        ("s", "registering", 1.0),
    ]


def test_without_once_it_goes_on_until_the_engine_is_gone_or_somebody_ends_it(monkeypatch) -> None:
    two = [report(sink(expected=1.0)), report(sink(expected=1.0, registered=2.0))]
    gone = run(monkeypatch, "h:1", answers=[*two, TransportError("nothing at h:1 answered")])
    assert gone.exit_code == 1
    assert gone.output.count("\n") == 3
    assert "nothing at h:1 answered" in gone.output
    ended = run(monkeypatch, "h:1", answers=[*two, KeyboardInterrupt()])
    assert (ended.exit_code, ended.output.count("\n")) == (0, 2)


def test_what_is_no_address_is_refused(monkeypatch) -> None:
    assert run(monkeypatch, "h").exit_code == 2


def test_the_table_of_a_terminal_has_all_of_them() -> None:
    from rich.console import Console

    console = Console(record=True, width=200, file=io.StringIO())
    console.print(trace.table(report(sink(expected=19.0), sink("old", expected=10.0, released=11.0, outcome="done"))))
    text = console.export_text()
    assert "e: 1 in flight, 1 finished before them" in text
    assert "registering" in text
    assert "1,000.0" in text


def test_what_engines_say_is_shown_as_it_is(monkeypatch) -> None:
    from rich.console import Console

    name, why, engine = "[/b]id[red]", "no [/] such [b]", "e[/z]"
    said = EngineReport(engine, [RankReport(0, None, "", {}, [sink(name, outcome="failed", reason=why, released=2.0)])])
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(trace.table(said))
    text = console.export_text()
    assert [one for one in (name, why, engine) if one not in text] == []
    monkeypatch.setattr(query, "fetch_records", lambda *_, **__: said)
    app = typer.Typer()
    command.register(app)
    result = CliRunner().invoke(app, ["records", "h:1"])
    assert result.exit_code == 0
    assert [one for one in (name, why, engine) if one not in result.output] == []


@pytest.mark.parametrize("wrong", [{"records": [{"handoff": 7}]}, {"card": {}}])
def test_a_report_that_is_not_understood_is_one_line(monkeypatch, wrong) -> None:
    fabric = TwinFabric()
    p = Rank("p", fabric, mode="push")
    ask = query._Asker.ask

    def other(asker, host, port, question, answer):
        found = ask(asker, host, port, question, answer)
        return msgspec.structs.replace(found, **wrong) if isinstance(question, ReportAsk) else found

    monkeypatch.setattr(query._Asker, "ask", other)
    try:
        with pytest.raises(TransportError, match="is not understood"):
            fetch_records(p.control.host, p.control.port)
    finally:
        p.close()


def test_records_of_long_prompts_that_fit_into_no_message_are_left_out_and_the_last_ones_come() -> None:
    p = Rank("p", TwinFabric(), mode="push")
    book = p.mover.records
    book._ended = deque(maxlen=5000)
    try:
        for number in range(4096):
            name = HandoffId(f"h{number}")
            record = book.open("source", name, 0, "push")
            record.times.chunks_final = [1.5] * MOST_MOMENTS
            record.completed = [(1.5, 1 << 40)] * MOST_MOMENTS
            book.end("source", name, "done", "", 2.0)
        for last in (4096, 1 << 70):
            found = fetch_records(p.control.host, p.control.port, last=last).records
            assert 500 < len(found) < 4096
            assert found[-1].handoff == "h4095"
            assert len(found) == 4096 - int(found[0].handoff[1:])
        assert len(fetch_records(p.control.host, p.control.port, last=7).records) == 7
    finally:
        p.close()


def test_a_real_engines_handoffs_in_flight_have_an_age_by_its_own_clock() -> None:
    fabric = TwinFabric()
    p, d = (Rank(name, fabric, mode="push") for name in "pd")
    try:
        d.open(HandoffId("x"), "d1", p.address, [5], 4)
        wait_until(lambda: p.mover.source.state(HandoffId("x")) is not None, what="the registration")
        (one,) = trace.seen(fetch_records(d.control.host, d.control.port))
        assert (one.stage, one.open) == ("wait for KV", True)
        assert one.seconds is not None
        assert 0 <= one.seconds < 60
    finally:
        p.close()
        d.close()


@pytest.mark.parametrize("interval", ["nan", "inf", "0"])
def test_an_interval_that_is_no_time_is_refused(monkeypatch, interval) -> None:
    result = run(monkeypatch, "h:1", "--interval", interval, answers=[])
    assert result.exit_code == 2
    assert "--interval" in result.output
