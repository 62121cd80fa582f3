"""Handoffs between blocks of unequal size whose inside only a re-pack can translate: two ranks over the twin, with real bytes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.protocol.actions import SinkFinished, SourceFinished
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport import commands as cmd
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.support.ranks import Rank, wait_until

H = HandoffId("x")
CONTENT = 64
"""Bytes of one token in one layer; each of them ``block_size`` from the next, as vLLM's CPU attention keeps K."""


class VecRank(Rank):
    """A rank whose blocks are [channel][token] inside."""

    def __init__(self, engine: str, fabric: TwinFabric, block_size: int, **options) -> None:
        inside = {"tokens": ((block_size, 1),), "channels": ((CONTENT, block_size),)}
        options = {"block_size": block_size, "block_bytes": block_size * CONTENT, "changes": inside, **options}
        super().__init__(engine, fabric, **options)

    def tokens(self, blocks: list[int]) -> np.ndarray:
        """What these blocks hold: [layer, position, channel]."""
        layers = self.memory.shape[0]
        inside = self.memory[:, blocks].reshape(layers, len(blocks), CONTENT, self.block_size)
        return inside.transpose(0, 1, 3, 2).reshape(layers, -1, CONTENT)


@pytest.fixture
def ranks():
    made: list[VecRank] = []

    def make(*args, **kwargs) -> VecRank:
        made.append(VecRank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def need(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("ours", "theirs"), [(4, 16), (16, 4), (4, 6)])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 16), (0, 95), (7, 90), (32, 33)])
def test_moves_exactly_the_positions_that_were_asked_for(ranks, mode, ours, theirs, start, tokens) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, ours, mode=mode), ranks("d", fabric, theirs, mode=mode, staging_bytes=1 << 20)
    source = list(range(5, 5 + need(tokens, ours)))
    sink = list(range(60, 60 - need(tokens, theirs), -1))
    p.fill(source, 1)
    d.fill(sink, 2)
    before = d.memory.copy()
    d.open(H, "d1", p.address, sink[start // theirs :], tokens, start=start)
    p.prefill(H, "p1", source, tokens, chunks=3)
    assert d.wait("d1") == SinkFinished(H, "d1", None)
    assert p.wait("p1") == SourceFinished(H, "p1")
    got, sent = d.tokens(sink), p.tokens(source)
    assert np.array_equal(got[:, start:tokens], sent[:, start:tokens])
    d.memory[:], after = before, d.memory.copy()
    old = d.tokens(sink)
    assert np.array_equal(got[:, :start], old[:, :start]), "what the sink's own prefix cache gave was touched"
    assert np.array_equal(got[:, tokens:], old[:, tokens:])
    others = [block for block in range(64) if block not in sink]
    assert np.array_equal(after[:, others], before[:, others]), "blocks of others were touched"


def test_handoffs_wait_their_turn_for_slots_and_give_them_back(ranks) -> None:
    """Room for two at a time of twelve; the area ends as free as it began."""
    fabric = TwinFabric()
    slot = 3 * 4 * CONTENT
    p, d = ranks("p", fabric, 4, num_blocks=200), ranks("d", fabric, 16, staging_bytes=11 * slot)
    p.fill(range(1, 61), 3)
    for i in range(12):
        d.open(HandoffId(f"h{i}"), f"d{i}", p.address, [1 + 2 * i, 2 + 2 * i], 20)
    for i in range(12):
        p.prefill(HandoffId(f"h{i}"), f"p{i}", list(range(1 + 5 * i, 6 + 5 * i)), 20)
    for i in range(12):
        assert d.wait(f"d{i}").reason is None
        assert np.array_equal(d.tokens([1 + 2 * i, 2 + 2 * i])[:, :20], p.tokens(list(range(1 + 5 * i, 6 + 5 * i))))
    staging = d.mover._staging
    assert sorted(staging._free) == list(range(11))
    assert staging.ready() is None


def test_a_prompt_longer_than_the_area_fails_alone_and_says_what_to_change(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, 4), ranks("d", fabric, 16, staging_bytes=4 * 3 * 4 * CONTENT)
    d.open(H, "d1", p.address, [1, 2], 20)
    reason = d.wait("d1").reason
    assert "x needs 5 slots to be re-packed and the staging area has 4: raise staging_bytes" in reason
    p.fill([1, 2, 3, 4], 4)
    d.open(HandoffId("y"), "d2", p.address, [1], 16)
    p.prefill(HandoffId("y"), "p2", [1, 2, 3, 4], 16)
    assert d.wait("d2").reason is None


def test_who_waits_for_slots_can_be_cancelled(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, 4), ranks("d", fabric, 16, staging_bytes=5 * 3 * 4 * CONTENT)
    d.open(H, "d1", p.address, [1, 2], 20)
    wait_until(lambda: d.mover._staging._staged, what="the first has all slots")
    d.open(HandoffId("y"), "d2", p.address, [3, 4], 20)
    d.open(HandoffId("z"), "d3", p.address, [5, 6], 20)
    wait_until(lambda: len(d.mover._staging._waiting) == 2, what="two wait")
    d.begin(cancelled=[cmd.SinkCancel("d2", "client went away")])
    d.wait("d2")
    for i, name in ((1, "x"), (3, "z")):
        p.fill([1, 2, 3, 4, 5], i)
        p.prefill(HandoffId(name), f"p{i}", [1, 2, 3, 4, 5], 20)
        assert d.wait(f"d{i}").reason is None
        assert np.array_equal(d.tokens([2 * i - 1, 2 * i])[:, :20], p.tokens([1, 2, 3, 4, 5]))
        p.wait(f"p{i}")


def test_a_lost_source_gives_the_slots_back(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, 4), ranks("d", fabric, 16, staging_bytes=5 * 3 * 4 * CONTENT)
    d.open(H, "d1", p.address, [1, 2], 20)
    wait_until(lambda: d.mover._staging._staged, what="it has all slots")
    p.kill()
    assert d.wait("d1").reason is not None
    assert len(d.mover._staging._free) == 5


def wait_in_line(p, d, other) -> None:
    """Give all slots to a handoff with ``other``, and let x of p wait for some, y of the other behind it."""
    d.open(HandoffId("first"), "d0", other.address, [1, 2], 20)
    wait_until(lambda: d.mover._staging._staged, what="the first has all slots")
    d.open(H, "d1", p.address, [3, 4], 20)
    wait_until(lambda: len(d.mover._staging._waiting) == 1, what="one waits")
    d.open(HandoffId("y"), "d2", other.address, [5, 6], 20)
    wait_until(lambda: len(d.mover._staging._waiting) == 2, what="two wait")


def test_who_waits_for_slots_when_its_source_dies_fails_and_nobody_waits_for_it(ranks) -> None:
    fabric = TwinFabric()
    p, other = ranks("p", fabric, 4), ranks("o", fabric, 4)
    d = ranks("d", fabric, 16, staging_bytes=5 * 3 * 4 * CONTENT, connect_timeout=1.0)
    wait_in_line(p, d, other)
    p.kill()
    for i, name in ((0, "first"), (2, "y")):
        other.fill([1, 2, 3, 4, 5], i)
        other.prefill(HandoffId(name), f"p{i}", [1, 2, 3, 4, 5], 20)
        assert d.wait(f"d{i}").reason is None
        assert np.array_equal(d.tokens([2 * i + 1, 2 * i + 2])[:, :20], other.tokens([1, 2, 3, 4, 5]))
    assert "p rank 0" in d.wait("d1").reason or "127.0.0.1" in d.wait("d1").reason
    assert d.mover._staging.ready() is None
    assert len(d.mover._staging._free) == 5


def test_who_waits_for_slots_when_the_session_breaks_registers_in_the_next_one(ranks) -> None:
    fabric = TwinFabric()
    p, other = ranks("p", fabric, 4), ranks("o", fabric, 4)
    d = ranks("d", fabric, 16, staging_bytes=5 * 3 * 4 * CONTENT)
    wait_in_line(p, d, other)
    card = d.mover.transfers.reach.card(p.me)
    d.mover.post(cmd.PeerLost(p.me, "a test says so", 0.0, dead=False))
    wait_until(lambda: not d.mover.transfers.reach.knows([p.me]), what="the loss")
    d.mover.post(cmd.PeerUp(p.me, card))
    p.fill([1, 2, 3, 4, 5], 9)
    p.prefill(H, "p1", [1, 2, 3, 4, 5], 20)
    for i, name in ((0, "first"), (2, "y")):
        other.prefill(HandoffId(name), f"p{i}", [1, 2, 3, 4, 5], 20)
        assert d.wait(f"d{i}").reason is None
    assert d.wait("d1").reason is None
    assert np.array_equal(d.tokens([3, 4])[:, :20], p.tokens([1, 2, 3, 4, 5]))


def test_the_report_waits_for_the_re_packs_fence(ranks) -> None:
    """And a re-pack that fails is a load that failed."""

    class Slow(HostPlatform):
        passed = broken = lost = False

        def repack(self, call):
            if self.broken:
                raise RuntimeError("the device is gone")
            super().repack(call)
            return self

        def done(self):
            if self.lost:
                raise RuntimeError("the device has fallen off the bus")
            return self.passed

    fabric, platform = TwinFabric(), Slow(fence_delay=0)
    p, d = ranks("p", fabric, 4), ranks("d", fabric, 16, staging_bytes=1 << 16, platform=platform)
    p.fill([1, 2, 3], 5)
    d.open(H, "d1", p.address, [1], 12)
    p.prefill(H, "p1", [1, 2, 3], 12)
    wait_until(d.mover._staging.packing, what="re-packing")
    time.sleep(0.05)
    assert not d.mover.results
    platform.passed = True
    assert d.wait("d1").reason is None
    platform.broken = True
    d.open(HandoffId("y"), "d2", p.address, [1], 12)
    p.prefill(HandoffId("y"), "p2", [1, 2, 3], 12)
    assert d.wait("d2").reason == "what was received could not be re-packed: the device is gone"
    platform.broken, platform.lost = False, True
    d.open(HandoffId("z"), "d3", p.address, [1], 12)
    p.prefill(HandoffId("z"), "p3", [1, 2, 3], 12)
    assert d.wait("d3").reason == "what was received could not be re-packed: the device has fallen off the bus"
    assert len(d.mover._staging._free) == (1 << 16) // (3 * 4 * CONTENT)


def test_sources_of_unlike_blocks_share_the_area_one_after_the_other(ranks) -> None:
    fabric = TwinFabric()
    small, large = ranks("s", fabric, 4), ranks("l", fabric, 8)
    d = ranks("d", fabric, 16, staging_bytes=1 << 14)
    small.fill([1, 2, 3], 6)
    large.fill([1, 2], 7)
    d.open(HandoffId("s"), "ds", small.address, [1], 12)
    wait_until(lambda: d.mover._staging._staged, what="the first has slots")
    d.open(HandoffId("l"), "dl", large.address, [2], 12)
    large.prefill(HandoffId("l"), "pl", [1, 2], 12)
    wait_until(d.mover._staging.ready, what="the second waits")
    small.prefill(HandoffId("s"), "ps", [1, 2, 3], 12)
    assert d.wait("ds").reason is None
    assert d.wait("dl").reason is None
    assert np.array_equal(d.tokens([1])[:, :12], small.tokens([1, 2, 3]))
    assert np.array_equal(d.tokens([2])[:, :12], large.tokens([1, 2])[:, :12])


def test_slots_are_nobody_elses_while_a_write_into_them_may_land(ranks) -> None:
    """The write of a handoff that failed is still under way: its slots are as exposed as its blocks were."""
    fabric = TwinFabric(Faults(delay=(0.8, 0.8)))
    p, d = ranks("p", fabric, 4), ranks("d", fabric, 16, staging_bytes=5 * 3 * 4 * CONTENT, drain_bound=10.0)
    p.fill([1, 2, 3, 4, 5], 8)
    d.open(H, "d1", p.address, [1, 2], 20)
    p.prefill(H, "p1", [1, 2, 3, 4, 5], 20)
    wait_until(lambda: p.mover.transfers.in_flight, what="the write")
    d.begin(cancelled=[cmd.SinkCancel("d1", "client went away")])
    d.open(HandoffId("y"), "d2", p.address, [3, 4], 20)
    time.sleep(0.1)
    assert d.mover._staging._free == []
    assert HandoffId("y") in d.mover._staging._waiting
    assert p.mover.transfers.in_flight, "the write is over: nothing was tested"
    d.wait("d1")
    p.prefill(HandoffId("y"), "p2", [1, 2, 3, 4, 5], 20)
    assert d.wait("d2").reason is None
    assert np.array_equal(d.tokens([3, 4])[:, :20], p.tokens([1, 2, 3, 4, 5]))


class Sharded(VecRank):
    """A rank that holds these heads of two, each [channel][token] inside a block."""

    def __init__(self, engine: str, fabric: TwinFabric, block_size: int, shard: tuple[int, int], **options) -> None:
        heads = heads_of(2, Shard(*shard))
        size = block_size * CONTENT
        inside = {"heads": heads, "total_heads": 2, "head_stride": size}
        inside |= {"tokens": ((block_size, 1),), "channels": ((CONTENT, block_size),)}
        options |= {"changes": inside, "block_bytes": len(heads) * size, "shard": shard}
        super().__init__(engine, fabric, block_size, **options)
        self.heads = heads

    def head(self, head: int, blocks: list[int]) -> np.ndarray:
        """What these blocks hold of a head: [layer, position, channel]."""
        layers, number = self.memory.shape[0], self.heads.index(head)
        inside = self.memory[:, blocks].reshape(layers, len(blocks), len(self.heads), CONTENT, self.block_size)
        return inside[:, :, number].transpose(0, 1, 3, 2).reshape(layers, -1, CONTENT)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
def test_ranks_of_unequal_engines_are_re_packed_as_well(mode, sizes) -> None:
    """Two source ranks have slots of one area, whose blocks differ in nothing but their heads."""
    fabric, tokens = TwinFabric(), 45
    p = [Sharded("p", fabric, 4, (rank, sizes[0]), mode=mode) for rank in range(sizes[0])]
    d = [Sharded("d", fabric, 16, (rank, sizes[1]), mode=mode, staging_bytes=1 << 20) for rank in range(sizes[1])]
    try:
        p[0].lead([rank.where for rank in p])
        source, sink = list(range(5, 5 + need(tokens, 4))), [7, 3, 9]
        for seed, rank in enumerate(p):
            rank.fill(source, seed)
            rank.prefill(H, "p1", source, tokens)
        for rank in d:
            rank.open(H, "d1", p[0].address, sink, tokens)
        assert [rank.wait("d1") for rank in d] == [SinkFinished(H, "d1", None)] * sizes[1]
        assert [rank.wait("p1") for rank in p] == [SourceFinished(H, "p1")] * sizes[0]
        for rank in d:
            for head in rank.heads:
                (giver,) = [one for one in p if head in one.heads]
                assert np.array_equal(rank.head(head, sink)[:, :tokens], giver.head(head, source)[:, :tokens])
            assert len(rank.mover._staging._free) > 0
            assert not rank.mover._staging._staged
    finally:
        for rank in p + d:
            rank.close()
