"""Staging and re-packing between random layouts: what arrives in the slots, and that the calls name the right tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.check import check
from kvxfer.layout.maps import CacheMap, Group, Plane, offsets
from kvxfer.layout.plan import Cost, prepare
from kvxfer.layout.positions import Table
from kvxfer.layout.ranks import share
from kvxfer.layout.refine import Held
from kvxfer.layout.repack import STRIDED, Call, Repacking, better
from tests.unit.layout.caches import (
    MAX_POSITION,
    NAMED_ORDERS,
    NOTHING,
    Rank,
    byte_pairs,
    carry_out,
    engines,
    fewest,
    models,
    regrouped,
    styles,
    tables,
    tag,
)

replace = msgspec.structs.replace

STAGING = 1 << 50


def performed(call: Call, staged: Rank, sink: Rank) -> None:
    """What a platform does, one token at a time."""
    for bundle in call.pairing.bundles:
        for piece in bundle.pieces:
            p, q = piece.source, piece.sink
            for ours, theirs in zip(bundle.source.tolist(), bundle.sink.tolist(), strict=True):
                for slot, first, block, to, tokens in call.moves.tolist():
                    for a, b in zip(piece.source_slots, piece.sink_slots, strict=True):
                        for token in range(tokens):
                            at = ours + piece.source_offset + slot * p.block_stride + a * p.head_stride - staged.base
                            there = theirs + piece.sink_offset + block * q.block_stride + b * q.head_stride - sink.base
                            at += int(offsets(p.tokens)[first + token])
                            there += int(offsets(q.tokens)[to + token])
                            for c, d in zip(offsets(p.channels).tolist(), offsets(q.channels).tolist(), strict=True):
                                sink.memory[there + d : there + d + q.item] = staged.memory[at + c : at + c + p.item]


@st.composite
def handoffs(draw):
    model = draw(models())
    style = draw(styles())
    sources = draw(engines(model, style, 1 << 40))
    sink = draw(st.sampled_from(draw(engines(draw(regrouped(model)), draw(styles()), 1 << 44))))
    prompt = draw(st.integers(1, MAX_POSITION))
    start = draw(st.integers(0, prompt))
    end = draw(st.integers(start, prompt))
    for one in sources:
        one.tables = draw(tables(one, 0, prompt, null_before=prompt, more=6))
        one.fill(prompt)
    sink.tables = draw(tables(sink, start, end, null_before=prompt))
    usual = style.order in NAMED_ORDERS and not style.padding
    return sources, sink, start, end, prompt, draw(st.integers(1, 5)), usual


@settings(max_examples=120)
@given(handoffs())
def test_what_is_re_packed_is_what_a_direct_copy_would_have_brought(case) -> None:
    sources, sink, start, end, prompt, slots, usual = case
    for source in sources:
        part = share(source.cache, source.shard, sink.cache, sink.shard)
        if not part:
            continue
        try:
            repacking = Repacking(source.cache, sink.cache, [STRIDED], base=STAGING, slots=slots, share=part)
        except LayoutMismatchError:  # tokens or channels outside blocks, or more padding than content
            assert not usual
            return
        staged = Rank(repacking.staging, source.shard, np.full(repacking.size, NOTHING, dtype=np.int64), STAGING)
        rounds = repacking.rounds(start, end)
        assert [p for span in rounds for p in range(*span)] == list(range(start, end))
        for span in rounds:
            plan = repacking.plan(source.tables, sink.tables, *span, prompt=prompt, keep=start)
            carry_out(plan.transfer, source, staged)
            assert plan.transfer.count == fewest(byte_pairs(plan.transfer))
            for call in plan.calls:
                performed(call, staged, sink)
    wanted = sink.memory * 0 + NOTHING
    for plane, layer, position, head, channel, at in sink.elements(start, end):
        if sink.looks_back(plane, position, prompt):
            for byte in range(plane.item):
                wanted[at + byte] = tag(plane.name, layer, position, head, channel, byte)
    assert (sink.memory == wanted).all()


# --- vLLM's CPU attention: K transposed within a block ----------------------------------------------------------------


def vec(
    block: int, blocks: int, base: int, *, layers: int = 4, heads: int = 4, size: int = 64, item: int = 2
) -> CacheMap:
    page = heads * block * 2 * size * item
    half = block * size * item

    def plane(name: str, at: int, token: int, channel: int) -> Plane:
        bases = tuple(base + layer * page * blocks + at for layer in range(layers))
        inside = (tuple(range(heads)), heads, page, 2 * half, ((block, token),), ((size, channel),))
        return Plane(name, "bfloat16", item, tuple(range(layers)), bases, *inside)

    planes = (plane("k", 0, item, block * item), plane("v", half, size * item, item))
    return CacheMap((Group(block, blocks, planes),), ((base, layers * page * blocks),), "DRAM")


def ids(*values: int) -> Table:
    return Table(np.array(values, dtype=np.int32))


def test_equal_blocks_with_a_transposed_interior_move_as_they_are() -> None:
    plan = prepare(vec(32, 64, 1 << 40), vec(32, 64, 1 << 42)).plan(
        [ids(*range(10, 20))], [ids(*range(30, 40))], 0, 320
    )
    assert plan.count == 4, "one run a layer"


def test_unequal_blocks_with_a_transposed_interior_are_refused_and_can_be_re_packed() -> None:
    source, sink = vec(32, 64, 1 << 40), vec(128, 16, 1 << 42)
    with pytest.raises(LayoutMismatchError, match="runs of 126 bytes"):
        prepare(source, sink)
    repacking = Repacking(source, sink, [STRIDED], base=STAGING, slots=8)
    assert repacking.size == 8 * 4 * 4 * 32 * 2 * 64 * 2, "slots hold the blocks, nothing else"
    staged = repacking.plan([ids(*range(10, 18))], [ids(3, 5)], 0, 250)
    assert staged.transfer.count == 4, "blocks in a row become slots in a row"
    assert staged.transfer.bytes >= 250 * 4 * 4 * 2 * 64 * 2
    (call,) = staged.calls
    assert sorted(map(tuple, call.moves.tolist())) == [
        (slot, 0, 3 if slot < 4 else 5, slot % 4 * 32, 32 if slot < 7 else 26) for slot in range(8)
    ]


def hnd(block: int, base: int) -> CacheMap:
    head = block * 512
    planes = tuple(
        Plane(
            name,
            "x",
            2,
            (0, 1),
            (base + at, base + 4 * 64 * head + at),
            (0, 1, 2, 3),
            4,
            4 * head,
            head,
            ((block, 512),),
            ((128, 2),),
        )
        for name, at in (("k", 0), ("v", 256))
    )
    return CacheMap((Group(block, 64, planes),), ((base, 8 * 64 * head),), "DRAM")


def test_re_packing_is_better_where_it_saves_more_descriptors_than_its_copy_costs() -> None:
    source, sink = hnd(16, 1 << 40), hnd(32, 1 << 42)
    direct = prepare(source, sink)  # 8 KiB runs are no crumbs
    repacking = Repacking(source, sink, [STRIDED], base=0, slots=8)
    assert direct.estimate(16, Cost(descriptor=1.0, rate=1e30)) == pytest.approx(4 * 2)
    assert repacking.estimate(16, Cost(descriptor=1.0, rate=1e30)) == pytest.approx(2), "of a block, a run a layer"
    assert direct.estimate(16, Cost(descriptor=0.0, rate=1.0)) == pytest.approx(16 * 2 * 4 * 512)
    assert better(direct, repacking)
    assert not better(direct, repacking, copy=1e9)
    assert not better(direct, repacking, cost=Cost(descriptor=0.0))
    assert better(None, repacking, copy=1.0)


def test_more_than_the_slots_hold_is_refused_and_cut_into_rounds() -> None:
    repacking = Repacking(vec(32, 64, 1 << 40), vec(128, 16, 1 << 42), [STRIDED], base=STAGING, slots=3)
    with pytest.raises(ValueError, match=r"positions \[40, 160\) need 4 slots of staging, and there are 3"):
        repacking.plan([ids(*range(10, 18))], [ids(3, 5)], 40, 160)
    assert repacking.rounds(40, 250) == [(40, 128), (128, 224), (224, 250)]
    assert repacking.rounds(7, 7) == []


def tiles(block: int, base: int, tag: str) -> CacheMap:
    cell = block * 100
    plane = Plane(
        "kv", "bfloat16", 1, (0, 1), (base, base + 9 * 4 * cell), (0, 1, 2, 3), 4, 4 * cell, cell, (), ((cell, 1),), tag
    )
    return CacheMap((Group(block, 9, (plane,)),), ((base, 2 * 9 * 4 * cell),), "DRAM")


def test_opaque_interiors_are_re_packed_where_the_platform_offers_just_that() -> None:
    source, sink = tiles(32, 1 << 40, "amx32"), tiles(64, 1 << 42, "amx64")
    for offers in ([], [STRIDED], [("amx64", "amx32")]):
        with pytest.raises(
            LayoutMismatchError, match="does not re-pack opaque interior 'amx32' to opaque interior 'amx64'"
        ):
            Repacking(source, sink, offers, base=STAGING, slots=4)
    with pytest.raises(
        LayoutMismatchError, match="does not re-pack opaque interior 'amx32' to opaque interior 'amx32'"
    ):
        Repacking(source, source, [STRIDED], base=STAGING, slots=4)
    with pytest.raises(LayoutMismatchError, match="does not re-pack strides to strides"):
        Repacking(vec(32, 64, 1 << 40), vec(128, 16, 1 << 42), [], base=STAGING, slots=4)
    with pytest.raises(LayoutMismatchError, match="channels of a head differs: the source has 64, the sink 32"):
        Repacking(vec(32, 64, 1 << 40), vec(128, 16, 1 << 42, size=32), [STRIDED], base=STAGING, slots=4)
    repacking = Repacking(source, sink, [("amx32", "amx64")], base=STAGING, slots=4)
    staged = repacking.plan([ids(1, 2, 3)], [ids(5, 6)], 10, 70)
    assert staged.transfer.bytes == 3 * 2 * 4 * 3200, "whole blocks of the source"
    (call,) = staged.calls
    assert sorted(map(tuple, call.moves.tolist())) == [(0, 10, 5, 10, 22), (1, 0, 5, 32, 32), (2, 0, 6, 0, 6)]


def test_nothing_asked_for_is_nothing_done() -> None:
    repacking = Repacking(vec(32, 64, 1 << 40), vec(128, 16, 1 << 42), [STRIDED], base=STAGING, slots=3)
    staged = repacking.plan([ids(1)], [ids(1)], 5, 5)
    assert staged.transfer.count == 0
    assert staged.calls == ()


def test_a_geometry_too_loose_to_be_copied_is_refused() -> None:
    inside = ((0, 1), 2, 1 << 20, 1 << 10, ((4, 64),), ((8, 2),))  # heads far apart inside a block, small cells
    loose = Plane("k", "x", 2, (0,), (1 << 40,), *inside)
    source = CacheMap((Group(4, 4, (loose,)),), ((1 << 40, 4 << 20),), "DRAM")
    with pytest.raises(LayoutMismatchError, match="strewn"):
        Repacking(source, source, [STRIDED], base=STAGING, slots=1)


def test_two_groups_of_the_sink_take_their_layers_out_of_the_same_slots() -> None:
    source, sink = vec(32, 64, 1 << 40), vec(128, 16, 1 << 42)
    (group,) = sink.groups

    def some(low: int, high: int) -> Group:
        planes = (replace(p, layers=p.layers[low:high], bases=p.bases[low:high]) for p in group.planes)
        return replace(group, planes=tuple(planes))

    sink = replace(sink, groups=(some(0, 1), some(1, 4)))
    staged = Repacking(source, sink, [STRIDED], base=STAGING, slots=8).plan([ids(*range(8))], [ids(3), ids(5)], 0, 128)
    assert staged.transfer.bytes == 4 * 4 * 4 * 32 * 2 * 64 * 2, "each block is sent once"
    assert [sorted(set(call.moves[:, 2].tolist())) for call in staged.calls] == [[3], [5]]
    assert [len(bundle.source) for call in staged.calls for bundle in call.pairing.bundles] == [1, 3]


@pytest.mark.parametrize(
    ("order", "runs"), [("LBHN", 2), ("LBNH", 2), ("LHBN", 2 * 3), ("BLHN", 2), ("BLNH", 2), ("BHLN", 4)]
)
def test_a_slot_is_as_tight_as_what_moves_of_the_sources_block(order, runs) -> None:
    """Three of four heads of one of vLLM's layouts, in two of three layers."""
    size = {"L": 3, "B": 9, "H": 4, "N": 4}
    stride, at = {}, 64
    for axis in reversed(order):
        stride[axis], at = at, at * size[axis]
    planes = tuple(
        Plane(
            name,
            "x",
            2,
            (0, 1, 2),
            tuple((1 << 40) + layer * stride["L"] + half for layer in range(3)),
            (0, 1, 2, 3),
            4,
            stride["B"],
            stride["H"],
            ((4, stride["N"]),),
            ((16, 2),),
        )
        for name, half in (("k", 0), ("v", 32))
    )
    cache = CacheMap((Group(4, 9, planes),), ((1 << 40, at),), "DRAM")
    check(cache)
    share = [Held(name, (0, 2), (0, 1, 2)) for name in ("k", "v")]
    repacking = Repacking(cache, cache, [STRIDED], base=STAGING, slots=5, share=share)
    check(repacking.staging)
    content = 2 * 3 * 4 * 64
    # Token-major, the fourth head lies between the others' tokens; in BHLN, the third layer between the others' heads.
    gaps = {"NH": 2 * 3 * 64, "LN": 3 * 4 * 64}.get(order[2:], 0)
    assert repacking.size == 5 * (content + gaps)
    staged = repacking.plan([ids(1, 3, 5, 7)], [ids(2, 4, 6, 8)], 0, 16)
    assert staged.transfer.bytes == 4 * content
    assert staged.transfer.count == 4 * (runs * 4 if order.endswith("NH") else runs)


def test_blocks_that_the_source_has_let_go_of_are_not_taken_for_the_windows() -> None:
    source, sink = (
        replace(cache, groups=tuple(replace(group, window=200) for group in cache.groups))
        for cache in (vec(32, 64, 1 << 40), vec(128, 16, 1 << 42))
    )
    repacking = Repacking(source, sink, [STRIDED], base=STAGING, slots=8)
    staged = repacking.plan([ids(0, 11, 12, 13, 14, 15, 16, 17)], [ids(3, 5)], 32, 256)
    assert sorted(set(staged.calls[0].moves[:, 2].tolist())) == [3, 5]
    staged = repacking.plan([ids(0, 0, 0, 0, 14, 15, 16, 17)], [ids(0, 5)], 32, 256)
    assert sorted(set(staged.calls[0].moves[:, 2].tolist())) == [5], "the sink's window has passed its first block"
    with pytest.raises(ValueError, match="the source has let go of blocks that are still in the sink's window"):
        repacking.plan([ids(0, 0, 12, 13, 14, 15, 16, 17)], [ids(3, 5)], 32, 256, prompt=256)


def test_without_the_sinks_table_every_block_in_the_window_must_be_there() -> None:
    """As a source plans, which knows slots alone."""
    source, sink = (
        replace(cache, groups=tuple(replace(group, window=200) for group in cache.groups))
        for cache in (vec(32, 64, 1 << 40), vec(128, 16, 1 << 42))
    )
    repacking = Repacking(source, sink, [STRIDED], base=STAGING, slots=8)
    slots = [ids(0, 1, 2, 3, 4, 5, 6, 7)]
    plan = repacking.transfer([ids(0, 11, 12, 13, 14, 15, 16, 17)], slots, 32, 256, prompt=256)
    assert plan.bytes == 7 * source.block_bytes, "positions 32 to 255"
    with pytest.raises(ValueError, match="the source has let go of blocks"):
        repacking.transfer([ids(0, 0, 12, 13, 14, 15, 16, 17)], slots, 32, 256, prompt=256)


def test_nothing_is_re_packed_below_what_is_kept() -> None:
    repacking = Repacking(vec(32, 64, 1 << 40), vec(128, 16, 1 << 42), [STRIDED], base=STAGING, slots=8)
    with pytest.raises(ValueError, match="positions from 32 on cannot be re-packed where those below 33 are kept"):
        repacking.calls([ids(0, 1)], [ids(3)], 32, 64, keep=33)
