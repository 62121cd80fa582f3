"""Ranks whose memory the fabric cannot reach: KV goes through mirrors, with real bytes over the twin, and copies that are late.

The twin knows the mirrors alone, so whatever is posted before it was copied out, or reported before it was copied in, is wrong.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.layout.tables import packed
from kvxfer.protocol.actions import SinkFinished, SourceFinished
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.peers import Timing
from kvxfer.transport import commands as cmd
from kvxfer.transport import mirroring
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.support.ranks import Rank, wait_until

H = HandoffId("x")
LATE = 0.03


class Device(HostPlatform):
    """Notes what is copied, and copies late."""

    def __init__(self, delay=LATE, **options) -> None:
        super().__init__(fence_delay=options.pop("fence_delay", 0), copy_delay=delay)
        self.copies: list[tuple[bool, np.ndarray]] = []
        self.fails = self.fails_late = False

    def mirror(self, spans, device):
        made = super().mirror(spans, device)
        copy = made.copy

        def noted(copies, *, inward):
            if self.fails:
                raise RuntimeError("the device has fallen off the bus")
            self.copies.append((inward, copies.copy()))
            fence = copy(copies, inward=inward)
            return Broken() if self.fails_late else fence

        made.copy = noted
        return made

    def bytes(self, *, inward: bool) -> int:
        return int(sum((copies[:, 2] * copies[:, 3]).sum() for way, copies in self.copies if way is inward))


class Broken:
    def done(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*args, **kwargs) -> Rank:
        kwargs.setdefault("mirrored", True)
        kwargs.setdefault("slice_tokens", 16)
        kwargs.setdefault("timing", Timing())  # nobody is lost here, however busy the machine is
        if kwargs["mirrored"]:
            kwargs.setdefault("platform", Device())
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def same(source: Rank, source_blocks: list[int], sink: Rank, sink_blocks: list[int]) -> bool:
    return np.array_equal(source.memory[:, source_blocks], sink.memory[:, sink_blocks])


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("order", ["registration first", "prefill first"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 160])
def test_moves_every_byte_of_the_device_and_touches_no_other(ranks, mode, order, tokens) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode=mode), ranks("d", fabric, mode=mode)
    need = -(-tokens // 4)
    theirs, mine = list(range(3, 3 + need)), list(range(60, 60 - need, -1))
    p.fill(range(64), 1)
    d.fill(range(64), 2)
    untouched = d.memory.copy()
    if order == "registration first":
        d.open(H, "d1", p.address, mine, tokens)
        wait_until(lambda: p.mover.source.state(H) is not None, what="the registration at the source")
        p.prefill(H, "p1", theirs, tokens, chunks=3)
    else:
        p.prefill(H, "p1", theirs, tokens)
        d.open(H, "d1", p.address, mine, tokens)
    assert d.wait("d1") == SinkFinished(H, "d1", None)
    assert same(p, theirs, d, mine)
    assert p.wait("p1") == SourceFinished(H, "p1")
    others = [b for b in range(64) if b not in mine]
    assert np.array_equal(d.memory[:, others], untouched[:, others]), "blocks of others were touched"
    size = need * p.cache.block_bytes
    assert p.platform.bytes(inward=False) == d.platform.bytes(inward=True) == size
    assert p.platform.bytes(inward=True) == d.platform.bytes(inward=False) == 0
    assert len(d.mover.sink) == len(p.mover.source) == 0
    for rank in (p, d):
        left = rank.mover._mirroring
        wait_until(lambda left=left: not (left._waiting or left._arriving or left._reads), what="nothing left behind")


def test_what_is_written_is_cut_so_that_copies_and_writes_overlap(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    blocks = list(range(1, 41))
    p.fill(blocks, 1)
    p.prefill(H, "p1", blocks, 160)
    d.open(H, "d1", p.address, blocks, 160)
    assert d.wait("d1").reason is None
    assert same(p, blocks, d, blocks)
    assert p.mover.counters["transfers"] == len(p.platform.copies) == len(d.platform.copies) == 10
    assert all(copies.shape == (1, 6) for _, copies in p.platform.copies), "three layers of a run are one copy"


def test_a_pull_is_copied_in_while_the_rest_arrives(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode="pull"), ranks("d", fabric, mode="pull")
    blocks = list(range(1, 41))
    p.fill(blocks, 1)
    p.prefill(H, "p1", blocks, 160)
    d.open(H, "d1", p.address, blocks, 160)
    assert d.wait("d1").reason is None
    assert same(p, blocks, d, blocks)
    assert (len(p.platform.copies), len(d.platform.copies)) == (1, 10)


def test_a_mirrored_rank_and_a_host_rank_understand_each_other(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric, mirrored=False)
    p.fill([1, 2, 3], 1)
    p.prefill(H, "p1", [1, 2, 3], 11)
    d.open(H, "d1", p.address, [7, 8, 9], 11)
    assert d.wait("d1").reason is None
    assert same(p, [1, 2, 3], d, [7, 8, 9])


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_sinks_own_positions_in_a_shared_block_are_kept(ranks, mode) -> None:
    """What the sink has on its device is not in its mirror: a block that is only received in part is copied in part."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode=mode), ranks("d", fabric, mode=mode)
    p.fill(range(1, 11), 3)
    d.fill(range(64), 4)
    before = d.memory.copy()
    d.open(H, "d1", p.address, [20, 21, 22, 23], 40, start=26)
    p.prefill(H, "p1", list(range(1, 11)), 40, chunks=2)
    assert d.wait("d1").reason is None
    assert same(p, [8, 9, 10], d, [21, 22, 23])
    assert np.array_equal(d.memory[:, 20, :128], before[:, 20, :128])
    assert np.array_equal(d.memory[:, 20, 128:], p.memory[:, 7, 128:])


class Vec(Rank):
    """Blocks that are [channel][token] inside, which only a re-pack translates."""

    def __init__(self, engine, fabric, block_size, **options) -> None:
        inside = {"tokens": ((block_size, 1),), "channels": ((64, block_size),)}
        options = {"timing": Timing(), "block_bytes": block_size * 64, "changes": inside, **options}
        super().__init__(engine, fabric, block_size=block_size, **options)

    def tokens(self, blocks) -> np.ndarray:
        inside = self.memory[:, blocks].reshape(3, len(blocks), 64, self.block_size)
        return inside.transpose(0, 1, 3, 2).reshape(3, -1, 64)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("ours", "theirs"), [(4, 16), (16, 4)])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 95), (7, 90), (32, 33)])
def test_what_is_re_packed_is_copied_in_first(mode, ours, theirs, start, tokens) -> None:
    fabric = TwinFabric()
    p = Vec("p", fabric, ours, mode=mode, mirrored=True, slice_tokens=16, platform=Device())
    d = Vec("d", fabric, theirs, mode=mode, staging_bytes=1 << 20, mirrored=True, slice_tokens=16, platform=Device())
    try:
        source = list(range(5, 5 + -(-tokens // ours)))
        sink = list(range(60, 60 - -(-tokens // theirs), -1))
        p.fill(source, 1)
        d.fill(sink, 2)
        before = d.tokens(sink).copy()
        d.open(H, "d1", p.address, sink[start // theirs :], tokens, start=start)
        p.prefill(H, "p1", source, tokens, chunks=3)
        assert d.wait("d1") == SinkFinished(H, "d1", None)
        got, sent = d.tokens(sink), p.tokens(source)
        assert np.array_equal(got[:, start:tokens], sent[:, start:tokens])
        assert np.array_equal(got[:, :start], before[:, :start])
        assert np.array_equal(got[:, tokens:], before[:, tokens:])
    finally:
        p.close()
        d.close()


# --- what must not happen ---------------------------------------------------------------------------------------------


def test_posted_before_it_was_copied_out_it_would_be_wrong(ranks, monkeypatch) -> None:
    """The check of the checks above."""
    monkeypatch.setattr(mirroring.Mirroring, "_passed", staticmethod(lambda one: True))
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=Device(0.3)), ranks("d", fabric, mirrored=False)
    p.fill([1], 1)
    p.prefill(H, "p1", [1], 4)
    d.open(H, "d1", p.address, [1], 4)
    assert d.wait("d1").reason is None
    assert not d.memory[:, 1].any()


def test_reported_before_it_was_copied_in_it_would_be_wrong(ranks, monkeypatch) -> None:
    monkeypatch.setattr(mirroring.Mirroring, "_passed", staticmethod(lambda one: True))
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mirrored=False), ranks("d", fabric, platform=Device(0.3))
    p.fill([1], 1)
    p.prefill(H, "p1", [1], 4)
    d.open(H, "d1", p.address, [1], 4)
    assert d.wait("d1").reason is None
    assert not d.memory[:, 1].any()


def test_a_late_write_into_the_mirror_reaches_no_device_memory(ranks) -> None:
    """What a stale source writes after its handoff has ended stays in the mirror, whoever has the block by then."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    p.fill([1, 2], 1)
    p.prefill(H, "p1", [1, 2], 8)
    d.open(H, "d1", p.address, [7, 8], 8)
    assert d.wait("d1").reason is None
    d.fill([7, 8], 9)  # another request computes there
    kept = d.memory.copy()
    mirror = d.mover._mirroring._mirror
    at = mirror.reflection.address(d.cache.spans[0][0])
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * d.memory.nbytes).from_address(at))[:] = 0xEE
    p.fill([3], 5)
    p.prefill(HandoffId("y"), "p2", [3], 4)
    d.open(HandoffId("y"), "d2", p.address, [9], 4)
    assert d.wait("d2").reason is None
    kept[:, 9] = p.memory[:, 3]
    assert np.array_equal(d.memory, kept)


def test_a_cancel_between_copy_and_post_posts_nothing(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=Device(0.4)), ranks("d", fabric)
    p.fill(range(1, 11), 1)
    p.prefill(H, "p1", list(range(1, 11)), 40)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    wait_until(lambda: p.platform.copies, what="the first copy")
    d.begin(cancelled=[cmd.SinkCancel("d1", "the client has gone")])
    assert d.wait("d1").reason == "the client has gone"
    assert p.wait("p1") == SourceFinished(H, "p1")
    assert p.mover.counters["transfers"] == 0
    assert not d.memory.any()


def test_a_cancel_between_arrival_and_copy_reports_when_the_copy_is_done(ranks) -> None:
    """Whoever is told of the end gives the blocks away at once: no copy may be under way then."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=Device(0.0)), ranks("d", fabric, platform=Device(0.4))
    p.fill(range(1, 11), 1)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 6)), 20)])
    p.end()
    wait_until(lambda: d.platform.copies, what="the first copy in")
    d.begin(cancelled=[cmd.SinkCancel("d1", "the client has gone")])
    assert d.wait("d1").reason == "the client has gone"
    there = d.memory.copy()
    assert there.any(), "it was reported while its copy was under way"
    d.memory[:] = 0
    time.sleep(0.6)
    assert not d.memory.any(), "something was copied into blocks that are another's"


def test_a_preemption_between_copy_and_post_is_written_anew(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=Device(0.2)), ranks("d", fabric)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    p.fill(range(1, 6), 1)
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 6)), 20)])
    p.end()
    wait_until(lambda: p.platform.copies, what="the first copy")
    p.begin(preempted=["p1"])
    p.fill(range(1, 6), 2)
    p.fill(range(20, 30), 3)
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(20, 30)), 40)])
    p.end()
    p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
    assert d.wait("d1").reason is None
    assert same(p, list(range(20, 30)), d, list(range(1, 11)))


@pytest.mark.parametrize("again", [True, False], ids=["again", "once"])
def test_what_a_preempted_prompt_writes_again_is_copied_in_again(ranks, monkeypatch, again) -> None:
    """Copied in once is the check of the check: the device keeps what the first generation wrote."""
    begin, seen = mirroring.Mirroring._in, set()

    def once(self, handoff, rank, start, end):
        if start not in seen:
            begin(self, handoff, rank, start, end)
        seen.add(start)

    if not again:
        monkeypatch.setattr(mirroring.Mirroring, "_in", once)
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    p.fill(range(1, 6), 1)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 6)), 20)])
    p.end()
    wait_until(lambda: same(p, list(range(1, 5)), d, list(range(1, 5))), what="what the first generation wrote")
    p.begin(preempted=["p1"])
    p.fill(range(20, 30), 3)
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(20, 30)), 40)])
    p.end()
    p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
    assert d.wait("d1").reason is None
    assert same(p, list(range(20, 30)), d, list(range(1, 11))) is again


def test_blocks_are_quiet_only_when_their_copy_is(ranks) -> None:
    """A preempted prompt's blocks are kept while they are copied from, as while they are written from."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=Device(0.4)), ranks("d", fabric)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 6)), 20)])
    p.end()
    wait_until(lambda: p.platform.copies, what="the first copy")
    began = time.monotonic()
    p.begin(preempted=["p1"], tokens={"p1": 77})
    wait_until(lambda: any(getattr(one, "token", 0) == 77 for one in p.mover.results), what="the blocks' quiet")
    assert time.monotonic() - began > 0.1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("mode", "side"), [("push", "p"), ("push", "d"), ("pull", "p"), ("pull", "d")])
def test_a_copy_that_fails_fails_its_handoff_with_the_reason(ranks, mode, side, late) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode=mode), ranks("d", fabric, mode=mode)
    broken = {"p": p, "d": d}[side].platform
    broken.fails, broken.fails_late = not late, late
    p.fill(range(1, 11), 1)
    p.prefill(H, "p1", list(range(1, 11)), 40)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    reason = d.wait("d1").reason
    assert "its KV could not be copied through host memory: " in reason
    assert ("an illegal memory access was encountered" if late else "the device has fallen off the bus") in reason
    assert p.wait("p1") == SourceFinished(H, "p1")
    broken.fails = broken.fails_late = False
    p.prefill(HandoffId("y"), "p2", [1], 4)
    d.open(HandoffId("y"), "d2", p.address, [2], 4)
    assert d.wait("d2").reason is None
    assert same(p, [1], d, [2])


@pytest.mark.parametrize("fail", [{"fail_post": 0.3}, {"fail_transfer": 0.3}])
def test_a_read_of_which_a_part_fails_ends_once_and_when_all_parts_have(ranks, fail) -> None:
    fabric = TwinFabric(faults=Faults(delay=(0.0, 0.05), **fail), seed=5)
    p, d = ranks("p", fabric, mode="pull"), ranks("d", fabric, mode="pull")
    p.fill(range(1, 41), 1)
    moved = failed = 0
    for i in range(12):
        handoff = HandoffId(f"h{i}")
        p.prefill(handoff, f"p{i}", list(range(1, 9)), 32)
        d.open(handoff, f"d{i}", p.address, list(range(1, 9)), 32)
        if d.wait(f"d{i}").reason is None:
            moved += 1
            assert same(p, list(range(1, 9)), d, list(range(1, 9)))
        else:
            failed += 1
        d.fill(range(1, 9), 50 + i)
    assert moved
    assert failed
    assert not d.mover._mirroring._reads


def test_an_id_that_is_used_again_while_its_copies_are_under_way_is_refused(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, platform=Device(0.0)), ranks("d", fabric, platform=Device(0.5))
    p.fill(range(1, 11), 1)
    p.prefill(H, "p1", list(range(1, 11)), 40)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    wait_until(lambda: d.platform.copies and d.mover.sink.state(H) is None, what="all that is left are copies")
    d.open(H, "d2", p.address, list(range(20, 30)), 40)
    assert "has this handoff id" in d.wait("d2").reason
    assert d.wait("d1").reason is None
    assert same(p, list(range(1, 11)), d, list(range(1, 11)))


def test_what_is_held_for_a_reader_is_copied_out_before_it_is_granted_and_once(ranks) -> None:
    """Reuse: prefill reads out of decode's mirror, where nothing of it has been before."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric, pull_lease=1.2), ranks("d", fabric, platform=Device(0.5), pull_lease=1.2)
    d.fill(range(1, 11), 1)
    held = cmd.SourceHeld(H, 40, packed(range(1, 11)), time.monotonic() + 30.0, False)
    d.begin(held=[held])
    now = time.monotonic()
    p.begin(opened=[cmd.SinkOpen(H, "p1", d.address, 0, 40, packed(range(20, 30)), now, now, b"", "pull")])
    assert p.wait("p1").reason is None
    assert same(d, list(range(1, 11)), p, list(range(20, 30)))
    assert len(d.platform.copies) == 1


def test_a_block_that_is_lent_is_not_copied_out_over_what_arrives_there(ranks) -> None:
    """Decode's scheduler has taken back what it held and lent it; its reader, which is late, is refused."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    d.fill(range(1, 11), 1)
    d.begin(held=[cmd.SourceHeld(H, 16, packed([1, 2, 3, 4]), time.monotonic() + 30.0, False)])
    d.open(HandoffId("y"), "d1", p.address, [4, 5], 8)
    now = time.monotonic()
    p.begin(opened=[cmd.SinkOpen(H, "p1", d.address, 0, 16, packed([1, 2, 3, 4]), now, now, b"", "pull")])
    assert "its blocks have been given to another request" in p.wait("p1").reason
    p.fill([7, 8], 3)
    p.prefill(HandoffId("y"), "p2", [7, 8], 8)
    assert d.wait("d1").reason is None
    assert same(p, [7, 8], d, [4, 5])


def test_blocks_are_lent_only_when_no_copy_out_of_them_is_under_way(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric, platform=Device(0.4))
    d.fill(range(1, 5), 1)
    d.begin(held=[cmd.SourceHeld(H, 16, packed([1, 2, 3, 4]), time.monotonic() + 30.0, False)])
    now = time.monotonic()
    p.begin(opened=[cmd.SinkOpen(H, "p1", d.address, 0, 16, packed([1, 2, 3, 4]), now, now, b"", "pull")])
    wait_until(lambda: d.platform.copies, what="the copy out")
    p.begin(cancelled=[cmd.SinkCancel("p1", "the client has gone")])
    p.fill([7, 8], 3)
    p.prefill(HandoffId("y"), "p2", [7, 8], 8)
    d.open(HandoffId("y"), "d1", p.address, [1, 2], 8)
    assert d.wait("d1").reason is None
    assert same(p, [7, 8], d, [1, 2])


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_each_rank_of_several_copies_its_own_heads(mode) -> None:
    fabric = TwinFabric()

    def rank(engine: str, shard: Shard) -> Rank:
        heads = heads_of(4, shard)
        inside = {
            "heads": heads, "total_heads": 4, "head_stride": 64, "tokens": ((4, 16),), "channels": ((16, 1),),
        }  # fmt: skip
        return Rank(
            engine, fabric, mode=mode, changes=inside, block_size=4, block_bytes=64 * len(heads), mirrored=True,
            slice_tokens=8, platform=Device(), shard=(shard.rank, shard.size), timing=Timing(),
        )  # fmt: skip

    (p,), ds = [rank("p", Shard(0, 1))], [rank("d", Shard(i, 2)) for i in range(2)]
    try:
        for d in ds[:1]:
            d.lead([one.where for one in ds])
        p.fill(range(1, 11), 1)
        now = time.monotonic()
        for d in ds:
            d.begin(opened=[cmd.SinkOpen(H, "d1", p.address, 0, 40, packed(range(20, 30)), now, now)])
        p.prefill(H, "p1", list(range(1, 11)), 40, chunks=2)
        for i, d in enumerate(ds):
            assert d.wait("d1").reason is None
            assert np.array_equal(d.memory[:, 20:30], p.memory[:, 1:11, 128 * i : 128 * (i + 1)])
        assert p.wait("p1") == SourceFinished(H, "p1")
        assert p.platform.bytes(inward=False) == p.cache.block_bytes * 10
    finally:
        for one in (p, *ds):
            one.close()


def test_keys_that_are_revoked_in_mid_copy_end_what_was_exposed(ranks) -> None:
    """A source that was lost and may live: the mirror's keys are revoked, and the next handoff goes through the same mirror."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric)
    p.fill(range(1, 11), 1)
    d.open(H, "d1", p.address, list(range(1, 11)), 40)
    p.begin(started=[cmd.SourceStart(H, "p1", 40, 0.0)])
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 6)), 20)])
    p.end()
    wait_until(lambda: d.platform.copies, what="the first copy in")
    d.mover._revoking = time.monotonic()
    d.begin()
    assert "revoked the keys" in d.wait("d1").reason
    p.begin(finished=[cmd.SourceFinish("p1", "gone", held=True)])
    p.wait("p1")

    def again() -> bool:
        n = len(d.finished)
        p.prefill(HandoffId(f"y{n}"), f"q{n}", [11], 4)
        d.open(HandoffId(f"y{n}"), f"e{n}", p.address, [30], 4)
        return d.wait(f"e{n}").reason is None

    p.fill([11], 2)
    wait_until(again, what="a handoff after the revocation")
    assert same(p, [11], d, [30])
