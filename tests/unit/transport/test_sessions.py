"""Sessions open, are replaced, forgotten and lost by themselves, without sockets; each loss is told once."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.errors import RemoteProtocolError
from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.peers import Timing
from kvxfer.transport.sessions import Sessions
from tests.support.cards import CACHE

TIMING = Timing(interval=1.0, timeout=5.0, lease=4.0, margin=0.5)
ME, PEER = RankId("d", "me", 0), RankId("p", "i1", 0)
AGAIN = RankId("p", "i2", 0)


def card(engine: str, **changes) -> RankCard:
    return msgspec.structs.replace(RankCard(engine, "m", 0, 1, 0, 1, "twin", CACHE, b"a"), **changes)


def made(mine: RankCard | None = None) -> Sessions:
    sessions = Sessions(ME, TIMING)
    sessions.card = mine
    return sessions


def hello(theirs: RankCard | None = None, sent: float = 50.0) -> messages.Hello:
    return messages.Hello({} if theirs is None else theirs.to_builtins(), sent)


def accepted(sessions: Sessions, rank: RankId = PEER, route: str = "route", now: float = 100.0, sent: float = 50.0):
    answer = sessions.accept(rank, hello(card(rank.engine), sent), route, now)
    assert isinstance(answer, messages.Welcome)
    return answer


def test_a_hello_is_answered_with_our_card_the_stamp_it_carried_and_a_lease() -> None:
    sessions = made(card("d"))
    welcome = accepted(sessions)
    assert RankCard.from_builtins(welcome.card) == card("d")
    assert (welcome.sent, welcome.echo, welcome.lease) == (100.0, 50.0, 4.0)
    session = sessions.get(PEER)
    assert (session.route, session.card) == ("route", card("p"))
    assert session.liveness.granted_until == 104.0
    assert session.liveness.may_post_until == 0.0, "the peer has granted nothing yet"


def test_a_welcome_grants_from_the_moment_of_our_hello() -> None:
    sessions = made(card("d"))
    assert RankCard.from_builtins(sessions.hello(100.0).card) == card("d")
    session = sessions.welcomed(PEER, messages.Welcome(card("p").to_builtins(), 7.0, 100.0, 4.0), "route", 103.0)
    assert session.liveness.may_post_until == 103.5
    assert list(sessions) == [session]


def test_scheduler_processes_have_no_card_and_are_accepted_without_one() -> None:
    sessions = made()
    assert sessions.hello(1.0).card == {}
    assert isinstance(sessions.accept(PEER, hello(card("p")), "route", 1.0), messages.Welcome)
    with_card = made(card("d"))
    assert isinstance(with_card.accept(RankId("p", "i1", -1), hello(), "route", 1.0), messages.Welcome)


@pytest.mark.parametrize("side", ["greeted", "greeting"])
@pytest.mark.parametrize("fault", ["does not fit", "is no card"])
def test_who_does_not_fit_gets_no_session_and_a_reason(side, fault) -> None:
    sessions = made(card("d"))
    theirs = card("p", model="other").to_builtins() if fault == "does not fit" else {"x": 1}
    text = "model differs: d has m, p has other" if fault == "does not fit" else "not a rank card"
    if side == "greeted":
        answer = sessions.accept(PEER, messages.Hello(theirs, 1.0), "route", 2.0)
        assert isinstance(answer, messages.Refused)
        assert text in answer.reason
    else:
        with pytest.raises(RemoteProtocolError, match=text):
            sessions.welcomed(PEER, messages.Welcome(theirs, 1.0, 1.0, 4.0), "route", 2.0)
    assert list(sessions) == []


def test_a_second_hello_changes_the_route_and_keeps_card_and_leases() -> None:
    sessions = made(card("d"))
    accepted(sessions, now=100.0)
    sessions.accept(PEER, hello(), "another", 101.0)
    (session,) = sessions
    assert (session.route, session.card) == ("another", card("p"))


def test_beats_come_once_an_interval_for_each_session() -> None:
    sessions = made(card("d"))
    accepted(sessions, now=100.0)
    assert list(sessions.beats_due(100.9)) == []
    ((session, beat),) = sessions.beats_due(101.0)
    assert (session.rank, beat.sent, beat.echo) == (PEER, 101.0, 50.0)
    assert list(sessions.beats_due(101.5)) == []


def test_a_silent_peer_is_lost_once_with_the_time() -> None:
    sessions = made(card("d"))
    accepted(sessions, now=100.0)
    accepted(sessions, RankId("q", "i1", 0), now=102.0)
    assert list(sessions.silent(104.9)) == []
    (lost,) = sessions.silent(105.0)
    assert (lost.session.rank, lost.reason) == (PEER, "nothing heard from it for 5 s")
    assert lost.session.liveness.granted_until == 104.0, "what its handoffs have to be fenced by"
    assert list(sessions.silent(105.0)) == []
    assert sessions.get(PEER) is None


def test_another_incarnation_replaces_that_rank_of_that_engine_only() -> None:
    sessions = made(card("d"))
    for rank in (PEER, RankId("p", "i1", 1), RankId("q", "i1", 0)):
        accepted(sessions, rank)
    (lost,) = sessions.replaced(AGAIN)
    assert (lost.session.rank, lost.reason) == (PEER, "another process has taken its place")
    assert list(sessions.replaced(AGAIN)) == []
    assert sessions.get(RankId("p", "i1", 1)) is not None
    assert sessions.get(RankId("q", "i1", 0)) is not None


def test_the_same_incarnation_replaces_nobody() -> None:
    sessions = made(card("d"))
    accepted(sessions)
    assert list(sessions.replaced(PEER)) == []


def test_a_peer_that_forgot_us_is_lost_once_and_may_come_again() -> None:
    sessions = made(card("d"))
    accepted(sessions)
    assert list(sessions.forgotten(AGAIN)) == []
    (lost,) = sessions.forgotten(PEER)
    assert lost.reason == "it has no session with this process"
    assert list(sessions.forgotten(PEER)) == []
    accepted(sessions, now=200.0, sent=150.0)
    assert sessions.get(PEER).liveness.may_post_until == 0.0, "a lease of the session that is over"
    assert list(sessions.silent(200.0)) == []
