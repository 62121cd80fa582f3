"""The in-memory twin on simulated time, watched: whatever lands outside a loan is foreign.

It is as unkind as the contract of an agent allows, and a little more. What a failed transfer has not copied yet may still land,
as on a fabric whose completion queue has given up before the network did: of a write until the drain bound is over, counted
from its posting, of a read until it is over after the failure. What a write has put
into the peer's memory is seen there only when its notification arrives, and not when the writer hears that it is done.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kvxfer.chaos import concern
from kvxfer.chaos.aims import Target
from kvxfer.errors import TransportError
from kvxfer.protocol.messages import unpack_written
from kvxfer.transport.agent import Status
from kvxfer.transport.twin import TwinAgent, TwinFabric, TwinTransfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation

LATE = 0.05
"""Seconds after its data from which on a notification is late."""
SOON = 0.002
"""Seconds for which it is not worth while to hide data: no forward comes so soon after a report."""
AT_ITS_END = 0.6
"""Probability of a slow read for a conversation that lands about when its pin ends."""
LIKELIER = {
    "sink/cancelling": 40.0,
    "sink/fencing": 60.0,
    "source/served": 12.0,
    "source/computing": 4.0,
    "sink/reading": 4.0,
    "reader/reading": 4.0,
    "reader/cancelling": 40.0,
}
"""How much likelier a fault of the fabric is in states that pass soon, so that it happens there at all."""


class Fabric(TwinFabric):
    """A twin whose events are the world's. ``drained`` is when the last of a transfer has landed, in seconds (see above)."""

    def __init__(self, sim: Simulation, drained: float) -> None:
        world = sim.world
        super().__init__(clock=lambda: world.now, seed=world.random.getrandbits(32))
        self.sim = sim
        self.world = world
        self.drained = drained
        self.slow_tail = 0.0
        self.stalls = sim.profile.sleep is not None or (sim.profile.revoke and world.random.random() < 0.5)  # noqa: PLR2004
        self.shores: dict[str, Process] = {}
        self._carried: dict[int, dict[int, bytes]] = {}  # what each write was to carry
        self._kept: list[TwinTransfer] = []  # so that no two have one id

    def _after(self, delay: tuple[float, float], happen: Callable[[], None]) -> float:
        at = self.world.now + self._random.uniform(*delay)
        self.world.at(at, happen)
        return at

    def _post(self, transfer: TwinTransfer) -> None:
        if self._strikes("failed_post", self.faults.fail_post, transfer):
            raise TransportError(f"the post to {transfer.peer} failed, as the faults demand")
        low, high = self.faults.delay
        if self._draw(self.slow_tail):
            low = 0.9 * high
        posted = self.world.now
        if transfer.operation == "WRITE":
            self._kept.append(transfer)
            self._carried[id(transfer)] = {mine: ctypes.string_at(mine, n) for mine, n, _ in transfer.local.tolist()}
        if self.sim.conversing and transfer.operation == "READ" and (due := self._slow_read(transfer)) is not None:
            self.last_due = due
            self.world.at(due, self._finish, transfer, posted)
            return
        self.last_due = self._after((low, high), lambda: self._finish(transfer, posted))

    def _slow_read(self, transfer: TwinTransfer) -> float | None:
        """Return when a read for a conversation lands that takes long: at any time, or about when its pin ends.

        Its reader hears nothing more of its holder then; and what is free there is computed into before it lands.
        """
        world, sim, reader = self.world, self.sim, self.shores[transfer.sender]
        reading = reader.reading(transfer.local[0, 0])
        if reading is None or not concern.is_reuse(reading[0]) or not sim.trouble.draws("slow_read"):
            return None
        sim.struck("slow_read")
        slot = sim.slot(sim.readers[reading[0].transfer][0])
        reuse = slot.process.scheduler.reuse
        end = None if reuse is None else reuse.pinned_until(reading[0])
        due = world.now + self._random.uniform(0.5, 6.0)
        evicted = due - self._random.uniform(0.01, 0.5)
        if end is not None and self._random.random() < AT_ITS_END:
            due = max(world.now, end + self._random.uniform(-0.2, 0.6))
            evicted = end + 0.002
            for pair in ((slot.host, reader.host), (reader.host, slot.host)):
                sim.network.stall(*pair, due)
        target = Target(slot, sim.slot(reader.host), slot, reading[0])
        world.at(evicted, lambda: None if sim.trouble.over else sim.trouble.strikes.evict(target))
        return due

    def _finish(self, transfer: TwinTransfer, posted: float = 0.0) -> None:
        shore = self.shores[transfer.sender]
        if self.stalls and transfer.operation == "WRITE" and shore.alive and shore.asleep:
            # As over tcp: what a process has not sent yet it sends when it wakes up, in the middle of a message, too.
            self.world.at(shore.awake_at + 1e-6, self._woken, transfer, posted)
            return
        faults = self.faults
        rows = list(zip(transfer.local.tolist(), transfer.remote.tolist(), strict=True))
        if self.reachable(transfer) is None:
            transfer.status = Status.FAILED
        elif self._strikes("torn_transfer", faults.fail_transfer, transfer):
            cut = self._random.randrange(len(rows) + 1)
            self._copy(transfer, rows[:cut])
            transfer.status = Status.FAILED
            begun = posted if transfer.operation == "WRITE" else self.world.now
            rest = self._random.uniform(self.world.now, max(self.world.now, begun + self.drained))
            self.world.at(rest, self._copy, transfer, rows[cut:])
        else:
            seen_at = self.world.now + self._random.uniform(*faults.notification_delay)
            if transfer.operation == "WRITE" and faults.notification_delay[1] > SOON:
                for _, (theirs, length, _) in rows:
                    self.shores[transfer.peer].hide(theirs, length, seen_at)
            self._copy(transfer, rows)
            transfer.status = Status.DONE
            self._notify(transfer, seen_at)
        self.shores[transfer.sender].wake()

    def _woken(self, transfer: TwinTransfer, posted: float) -> None:
        """Go on; who has died in its sleep sends nothing any more."""
        if self.shores[transfer.sender].alive:
            self._finish(transfer, posted)
        else:
            transfer.status = Status.FAILED

    def _copy(self, transfer: TwinTransfer, rows: list[Any]) -> None:
        write = transfer.operation == "WRITE"
        if self.reachable(transfer) is None or (not write and transfer.sender not in self.agents):
            return
        written = unpack_written(transfer.notification) if write else None
        if write and self.shores[transfer.sender].alive:
            self._check_carried(transfer, rows)
        for (mine, length, _), (theirs, _, _) in rows:
            if write:
                self.shores[transfer.peer].landed(written, theirs, length)
                ctypes.memmove(theirs, mine, length)
            else:
                self.shores[transfer.sender].landed(None, mine, length)
                ctypes.memmove(mine, theirs, length)

    def _check_carried(self, transfer: TwinTransfer, rows: list[Any]) -> None:
        """A write carries what was there when it was posted: its source's blocks are nobody else's while it reads them."""
        carried = self._carried[id(transfer)]
        for (mine, length, _), _ in rows:
            if ctypes.string_at(mine, length) != carried[mine]:
                handoff = unpack_written(transfer.notification).handoff.transfer
                what = f"a write of {handoff} carries what was not there when {transfer.sender} posted it"
                self.sim.violate("wrong_bytes", handoff, what)
                return

    def _notify(self, transfer: TwinTransfer, seen_at: float) -> None:
        if not transfer.notification:
            return
        faults, now = self.faults, self.world.now
        if self._strikes("lost_notification", faults.lose_notification, transfer):
            return
        self.world.at(seen_at, self._hear, transfer, seen_at - now > LATE)
        if self._strikes("doubled_notification", faults.double_notification, transfer):
            self.world.at(seen_at + self._random.uniform(*faults.notification_delay), self._hear, transfer, False)

    def _hear(self, transfer: TwinTransfer, late: bool) -> None:
        if late:
            self.sim.struck("late_notification", self._states(transfer))
        peer = self.reachable(transfer)
        if peer is not None:
            peer.inbox.append((transfer.sender, transfer.notification))
            self.shores[transfer.peer].wake()

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def _strikes(self, fault: str, probability: float, transfer: TwinTransfer) -> bool:
        if probability == 0.0:
            return False
        states = self._states(transfer)
        weight = max((LIKELIER.get(state, 1.0) for state in states), default=1.0)
        if not self._draw(min(0.95, weight * probability)):
            return False
        self.sim.struck(fault, states)
        return True

    def _states(self, transfer: TwinTransfer) -> set[str]:
        sender, peer = self.shores[transfer.sender], self.shores[transfer.peer]
        if transfer.operation == "WRITE":
            written = unpack_written(transfer.notification)
            return concern.of_attempt(sender, peer, written.handoff, written.attempt)
        reading = sender.reading(transfer.local[0, 0])
        return set() if reading is None else concern.of_attempt(peer, sender, *reading)


class Agent(TwinAgent):
    """A twin's agent. It need not make the fabric progress: the world does."""

    def status(self, transfer: TwinTransfer) -> Status:
        """Look."""
        return transfer.status

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take what has arrived."""
        arrived, self.inbox = self.inbox, []
        return arrived
