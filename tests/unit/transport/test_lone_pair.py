"""Two ranks over the twin: mover, control channel, machines and layout together, with real bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.layout.tables import packed
from kvxfer.protocol.actions import SinkFinished, SourceFinished
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport import commands as cmd
from kvxfer.transport.query import fetch_records
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.support.ranks import Rank, wait_until

H = HandoffId("x")


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*args, **kwargs) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def registered(source: Rank) -> bool:
    record = source.mover.records.get("source", H)
    return record is not None and record.times.registered is not None


def same(source: Rank, source_blocks: list[int], sink: Rank, sink_blocks: list[int]) -> bool:
    return np.array_equal(source.memory[:, source_blocks], sink.memory[:, sink_blocks])


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("order", ["registration first", "prefill first"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 23, 160])
def test_moves_every_byte(ranks, mode, order, tokens) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode=mode), ranks("d", fabric, mode=mode)
    need = -(-tokens // 4)
    theirs, mine = list(range(3, 3 + need)), list(range(60, 60 - need, -1))
    p.fill(theirs, 1)
    untouched = d.memory.copy()
    if order == "registration first":
        d.open(H, "d1", p.address, mine, tokens)
        wait_until(lambda: p.mover.source.state(H) is not None, what="the registration at the source")
        p.prefill(H, "p1", theirs, tokens)
    else:
        p.prefill(H, "p1", theirs, tokens)
        d.open(H, "d1", p.address, mine, tokens)
    assert d.wait("d1") == SinkFinished(H, "d1", None)
    assert p.wait("p1") == SourceFinished(H, "p1")
    assert same(p, theirs, d, mine)
    others = [b for b in range(64) if b not in mine]
    assert np.array_equal(d.memory[:, others], untouched[:, others]), "blocks of others were touched"
    posted = (p if mode == "push" else d).record("source" if mode == "push" else "sink", H)
    assert posted.bytes == need * p.cache.block_bytes
    assert posted.outcome == "done"
    assert len(d.mover.sink) == len(p.mover.source) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_chunks_stream_while_computing(ranks, stream) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, stream=stream), ranks("d", fabric)
    blocks = list(range(1, 11))
    p.fill(blocks, 2)
    d.open(H, "d1", p.address, blocks, 40)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    p.begin(progress=[cmd.SourceProgress("p1", packed(blocks[:6]), 22)])
    p.end()
    if stream:
        wait_until(lambda: np.array_equal(d.memory[:, 1:6], p.memory[:, 1:6]), what="the first chunk's whole blocks")
        assert not d.memory[:, 6].any(), "a block that was not final was written"
    p.begin(progress=[cmd.SourceProgress("p1", packed(blocks[6:]), 40)])
    p.end()
    p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
    assert d.wait("d1").reason is None
    p.wait("p1")
    assert same(p, blocks, d, blocks)
    record = p.record("source", H)
    assert record.bytes == 10 * p.cache.block_bytes
    assert len(record.times.chunks_final) == 2
    assert record.descriptors == (6 if stream else 3)  # a run a layer, for each post


def test_a_partial_prefix_is_not_moved(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    p.fill(list(range(1, 11)), 3)
    d.open(H, "d1", p.address, [20, 21, 22], 40, start=28)
    p.prefill(H, "p1", list(range(1, 11)), 40)
    assert d.wait("d1").reason is None
    assert same(p, [8, 9, 10], d, [20, 21, 22])
    assert p.record("source", H).bytes == 3 * p.cache.block_bytes


def test_a_fence_that_passes_late_is_waited_for(ranks) -> None:
    """On the late platform bytes become right only when the stream has run: reading before the fence gives old ones."""
    platform = HostPlatform(fence_delay=0.15)
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=platform), ranks("d", fabric)
    blocks = [1, 2, 3]
    d.open(H, "d1", p.address, blocks, 12)
    p.begin(started=[cmd.SourceStart(H, "p1", 12, 0.0)])
    p.begin(progress=[cmd.SourceProgress("p1", packed([1, 2, 3]), 12)])
    platform.stream.launch(lambda: p.fill(blocks, 4))
    p.end()
    p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
    assert d.wait("d1").reason is None
    assert d.memory[:, blocks].any()
    assert same(p, blocks, d, blocks)


def test_without_the_fence_the_late_platform_gives_wrong_bytes(ranks) -> None:
    """The check of the check above: a mover that does not wait moves zeros."""
    platform = HostPlatform(fence_delay=0.3)
    passed = HostPlatform(fence_delay=0).fence()
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=platform), ranks("d", fabric)
    d.open(H, "d1", p.address, [1], 4)
    p.mover.post(cmd.StepBegin(cmd.Step(started=[cmd.SourceStart(H, "p1", 4, 0.0)]), passed))
    p.mover.post(cmd.StepBegin(cmd.Step(progress=[cmd.SourceProgress("p1", packed([1]), 4)]), passed))
    platform.stream.launch(lambda: p.fill([1], 4))
    p.mover.post(cmd.StepEnd(passed))
    assert d.wait("d1").reason is None
    assert not d.memory[:, 1].any()


def test_registration_waits_for_the_fence_of_the_sinks_blocks(ranks) -> None:
    """A step launched before the allocation may still write into the blocks: it must lose against the transfer."""
    platform = HostPlatform(fence_delay=0.15)
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric, platform=platform)
    p.fill([1, 2], 5)
    p.prefill(H, "p1", [1, 2], 8)
    platform.stream.launch(lambda: d.fill([7, 8], 99))
    d.open(H, "d1", p.address, [7, 8], 8)
    assert d.wait("d1").reason is None
    assert same(p, [1, 2], d, [7, 8])


def test_a_preempted_source_sends_everything_anew(ranks) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.05)))
    p, d = ranks("p", fabric), ranks("d", fabric)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    p.fill(list(range(1, 6)), 6)
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 6)), 20)])
    p.end()
    p.begin(preempted=["p1"])
    p.fill(list(range(1, 6)), 7)  # others have the blocks now
    p.fill(list(range(30, 40)), 8)
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(30, 40)), 40)])
    p.end()
    p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
    assert d.wait("d1").reason is None
    assert same(p, list(range(30, 40)), d, list(range(1, 11)))


def test_decode_cancels_while_prefill_computes(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    wait_until(lambda: registered(p), what="registration")
    d.begin(cancelled=[cmd.SinkCancel("d1", "client went away")])
    assert d.wait("d1").reason == "client went away"
    before = d.memory.copy()
    p.fill(list(range(1, 11)), 9)
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 11)), 40)])
    p.end()
    p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
    p.wait("p1")
    assert np.array_equal(d.memory, before), "written after the cancel was acknowledged"


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_prefill_aborts(ranks, mode) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode=mode), ranks("d", fabric, mode=mode)
    d.open(H, "d1", p.address, [1, 2], 8)
    p.begin(started=[cmd.SourceStart(H, "p1", 8, 0.0)])
    p.begin(finished=[cmd.SourceFinish("p1", "prefill ended with FINISHED_ABORTED", held=False)])
    assert "FINISHED_ABORTED" in d.wait("d1").reason
    wait_until(lambda: not len(p.mover.source), what="the source forgetting it")


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_legs_that_never_come(ranks, mode) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode=mode, leg_timeout=0.5), ranks("d", fabric, mode=mode)
    d.open(H, "d1", p.address, [1, 2], 8)
    assert "no prefill request with this id came for 0.5 s" in d.wait("d1").reason
    other = HandoffId("y")
    p.fill([1, 2], 1)
    p.prefill(other, "p2", [1, 2], 8)
    p.wait("p2")
    assert "no decode request came" in p.record("source", other).reason


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_other_process_dies(ranks, mode) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode=mode), ranks("d", fabric, mode=mode)
    d.open(H, "d1", p.address, [1, 2], 8)
    wait_until(lambda: p.mover.source.state(H) is not None, what="the registration at the source")
    p.kill()
    assert "gone" in d.wait("d1").reason


def test_a_failing_transfer_fails_the_handoff_on_both_sides(ranks) -> None:
    fabric = TwinFabric(Faults(fail_transfer=1.0))
    p, d = ranks("p", fabric), ranks("d", fabric)
    p.fill([1, 2], 1)
    d.open(H, "d1", p.address, [1, 2], 8)
    p.prefill(H, "p1", [1, 2], 8)
    assert "a write failed" in d.wait("d1").reason
    p.wait("p1")


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"model": "other"}, ["model differs: p has lone, d has other"]),
        (
            {"changes": {"dtype": "bfloat16"}},
            ["element type differs", "p rank 0 lays kv", "] uint8;", "d rank 0 lays kv", "] bfloat16;"],
        ),
        ({"block_size": 8}, ["channels of a head differs: the source has 64, the sink 32"]),
        (
            {"changes": {"interior": "amx", "tokens": (), "channels": ((256, 1),)}},
            ["d rank 0 lays kv", "opaque", "'amx' of 4 tokens"],
        ),
    ],
)
def test_engines_that_do_not_fit_refuse_each_other(ranks, change, texts) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric, **change)
    d.open(H, "d1", p.address, [1, 2], 8)
    reason = d.wait("d1").reason
    assert [text for text in texts if text not in reason] == [], reason
    # The refusal harms nobody: a pair that fits still works.
    good = ranks("d2", fabric)
    p.fill([1, 2], 1)
    good.open(HandoffId("z"), "d2", p.address, [1, 2], 8)
    p.prefill(HandoffId("z"), "p2", [1, 2], 8)
    assert good.wait("d2").reason is None


def test_wrong_addresses_are_named(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric, connect_timeout=2.0)
    d.open(H, "d1", cmd.EngineAddress("127.0.0.1", p.control.port, "somebody"), [1], 4)
    assert "lives the engine 'p', the request names 'somebody'" in d.wait("d1").reason
    d.open(HandoffId("y"), "d2", cmd.EngineAddress("127.0.0.1", 1, "p"), [1], 4)
    assert "no answer from p at 127.0.0.1:1 within 2 s" in d.wait("d2").reason
    d.open(HandoffId("z"), "d3", cmd.EngineAddress("not a host", 5, "p"), [1], 4)
    assert d.wait("d3").reason
    d.open(H, "d4", p.address, [1], 4)
    p.fill([2], 1)
    p.prefill(H, "p1", [2], 4)
    assert d.wait("d4").reason is None


def test_two_requests_with_one_handoff_id(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    p.fill([1, 2], 1)
    d.open(H, "d1", p.address, [1, 2], 8)
    d.open(H, "d2", p.address, [3, 4], 8)
    assert "d1 has this handoff id" in d.wait("d2").reason
    p.prefill(H, "p1", [1, 2], 8)
    assert d.wait("d1").reason is None
    assert same(p, [1, 2], d, [1, 2])
    assert not d.memory[:, [3, 4]].any()


def test_many_at_once_with_reordering(ranks) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.02), notification_delay=(0.0, 0.02), double_notification=0.3), seed=7)
    p, d = ranks("p", fabric, num_blocks=256), ranks("d", fabric, num_blocks=256)
    for i in range(40):
        p.fill(list(range(i * 6, i * 6 + 6)), i)
        d.open(HandoffId(f"h{i}"), f"d{i}", p.address, list(range(i * 6 + 5, i * 6 - 1, -1)), 23)
        p.prefill(HandoffId(f"h{i}"), f"p{i}", list(range(i * 6, i * 6 + 6)), 23, chunks=1 + i % 4)
    for i in range(40):
        assert d.wait(f"d{i}").reason is None
        p.wait(f"p{i}")
        assert same(p, list(range(i * 6, i * 6 + 6)), d, list(range(i * 6 + 5, i * 6 - 1, -1)))


def test_records_are_readable_from_outside(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    p.fill([1, 2], 1)
    d.open(H, "d1", p.address, [1, 2], 8)
    p.prefill(H, "p1", [1, 2], 8)
    d.wait("d1")
    p.wait("p1")
    report = fetch_records("127.0.0.1", p.control.port)
    assert report.engine == "p"
    (record,) = report.records
    times = record.times
    assert (record.side, record.tokens, record.blocks, record.bytes) == ("source", 8, 2, 2 * p.cache.block_bytes)
    assert times.chunks_final[0] <= times.first_post <= times.last_byte <= times.sealed <= times.released
    (record,) = fetch_records("127.0.0.1", d.control.port).records
    times = record.times
    assert times.expected <= times.allocated <= times.registered <= times.notified <= times.released


@pytest.mark.parametrize("held", [True, False])
def test_every_record_is_closed(ranks, held) -> None:
    """Also that of a request which ended without blocks, for which the engine is owed nothing."""
    p = ranks("p", TwinFabric())
    p.begin(started=[cmd.SourceStart(H, "p1", 8, 0.0)])
    p.begin(finished=[cmd.SourceFinish("p1", "prefill ended with FINISHED_ABORTED", held=held)])
    wait_until(lambda: any(r.outcome != "open" for r in p.mover.records.last(9)), what="the end of the record")
    record = p.record("source", H)
    assert "FINISHED_ABORTED" in record.reason
    assert record.times.released is not None
