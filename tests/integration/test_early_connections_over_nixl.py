"""Introduced ranks over real NIXL: connected before the first handoff, and nobody caught in a call about who sleeps or is dead."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

from tests.support.ranks import wait_until

if TYPE_CHECKING:
    from tests.support.peers import PeerProcess

pytestmark = pytest.mark.integration


def early(peer: PeerProcess, count: int) -> None:
    wait_until(lambda: peer("counters")["early_connections"] >= count, 30.0, f"{count} early connections")


def hand_over(p: PeerProcess, d: PeerProcess, name: str) -> None:
    p("fill", blocks=[1, 2, 3], seed=7)
    p("prefill", handoff=name, request=f"p{name}", blocks=[1, 2, 3], tokens=11)
    d("open", handoff=name, request=f"d{name}", engine="p", port=p.port, blocks=[9, 8, 7], tokens=11)
    assert d("wait", request=f"d{name}") is None
    assert p("wait", request=f"p{name}") is None
    assert d("digest", blocks=[9, 8, 7]) == p("digest", blocks=[1, 2, 3])


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_first_handoff_after_an_introduction_makes_no_connection_of_its_own(peers, mode) -> None:
    p, d = peers("p", mode=mode, eager=mode == "push"), peers("d", mode=mode, eager=mode == "pull")
    posts, waits = (p, d) if mode == "push" else (d, p)
    d("keep", port=p.port)
    early(posts, 1)
    assert (posts("connections"), waits("connections")) == (1, 0)
    hand_over(p, d, "h")
    assert (posts("connections"), waits("connections")) == (1, 0)


def test_two_that_both_post_are_both_connected(peers) -> None:
    """As with kv_both: neither is caught in a call about the other, which is in one itself."""
    p, d = peers("p", eager=True), peers("d", eager=True)
    d("keep", port=p.port)
    for one in (p, d):
        early(one, 1)
    assert [one("connections") for one in (p, d)] == [1, 1]
    hand_over(p, d, "h")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["sleeps", "is dead"])
def test_nobody_is_caught_in_a_call_about_who(peers, number) -> None:
    """The rank that posts has work under way, and so asks only when the other is stopped, or gone, already."""
    p, d, other = (peers(name, eager=name == "p", timing=(0.5, 20.0, 10.0, 0.2)) for name in ("p", "d", "e"))
    p("busy", seconds=3.0)
    d("keep", port=p.port)
    wait_until(lambda: p("sessions") == 1, what="the session")
    os.kill(d.process.pid, number)
    assert p("counters")["early_connections"] == 0
    other("keep", port=p.port)
    early(p, 1)
    assert p("connections") == 1, "of the one that answers"
    hand_over(p, other, "h")
    assert p("connections") == 1
    if number is signal.SIGSTOP:
        os.kill(d.process.pid, signal.SIGCONT)
        early(p, 2)
        hand_over(p, d, "h2")
        assert p("connections") == 2
