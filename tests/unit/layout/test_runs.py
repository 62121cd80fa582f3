"""Joining and cutting runs, against bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.runs import EMPTY, Runs, capped, gathered, joined, rows


def runs(*triples) -> Runs:
    return Runs(*(np.array(column, dtype=np.int64) for column in zip(*triples, strict=True))) if triples else EMPTY


def pairs(some: Runs) -> list[tuple[int, int]]:
    return [
        (a + i, b + i) for a, b, length in zip(*(array.tolist() for array in some), strict=True) for i in range(length)
    ]


TRIPLES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 6)), max_size=12)


@given(TRIPLES)
def test_joined_runs_copy_the_same_in_the_fewest_pieces_or_are_refused(triples) -> None:
    some = runs(*triples)
    before = pairs(some)
    if len({there for _, there in before}) < len(before):
        with pytest.raises(LayoutMismatchError, match="two runs write the byte at 0x"):
            joined(some)
        return
    result = joined(some)
    assert sorted(pairs(result)) == sorted(before)
    assert len(result.length) == sum((a - 1, b - 1) not in set(before) for a, b in before)
    assert (np.diff(result.sink) > 0).all()


@given(TRIPLES, st.integers(1, 7))
def test_capped_runs_copy_the_same_and_none_is_longer(triples, limit) -> None:
    some = runs(*triples)
    result = capped(some, limit)
    assert pairs(result) == pairs(some)
    assert all(length <= limit for length in result.length.tolist())
    assert len(result.length) == sum(-(-length // limit) for _, _, length in triples)


def test_runs_at_the_end_of_the_address_space_are_exact() -> None:
    high = (1 << 63) - 32
    result = joined(runs((high + 8, 8, 8), (high, 0, 8)))
    assert pairs(result) == [(high + i, i) for i in range(16)]
    assert rows(result.source, result.length, 3).tolist() == [[high, 16, 3]]
    assert rows(result.source, result.length, 3).dtype == np.uint64


def test_gathering_nothing_and_shifting_nothing_give_nothing() -> None:
    assert len(gathered([]).length) == 0
    assert len(gathered([runs((1, 2, 3)), EMPTY]).length) == 1
    assert len(EMPTY.shifted(np.arange(3), np.arange(3)).length) == 0
    assert pairs(runs((1, 2, 2)).shifted(np.array([0, 10]), np.array([5, 0]))) == [(1, 7), (2, 8), (11, 2), (12, 3)]
