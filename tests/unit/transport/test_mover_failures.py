"""What must not leave a request waiting for ever, nor end the mover: each case found by reading, with one rank or two."""

from __future__ import annotations

import time

import pytest

from kvxfer.errors import TransportError
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport import commands as cmd
from kvxfer.transport.twin import TwinAgent, TwinFabric
from kvxfer_host import HostPlatform
from tests.support.ranks import Rank, wait_until

H, WARM = HandoffId("x"), HandoffId("warm")


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*args, **kwargs) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def warm_up(p: Rank, d: Rank) -> None:
    p.fill([1], 1)
    d.open(WARM, "d0", p.address, [1], 4)
    p.prefill(WARM, "p0", [1], 4)
    assert d.wait("d0").reason is None


@pytest.mark.parametrize("connected", [True, False])
def test_a_source_that_is_lost_while_the_sinks_fence_has_not_passed(ranks, connected) -> None:
    fabric = TwinFabric()
    p, d = ranks("p", fabric), ranks("d", fabric, connect_timeout=0.5)
    if connected:
        warm_up(p, d)
    late = HostPlatform(fence_delay=1.5).fence()
    now = time.monotonic()
    opened = cmd.SinkOpen(H, "d1", p.address, 0, 4, (5).to_bytes(4, "little"), now, now)
    d.mover.post(cmd.StepBegin(cmd.Step(opened=[opened]), late))
    wait_until(lambda: p.me in {session.rank for session in d.control.sessions}, what="the session")
    p.kill()
    assert d.wait("d1", timeout=3.5).reason


class Odd(TwinAgent):
    """An agent that fails in ways that its contract does not name, or names and nobody expects."""

    fault = ""

    def post(self, *args, **kwargs):
        if self.fault == "post":
            raise RuntimeError("not of the contract")
        return super().post(*args, **kwargs)

    def release(self, transfer) -> None:
        if self.fault == "release":
            raise TransportError("would not release")
        super().release(transfer)

    def notifications(self):
        if self.fault == "notifications":
            self.fault = ""
            raise TransportError("the fabric is out of order for a moment")
        return super().notifications()


@pytest.mark.parametrize("fault", ["post", "release", "notifications"])
def test_an_agent_that_raises_ends_no_mover_and_strands_no_handoff(ranks, fault) -> None:
    fabric = TwinFabric()
    agents: list[Odd] = []

    def make(name: str) -> Odd:
        agents.append(Odd(name, fabric))
        return agents[-1]

    p = ranks("p", make_agent=make)
    d = ranks("d", make_agent=make)
    warm_up(p, d)
    p.wait("p0")
    agents[1 if fault == "notifications" else 0].fault = fault
    p.fill([2], 2)
    d.open(H, "d1", p.address, [2], 4)
    p.prefill(H, "p1", [2], 4)
    d.wait("d1", timeout=2.0)
    p.wait("p1", timeout=2.0)
