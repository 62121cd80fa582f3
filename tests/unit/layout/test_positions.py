"""Which positions move, and what is said of tables that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.layout.positions import Span, Table, kinds, moving, segments, unpacked
from kvxfer.layout.refine import Pairing


def pairing(
    source: int = 4, sink: int = 4, *, window: int | None = None, whole: bool = False, blocks: int = 100
) -> Pairing:
    return Pairing(0, 0, (source, sink), (blocks, blocks), window, whole, ())


def ids(*values: int, first: int = 0) -> Table:
    return Table(np.array(values, dtype=np.int32), first)


@pytest.mark.parametrize(
    ("of", "asked", "moved"),
    [
        (pairing(), {"start": 5, "end": 7}, (5, 8)),
        (pairing(), {"start": 5, "end": 7, "exact": True}, (5, 7)),
        (pairing(4, 6), {"start": 1, "end": 5}, (1, 6)),
        (pairing(4, 6), {"start": 1, "end": 3}, (1, 4)),
        (pairing(), {"start": 5, "end": 5}, (5, 5)),
        (pairing(window=6), {"start": 0, "end": 16, "prompt": 16}, (8, 16)),
        (pairing(window=6), {"start": 9, "end": 16, "prompt": 16}, (9, 16)),
        (pairing(window=6), {"start": 0, "end": 16, "prompt": 18}, (12, 16)),
        (pairing(6, 3, window=6), {"start": 0, "end": 16, "prompt": 16}, (9, 18)),
        (pairing(window=6), {"start": 12, "end": 16, "prompt": 16}, (12, 16)),
        (pairing(window=6), {"start": 0, "end": 8, "prompt": 16}, (8, 8)),
        (pairing(window=99), {"start": 3, "end": 8, "prompt": 16}, (3, 8)),
        (pairing(whole=True), {"start": 5, "end": 7}, (4, 8)),
        (pairing(whole=True), {"start": 5, "end": 7, "exact": True, "keep": 4}, (4, 8)),
        (pairing(whole=True, window=6), {"start": 0, "end": 15, "prompt": 15}, (8, 16)),
    ],
)
def test_which_positions_move(of, asked, moved) -> None:
    assert moving(of, **({"prompt": asked["end"]} | asked)) == Span(*moved)


def test_a_whole_block_is_not_written_over_what_the_sink_keeps() -> None:
    with pytest.raises(
        ValueError, match=r"position 6 is in a block of 4 tokens that begins at 4, .* below 5: .* from 4 on"
    ):
        moving(pairing(whole=True), 6, 9, prompt=9, keep=5)


@pytest.mark.parametrize(("start", "end", "keep"), [(5, 4, 0), (5, 9, 6), (-1, 4, 0), (3, 4, -1)])
def test_positions_that_make_no_sense_are_refused(start, end, keep) -> None:
    with pytest.raises(ValueError, match=rf"positions \[{start}, {end}\) cannot be written by a handoff"):
        moving(pairing(), start, end, prompt=9, keep=keep)


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 40), st.integers(0, 30), st.integers(0, 2), st.integers(0, 2)
)
def test_segments_are_all_positions_once_where_both_tables_have_them(a, b, start, length, before, before_there) -> None:
    first, there = max(0, start // a - before) * a, max(0, start // b - before_there) * b
    end = start + length
    # Ids that tell which block of the request they are.
    source = Table(np.arange(first // a, max(first, -(-end // a)) + 1, dtype=np.int32), first)
    sink = Table(np.arange(there // b, max(there, -(-end // b)) + 1, dtype=np.int32), there)
    seen = []
    for found in segments(pairing(a, b), Span(start, end), source, sink):
        kind = found.kind
        assert kind.tokens > 0
        assert kind.source + kind.tokens <= a
        assert kind.sink + kind.tokens <= b
        for ours, theirs in zip(found.source.tolist(), found.sink.tolist(), strict=True):
            for token in range(kind.tokens):
                assert ours * a + kind.source + token == theirs * b + kind.sink + token
                seen.append(ours * a + kind.source + token)
    assert sorted(seen) == list(range(start, end))


@given(st.integers(1, 12), st.integers(1, 12))
def test_the_kinds_between_two_block_sizes_make_up_one_round_of_both(a, b) -> None:
    found = list(kinds(a, b))
    assert sum(kind.tokens * times for kind, times in found) == np.lcm(a, b)
    assert len({kind for kind, _ in found}) == len(found)
    assert sum(times for _, times in found) == (1 if a == b else np.lcm(a, b) // a + np.lcm(a, b) // b - 1)


@pytest.mark.parametrize(
    ("source", "sink", "text"),
    [
        (
            ids(1, 2),
            ids(1, 2, 3),
            r"positions \[3, 10\) need the source's blocks 0 to 3 of a list that holds 2 from position 0",
        ),
        (ids(1, 2, 3), ids(1, 2, first=4), r"need the sink's blocks -1 to 2 of a list that holds 2 from position 4"),
        (ids(1, 2, 3), ids(1, 2, 3, first=-4), "the sink's blocks begin at position -4, inside"),
        (ids(1, 2, 3, first=2), ids(1, 2, 3), "the source's blocks begin at position 2, inside a block of 4 tokens"),
        (ids(1, 2, 100), ids(1, 2, 3), "the source's block 100 is outside a cache of 100 blocks"),
        (ids(1, 2, 3), ids(1, -2, 3), "the sink's block -2 is outside a cache of 100 blocks"),
    ],
)
def test_tables_that_do_not_fit_are_refused(source, sink, text) -> None:
    with pytest.raises(ValueError, match=text):
        list(segments(pairing(), Span(3, 10), source, sink))


def test_blocks_that_a_window_has_passed_do_not_move() -> None:
    window = pairing(window=20)
    (found,) = segments(window, Span(0, 12), ids(7, 8, 9), ids(0, 5, 6))
    assert (found.source.tolist(), found.sink.tolist()) == ([8, 9], [5, 6])
    with pytest.raises(ValueError, match="the source has let go of blocks that are still in the sink's window"):
        list(segments(window, Span(0, 12), ids(0, 0, 9), ids(0, 5, 6)))
    (found,) = segments(pairing(), Span(0, 12), ids(0, 8, 9), ids(0, 5, 6))
    assert found.source.tolist() == [0, 8, 9], "without a window, block 0 is a block like any other"


def test_a_table_from_the_wire() -> None:
    table = unpacked(np.array([3, -1], dtype="<i4").tobytes(), 32)
    assert (table.ids.tolist(), table.first) == ([3, -1], 32)
    with pytest.raises(ValueError, match="buffer size"):
        unpacked(b"12345")
