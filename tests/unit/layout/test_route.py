"""Routes: straight or by way of slots, the same on both sides, and positions that end where they should."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.check import check
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.repack import STRIDED
from kvxfer.layout.route import Route, StagingArea
from kvxfer.layout.tables import Tables

A, B, AREA = 1 << 40, 1 << 42, 1 << 44


def rows(block: int, base: int, *, blocks: int = 32, layers: int = 2, heads: int = 4, size: int = 64) -> CacheMap:
    """Blocks [head][token][channel], a layer after the other."""
    page = heads * block * size * 2
    bases = tuple(base + layer * blocks * page for layer in range(layers))
    inside = (page, block * size * 2, ((block, size * 2),), ((size, 2),))
    plane = Plane("kv", "bfloat16", 2, tuple(range(layers)), bases, tuple(range(heads)), heads, *inside)
    return CacheMap((Group(block, blocks, (plane,)),), ((base, layers * blocks * page),), "DRAM")


def columns(block: int, base: int, **options: int) -> CacheMap:
    """Blocks [head][channel][token]."""
    made = rows(block, base, **options)
    (plane,) = made.groups[0].planes
    size = plane.channels[0][0]
    turned = msgspec.structs.replace(plane, tokens=((block, 2),), channels=((size, block * 2),))
    return msgspec.structs.replace(made, groups=(msgspec.structs.replace(made.groups[0], planes=(turned,)),))


def packed(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def area(size: int = 1 << 20, *offers: tuple[str, str]) -> StagingArea:
    return StagingArea(AREA, size, offers or (STRIDED,))


def test_blocks_with_long_runs_move_straight_though_there_is_a_staging_area() -> None:
    route = Route(rows(16, A, heads=1), rows(32, B, heads=1), area=area())
    assert (route.geometry, route.slots, route.block_size) == (None, 0, 32)
    assert route.slots_for(0, 999) == 0
    assert route.calls(b"", packed(1), (0, 20)) == ()


def test_blocks_turned_alike_move_straight_where_their_sizes_are_equal() -> None:
    assert Route(columns(16, A), columns(16, B), area=area()).geometry is None


@pytest.mark.parametrize(("source", "sink"), [(16, 32), (32, 16)])
def test_blocks_turned_alike_of_unequal_size_go_through_slots(source, sink) -> None:
    ours, theirs = columns(source, A), columns(sink, B)
    route = Route(ours, theirs, area=area())
    slot = ours.block_bytes
    assert route.geometry is not None
    check(route.geometry)
    assert route.geometry.block_bytes == slot
    assert route.slots == (1 << 20) // slot
    assert route.block_size == source, "slots are laid out like the source's blocks"
    assert route.slots_for(0, source) == 1
    assert route.slots_for(source - 1, source + 1) == 2
    assert route.slots_for(5, 5 + 10 * source) == 11


def test_both_sides_make_the_same_route() -> None:
    """They compute it from the same two cards: descriptors and slots must not depend on who did."""
    ours, theirs = columns(16, A), columns(32, B)
    one, other = Route(ours, theirs, area=area()), Route(ours, theirs, area=area())
    assert one.geometry == other.geometry
    tables = (packed(3, 4, 5), packed(7, 8, 9), (0, 40), 0, 40)
    first, second = one.plan(*tables), other.plan(*tables)
    assert np.array_equal(first.source, second.source)
    assert np.array_equal(first.sink, second.sink)


def test_a_staged_plan_fills_the_registered_slots_and_the_calls_name_the_positions() -> None:
    ours, theirs = columns(16, A), columns(32, B)
    route = Route(ours, theirs, area=area())
    span = (5, 40)
    plan = route.plan(packed(3, 4, 5), packed(7, 8, 2), span, 5, 40)
    assert plan.bytes == 3 * ours.block_bytes, "whole blocks of the source go into slots"
    ends = plan.sink[:, 0] + plan.sink[:, 1]
    assert plan.sink[:, 0].min() >= AREA
    assert ends.max() <= AREA + (1 << 20)
    (call,) = route.calls(packed(7, 8, 2), packed(20, 21), span)
    assert sorted(map(tuple, call.moves.tolist())) == [(2, 0, 21, 0, 8), (7, 5, 20, 5, 11), (8, 0, 20, 16, 16)]


def test_a_straight_plan_begins_in_the_block_that_holds_the_first_position() -> None:
    ours, theirs = rows(16, A), rows(16, B)
    route = Route(ours, theirs)
    plan = route.plan(packed(1, 2, 3, 4), packed(9, 10), (20, 60), 20, 48)
    page = ours.block_bytes // 2
    assert plan.sink[:, 0].min() >= B + 9 * page
    assert plan.bytes == (48 - 20) * ours.block_bytes // 16, (
        "a chunk whose continuation is written by itself ends exactly"
    )
    last = route.plan(packed(1, 2, 3, 4), packed(9, 10, 11), (20, 60), 48, 60)
    assert last.bytes == ours.block_bytes, "behind the prompt's end the block is filled: nobody's, and longer runs"


def test_what_cannot_move_is_refused_with_what_staging_lacks() -> None:
    ours, theirs = columns(16, A), columns(32, B)
    with pytest.raises(LayoutMismatchError) as refused:
        Route(ours, theirs, names=("p", "d"))
    assert "p lays kv" in str(refused.value)
    assert "staging_bytes" not in str(refused.value)
    with pytest.raises(LayoutMismatchError, match="staging_bytes=100 holds no block of 16,384 bytes"):
        Route(ours, theirs, area=area(100))
    with pytest.raises(LayoutMismatchError, match="and it is not re-packed"):
        Route(ours, theirs, area=area(1 << 20, ("amx", "vec")))


def test_a_staging_area_that_is_too_small_for_a_block_leaves_the_straight_way() -> None:
    assert Route(rows(16, A), rows(32, B), area=area()).geometry is not None, (
        "fewer descriptors: the slots are worth it"
    )
    assert Route(rows(16, A), rows(32, B), area=area(1)).geometry is None


# --- several groups ---------------------------------------------------------------------------------------------------


def hybrid(block: int, base: int, turn: type = rows, *, windowed: int | None = None) -> CacheMap:
    """Two groups over the same memory, as vLLM lays them: full attention in the even layers, a window of 40 in the odd ones."""
    full, window = turn(block, base, heads=1), turn(windowed or block, base, heads=1)
    planes = [
        msgspec.structs.replace(plane, layers=tuple(2 * layer + number for layer in plane.layers))
        for number, (plane,) in enumerate((full.groups[0].planes, window.groups[0].planes))
    ]
    groups = (
        msgspec.structs.replace(full.groups[0], planes=(planes[0],)),
        msgspec.structs.replace(window.groups[0], planes=(planes[1],), window=40),
    )
    return CacheMap(groups, max(full.spans, window.spans), "DRAM")


def test_each_group_moves_by_its_own_tables() -> None:
    """100 positions of a prompt of 101: the last token looks back to position 61, and whole blocks of the window move."""
    route, tables = Route(hybrid(16, A), hybrid(16, B)), Tables.of(hybrid(16, A))
    source = tables.pack([range(1, 8), range(11, 15)], [0, 3])
    sink = tables.pack([range(21, 28), range(8, 12)], [0, 3])
    plan = route.plan(source, sink, (0, 100), 0, 100)
    assert [tuple(span) for span in plan.moved] == [(0, 112), (48, 112)]
    page = hybrid(16, A).groups[0].block_bytes // 2
    blocks = sorted({(int(a) - A) // page % 32 for a in plan.source[:, 0]})
    assert blocks == [1, 11]
    assert plan.bytes == (7 + 4) * 2 * page
    early = route.plan(source, sink, (0, 100), 0, 48)
    assert [span.end - span.start for span in early.moved] == [48, 0], "of a window nothing moves before its last one"


@pytest.mark.parametrize("wrong", ["source", "sink"])
def test_tables_that_do_not_fit_the_cards_groups_are_refused(wrong) -> None:
    route, tables = Route(hybrid(16, A), hybrid(16, B)), Tables.of(hybrid(16, A))
    right = tables.pack([range(1, 8), range(11, 15)], [0, 3])
    for bad in (
        packed(1, 2, 3, 4, 5, 6, 7),
        right[:-4],
        tables.pack([[], []], [0, 0]),
        tables.pack([[99] * 7, [99] * 4], [0, 3]),
    ):
        with pytest.raises(ValueError, match=r"tables of 2 groups|a list that holds|outside a cache"):
            route.plan(*((bad, right) if wrong == "source" else (right, bad)), (0, 100), 0, 100)


@pytest.mark.parametrize(("turn", "area_of"), [(rows, None), (columns, area())])
def test_a_sink_whose_blocks_are_larger_needs_what_a_windows_source_has_let_go_of(turn, area_of) -> None:
    with pytest.raises(
        LayoutMismatchError, match="of a window of 40 positions the source keeps blocks of 16 tokens, and the sink"
    ):
        Route(hybrid(16, A, turn), hybrid(32, B, turn), area=area_of)
    assert Route(hybrid(32, A, turn), hybrid(16, B, turn), area=area_of)


def test_a_sink_that_waits_for_a_block_that_it_has_let_go_of_is_refused() -> None:
    """Skipped, it would be taken for received: of full attention block 0 is refused nowhere, of a window it is nobody's."""
    route, tables = Route(hybrid(16, A), hybrid(16, B)), Tables.of(hybrid(16, A))
    source = tables.pack([range(1, 8), range(11, 15)], [0, 3])
    with pytest.raises(ValueError, match="the sink waits for positions of a window whose blocks it has let go of"):
        route.plan(source, tables.pack([range(1, 8), [0, 12, 13, 14]], [0, 3]), (0, 100), 0, 100)


def test_slots_take_the_blocks_of_all_groups_and_the_calls_name_each_groups_own() -> None:
    ours, theirs = hybrid(32, A, columns), hybrid(16, B, columns)
    route = Route(ours, theirs, area=area())
    assert route.geometry is not None
    source = Tables.of(ours).pack([range(1, 5), range(11, 14)], [0, 1])
    blocks = Tables.of(theirs).pack([range(1, 8), range(21, 25)], [0, 3])
    plan = route.plan(source, packed(4, 5, 6, 7), (0, 100), 0, 100)
    assert [tuple(span) for span in plan.moved] == [(0, 100), (48, 100)]
    full, window = route.calls(packed(4, 5, 6, 7), blocks, (0, 100))
    assert sorted({(slot, block) for slot, _, block, *_ in window.moves.tolist()}) == [
        (5, 21),
        (6, 22),
        (6, 23),
        (7, 24),
    ]
    assert {block for _, _, block, *_ in full.moves.tolist()} == set(range(1, 8))


def test_groups_of_unequal_blocks_are_not_staged() -> None:
    ours, theirs = hybrid(16, A, columns, windowed=64), hybrid(32, B, columns, windowed=32)
    with pytest.raises(LayoutMismatchError, match="not re-packed: the source's groups have blocks of unequal size"):
        Route(ours, theirs, area=area())
