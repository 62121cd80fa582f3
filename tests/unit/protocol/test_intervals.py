"""An interval set is a set of ints, whatever the order and number of additions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.protocol.intervals import IntervalSet

SPANS = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda t: (t[0], t[0] + t[1]))


def built(spans) -> IntervalSet:
    made = IntervalSet()
    for start, end in spans:
        made.add(start, end)
    return made


def positions(spans) -> set[int]:
    return {p for start, end in spans for p in range(start, end)}


@given(st.lists(SPANS))
def test_holds_exactly_what_was_added(spans) -> None:
    made, model = built(spans), positions(spans)
    assert positions(made) == model
    assert len(made) == len(model)


@given(st.lists(SPANS), SPANS)
def test_holds_nothing_of_what_was_removed(spans, gone) -> None:
    made = built(spans)
    made.remove(*gone)
    assert positions(made) == positions(spans) - positions([gone])
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(made))


@given(st.lists(SPANS))
def test_spans_are_sorted_not_empty_and_do_not_touch(spans) -> None:
    at = -1
    for start, end in built(spans):
        assert at < start < end
        at = end


@given(st.lists(SPANS), st.data())
def test_equality_ignores_order_and_doubling(spans, data) -> None:
    again = data.draw(st.permutations(spans + spans[: len(spans) // 2]))
    assert built(spans) == built(again)
    assert repr(built(spans)) == repr(built(again))


@given(st.lists(SPANS), st.lists(SPANS))
def test_equality_is_that_of_sets(a, b) -> None:
    assert (built(a) == built(b)) == (positions(a) == positions(b))
    assert built(a) != positions(a)


@given(st.lists(SPANS), SPANS)
def test_covers_and_missing_agree_with_the_set(spans, asked) -> None:
    made, absent = built(spans), set(range(*asked)) - positions(spans)
    assert made.covers(*asked) == (not absent)
    gaps = made.missing(*asked)
    assert positions(gaps) == absent
    assert gaps == list(built(gaps)), "gaps are not maximal, or not in order"


@pytest.mark.parametrize("span", [(-1, 3), (5, 4), (-3, -2)])
def test_what_is_no_span_is_refused(span) -> None:
    with pytest.raises(ValueError, match="is not a span of positions"):
        IntervalSet().add(*span)


def test_a_reversed_question_covers_nothing_and_misses_nothing() -> None:
    assert IntervalSet().covers(5, 3)
    assert IntervalSet().missing(5, 3) == []


def test_sets_that_change_have_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(IntervalSet())


def test_repr_shows_the_spans() -> None:
    assert repr(built([(4, 6), (0, 2)])) == "IntervalSet([0, 2), [4, 6))"
