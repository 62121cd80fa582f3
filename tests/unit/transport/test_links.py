"""Attacks on processes that share a secret: replay, forgery, reflection, confusion. No sockets: a wiretap carries the words.

The attacker hears everything, and may say anything to anybody, by any connection, at any time. It does not know the secret.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages
from kvxfer.protocol.auth import CHALLENGE_LIFE, Secret
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Directory, RankAddress, Refusal, open_envelope, read_body
from kvxfer.protocol.peers import Timing
from kvxfer.transport import links
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.switchboard import Switchboard
from tests.support.cards import CACHE

SECRET = Secret(b"what the engines share")
TIMING = Timing()
START = 1000.0

HARMLESS = (messages.Challenge, messages.Stale)
"""What may be said to a stranger beside a refusal: who is there, and nothing else."""


@dataclass(eq=False)
class Net:
    """Wires between processes. A route is (wire, end of it, life): "dialer" or "listener", anew when the wire breaks."""

    now: float = START
    listeners: dict = field(default_factory=dict)
    wires: dict = field(default_factory=dict)  # number -> [dialer, listener, address, life]
    queue: deque = field(default_factory=deque)
    tapped: list = field(default_factory=list)  # (process, route, packed)
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))

    def run(self) -> None:
        while self.queue:
            process, route, packed = self.queue.popleft()
            self.tapped.append((process, route, packed))
            process.board.receive(packed, route, self.now)

    def run_in_any_order(self, draw: random.Random) -> None:
        """Keep the order on each connection only; time passes."""
        while self.queue:
            ways = {}
            for one in self.queue:
                ways.setdefault(one[1][:2], one)
            one = draw.choice(list(ways.values()))
            self.queue.remove(one)
            self.now += 0.001
            one[0].board.receive(one[2], one[1], self.now)


class Process:
    """A process: its switchboard, its wires, and what its listener heard."""

    def __init__(self, net: Net, engine: str, *, rank: int = 0, life: str = "i1", port: int = 0, secret=SECRET) -> None:
        self.net, self.me, self.port = net, RankId(engine, life, rank), port or next(net.numbers) + 5000
        self.heard: list = []
        self.said: list = []  # by routes that the attacker made
        self.board = Switchboard(self.me, self, self, TIMING, 5.0, secret)
        self.board.sessions.card = RankCard(engine, "m", 0, 1, 0, 1, "twin", CACHE, b"a")
        where = RankAddress(rank, life, 0, 0, "", self.port)
        self.board.directory = Directory(engine, 1, 1, ready=True, ranks=(where,))
        net.listeners[self.port] = self
        self.address = EngineAddress("h", self.port, engine)

    # wires
    def dial(self, address, host, port, first) -> None:
        number = next(self.net.numbers)
        self.net.wires[number] = [self, self.net.listeners[port], address, 0]
        self.put((number, "dialer", 0), first)

    def put(self, route, packed) -> None:
        number, end, _ = route
        if number == "attacker":
            self.said.append(packed)
            return
        wire = self.net.wires.get(number)
        if wire is not None:
            dialer, listener, _, life = wire
            there = (listener, (number, "listener", life)) if end == "dialer" else (dialer, (number, "dialer", 0))
            self.net.queue.append((*there, packed))

    def where(self, route):
        wire = self.net.wires.get(route[0])
        return None if self.dialed(route) is None else ("h", wire[1].port)

    def came_from(self, route):
        return ""

    def knock(self, rank, host, port) -> None:
        """Everybody lives."""

    def dialed(self, route):
        wire = self.net.wires.get(route[0])
        return wire[2] if wire is not None and route[1] == "dialer" and wire[0] is self else None

    def dialed_for(self, address):
        return [(n, "dialer", 0) for n, w in self.net.wires.items() if w[0] is self and w[2] == address]

    def hang_up(self, route) -> None:
        if self.dialed(route) is not None:
            del self.net.wires[route[0]]

    # listener
    def on_message(self, frm, message) -> None:
        self.heard.append((frm, message))

    def on_up(self, rank, card) -> None:
        self.heard.append(("up", rank))

    def beating(self, now) -> bool:
        return True

    def on_ended(self, rank) -> None:
        raise AssertionError(rank)

    def on_lost(self, rank, reason, granted_until, *, dead) -> None:
        self.heard.append(("lost", rank, reason))

    def on_lease(self, rank, until, asked) -> None:
        self.heard.append(("lease", rank, until))

    def on_outcome(self, outcome) -> None:
        self.heard.append(("outcome", outcome.ranks, outcome.reason))

    def on_round(self, now) -> None:
        pass

    def on_report(self, last):
        self.heard.append(("report", last))
        return messages.Report(0, {}, {}, [])

    # for tests
    def state(self):
        """Everything that an envelope could have changed."""
        sessions = {
            s.rank: (s.route, s.since, [getattr(s.liveness, name) for name in type(s.liveness).__slots__])
            for s in self.board.sessions
        }
        return list(self.heard), sessions, len(self.board._links), self.board.calling

    def strangers_heard(self) -> list[type]:
        """Take what was said by the attacker's own routes."""
        said, self.said = self.said, []
        opened = [open_envelope(packed) for packed in said]
        return [type(e) if isinstance(e, Refusal) else type(read_body(e)) for e in opened]


def talk(net: Net, p: Process, d: Process) -> None:
    """d calls p, both talk, somebody asks for records."""
    d.board.call(p.address, net.now)
    net.run()
    assert ("outcome", (p.me,), None) in d.heard
    d.board.send(p.me, messages.Expect(HandoffId("h"), 30.0))
    d.board.send(p.me, messages.Register(HandoffId("h"), 1, "push", 0, 4, b"\1\0\0\0", 1.0))
    p.board.send(d.me, messages.Seal(HandoffId("h"), 1, 0, 4))
    d.board.send(p.me, messages.Release(HandoffId("h"), "done"))
    net.now += 1.5
    for process in (p, d):
        process.board.tick(net.now)
    net.run()
    route = next(s.route for s in d.board.sessions)
    d.board._say(route, p.me.incarnation, messages.ReportAsk(7))
    net.run()
    assert ("report", 7) in p.heard


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def pair(net):
    p, d = Process(net, "p"), Process(net, "d")
    talk(net, p, d)
    return p, d


KINDS = (
    "Knock",
    "Challenge",
    "WhoIs",
    "Directory",
    "Hello",
    "Welcome",
    "Heartbeat",
    "Expect",
    "Register",
    "Seal",
    "Release",
)


def kind(packed: bytes) -> str:
    return type(read_body(open_envelope(packed))).__name__


def test_the_tap_hears_every_kind_of_word(net, pair) -> None:
    assert {kind(packed) for *_, packed in net.tapped} >= {*KINDS, "ReportAsk", "Report"}


# --- replay -----------------------------------------------------------------------------------------------------------


def unchanged(net: Net, process: Process, packed: bytes, route) -> None:
    before, replies = process.state(), len(net.queue)
    process.board.receive(packed, route, net.now)
    assert process.state() == before, f"{kind(packed)} by {route} had an effect"
    answers = [open_envelope(one) for *_, one in list(net.queue)[replies:]]
    assert all(isinstance(a, Refusal) or isinstance(read_body(a), HARMLESS) for a in answers), kind(packed)
    while len(net.queue) > replies:
        net.queue.pop()
    assert set(process.strangers_heard()) <= {*HARMLESS, Refusal}, kind(packed)


@pytest.mark.parametrize("later", [0.0, 3.0, CHALLENGE_LIFE + 1.0, 1e5])
def test_replayed_at_its_own_process_no_envelope_has_an_effect(net, pair, later) -> None:
    """By the very connection, by one of the attacker's, by each one that there is; at once and at any later time."""
    _p, _d = pair
    tapped = list(net.tapped)
    net.now += later
    for process, route, packed in tapped:
        for by in (route, ("attacker", "listener", 0), *((n, "listener", 0) for n in net.wires)):
            unchanged(net, process, packed, by)


def test_replayed_when_the_session_is_over_or_the_peer_lost_nothing_begins_again(net, pair) -> None:
    _p, _d = pair
    tapped = list(net.tapped)
    net.now += TIMING.timeout + 1.0
    for process in pair:
        process.board.tick(net.now)
        assert list(process.board.sessions) == []
    for process, route, packed in tapped:
        for by in (route, ("attacker", "listener", 0)):
            unchanged(net, process, packed, by)


@pytest.mark.parametrize("other", [("p", 1, "i1"), ("q", 0, "i1"), ("p", 0, "i2"), ("p", 0, "i1")])
def test_replayed_at_another_process_no_envelope_has_an_effect(net, pair, other) -> None:
    """Another rank, another engine, the next incarnation; and one that has even drawn the same incarnation again."""
    engine, rank, life = other
    tapped = list(net.tapped)
    third = Process(net, engine, rank=rank, life=life)
    for _, _, packed in tapped:
        unchanged(net, third, packed, ("attacker", "listener", 0))


def test_replayed_at_whoever_said_it_no_envelope_has_an_effect(net, pair) -> None:
    for process, _, packed in list(net.tapped):
        other = next(one for one in pair if one is not process)
        for by in (("attacker", "listener", 0), *((n, "dialer", 0) for n in net.wires)):
            unchanged(net, other, packed, by)


def test_a_handshake_replayed_while_a_call_is_under_way_does_not_answer_it(net, pair) -> None:
    """The old challenge and the old directory, brought to a call that has just begun: its own answer is still waited for."""
    p, d = pair
    tapped = list(net.tapped)
    net.now += TIMING.timeout + 1.0
    d.board.tick(net.now)
    d.heard.clear()
    d.board.call(p.address, net.now)
    net.queue.clear()
    number = max(net.wires)
    for process, _, packed in tapped:
        if process is d:
            d.board.receive(packed, (number, "dialer", 0), net.now)
    assert d.heard == []
    assert d.board.calling


def test_a_challenge_that_comes_twice_is_answered_once(net) -> None:
    p, d = Process(net, "p"), Process(net, "d")
    d.board.call(p.address, net.now)
    net.queue.append(net.queue[0])  # the knock, doubled
    for _ in range(2):
        process, route, packed = net.queue.popleft()
        net.now += 1.0
        process.board.receive(packed, route, net.now)
    assert [kind(packed) for *_, packed in net.queue] == ["Challenge"] * 2
    net.run()
    assert sum(kind(packed) == "WhoIs" for *_, packed in net.tapped) == 1
    assert ("outcome", (p.me,), None) in d.heard


def test_a_word_that_was_held_back_counts_once_and_never_after_its_successor(net, pair) -> None:
    p, d = pair
    for text in ("1", "2", "3"):
        d.board.send(p.me, messages.Release(HandoffId(text), "x"))
    first, second, third = (packed for *_, packed in net.queue)
    net.queue.clear()
    before = len(p.heard)
    for packed in (second, second, first, third, first, second):
        p.board.receive(packed, ("attacker", "listener", 0), net.now)
    assert [message.handoff.transfer for _, message in p.heard[before:]] == ["2", "3"]


def test_doubled_words_end_nothing_and_are_counted(net, pair) -> None:
    p, d = pair
    d.board.send(p.me, messages.Release(HandoffId("x"), "x"))
    d.board.send(p.me, messages.Failed(HandoffId("y"), 1, "x"))
    net.queue.extend(list(net.queue))
    before = len(p.heard)
    net.run()
    assert len(p.heard) == before + 2
    assert p.board.counters["control_repeated"] == 2
    assert p.board.sessions.get(d.me) is not None


def test_a_connection_that_is_made_anew_goes_on_with_its_link(net, pair) -> None:
    p, d = pair
    number = next(s.route for s in d.board.sessions)[0]
    net.wires[number][3] += 1  # the listener sees a new route
    d.board.send(p.me, messages.Release(HandoffId("x"), "x"))
    net.run()
    assert p.heard[-1] == (d.me, messages.Release(HandoffId("x"), "x"))
    assert p.board.sessions.get(d.me).route == (number, "listener", 1)
    p.board.send(d.me, messages.Seal(HandoffId("x"), 1, 0, 4))
    net.run()
    assert d.heard[-1] == (p.me, messages.Seal(HandoffId("x"), 1, 0, 4))


@pytest.mark.parametrize("seed", range(60))
def test_two_that_call_each_other_open_one_session_whatever_crosses(net, seed) -> None:
    draw = random.Random(seed)
    p, d = Process(net, "p"), Process(net, "d")
    d.board.call(p.address, net.now)
    for _ in range(draw.randrange(6)):
        if net.queue:
            process, route, packed = net.queue.popleft()
            process.board.receive(packed, route, net.now)
    p.board.call(d.address, net.now)
    net.run_in_any_order(draw)
    for mine, other in ((p, d), (d, p)):
        assert ("outcome", (other.me,), None) in mine.heard
        assert [one for one in mine.heard if one[0] == "lost"] == []


# --- forgery ----------------------------------------------------------------------------------------------------------


def variants(packed: bytes, others: list[bytes]):
    """An envelope changed in each of its parts."""
    wire, sender, to, body, proof, heard = msgspec.msgpack.decode(packed)
    link, number, mac = proof
    bodies = [msgspec.msgpack.decode(one)[3] for one in others]
    release = msgspec.msgpack.decode(msgspec.msgpack.encode(messages.Release(HandoffId("forged"), "x")))
    for changed in (
        [wire, ["d", "i9", 0], to, body, proof, heard],
        [wire, ["x", sender[1], 0], to, body, proof, heard],
        [wire, [sender[0], sender[1], 5], to, body, proof, heard],
        [wire, sender, "", body, proof, heard],
        [wire, sender, "i9", body, proof, heard],
        [wire, sender, to, release, proof, heard],
        *([wire, sender, to, one, proof, heard] for one in bodies if one != body),
        [wire, sender, to, body],
        [wire, sender, to, body, None],
        [wire, sender, to, body, [b"", number, mac], heard],
        [wire, sender, to, body, [link, number + 1, mac], heard],
        [wire, sender, to, body, [link, 2**53 - 1, mac], heard],
        [wire, sender, to, body, [link, 0, mac], heard],
        [wire, sender, to, body, [link, number, b""], heard],
        [wire, sender, to, body, [link, number, mac[:31], heard]],
        [wire, sender, to, body, [link, number, bytes(32)], heard],
        [wire, sender, to, body, [link[::-1], number, mac], heard],
        [wire, sender, to, body, proof, heard + 1.0],
    ):
        yield msgspec.msgpack.encode(changed)
    for at in range(0, len(packed), 3):
        damaged = bytearray(packed)
        damaged[at] ^= 0x11
        yield bytes(damaged)


@pytest.mark.parametrize("word", ["Register", "Seal", "Release", "Heartbeat", "ReportAsk"])
def test_of_a_word_that_was_changed_on_its_way_nothing_is_heard(net, pair, word) -> None:
    """Changed in any part, and brought before the true one; the true one is then heard all the same."""
    p, d = pair
    *_, sample = next(t for t in net.tapped if kind(t[2]) == word)
    message = read_body(open_envelope(sample))
    frm, to = (p, d) if word == "Seal" else (d, p)
    frm.board._say(frm.board.sessions.get(to.me).route, to.me.incarnation, message)
    (process, route, packed) = net.queue.popleft()
    before, refused = process.state(), process.board.counters["control_refused"]
    count = 0
    for forged in variants(packed, [one for *_, one in net.tapped]):
        if _same(forged, packed):
            continue  # the same values in another spelling
        count += 1
        process.board.receive(forged, route, net.now)
        assert process.state() == before
    net.queue.clear()
    assert count > 60
    assert process.board.counters["control_refused"] > refused
    process.board.receive(packed, route, net.now)
    assert process.state() != before


def _same(one: bytes, other: bytes) -> bool:
    try:
        return msgspec.msgpack.decode(one) == msgspec.msgpack.decode(other)
    except msgspec.MsgspecError:
        return False


@pytest.mark.parametrize("wrong", [None, Secret(b"quite another secret")])
def test_who_does_not_know_the_secret_is_told_nothing_and_takes_no_room(net, wrong) -> None:
    p, x = Process(net, "p"), Process(net, "x", secret=wrong)
    for i in range(50):
        x.board.call(EngineAddress("h", p.port, f"p{i}"), net.now)
    net.run()
    assert {type(open_envelope(packed)) for process, _, packed in net.tapped if process is x} == {Refusal}
    assert len(p.board._links) == 0
    assert p.heard == []


def test_a_welcome_from_the_engine_next_door_opens_no_session_with_the_one_that_was_called(net) -> None:
    """Every word of the other's is true, only that nobody called it."""
    p, q, d = Process(net, "p"), Process(net, "q"), Process(net, "d")
    p.board.directory = Directory("p", 1, 1, ready=True, ranks=(RankAddress(0, "i1", 0, 0, "", q.port),))
    d.board.call(p.address, net.now)
    net.run()
    assert list(d.board.sessions) == []
    ((_, ranks, reason),) = [one for one in d.heard if one[0] == "outcome"]
    assert ranks == ()
    assert "at the address of p rank 0 lives q rank 0 now" in reason


@pytest.mark.parametrize(
    "message",
    [
        messages.Challenge(),
        messages.Knock(),
        messages.Report(0, {}, {}, []),
        Directory("p", 1, 1, ready=True, ranks=(RankAddress(0, "i2", 0, 0, "", 1),)),
        messages.Welcome({}, 1.0, 1.0, 1e6),
        messages.Refused("because"),
    ],
)
def test_a_peer_that_answers_what_nobody_asked_changes_nothing(net, pair, message) -> None:
    p, d = pair
    d.board._say(d.board.sessions.get(p.me).route, p.me.incarnation, message)
    before = p.state()
    net.run()
    assert p.state() == before
    assert p.board.counters["control_refused"] >= 1


# --- room -------------------------------------------------------------------------------------------------------------


def test_knocks_take_no_room_at_the_listener_and_calls_that_ended_none_at_the_dialer(net) -> None:
    p, d = Process(net, "p"), Process(net, "d")
    for i in range(100):
        d.board.call(EngineAddress("h", p.port, f"p{i}"), net.now)
    waiting = list(net.queue)
    net.queue.clear()
    for process, route, packed in waiting:
        process.board.receive(packed, route, net.now)
    assert len(p.board._links) == 0
    assert len(d.board._links) == 100
    net.now += 10.0
    d.board.tick(net.now)
    assert len(d.board._links) == 0


def test_links_have_an_end_and_none_is_forgotten_while_its_envelopes_could_open_it_again(net, monkeypatch) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 4)
    p, d = Process(net, "p"), Process(net, "d")
    for i in range(6):
        d.board.call(EngineAddress("h", p.port, f"wrong{i}"), net.now)
        net.run()
    assert len(p.board._links) == 4
    assert "p rank 0 has 4 connections of the last seconds" in d.heard[-1][2]
    first = [t for t in net.tapped if t[0] is p]
    net.now += CHALLENGE_LIFE + 1.0
    d.board.call(p.address, net.now)
    net.run()
    assert ("outcome", (p.me,), None) in d.heard
    assert len(p.board._links) == 4
    before = p.state()
    for _, route, packed in first:
        p.board.receive(packed, route, net.now)
    assert p.state() == before


def test_a_listener_that_has_forgotten_a_link_says_so_to_the_dialer_alone(net, pair, monkeypatch) -> None:
    """What it says cannot be turned against another link, another peer, or a process of another name."""
    p, d = pair
    q, sibling = Process(net, "q"), Process(net, "p", rank=1)
    for other in (q, sibling):
        d.board.call(other.address, net.now)
        net.run()
        assert d.board.sessions.get(other.me) is not None
    route = d.board.sessions.get(p.me).route
    d.board.send(p.me, messages.Release(HandoffId("x"), "x"))
    (_, _, packed) = net.queue.popleft()
    for other in (q, sibling):
        other.board.receive(packed, ("attacker", "listener", 0), net.now)
        (gone,) = other.said
        before = d.state()
        d.board.receive(gone, route, net.now)
        assert d.state() == before, "the word of another process"
    again = Process(net, "p", life="i2")
    again.board.receive(packed, ("attacker", "listener", 0), net.now)
    (gone,) = again.said
    before = d.state()
    d.board.receive(gone, (max(net.wires) + 1, "dialer", 0), net.now)
    d.board.receive(gone, ("attacker", "listener", 0), net.now)
    assert d.state() == before, "by another connection"
    d.board.receive(gone, route, net.now)
    assert d.heard[-1] == ("lost", p.me, "another process has taken its place")
