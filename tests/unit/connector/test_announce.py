"""What a decode engine's scheduler process tells prefill engines, and when; over a control channel that is woken by hand."""

import pytest

from kvxfer.connector.announce import Announcer
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Expect, Release
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.dialer import Outcome

ADDRESS = EngineAddress("h", 1, "p")
RANKS = (RankId("p", "i", 0), RankId("p", "i", 1))
H = HandoffId("h")


class Channel:
    """A control channel whose thread sleeps until it is woken, by a call that asks for it or by ``wake``."""

    def __init__(self):
        self.now = 0.0
        self.todo, self.sent, self.connecting = [], [], []
        self.announcer = Announcer(self, ttl=30.0)

    def call(self, act, *, wake=True):
        self.todo.append(act)
        if wake:
            self.wake()

    def wake(self):
        while self.todo:
            self.todo.pop(0)(self.now)
        self.announcer.on_round(self.now)

    def connect(self, address):
        self.connecting.append(address)

    def send(self, rank, message):
        self.sent.append((rank, message))

    def said(self):
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def channel():
    return Channel()


@pytest.fixture
def connected(channel):
    channel.announcer.expect(H, "d", ADDRESS)
    channel.announcer.on_outcome(Outcome(ADDRESS, RANKS, None))
    assert channel.said() == [(rank, Expect(H, 30.0)) for rank in RANKS]
    return channel


def test_an_engine_is_called_once_and_hears_what_waited(channel):
    channel.announcer.expect(H, "d", ADDRESS)
    channel.announcer.expect(HandoffId("other"), "e", ADDRESS)
    assert channel.connecting == [ADDRESS]
    assert channel.said() == []
    channel.announcer.on_outcome(Outcome(ADDRESS, RANKS[:1], None))
    assert channel.said() == [(RANKS[0], Expect(H, 30.0)), (RANKS[0], Expect(HandoffId("other"), 30.0))]


def test_an_engine_that_is_known_hears_of_a_request_at_once(connected):
    connected.announcer.expect(HandoffId("other"), "e", ADDRESS)
    assert connected.said() == [(rank, Expect(HandoffId("other"), 30.0)) for rank in RANKS]


def test_expectations_are_renewed_until_the_request_is_settled(connected):
    connected.now = 11.0
    connected.wake()
    assert connected.said() == [(rank, Expect(H, 30.0)) for rank in RANKS]
    connected.announcer.settle(H, "d")
    assert connected.todo, "settling wakes nobody"
    connected.now = 100.0
    connected.wake()
    assert connected.said() == [], "it is forgotten before anything is renewed"


def test_a_release_goes_at_once_unless_another_request_waits_for_the_handoff(connected):
    connected.announcer.expect(H, "again", ADDRESS)
    connected.said()
    connected.announcer.release(H, "d", ADDRESS, "gave up")
    assert connected.said() == []
    connected.announcer.release(H, "again", ADDRESS, "gave up")
    assert connected.said() == [(rank, Release(H, "gave up")) for rank in RANKS]


def test_an_engine_that_cannot_be_reached_is_called_again_for_the_next_request(channel):
    channel.announcer.expect(H, "d", ADDRESS)
    channel.announcer.on_outcome(Outcome(ADDRESS, (), "nobody answers"))
    channel.announcer.expect(HandoffId("other"), "e", ADDRESS)
    assert channel.connecting == [ADDRESS, ADDRESS]


def test_the_ranks_of_an_engine_that_was_lost_are_asked_for_again(connected):
    connected.announcer.on_lost(RANKS[1])
    connected.announcer.expect(HandoffId("other"), "e", ADDRESS)
    assert connected.said() == []
    assert connected.connecting == [ADDRESS, ADDRESS]
