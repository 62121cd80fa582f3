"""Engines that a process stays connected with: when each is called, for how long, and what is said of it."""

from __future__ import annotations

import pytest

from kvxfer.protocol.ids import RankId
from kvxfer.transport import introductions
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.dialer import Outcome
from kvxfer.transport.introductions import FIRST, GIVEN_UP, LONGEST, Introductions

A, B = (EngineAddress("127.0.0.1", port, "") for port in (5600, 5601))
RANKS = (RankId("p", "life1", 0), RankId("p", "life1", 1))


@pytest.fixture
def kept() -> Introductions:
    return Introductions()


def up(address=A, ranks=RANKS) -> Outcome:
    return Outcome(address, ranks, None)


def down(address=A) -> Outcome:
    return Outcome(address, (), "no answer")


def call(kept, now):
    """Return whom to call at ``now``; it is due at that very moment and not before."""
    at = kept.next_at()
    assert at == pytest.approx(now)
    assert kept.due(at - 0.001) == []
    return kept.due(at)


def test_an_engine_is_called_at_once_and_once(kept) -> None:
    kept.keep(A, 10.0, lasting=True)
    assert kept.due(10.0) == [A]
    assert kept.due(11.0) == []
    assert kept.next_at() is None, "it is being called"


def test_who_does_not_answer_is_called_again_ever_more_rarely(kept) -> None:
    kept.keep(A, 0.0, lasting=True)
    now, waits = 0.0, []
    assert kept.due(now) == [A]
    for _ in range(10):
        kept.outcome(down(), now + 5.0)
        at = kept.next_at()
        waits.append(at - now - 5.0)
        assert call(kept, at) == [A]
        now = at
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30])
    assert (waits[0], waits[-1]) == (FIRST, LONGEST)


def test_the_same_failure_is_said_once_and_again_after_a_success(kept) -> None:
    kept.keep(A, 0.0, lasting=True)
    said = [kept.outcome(one, 0.0) for one in (down(), down(), down(), up(), down(), down())]
    assert said == [True, False, False, True, True, False]


def test_a_call_for_a_request_is_always_worth_a_line(kept) -> None:
    kept.keep(A, 0.0, lasting=True)
    assert [kept.outcome(down(B), 0.0) for _ in range(2)] == [True, True]


def test_who_is_connected_is_called_when_one_of_its_ranks_is_lost(kept) -> None:
    kept.keep(A, 0.0, lasting=True)
    kept.due(0.0)
    kept.outcome(up(), 1.0)
    assert kept.next_at() is None
    kept.lost(RankId("d", "life1", 0), 2.0)
    assert kept.next_at() is None, "another engine's"
    kept.lost(RANKS[1], 3.0)
    kept.lost(RANKS[0], 3.1)
    assert call(kept, 3.0 + FIRST) == [A], "once for all of its ranks"


def test_what_was_only_introduced_is_given_up_and_what_is_configured_never(kept) -> None:
    kept.keep(A, 0.0, lasting=False)
    kept.keep(B, 0.0, lasting=True)
    for address in (A, B):
        kept.due(0.0)
        kept.outcome(down(address), 1.0)
    assert set(kept.due(GIVEN_UP - 1.0)) == {A, B}
    kept.outcome(down(A), GIVEN_UP)
    kept.outcome(down(B), GIVEN_UP)
    assert kept.due(GIVEN_UP + LONGEST) == [B]


def test_patience_with_who_was_introduced_begins_when_it_is_lost(kept) -> None:
    kept.keep(A, 0.0, lasting=False)
    kept.due(0.0)
    kept.outcome(up(), 1.0)
    late = 5 * GIVEN_UP
    assert kept.due(late) == []
    kept.lost(RANKS[0], late)
    assert kept.due(late + 1.0) == [A]


@pytest.mark.parametrize("again", [True, False])
def test_who_is_introduced_again_is_called_at_once(kept, again) -> None:
    """Its router has seen it come back; whoever was configured stays so."""
    kept.keep(A, 0.0, lasting=True)
    now = 0.0
    for _ in range(8):
        now = kept.next_at()
        kept.due(now)
        kept.outcome(down(), now)
    kept.keep(A, now + 2.0, lasting=again)
    assert call(kept, now + 2.0) == [A]
    kept.outcome(down(), now + 3.0)
    assert kept.next_at() == now + 3.0 + FIRST
    kept.due(now + 3.0 + FIRST)
    kept.outcome(down(), now + 10 * GIVEN_UP)
    assert kept.next_at() is not None


def test_an_introduction_neither_calls_a_second_time_nor_disturbs_who_is_connected(kept) -> None:
    kept.keep(A, 0.0, lasting=False)
    kept.due(0.0)
    kept.keep(A, 0.1, lasting=False)
    assert kept.due(0.2) == []
    kept.outcome(up(), 0.3)
    kept.keep(A, 0.4, lasting=False)
    assert kept.due(100.0) == []


def test_who_is_forgotten_is_called_no_more(kept) -> None:
    kept.keep(A, 0.0, lasting=True)
    kept.forget(A)
    kept.forget(B)
    assert kept.due(1.0) == []
    kept.outcome(down(), 2.0)
    assert kept.next_at() is None


def test_the_table_has_an_end(kept, monkeypatch) -> None:
    monkeypatch.setattr(introductions, "MOST", 3)
    many = [EngineAddress("127.0.0.1", port, "") for port in range(1, 6)]
    for address in many:
        kept.keep(address, 0.0, lasting=False)
    assert kept.due(0.0) == many[:3]
