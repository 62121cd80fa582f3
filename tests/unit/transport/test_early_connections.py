"""Ranks that were introduced to each other, over the twin: connected before their first handoff, and again after a new start."""

from __future__ import annotations

import pytest

from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.peers import Timing
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.twin import TwinAgent, TwinFabric
from tests.support.ranks import Rank, wait_until


class Counting(TwinAgent):
    """Notes whom it connects."""

    def __init__(self, name: str, fabric: TwinFabric, connected: list[tuple[str, str]]) -> None:
        super().__init__(name, fabric)
        self._connected = connected

    def add_peer(self, metadata: bytes, name: str = "") -> str:
        self._connected.append((self.name.partition("/")[0], name.partition("/")[0]))
        return super().add_peer(metadata, name)


class House:
    def __init__(self) -> None:
        self.fabric = TwinFabric()
        self.connected: list[tuple[str, str]] = []
        self.ranks: list[Rank] = []

    def rank(self, name: str, **options) -> Rank:
        def make_agent(agent: str) -> Counting:
            return Counting(agent, self.fabric, self.connected)

        self.ranks.append(Rank(name, make_agent=make_agent, **options))
        return self.ranks[-1]


@pytest.fixture
def house():
    made = House()
    yield made
    for rank in made.ranks:
        rank.close()


def unnamed(rank: Rank) -> EngineAddress:
    """Return an address as the configuration or a router gives it."""
    return EngineAddress("127.0.0.1", rank.control.port, "")


def early(rank: Rank) -> int:
    return rank.mover.counters["early_connections"]


def hand_over(p: Rank, d: Rank, request: str = "1") -> None:
    handoff = HandoffId(request)
    p.fill([1, 2], 3)
    p.prefill(handoff, f"p{request}", [1, 2], 8)
    d.open(handoff, f"d{request}", p.address, [5, 6], 8)
    assert d.wait(f"d{request}").reason is None
    p.wait(f"p{request}")
    assert (d.memory[:, [5, 6]] == p.memory[:, [1, 2]]).all()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_first_handoff_after_an_introduction_makes_no_connection_of_its_own(house, mode) -> None:
    """Neither one for data, nor a session."""
    p, d = house.rank("p", mode=mode, eager=mode == "push"), house.rank("d", mode=mode, eager=mode == "pull")
    posts, waits = (p, d) if mode == "push" else (d, p)
    d.control.keep(unnamed(p))
    wait_until(lambda: early(posts) == 1, what="the connection")
    connected = [(posts.me.engine, waits.me.engine)]
    assert house.connected == connected
    asked = []
    d.control._switchboard._dial = lambda *args: asked.append(args)
    hand_over(p, d)
    assert house.connected == connected
    assert asked == [], "the request names the engine, whose ranks are known by then"


def test_without_an_introduction_the_first_handoff_connects(house) -> None:
    p, d = house.rank("p"), house.rank("d")
    hand_over(p, d)
    assert house.connected == [("p", "d")]
    assert early(p) == 0


def test_a_rank_is_introduced_to_one_that_starts_later(house) -> None:
    p = house.rank("p", eager=True)
    port = p.control.port
    p.kill()
    d = house.rank("d")
    d.control.keep(EngineAddress("127.0.0.1", port, ""))
    again = house.rank("p", eager=True, port=port)
    wait_until(lambda: early(again) == 1, what="the connection")
    hand_over(again, d)
    assert house.connected == [("p", "d")]


@pytest.mark.parametrize("dies", ["p", "d"])
def test_whoever_starts_anew_is_connected_again(house, dies) -> None:
    p, d = house.rank("p", eager=True), house.rank("d")
    d.control.keep(unnamed(p))
    wait_until(lambda: early(p) == 1, what="the first connection")
    port = p.control.port
    if dies == "p":
        p.kill()
        p = house.rank("p", eager=True, port=port)
        wait_until(lambda: early(p) == 1, what="the second connection")
    else:
        d.kill()
        d = house.rank("d")
        d.control.keep(unnamed(p))
        wait_until(lambda: early(p) == 2, what="the second connection")
    hand_over(p, d)
    assert house.connected == [("p", "d")] * 2


def test_a_rank_that_has_revoked_its_keys_is_connected_again(house) -> None:
    p, d = house.rank("p", eager=True), house.rank("d")
    d.control.keep(unnamed(p))
    wait_until(lambda: early(p) == 1, what="the first connection")
    d.mover._revoking = 0.0
    d.begin(cancelled=[])
    wait_until(lambda: d.mover.counters["revocations"] == 1, what="the revocation")
    wait_until(lambda: early(p) == 2, what="the second connection")
    hand_over(p, d)
    assert house.connected == [("p", "d")] * 2


def test_an_engine_that_is_introduced_to_itself_stays_alone(house) -> None:
    p = house.rank("p", eager=True)
    p.control.keep(unnamed(p))
    board = p.control._switchboard
    wait_until(lambda: not board._introductions._kept and not board.calling, what="the end of the call")
    assert list(p.control.sessions) == []


def test_an_idle_rank_that_is_connected_sleeps(house) -> None:
    """Its mover waits for its mailbox alone, and its control thread for the next heartbeat."""
    timing = Timing(1.0, 5.0, 3.0, 0.1)
    p, d = house.rank("p", eager=True, timing=timing), house.rank("d", timing=timing)
    d.control.keep(unnamed(p))
    wait_until(lambda: early(p) == 1, what="the connection")
    for rank in (p, d):
        wait_until(lambda rank=rank: rank.mover._wait_time() is None, what="sleep")
        assert rank.control._wait_ms() == rank.control.sessions.timing.interval * 250
