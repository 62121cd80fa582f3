"""A switchboard without sockets: what belongs to a session ends with it, however late it arrives."""

from __future__ import annotations

import pytest

from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import open_envelope, pack, unpack
from kvxfer.protocol.peers import Timing
from kvxfer.transport import switchboard
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.suspects import Answer
from kvxfer.transport.switchboard import Switchboard
from tests.support.cards import CACHE

ME, PEER = RankId("p", "me", 0), RankId("d", "i1", 0)
HANDOFF = HandoffId("h")
ADDRESS = EngineAddress("h", 5600, "d")
WORDS = [
    messages.Register(HANDOFF, 1, "push", 0, 4, b"\0\0\0\0", 1.0),
    messages.Cancel(HANDOFF, 1, "why"),
    messages.Heartbeat(sent=60.0, echo=100.0, lease=1000.0),
]


class Heard:
    """A listener."""

    def __init__(self) -> None:
        self.messages, self.lost, self.leases = [], [], []

    def on_message(self, frm, message):
        self.messages.append(message)

    def beating(self, now):
        return True

    def on_lost(self, rank, reason, granted_until, *, dead):
        self.lost.append(rank)

    def on_lease(self, rank, until, asked):
        self.leases.append(until)

    def on_up(self, rank, card): ...

    def on_round(self, now): ...


class Wires:
    """Every route leads from the peer, who dialed it."""

    def __init__(self) -> None:
        self.said = []

    def put(self, route, packed):
        self.said.append((route, unpack(packed)[1]))

    def where(self, route):
        return None

    def came_from(self, route):
        return ""

    def knock(self, rank, host, port):
        raise AssertionError(rank)

    def dialed(self, route):
        return None


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def board(heard):
    made = Switchboard(ME, heard, Wires(), Timing(), 3.0)
    made.sessions.card = RankCard("p", "m", 0, 1, 0, 1, "twin", CACHE, b"a")
    return made


def say(board, message, route, now, heard=0.0):
    board.receive(pack(PEER, ME.incarnation, message, heard=heard), route, now)


def greet(board, route, now, sent):
    card = RankCard("d", "m", 0, 1, 0, 1, "twin", CACHE, b"a")
    say(board, messages.Hello(card.to_builtins(), sent), route, now)


def silence(board):
    board.tick(106.0)


def greeted_anew(board):
    greet(board, "second", 101.0, sent=56.0)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
@pytest.mark.parametrize("lost", [silence, greeted_anew])
@pytest.mark.parametrize("route", ["first", "second", "one made anew"])
def test_what_an_ended_session_has_said_is_not_heard_in_the_next(board, heard, lost, route, word):
    """By whatever connection it comes: one that broke was made anew, and delivers then what was said before."""
    greet(board, "first", 100.0, sent=50.0)
    lost(board)
    greet(board, "second", 107.0, sent=57.0)
    said = len(board._wires.said)
    say(board, word, route, 108.0, heard=100.0)
    assert (heard.messages, heard.leases) == ([], [])
    assert board.sessions.get(PEER).route == "second"
    assert board.sessions.get(PEER).liveness.last_heard == 107.0
    assert len(board._wires.said) == said, "nothing that could end the peer's new session"
    say(board, word, route, 108.0, heard=107.0)
    assert len(heard.messages) + len(heard.leases) == 1


def test_without_a_session_such_a_word_is_answered_like_any_other(board, heard):
    greet(board, "first", 100.0, sent=50.0)
    silence(board)
    assert heard.lost == [PEER]
    say(board, WORDS[0], "first", 107.0, heard=100.0)
    assert board._wires.said[-1] == ("first", messages.Stale())


def test_the_ends_of_so_many_sessions_are_remembered(board, monkeypatch):
    monkeypatch.setattr(switchboard, "ENDED", 3)
    for sent in range(1, 9):
        greet(board, "first", 100.0 + sent, sent=float(sent))
    assert list(board._ended) == [PEER]
    assert board._ended[PEER] == 108.0


def test_what_is_said_names_what_was_heard_last(board):
    greet(board, "first", 100.0, sent=50.0)
    raw = []
    board._wires.put = lambda route, packed: raw.append(open_envelope(packed))
    board.send(PEER, WORDS[1])
    say(board, WORDS[2], "first", 101.0, heard=100.0)
    board.send(PEER, WORDS[1])
    assert [envelope.heard for envelope in raw] == [50.0, 60.0]


def test_a_session_may_go_on_by_another_route(board, heard):
    greet(board, "first", 100.0, sent=50.0)
    say(board, WORDS[0], "second", 101.0)
    assert board.sessions.get(PEER).route == "second"
    assert heard.messages == [WORDS[0]]


REFUSES, ACCEPTS = Answer.REFUSES, Answer.ACCEPTS


class Looked(Heard):
    """A listener that notes who is thought dead."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = []

    def on_lost(self, rank, reason, granted_until, *, dead):
        super().on_lost(rank, reason, granted_until, dead=dead)
        self.dead += [rank] if dead else []

    def on_ended(self, rank):
        self.dead.append(rank)


class Looking(Wires):
    """Connections come from a host at which the peer does not listen; every look is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = []

    def came_from(self, route):
        return "10.1.0.2"

    def knock(self, rank, host, port):
        self.looks.append((host, port))


def hello(board, route, now, sent):
    card = RankCard("d", "m", 0, 1, 0, 1, "twin", CACHE, b"a")
    say(board, messages.Hello(card.to_builtins(), sent, 1.0, 5.0, 5600), route, now)


@pytest.fixture
def looking():
    made = Switchboard(ME, Looked(), Looking(), Timing(), 3.0)
    made.sessions.card = RankCard("p", "m", 0, 1, 0, 1, "twin", CACHE, b"a")
    return made


def test_a_first_look_that_is_refused_proves_nothing_however_often_it_greets(looking):
    hello(looking, "first", 100.0, sent=50.0)
    hello(looking, "second", 100.01, sent=50.01)
    for now in (100.02, 100.03):
        looking.knocked(PEER, ("10.1.0.2", 5600), now, REFUSES)
    assert looking._listener.dead == []
    assert looking.sessions.get(PEER).listens is None


def test_a_first_look_that_is_answered_after_its_session_proves_nothing(looking):
    hello(looking, "first", 100.0, sent=50.0)
    say(looking, messages.Stale(), "first", 100.1)
    looking.knocked(PEER, ("10.1.0.2", 5600), 100.2, REFUSES)
    assert looking._listener.dead == []


def test_a_refusal_counts_only_at_the_address_at_which_the_suspect_listened(looking):
    hello(looking, "first", 100.0, sent=50.0)
    looking.knocked(PEER, ("10.1.0.2", 5600), 100.1, ACCEPTS)
    assert looking.sessions.get(PEER).listens == ("10.1.0.2", 5600)
    looking.tick(103.0)  # it has missed two beats
    looking.knocked(PEER, ("10.9.9.9", 5600), 103.1, REFUSES)
    assert looking._listener.dead == []
    looking.knocked(PEER, ("10.1.0.2", 5600), 103.2, REFUSES)
    assert looking._listener.dead == [PEER]


def test_a_revocation_ends_sessions_at_its_own_moment(looking):
    hello(looking, "first", 100.0, sent=50.0)
    looking.tick(101.0)  # a beat leaves, with this stamp
    looking.renew(looking.sessions.card, 101.2)
    hello(looking, "second", 101.3, sent=51.3)
    say(looking, WORDS[0], "first", 101.4, heard=101.0)
    assert looking._listener.messages == []


def test_what_answers_a_greeting_from_before_a_revocation_opens_nothing_and_is_greeted_anew():
    class Dialed(Wires):
        def __init__(self) -> None:
            super().__init__()
            self.dials = []

        def dialed(self, route):
            return ADDRESS if route == "dialed" else None

        def where(self, route):
            return ("h", 5600)

        def dial(self, address, host, port, first):
            self.dials.append((host, port, unpack(first)[1]))

        def hang_up(self, route):
            self.dials.append(route)

    wires = Dialed()
    board = Switchboard(ME, Looked(), wires, Timing(), 3.0)
    mine = RankCard("p", "m", 0, 1, 0, 1, "twin", CACHE, b"old")
    board.sessions.card = mine
    board.greet(ADDRESS, PEER, "h", 5600, 100.0)
    board.renew(RankCard("p", "m", 0, 1, 0, 1, "twin", CACHE, b"new"), 100.5)
    theirs = RankCard("d", "m", 0, 1, 0, 1, "twin", CACHE, b"a").to_builtins()
    say(board, messages.Welcome(theirs, 70.0, 100.0, 4.0), "dialed", 101.0)
    assert board.sessions.get(PEER) is None
    assert wires.said == [("dialed", messages.Stale())], "the peer has opened one, with keys that open nothing"
    assert wires.dials[1] == "dialed"
    assert wires.dials[2][2].card["agent"] == b"new"
