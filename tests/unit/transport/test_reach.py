"""Nobody is posted to whose life is in doubt: NIXL may never return from that."""

from __future__ import annotations

import time

import pytest

from kvxfer.bench.lone import LoneRank
from kvxfer.errors import TransportError
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.transport import commands as cmd
from kvxfer.transport.reach import KEPT, Reach
from kvxfer.transport.threads import STUCK, Round
from kvxfer.transport.twin import TwinAgent, TwinFabric
from kvxfer_host import HostPlatform
from tests.support.ranks import FAST, Rank, wait_until

A, B = RankId("a", "1", 0), RankId("b", "1", 0)


class Card:
    def __init__(self, agent: TwinAgent) -> None:
        self.agent = agent.metadata()


def test_who_has_not_answered_since_a_connection_broke_is_not_reached() -> None:
    fabric = TwinFabric()
    me = TwinAgent("me", fabric)
    reach = Reach()
    for peer in (A, B):
        with pytest.raises(TransportError, match="no open session"):
            reach.of(peer, me)
        reach.up(peer, Card(TwinAgent(peer.agent, fabric)))
        assert reach.heard(peer, 10.0)
        assert reach.of(peer, me)[0] == peer.agent
    reach.doubt(20.0)
    for peer in (A, B):
        with pytest.raises(TransportError, match="has not answered since"):
            reach.of(peer, me)
    assert not reach.heard(A, 20.0), "what was asked before proves nothing, however late it is answered"
    assert reach.heard(B, 20.1)
    assert not reach.heard(B, 15.0)
    assert reach.of(B, me)[0] == B.agent
    with pytest.raises(TransportError, match="has not answered since"):
        reach.of(A, me)
    reach.lost(A, 50.0)
    with pytest.raises(TransportError, match="no open session"):
        reach.of(A, me)


def test_what_is_loaded_of_a_peer_outlives_its_session_and_not_its_life() -> None:
    fabric = TwinFabric()
    me, adds = TwinAgent("me", fabric), []
    add = me.add_peer
    me.add_peer = lambda metadata, name="": adds.append(name) or add(metadata, name)
    reach, card = Reach(), Card(TwinAgent(A.agent, fabric))
    for _ in range(2):
        reach.up(A, card)
        reach.of(A, me)
        reach.lost(A, 100.0)
    assert adds == [A.agent]
    assert reach.has(A.agent)
    assert reach.over(A, 100.0) == reach.over(B, 100.0 + KEPT) == []
    assert reach.over(B, 101.0 + KEPT) == [A], "nobody has heard of it for long"
    again = RankId(A.engine, "2", A.rank)
    assert reach.over(again, 100.0) == [A], "another process has taken its place"
    reach.forget(A)
    assert not reach.has(A.agent)
    reach.up(A, card)
    reach.of(A, me)
    reach.reset()
    assert not reach.has(A.agent)
    assert adds == [A.agent] * 2


def test_a_peer_with_other_keys_is_loaded_anew() -> None:
    fabric = TwinFabric()
    me, reach = TwinAgent("me", fabric), Reach()
    for _ in range(2):
        other = TwinAgent(A.agent, fabric)
        reach.up(A, Card(other))
        assert reach.of(A, me)[0] == A.agent
        assert me.peers[A.agent].key == other.key


class Wary(TwinAgent):
    """A twin's agent that says what NIXL's says: some connection broke. It notes the moment of every post."""

    def __init__(self, name: str, fabric: TwinFabric) -> None:
        super().__init__(name, fabric)
        self.broke = False
        self.posts: list[float] = []

    def disturbed(self) -> bool:
        told, self.broke = self.broke, False
        return told

    def post(self, *args, **kwargs):
        self.posts.append(time.monotonic())
        return super().post(*args, **kwargs)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_after_a_broken_connection_the_living_go_on_when_they_have_answered(mode) -> None:
    fabric = TwinFabric()
    agents = {}

    def make(name):
        agents[name] = Wary(name, fabric)
        return agents[name]

    source, sink = (Rank(name, fabric, mode=mode, make_agent=make, pull_lease=1.5) for name in "ps")
    try:
        poster = source if mode == "push" else sink
        for number in range(2):
            handoff = HandoffId(f"h{number}")
            source.fill([1, 2], number)
            sink.open(handoff, f"d{number}", source.address, [5, 6], 8)
            if number:
                wait_until(lambda: len(source.mover.source) == 1, what="registration")
                agents[poster.me.agent].broke = True
                posts, broke = len(agents[poster.me.agent].posts), time.monotonic()
            source.prefill(handoff, f"p{number}", [1, 2], 8, chunks=2)
            assert getattr(sink.wait(f"d{number}"), "reason", None) is None
            source.wait(f"p{number}")
            assert (sink.memory[:, [5, 6]] == source.memory[:, [1, 2]]).all()
        assert agents[poster.me.agent].posts[posts] > broke
        assert not agents[poster.me.agent].broke
    finally:
        source.close()
        sink.close()


class Brief(TwinAgent):
    """Planning takes longer than the lease holds, once: the peer lives, and is only not asked in time."""

    late = True

    def add_peer(self, metadata: bytes, name: str = "") -> str:
        if self.late:
            type(self).late = False
            time.sleep(FAST.lease)
        return super().add_peer(metadata, name)


def test_a_lease_that_ends_before_the_post_costs_a_living_peer_nothing(monkeypatch) -> None:
    monkeypatch.setattr(Brief, "late", True)
    fabric = TwinFabric()
    source, sink = (Rank(name, fabric, make_agent=lambda name: Brief(name, fabric)) for name in "ps")
    try:
        source.fill([1, 2], 7)
        sink.open(HandoffId("h"), "d", source.address, [5, 6], 8)
        source.prefill(HandoffId("h"), "p", [1, 2], 8)
        assert getattr(sink.wait("d"), "reason", None) is None
        assert (sink.memory[:, [5, 6]] == source.memory[:, [1, 2]]).all()
        assert not Brief.late
    finally:
        source.close()
        sink.close()


def test_a_thread_that_is_caught_is_told_of() -> None:
    watched = Round()
    watched.check("a rank 0", 1e9, alive=True)
    watched.since = 100.0
    watched.check("a rank 0", 100.0 + STUCK, alive=True)
    with pytest.raises(TransportError, match="a rank 0: a call to NIXL has not returned"):
        watched.check("a rank 0", 101.0 + STUCK, alive=True)
    with pytest.raises(TransportError, match="a rank 0: the mover has ended"):
        watched.check("a rank 0", 100.0, alive=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_hears_at_every_step_whether_its_mover_goes_on() -> None:
    fabric = TwinFabric()
    rank = LoneRank("a", lambda name: TwinAgent(name, fabric))
    try:
        mover = rank.mover
        for _ in range(100):
            mover.check()
        mover.turn = lambda _wait: 1 / 0  # type: ignore[method-assign]  # a defect that nothing guards against
        mover.post(cmd.StepEnd(HostPlatform(fence_delay=0).fence()))
        mover.join(10.0)
        with pytest.raises(TransportError, match="rank 0: the mover has ended"):
            mover.check()
    finally:
        rank.close()
