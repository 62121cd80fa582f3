"""Who connects whom before a handoff needs it, and that nobody calls a peer that does not make progress meanwhile."""

from __future__ import annotations

import itertools

import pytest

from kvxfer.errors import RemoteProtocolError, TransportError
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Approach
from kvxfer.transport import approaches
from kvxfer.transport.approaches import FRESH, PROMISE, TRIES, Approaches


class Connector:
    """A call about a rank fails the test unless that one makes progress."""

    def __init__(self, room: Room, name: str) -> None:
        self.room, self.name = room, name

    def approach(self, peer: RankId) -> None:
        room, called = self.room, peer.engine
        assert called not in room.asleep, f"{self.name} is caught in a call about {called}, which sleeps"
        assert room.ranks[called].promised(), f"{self.name} calls {called}, which makes no progress"
        assert called not in room.calling, f"{self.name} calls {called}, which is in a call itself"
        waiting = [one for one, (about, _) in room.calling.items() if about == self.name]
        assert not waiting, f"{self.name} calls {called}, while {waiting} wait for it"
        room.calling[self.name] = called, room.now + room.lasts
        if (self.name, called) in room.refuse:
            raise TransportError("no")
        room.calls.append((self.name, called))

    def is_connected(self, peer: RankId) -> bool:
        return (self.name, peer.engine) in self.room.calls

    def lives(self, peer: RankId, asked: float) -> bool:
        return asked > self.room.doubt_since


class Room:
    """Some ranks that hear each other after ``lag`` seconds. Who calls does nothing else, for as long as a call ``lasts``."""

    def __init__(self, *names: str, eager: str = "", lag: float = 0.01, lasts: float = 0.0) -> None:
        self.now = 100.0
        self.lasts = lasts
        self.calling: dict[str, tuple[str, float]] = {}
        self.lag = lag
        self.busy: set[str] = set()
        self.asleep: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.doubt_since = 0.0
        self.counters = {"early_connections": 0}
        self.said: list[tuple[str, str, str]] = []
        self.refuse: set[tuple[str, str]] = set()
        self._mail: list[tuple[float, str, str, Approach]] = []
        self.ids = {name: RankId(name, "life", 0) for name in names}
        self.ranks = {name: self._make(name, eager=name in eager) for name in names}

    def _make(self, name: str, *, eager: bool) -> Approaches:
        def send(to: RankId, message: Approach) -> None:
            self.said.append((name, to.engine, message.what))
            _, over = self.calling.get(name, ("", self.now))
            self._mail.append((over + self.lag, name, to.engine, message))

        return Approaches(self.ids[name], Connector(self, name), send, self.counters, eager=eager)

    def meet(self, a: str, b: str) -> None:
        """Open a session between two."""
        self.ranks[a].up(self.ids[b], self.now)
        self.ranks[b].up(self.ids[a], self.now)

    def run(self, seconds: float, step: float = 0.005) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.calling = {name: call for name, call in self.calling.items() if call[1] > self.now}
            away = self.asleep | self.calling.keys()
            for letter in [one for one in self._mail if one[0] <= self.now and one[2] not in away]:
                self._mail.remove(letter)
                _, frm, to, message = letter
                self.ranks[to].heard(self.ids[frm], message, self.now)
            for name in sorted(self.ranks.keys() - away):
                self.ranks[name].act(self.now, name not in self.busy)


def test_a_rank_that_posts_connects_whoever_it_meets() -> None:
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.run(1.0)
    assert room.calls == [("p", "d")]
    assert room.counters == {"early_connections": 1}
    assert room.said == [("p", "d", "ask"), ("d", "p", "come"), ("p", "d", "done")]
    assert len(room.ranks["p"]) == 0
    assert not room.ranks["d"].promised(), "it need not make progress any more"


def test_a_rank_that_posts_nothing_connects_nobody() -> None:
    room = Room("p", "d")
    room.meet("p", "d")
    room.run(5.0)
    assert room.calls == room.said == []


def test_who_is_connected_already_is_not_asked() -> None:
    room = Room("p", "d", eager="p")
    room.calls.append(("p", "d"))
    room.meet("p", "d")
    room.run(5.0)
    assert room.said == []


def test_a_handoff_that_connects_first_ends_it() -> None:
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.busy = {"p"}
    room.run(0.1)
    room.calls.append(("p", "d"))
    room.busy = set()
    room.run(5.0)
    assert room.calls == [("p", "d")]
    assert len(room.ranks["p"]) == 0


def test_nothing_is_begun_while_transfers_are_under_way() -> None:
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.busy = {"p"}
    room.run(3.0)
    assert room.said == []
    room.busy = set()
    room.run(0.5)
    assert room.calls == [("p", "d")]


def test_an_answer_that_finds_transfers_under_way_is_declined_and_asked_for_again() -> None:
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.run(0.005)
    room.busy = {"p"}
    room.run(0.1)
    assert room.said[-1] == ("p", "d", "done")
    assert not room.ranks["d"].promised()
    room.busy = set()
    room.run(3.0)
    assert room.calls == [("p", "d")]


def test_who_sleeps_is_asked_and_not_called_and_is_connected_when_it_wakes_up() -> None:
    room = Room("p", "d", eager="p")
    room.asleep = {"d"}
    room.meet("p", "d")
    room.run(7.0)
    assert room.calls == []
    assert room.said.count(("p", "d", "ask")) > 3
    room.asleep = set()
    room.run(3.0)
    assert room.calls == [("p", "d")]


def test_an_answer_that_is_not_fresh_begins_nothing() -> None:
    room = Room("p", "d", eager="p", lag=FRESH * 0.6)  # there and back takes longer than an answer counts
    room.meet("p", "d")
    room.run(6.0)
    assert room.calls == []
    assert ("d", "p", "come") in room.said
    room.lag = 0.01
    room.run(6.0)
    assert room.calls == [("p", "d")]


def test_an_answer_to_another_question_than_the_last_begins_nothing() -> None:
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.run(0.005)
    asked = room.now
    room.ranks["p"].heard(room.ids["d"], Approach("come", asked - 0.001), room.now)
    room.ranks["p"].act(room.now, free=True)
    assert room.calls == []


def test_an_answer_to_what_was_never_asked_begins_nothing() -> None:
    room = Room("p", "d", eager="")
    room.meet("p", "d")
    room.ranks["d"].heard(room.ids["p"], Approach("come", room.now), room.now)
    room.ranks["d"].act(room.now, free=True)
    assert room.calls == []
    assert room.said == [("d", "p", "done")], "whoever it is need not make progress"


def test_an_answer_from_the_future_is_refused() -> None:
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.run(0.005)
    with pytest.raises(RemoteProtocolError, match="has not asked yet"):
        room.ranks["p"].heard(room.ids["d"], Approach("come", room.now + 1.0), room.now)


def test_an_answer_from_before_some_connection_broke_begins_nothing() -> None:
    """NIXL does not say whose it was: whoever has not answered since may be dead."""
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.run(0.005)
    room.doubt_since = room.now
    room.run(0.5)
    assert ("d", "p", "come") in room.said
    assert room.calls == []
    room.run(3.0)
    assert room.calls == [("p", "d")]


def test_a_peer_that_is_lost_meanwhile_is_not_called() -> None:
    room = Room("p", "d", eager="p")
    room.meet("p", "d")
    room.run(0.015)  # the question is there, the answer is not
    assert room.said[-1] == ("d", "p", "come")
    room.ranks["p"].lost(room.ids["d"])
    room.ranks["d"].lost(room.ids["p"])
    room.run(PROMISE)
    assert room.calls == []
    assert not room.ranks["d"].promised()


def test_who_could_not_be_connected_is_asked_again_and_the_others_are_not_forgotten() -> None:
    room = Room("p", "c", "d", eager="p")
    room.refuse = {("p", "c")}
    room.meet("p", "c")
    room.meet("p", "d")
    room.run(4.0)
    assert room.calls == [("p", "d")]
    assert not room.ranks["c"].promised(), "it was told that the call is over"
    room.refuse = set()
    room.run(4.0)
    assert room.calls == [("p", "d"), ("p", "c")]


def test_who_never_answers_is_given_up() -> None:
    room = Room("p", "d", eager="p")
    room.asleep = {"d"}
    room.meet("p", "d")
    room.run(60.0, step=0.05)
    assert room.said.count(("p", "d", "ask")) == TRIES
    assert len(room.ranks["p"]) == 0


def test_a_promise_ends_although_nobody_says_that_it_is_over() -> None:
    room = Room("p", "d", eager="p")
    room.asleep = {"p"}
    room.ranks["d"].heard(room.ids["p"], Approach("ask", 3.0), room.now)
    room.run(PROMISE - 0.1)
    assert room.ranks["d"].promised()
    room.run(0.2)
    assert not room.ranks["d"].promised()


def test_the_end_of_an_earlier_question_does_not_end_what_was_promised_since() -> None:
    """An answer that came too late to count is declined when the next question has been asked, and answered."""
    room = Room("p", "d", eager="p")
    d, p = room.ranks["d"], room.ids["p"]
    for what, asked in (("ask", 1.0), ("ask", 2.0), ("done", 1.0)):
        d.heard(p, Approach(what, asked), room.now)
    assert d.promised()
    d.heard(p, Approach("done", 2.0), room.now)
    assert not d.promised()


def test_answers_that_come_together_are_acted_on_one_a_round() -> None:
    room = Room("p", "a", "b", eager="p", lag=1e9)
    p, asked = room.ranks["p"], {}
    for name in "ab":
        room.meet("p", name)
        p.act(room.now, free=True)
        asked[name] = room.now
        room.now += 0.001
    for name in "ab":
        room.ranks[name].heard(room.ids["p"], Approach("ask", asked[name]), room.now)
        p.heard(room.ids[name], Approach("come", asked[name]), room.now)
    p.act(room.now, free=True)
    assert room.calls == [("p", "a")]
    assert room.said[-2:] == [("p", "a", "done"), ("p", "b", "done")], "b is asked again"
    room.lag = 0.01
    room.run(5.0)
    assert sorted(room.calls) == [("p", "a"), ("p", "b")]


@pytest.mark.parametrize("names", [("p", "q"), ("q", "p")])
def test_of_two_that_want_each_other_both_are_connected_and_never_call_at_once(names) -> None:
    """Both post (kv_both). The room fails the test if one is called that waits itself: it has promised nothing then."""
    room = Room(*names, eager="pq")
    room.meet("p", "q")
    room.run(0.5)
    assert room.calls == [("p", "q")], "the first by name goes first"
    room.run(5.0)
    assert sorted(room.calls) == [("p", "q"), ("q", "p")]


@pytest.mark.parametrize("lasts", [0.0, 0.02, 0.4])
@pytest.mark.parametrize("lag", [0.0, 0.01, 0.05, 0.3])
def test_no_circle_waits_for_each_other(lag, lasts) -> None:
    """While one calls, whom it calls must not be calling anybody: see what the room fails for."""
    names = "abcd"
    room = Room(*names, eager=names, lag=lag, lasts=lasts)
    for one, other in itertools.combinations(names, 2):
        room.meet(one, other)
    room.run(90.0, step=0.01)
    assert sorted(room.calls) == sorted(itertools.permutations(names, 2))


def test_not_more_are_promised_than_there_can_be_sessions(monkeypatch) -> None:
    monkeypatch.setattr(approaches, "MOST", 2)
    room = Room("p", "a", "b", "c")
    for name in "abca":
        room.ranks["p"].heard(room.ids[name], Approach("ask", 1.0), room.now)
    assert room.said == [("p", "a", "come"), ("p", "b", "come"), ("p", "a", "come")]
