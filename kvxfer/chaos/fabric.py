"""The in-memory twin on simulated time, watched: whatever lands outside a loan is foreign.

Beside the twin's own faults, what a failed transfer has not copied yet may still land until the drain bound is over, as on a
fabric whose completion queue has given up before the network did.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

from kvxfer.protocol.messages import unpack_written
from kvxfer.transport.agent import Status
from kvxfer.transport.twin import TwinAgent, TwinFabric, TwinTransfer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from kvxfer.chaos.world import World


class Shore(Protocol):
    """The process whose memory an agent has registered."""

    def landed(self, handoff: str, address: int, length: int) -> None:
        """Bytes of a handoff have come, or are about to, from elsewhere."""

    def wake(self, delay: float = 0.0) -> None:
        """Something has changed that the mover would find by looking."""


class Fabric(TwinFabric):
    """A twin whose events are the world's. ``late`` is how long after a failure its rest may land, in seconds."""

    def __init__(self, world: World, counts: Counter[str], late: float) -> None:
        super().__init__(clock=lambda: world.now, seed=world.random.getrandbits(32))
        self.world = world
        self.counts = counts
        self.late = late
        self.shores: dict[str, Shore] = {}

    def _after(self, delay: tuple[float, float], happen: Callable[[], None]) -> float:
        at = self.world.now + self._random.uniform(*delay)
        self.world.at(at, happen)
        return at

    def _finish(self, transfer: TwinTransfer) -> None:
        peer = self.reachable(transfer)
        rows = list(zip(transfer.local.tolist(), transfer.remote.tolist(), strict=True))
        torn = self._draw(self.faults.fail_transfer)
        if peer is None:
            transfer.status = Status.FAILED
        elif torn:
            self.counts["torn_transfer"] += 1
            cut = self._random.randrange(len(rows) + 1)
            self._copy(transfer, rows[:cut])
            transfer.status = Status.FAILED
            self.world.after(self._random.uniform(0.0, self.late), self._copy, transfer, rows[cut:])
        else:
            self._copy(transfer, rows)
            transfer.status = Status.DONE
            self._notify(transfer)
        self.shores[transfer.sender].wake()

    def _copy(self, transfer: TwinTransfer, rows: list[Any]) -> None:
        write = transfer.operation == "WRITE"
        if self.reachable(transfer) is None or (not write and transfer.sender not in self.agents):
            return
        handoff = unpack_written(transfer.notification).handoff.transfer if write else ""
        for (mine, length, _), (theirs, _, _) in rows:
            if write:
                self.shores[transfer.peer].landed(handoff, theirs, length)
                ctypes.memmove(theirs, mine, length)
            else:
                self.shores[transfer.sender].landed(handoff, mine, length)
                ctypes.memmove(mine, theirs, length)

    def _notify(self, transfer: TwinTransfer) -> None:
        if not transfer.notification:
            return
        if self._draw(self.faults.lose_notification):
            self.counts["lost_notification"] += 1
            return
        doubled = self._draw(self.faults.double_notification)
        self.counts["doubled_notification"] += doubled
        for _ in range(1 + doubled):
            self._after(self.faults.notification_delay, lambda: self._hear(transfer))

    def _hear(self, transfer: TwinTransfer) -> None:
        peer = self.agents.get(transfer.peer)
        if peer is not None:
            peer.inbox.append((transfer.sender, transfer.notification))
            self.shores[transfer.peer].wake()


class Agent(TwinAgent):
    """A twin's agent. It need not make the fabric progress: the world does."""

    def status(self, transfer: TwinTransfer) -> Status:
        """Look."""
        return transfer.status

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take what has arrived."""
        arrived, self.inbox = self.inbox, []
        return arrived
