"""Packed tables: read back as they were packed, extended block by block, and what is none of them refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.layout.maps import CacheMap, Group
from kvxfer.layout.tables import Shape, Tables, packed

ONE = Tables([Shape(16)])
HYBRID = Tables([Shape(16), Shape(16, 40), Shape(32, 40)])


def seen(tables, table: bytes, start: int = 0) -> list:
    return [(one.first, one.ids.tolist()) for one in tables.read(table, start)]


def test_of_one_group_there_are_ids_and_nothing_else() -> None:
    assert ONE.pack([[7, 8, -1]], [0]) == packed([7, 8, -1]) == np.array([7, 8, -1], dtype="<i4").tobytes()
    assert seen(ONE, packed([7, 8])) == [(0, [7, 8])]
    assert seen(ONE, packed([7, 8]), 37) == [(32, [7, 8])], "what a sink registers begins in its first position's block"
    assert ONE.join(b"", packed([7])) + packed([8]) == ONE.join(packed([7]), packed([8])) == packed([7, 8])


@pytest.mark.parametrize("tables", [HYBRID, Tables([Shape(16, 40)])], ids=["several groups", "a window"])
def test_anything_else_says_where_each_group_begins(tables) -> None:
    ids = [[1, 2], [], [5]][: len(tables.groups)]
    table = tables.pack(ids, [0, 3, 4][: len(ids)])
    assert seen(tables, table) == [(0, [1, 2]), (48, []), (128, [5])][: len(ids)]
    assert seen(tables, table, 999) == seen(tables, table)


def test_what_the_groups_have_in_common() -> None:
    cache = CacheMap((Group(16, 9, ()), Group(48, 9, (), 40)), (), "DRAM")
    both = Tables.of(cache)
    assert (both.groups, both.step) == ((Shape(16), Shape(48, 40)), 48)
    assert (both.plain, both.windowed, both.streams) == (False, True, True)
    assert (ONE.plain, ONE.windowed, ONE.streams) == (True, False, True)
    alone = Tables([Shape(16, 40)])
    assert (alone.plain, alone.windowed, alone.streams) == (False, True, False)


@pytest.mark.parametrize(
    ("start", "end", "registered"),
    [
        (0, 99, [(0, [0, 1, 2, 3, 4, 5, 6]), (48, [3, 4, 5, 6]), (32, [1, 2, 3])]),  # the last token looks back to 60
        (0, 103, [(0, [0, 1, 2, 3, 4, 5, 6]), (64, [4, 5, 6]), (64, [2, 3])]),
        (80, 99, [(80, [5, 6]), (80, [5, 6]), (64, [2, 3])]),
        (0, 20, [(0, [0, 1]), (0, [0, 1]), (0, [0])]),
    ],
)
def test_a_sink_registers_of_a_window_what_the_prompts_last_token_looks_back_to(start, end, registered) -> None:
    whole = [[n if n * group.block_size < 200 else 0 for n in range(13)] for group in HYBRID.groups]
    assert seen(HYBRID, HYBRID.spanning(whole, start, end)) == registered


@given(st.data(), st.lists(st.tuples(st.sampled_from([4, 8]), st.none() | st.integers(1, 30)), min_size=1, max_size=4))
def test_tables_that_grow_are_read_as_if_they_had_been_packed_at_once(data, shapes) -> None:
    tables = Tables(Shape(*shape) for shape in shapes)
    words = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=6)
    ids = [data.draw(words) for _ in shapes]
    first = [0 if tables.plain else data.draw(st.integers(0, 9)) for _ in shapes]
    table, at = b"", [0] * len(shapes)
    while at != [len(one) for one in ids]:
        upto = [data.draw(st.integers(low, len(one))) for low, one in zip(at, ids, strict=True)]
        more = [one[low:high] for one, low, high in zip(ids, at, upto, strict=True)]
        table = tables.join(table, tables.pack(more, [f + low for f, low in zip(first, at, strict=True)]))
        at = upto
    if table:
        assert table == tables.pack(ids, first)
        expected = [(f * shape[0], one) for f, one, shape in zip(first, ids, shapes, strict=True)]
        assert seen(tables, table) == expected


def test_blocks_that_do_not_follow_are_refused() -> None:
    table = HYBRID.pack([[1], [2], [3]], [0, 3, 3])
    with pytest.raises(ValueError, match="blocks from position 80 on do not follow 1 from position 48 on"):
        HYBRID.join(table, HYBRID.pack([[4], [5], [6]], [1, 5, 4]))
    assert seen(HYBRID, HYBRID.join(table, HYBRID.pack([[], [], [6]], [9, 9, 4]))) == [
        (0, [1]),
        (48, [2]),
        (96, [3, 6]),
    ]


@pytest.mark.parametrize(
    "words",
    [
        [],
        [0, 1, 0, 0, 0],
        [0, 1, 0, 1, 0, 1, 7, 8],
        [0, 1, 0, 1, 0, 1, 7, 8, 9, 10],
        [0, 1, 0, -1, 0, 3, 7, 8, 9],
        [-1, 1, 0, 1, 0, 1, 7, 8, 9],
        [0, (1 << 31) - 1, 0, (1 << 31) - 1, 0, 5, 7, 8, 9],
        [0, 2, 0, 1, 7, 8, 9],
    ],
    ids=str,
)
def test_what_is_not_tables_of_so_many_groups_is_refused(words) -> None:
    with pytest.raises(ValueError, match="are not the tables of 3 groups"):
        HYBRID.read(packed(words))


@given(st.binary(max_size=64))
def test_whatever_a_peer_sends_is_read_or_refused(sent) -> None:
    try:
        tables = HYBRID.read(sent)
    except ValueError:
        return
    assert sum(len(one.ids) for one in tables) == len(sent) // 4 - 6
    assert all(
        one.first >= 0 and one.first % group.block_size == 0 for one, group in zip(tables, HYBRID.groups, strict=True)
    )
