"""A sink that takes its shares from several source ranks: each grants, is read, fails and is released for itself."""

from __future__ import annotations

import pytest

from kvxfer.protocol.actions import PostRead, Revoke, Send
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Grant, Register, Release
from kvxfer.protocol.sink import IDLE, State
from tests.unit.protocol.test_sink import BLOCKS, P1, H, P, Rig, ends, sent

P2 = RankId("p", "i1", 2)


class Pull(Rig):
    """A sink that reads from ranks 0 and 1 of prefill."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.open("pull")
        self.connect(P, P1)

    def granted(self, frm=P, tokens=8, asked=100.0, lease=10.0) -> list:
        return self.do("grant", frm, Grant(H, 1, 0, tokens, bytes(8), asked, lease), self.now)


def told(actions: list, kind: type) -> list[RankId]:
    return [a.to for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def test_each_rank_is_read_from_and_released_and_the_last_read_completes() -> None:
    rig = Pull()
    reads = [a for rank in (P, P1) for a in rig.granted(rank) if isinstance(a, PostRead)]
    assert [(read.frm, read.transfer) for read in reads] == [(P, 1), (P1, 2)]
    first = rig.read_done(2)
    assert told(first, Release) == [P1]
    assert ends(first) == []
    assert rig.sink.receiving()
    last = rig.read_done(1)
    assert told(last, Release) == [P]
    assert ends(last) == [None]
    assert not rig.sink.receiving()


def test_a_rank_may_grant_when_another_has_been_read() -> None:
    rig = Pull()
    rig.granted(P)
    rig.read_done(1)
    assert rig.state is State.READING
    assert rig.granted(P) == [], "over with this one"
    rig.granted(P1)
    assert ends(rig.read_done(2)) == [None]


def test_the_shortest_lease_of_those_that_are_still_read_from_says_when_all_are_renewed() -> None:
    rig = Pull()
    rig.granted(P, lease=100.0)
    rig.granted(P1, lease=4.0)
    assert told(rig.wait(1.0), Register) == [P, P1]
    rig.read_done(2)
    assert told(rig.wait(4.9), Register) == []
    assert told(rig.wait(0.1), Register) == [P]


def test_a_grant_of_one_rank_is_no_lease_of_another() -> None:
    rig = Pull()
    rig.granted(P)
    rig.granted(P1)
    rig.now += 6.0
    rig.granted(P, asked=105.0)
    rig.now += 4.0
    assert ends(rig.read_done(1)) == []
    actions = rig.read_done(2)
    assert ends(actions) == ["the read completed 0.500 s after its lease had ended"]
    assert told(actions, Release) == [P1]


def test_a_late_read_fails_the_handoff_when_the_other_is_terminal() -> None:
    rig = Pull()
    rig.granted(P)
    rig.granted(P1)
    rig.now += 10.0
    assert ends(rig.read_done(1)) == []
    assert rig.state is State.CANCELLING
    actions = rig.read_done(2)
    assert ends(actions) == ["the read completed 0.500 s after its lease had ended"]
    assert told(actions, Release) == [P, P1]


def test_what_is_not_granted_is_asked_again_of_those_that_have_not_been_read() -> None:
    rig = Pull()
    rig.granted(P)
    rig.read_done(1)
    assert told(rig.wait(5.0), Register) == [P1]


def test_a_grant_that_is_too_old_is_asked_for_again_of_that_rank_alone() -> None:
    rig = Pull()
    rig.granted(P)
    rig.now += 9.6
    assert told(rig.granted(P1), Register) == [P1]
    assert [a.frm for a in rig.granted(P1, asked=109.0) if isinstance(a, PostRead)] == [P1]


@pytest.mark.parametrize("way", ["cancel", "fail", "lose"])
@pytest.mark.parametrize("both", [True, False])
def test_a_pull_that_fails_waits_for_every_read(way, both) -> None:
    rig = Pull()
    rig.granted(P)
    if both:
        rig.granted(P1)
    getattr(rig, way)(**({} if way == "cancel" else {"frm": P1}))
    assert rig.state is State.CANCELLING
    assert rig.granted(P1) == []
    actions = rig.read_done(1)
    if both:
        assert ends(actions) == []
        actions = rig.read_done(2)
    assert len(ends(actions)) == 1
    assert told(actions, Release) == [P, P1]


def test_after_one_read_what_fails_releases_the_others() -> None:
    rig = Pull()
    rig.granted(P)
    rig.read_done(1)
    actions = rig.cancel()
    assert ends(actions) == ["gone"]
    assert told(actions, Release) == [P1]


def test_a_failed_read_waits_for_the_drain_and_for_every_other_read() -> None:
    rig = Pull()
    rig.granted(P)
    rig.granted(P1)
    rig.read_failed(1)
    assert ends(rig.wait(50.0)) == [], "the second is not terminal"
    assert ends(rig.read_done(2)) == []
    actions = rig.wait(0.25)
    assert ends(actions) == ["a read failed: torn"]
    assert told(actions, Release) == [P, P1]


def test_two_failed_reads_drain_until_the_later_of_both() -> None:
    rig = Pull()
    rig.granted(P)
    rig.granted(P1)
    rig.read_failed(1)
    rig.now += 1.5
    rig.read_failed(2)
    assert ends(rig.wait(1.9)) == []
    assert ends(rig.wait(0.1)) == ["a read failed: torn"]


def test_what_a_rank_says_after_it_has_been_read_changes_nothing() -> None:
    rig = Pull()
    rig.granted(P)
    rig.granted(P1)
    rig.read_done(1)
    assert rig.fail() + rig.lose() == []
    assert ends(rig.read_done(2)) == [None]


def test_each_read_that_never_ends_is_stopped() -> None:
    rig = Pull()
    rig.granted(P)
    rig.granted(P1)
    assert len([a for a in rig.wait(120.0) if isinstance(a, Revoke)]) == 2
    assert [a for a in rig.wait(120.0) if isinstance(a, Revoke)] == []


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_ranks_that_nobody_takes_from_are_told_once_and_have_no_part(mode) -> None:
    rig = Rig()
    rig.open(mode)
    actions = rig.do("connected", H, (P,), rig.now, None, (P1, P2))
    assert told(actions, Register) == [P]
    assert [(a.to, a.message) for a in actions if isinstance(a, Send)][1:] == [
        (P1, Release(H, IDLE)),
        (P2, Release(H, IDLE)),
    ]
    assert told(rig.cancel(), Release) == ([P] if mode == "pull" else [])


def test_each_rank_gets_the_blocks_that_are_registered_with_it() -> None:
    rig = Rig()
    rig.open("pull")
    actions = rig.do("connected", H, (P, P1), rig.now, {P1: b"slot"})
    assert [message.blocks for message in sent(actions, Register)] == [BLOCKS, b"slot"]
