"""Records that end: to whom they are told, to a file that may be moved, and to spans."""

from __future__ import annotations

import json
import os
import threading

import pytest

from kvxfer.errors import ConfigError
from kvxfer.layout.tables import packed
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.transport import commands as cmd
from kvxfer.transport.journal import Journal, Lines, epoch
from kvxfer.transport.records import HandoffRecord, RecordBook, Times
from kvxfer.transport.stages import STAGES, stages, whole
from kvxfer.transport.twin import TwinFabric
from tests.support.ranks import Rank, wait_until

ME = RankId("prefill/0", "abc", 1)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(handoff: str = "h", *, side: str = "sink", outcome: str = "done", trace: str = "") -> HandoffRecord:
    times = Times(expected=1.0, allocated=2.0, registered=3.5, notified=5.0, released=6.0)
    return HandoffRecord(handoff, "r", side, 0, "push", tokens=5, outcome=outcome, times=times, trace=trace)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- whom the book tells --------------------------------------------------------------------------------------------


def test_each_record_is_told_once_when_it_has_ended_and_a_defect_of_who_hears_it_harms_nobody() -> None:
    heard = []

    def fails(_record):
        raise ValueError

    book = RecordBook(1, [fails, heard.append])
    for name in "ab":
        book.open("sink", HandoffId(name), 0, "push")
    assert heard == []
    for name in "aba":
        book.end("sink", HandoffId(name), "done", "", 1.0)
    assert [(one.handoff, one.outcome, one.times.released) for one in heard] == [("a", "done", 1.0), ("b", "done", 1.0)]
    assert [one.handoff for one in book.last(10)] == ["b"]


def test_a_real_handoff_is_heard_on_both_sides_with_its_trace_and_its_stages() -> None:
    heard: list[HandoffRecord] = []
    fabric = TwinFabric()
    p, d = (Rank(name, fabric, mode="push") for name in "pd")
    try:
        for one in (p, d):
            one.mover.records._hear = [heard.append]
        p.fill([3, 4], 1)
        d.begin(opened=[cmd.SinkOpen(HandoffId("x"), "d1", p.address, 0, 8, packed([5, 6]), 1.0, 2.0, trace=TRACE)])
        p.begin(started=[cmd.SourceStart(HandoffId("x"), "p1", 8, 1.0, trace=TRACE)])
        p.begin(progress=[cmd.SourceProgress("p1", packed([3, 4]), 8)])
        p.end()
        p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
        d.wait("d1")
        p.wait("p1")
    finally:
        p.close()
        d.close()
    by_side = {one.side: one for one in heard}
    assert len(heard) == 2
    assert {one.trace for one in heard} == {TRACE}
    assert [stage.name for stage in stages(by_side["sink"])] == ["decode queue", "registration", "wait for KV"]
    assert [stage.name for stage in stages(by_side["source"])] == list(STAGES["source"])
    assert all(whole(one) is not None for one in heard)


# --- lines ----------------------------------------------------------------------------------------------------------


def test_lines_are_appended_and_the_file_is_opened_anew_when_it_was_moved_or_removed(tmp_path) -> None:
    lines = Lines(tmp_path / "made", ME)
    path = tmp_path / "made" / "prefill_0-rank1.jsonl"
    lines.write([record("a"), record("b")])
    path.rename(tmp_path / "old")
    lines.write([record("c")])
    assert [one["handoff"] for one in read(tmp_path / "old")] == ["a", "b"]
    assert [one["handoff"] for one in read(path)] == ["c"]
    path.unlink()
    lines.write([record("d")])
    lines.close()
    again = Lines(tmp_path / "made", ME)
    again.write([record("e")])
    again.close()
    found = read(path)
    assert [one["handoff"] for one in found] == ["d", "e"]
    assert (found[0]["engine"], found[0]["incarnation"], found[0]["times"]["released"]) == ("prefill/0", "abc", 6.0)
    assert abs(found[0]["epoch"] - epoch()) < 1.0


def test_what_cannot_be_written_is_told_once_and_it_goes_on_when_it_can(tmp_path, monkeypatch, caplog) -> None:
    lines = Lines(tmp_path, ME)
    real = os.write

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvxfer.transport.journal.os.write", full)
    lines.write([record("a")])
    lines.write([record("b")])
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    monkeypatch.setattr("kvxfer.transport.journal.os.write", lambda fd, text: real(fd, text[:7]))  # in small parts
    lines.write([record("c")])
    lines.close()
    assert [one["handoff"] for one in read(tmp_path / "prefill_0-rank1.jsonl")] == ["c"]


def test_a_file_that_cannot_be_opened_anew_is_closed_once(tmp_path) -> None:
    lines = Lines(tmp_path / "made", ME)
    (tmp_path / "made" / "prefill_0-rank1.jsonl").unlink()
    (tmp_path / "made").rmdir()
    lines.write([record("a")])
    with (tmp_path / "of somebody else").open("w") as other:  # which has the number of the one that was closed
        lines.write([record("b")])
        lines.close()
        assert os.fstat(other.fileno()).st_size == 0
    lines = Lines(tmp_path / "made", ME)
    (tmp_path / "made" / "prefill_0-rank1.jsonl").unlink()
    (tmp_path / "made").rmdir()
    lines.write([record("c")])
    (tmp_path / "made").mkdir()
    lines.write([record("d")])
    lines.close()
    assert [one["handoff"] for one in read(tmp_path / "made" / "prefill_0-rank1.jsonl")] == ["d"]


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path, monkeypatch) -> None:
    lines = Lines(tmp_path, ME)
    real = os.write

    def nearly_full(fd, text):
        if len(text) < 100:
            raise OSError(28, "No space left on device")
        return real(fd, text[: len(text) - 50])

    monkeypatch.setattr("kvxfer.transport.journal.os.write", nearly_full)
    lines.write([record("a")])
    monkeypatch.setattr("kvxfer.transport.journal.os.write", real)
    lines.write([record("b")])
    lines.write([record("c")])
    lines.close()
    cut, *whole_ones = (tmp_path / "prefill_0-rank1.jsonl").read_text().splitlines()
    assert cut.startswith("{")
    assert [json.loads(one)["handoff"] for one in whole_ones] == ["b", "c"]


def test_a_directory_that_cannot_be_written_ends_the_start(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="records_dir"):
        Lines(tmp_path / "file", ME)


def test_the_journal_writes_what_came_before_it_was_stopped_and_never_keeps_the_mover_waiting(tmp_path) -> None:
    gate, written = threading.Event(), []

    class Slow:
        def write(self, records):
            gate.wait(10)
            written.extend(records)

        def close(self):
            written.append("closed")

    journal = Journal(Slow(), None)
    journal.start()
    for name in "abc":
        journal.hear(record(name))
    assert written == [], "the mover went on although nothing could be written"
    gate.set()
    journal.stop()
    assert not journal.is_alive()
    assert [one if one == "closed" else one.handoff for one in written] == ["a", "b", "c", "closed"]


def test_a_defect_in_one_batch_does_not_end_the_thread(tmp_path, caplog) -> None:
    written = []

    class Fails:
        def write(self, records):
            if not written:
                written.append("failed")
                raise ValueError("odd")
            written.extend(one.handoff for one in records)

        def close(self):
            pass

    journal = Journal(Fails(), None)
    journal.start()
    journal.hear(record("a"))
    wait_until(lambda: written, what="the first batch")
    journal.hear(record("b"))
    journal.stop()
    assert written == ["failed", "b"]
    assert "odd" in caplog.text


# --- spans ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spans():
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from kvxfer.transport.spans import Spans

    exporter = InMemorySpanExporter()
    made = Spans(exporter, ME)

    def export(*records):
        for one in records:
            made.export(one)
        made.close()
        return exporter.get_finished_spans()

    return export


def test_a_handoff_is_a_span_in_the_requests_trace_with_its_stages_below(spans) -> None:
    found = {span.name: span for span in spans(record(trace=TRACE))}
    assert set(found) == {"kvxfer.handoff", "kvxfer.decode_queue", "kvxfer.registration", "kvxfer.wait_for_KV"}
    handoff = found.pop("kvxfer.handoff")
    assert f"{handoff.context.trace_id:032x}" == TRACE.split("-")[1]
    assert f"{handoff.parent.span_id:016x}" == TRACE.split("-")[2]
    assert (handoff.attributes["kvxfer.handoff"], handoff.attributes["kvxfer.tokens"]) == ("h", 5)
    assert (handoff.resource.attributes["kvxfer.engine"], handoff.resource.attributes["kvxfer.rank"]) == (
        "prefill/0",
        1,
    )
    assert abs((handoff.end_time - handoff.start_time) / 1e9 - 5.0) < 1e-6
    assert abs(handoff.start_time / 1e9 - (epoch() + 1.0)) < 1.0
    for span in found.values():
        assert span.parent.span_id == handoff.context.span_id
    seconds = {name: round((span.end_time - span.start_time) / 1e9, 6) for name, span in found.items()}
    assert seconds == {"kvxfer.decode_queue": 1.0, "kvxfer.registration": 1.5, "kvxfer.wait_for_KV": 1.5}


def test_what_failed_is_an_error_with_its_reason(spans) -> None:
    failed = record(outcome="failed", trace=TRACE)
    failed.reason = "the peer is gone"
    (span,) = (span for span in spans(failed) if span.name == "kvxfer.handoff")
    assert (span.status.is_ok, span.status.description) == (False, "failed: the peer is gone")


@pytest.mark.parametrize("trace", ["", "nonsense", TRACE[:-2] + "00"])
def test_without_a_trace_that_is_sampled_there_are_no_spans(spans, trace) -> None:
    assert spans(record(trace=trace)) == ()


def test_an_unknown_protocol_ends_the_start(monkeypatch) -> None:
    from kvxfer.transport.spans import otlp

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="grpc or http/protobuf"):
        otlp("http://127.0.0.1:4317")
