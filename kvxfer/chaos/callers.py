"""Watches the calls to NIXL that connect a peer before a handoff needs it, each of which lasts until the peer makes progress.

Over the twin they return at once, so what is watched is whether they would: the peer's mover has turned just now, and it has
promised progress that it has not taken back. What remains is a peer that dies, or falls asleep, after its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.transport.approaches import FRESH

if TYPE_CHECKING:
    from kvxfer.chaos.process import Process
    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.transfers import Transfers

DRIFT = 1.2
"""By how much longer than by the caller's clock an answer may have lasted."""


class Watched:
    """What connects peers for the mover's approaches: its ``Transfers``, watched."""

    def __init__(self, process: Process, transfers: Transfers) -> None:
        self._process = process
        self._transfers = transfers

    def approach(self, peer: RankId) -> None:
        """Connect a peer; note when that might never have returned."""
        sim, me = self._process.sim, self._process.me
        other = sim.anybody(peer)
        since = sim.world.now - other.turned_at
        if since > FRESH * DRIFT:
            sim.violate("caught", "", f"{me.agent} calls {peer.agent}, whose mover has not turned for {since:.3f} s")
        if other.alive and me not in other.mover._approaches._promised:  # noqa: SLF001 - looked at, not touched
            sim.violate("caught", "", f"{me.agent} calls {peer.agent}, which has promised it nothing")
        self._transfers.approach(peer)
        sim.faults["approached"] += 1

    def is_connected(self, peer: RankId) -> bool:
        """Ask."""
        return self._transfers.is_connected(peer)

    def lives(self, peer: RankId, asked: float) -> bool:
        """Ask."""
        return self._transfers.lives(peer, asked)
