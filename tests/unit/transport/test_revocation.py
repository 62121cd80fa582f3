"""A rank revokes its keys: what a lost peer, which is not dead, had posted does not land, and everything works again after it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.layout.card import RankCard
from kvxfer.protocol.actions import SinkFinished
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport.keeper import AgentKeeper
from kvxfer.transport.twin import Faults, TwinAgent, TwinFabric
from tests.support.cards import CACHE
from tests.support.ranks import Rank, wait_until

if TYPE_CHECKING:
    from kvxfer.transport.agent import Status

ASLEEP, BESIDE, AFTER = HandoffId("asleep"), HandoffId("beside"), HandoffId("after")


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*args, **kwargs) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        getattr(rank, "wakes", lambda: None)()
        rank.close()


def falls_silent(rank: Rank) -> None:
    """Its process is out of hearing, and not dead: its port accepts, and what it has posted goes on."""
    goes_on = rank.control._round
    rank.control._round = lambda: time.sleep(0.02)
    rank.wakes = lambda: setattr(rank.control, "_round", goes_on)


def test_a_write_of_a_source_that_was_asleep_does_not_land(ranks) -> None:
    fabric = TwinFabric()
    p, d, other = ranks("p", fabric), ranks("d", fabric), ranks("other", fabric)
    fabric.faults = Faults(delay=(4.0, 4.0))
    blocks = list(range(1, 11))
    p.fill(blocks, 1)
    d.open(ASLEEP, "d1", p.address, blocks, 40)
    p.prefill(ASLEEP, "p1", blocks, 40)
    wait_until(lambda: p.mover.transfers.in_flight, what="the write")
    due = time.monotonic() + 4.0
    d.open(BESIDE, "d2", other.address, list(range(20, 30)), 40)
    wait_until(lambda: other.mover.source.state(BESIDE) is not None, what="the registration beside it")
    falls_silent(p)
    assert "p rank 0 is gone" in d.wait("d1").reason
    assert time.monotonic() < due, "the write was over already: nothing is tested"
    assert d.mover.counters["revocations"] == 1
    assert "revoked the keys" in d.wait("d2").reason, "nothing may be taken for valid that was registered before"
    d.fill(blocks, 9)  # they are the engine's again
    mine = d.memory.copy()
    time.sleep(max(0.0, due - time.monotonic()) + 0.3)
    fabric.progress()
    assert np.array_equal(d.memory, mine), "a write landed in blocks that are the engine's"

    fabric.faults = Faults()
    other.fill(blocks, 3)
    d.open(AFTER, "d3", other.address, blocks, 40)
    other.prefill(AFTER, "o3", blocks, 40)
    assert d.wait("d3") == SinkFinished(AFTER, "d3", None)
    assert np.array_equal(d.memory[:, blocks], other.memory[:, blocks])


def test_without_revocation_it_would_land(ranks) -> None:
    """The check of the check above."""
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric, revoke=False)
    fabric.faults = Faults(delay=(4.0, 4.0))
    p.fill([1], 1)
    d.open(ASLEEP, "d1", p.address, [1], 4)
    p.prefill(ASLEEP, "p1", [1], 4)
    wait_until(lambda: p.mover.transfers.in_flight, what="the write")
    falls_silent(p)
    assert "p rank 0 is gone" in d.wait("d1").reason
    assert not d.memory[:, 1].any()
    wait_until(lambda: fabric.progress() or d.memory[:, 1].any(), what="the late write")


def test_a_write_that_never_ends_is_stopped_and_its_blocks_come_back(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, transfer_limit=0.5), ranks("d", fabric)
    p.fill([1, 2], 1)
    fabric.faults = Faults(delay=(1e6, 1e6))
    d.open(ASLEEP, "d1", p.address, [5, 6], 8)
    p.prefill(ASLEEP, "p1", [1, 2], 8)
    wait_until(lambda: p.mover.transfers.in_flight, what="the write")
    p.wait("p1")
    assert d.wait("d1").reason is not None
    fabric.faults = Faults()
    d.open(AFTER, "d2", p.address, [5, 6], 8)
    p.prefill(AFTER, "p2", [1, 2], 8)
    assert d.wait("d2").reason is None
    assert np.array_equal(d.memory[:, [5, 6]], p.memory[:, [1, 2]])


def test_a_read_that_never_ends_is_stopped(ranks) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric, mode="pull", pull_lease=2.0), ranks("d", fabric, mode="pull", transfer_limit=0.5)
    fabric.faults = Faults(delay=(1e6, 1e6))
    p.prefill(ASLEEP, "p1", [1], 4)
    d.open(ASLEEP, "d1", p.address, [5], 4)
    assert "keys" in d.wait("d1").reason
    p.wait("p1")
    fabric.faults = Faults()
    p.fill([1], 1)
    p.prefill(AFTER, "p2", [1], 4)
    d.open(AFTER, "d2", p.address, [5], 4)
    assert d.wait("d2").reason is None


def test_while_no_agent_can_be_made_nothing_is_posted_and_it_is_tried_again(ranks, caplog) -> None:
    fabric = TwinFabric()
    broken = []

    def make_agent(name: str) -> TwinAgent:
        if broken:
            broken.pop()
            raise TransportError("no rails")
        return TwinAgent(name, fabric)

    p, d = ranks("p", fabric), ranks("d", make_agent=make_agent)
    fabric.faults = Faults(delay=(4.0, 4.0))
    d.open(ASLEEP, "d1", p.address, [1], 4)
    p.prefill(ASLEEP, "p1", [1], 4)
    wait_until(lambda: p.mover.transfers.in_flight, what="the write")
    broken += [1, 2]
    caplog.clear()
    falls_silent(p)
    assert "is gone" in d.wait("d1").reason, "it is safe as soon as the old agent is closed"
    wait_until(lambda: d.mover.counters["revocations"] == 1, what="a new agent")
    assert broken == []
    assert "its keys could not be revoked, and that is tried again: no rails" in caplog.text
    assert "defect" not in caplog.text


def test_a_peer_that_is_not_beaten_any_more_because_the_mover_hangs_is_lost(ranks) -> None:
    fabric = TwinFabric()
    hanging = []

    class Hangs(TwinAgent):
        def status(self, transfer) -> Status:
            while hanging:
                time.sleep(0.01)
            return super().status(transfer)

    p = ranks("p", make_agent=lambda name: Hangs(name, fabric), mover_timeout=0.3)
    d = ranks("d", fabric)
    hanging.append(True)
    try:
        d.open(ASLEEP, "d1", p.address, [1], 4)
        p.prefill(ASLEEP, "p1", [1], 4)
        assert "nothing heard from it" in d.wait("d1").reason
    finally:
        hanging.clear()


def test_an_agent_that_cannot_register_is_not_kept() -> None:
    fabric = TwinFabric()
    made = []

    class Refusing(TwinAgent):
        def register(self, spans, memory) -> None:
            made.append(self)
            raise TransportError("locked memory")

    keeper = AgentKeeper(lambda: Refusing("a", fabric), RankCard("p", "m", 0, 1, 0, 1, "twin", CACHE, b""))
    with pytest.raises(TransportError, match="locked memory"):
        keeper.open()
    assert made[0].closed
    assert not keeper.is_open
    keeper.close()
    nobody = keeper.agent
    assert nobody.notifications() == []
    nobody.remove_peer("x")
    nobody.release(None)
    nobody.close()
    for refused in (
        lambda: nobody.register((), "DRAM"),
        nobody.metadata,
        lambda: nobody.add_peer(b""),
        lambda: nobody.post("WRITE", None, None, "DRAM", "x"),
        lambda: nobody.status(None),
    ):
        with pytest.raises(TransportError, match="has revoked its keys and has no NIXL agent yet"):
            refused()
