"""What must be true of every process when everything has ended: nothing is open, nothing leaks, nothing is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation


def check(sim: Simulation) -> None:
    """Find what is left although everything has ended."""
    alive = {s.process.me.incarnation for s in sim.living()}
    for slot in sim.living():
        process, engine = slot.process, slot.engine
        for one in engine.requests.values():
            mover = process.mover
            states = f"source {mover.source.state(one.handoff.id)}, sink {mover.sink.state(one.handoff.id)}"
            sim.violate("stuck", one.handoff.id.transfer, f"{slot.host}: {one.id} is {one.state}; {states}")
        if not engine.requests and len(engine.pool.free) != slot.num_blocks:
            what = f"{slot.host}: {len(engine.pool.free)} of {slot.num_blocks} blocks are free"
            sim.violate("leaked_blocks", "", what)
        if not engine.requests:
            for what in _leftovers(process, alive):
                sim.violate("leftovers", "", f"{slot.host}: {what}")


def _leftovers(process: Process, alive: set[str]) -> list[str]:
    """Name what a process still remembers although everything has ended."""
    mover, found = process.mover, []
    for owner, names in (
        (mover.source, ("_handoffs", "_by_request", "_transfers", "_granted")),
        (mover.sink, ("_handoffs", "_by_request", "_transfers", "_exposed")),
        (mover._openings, ("_open", "_called")),  # noqa: SLF001
        (mover, ("_steps",)),
        (mover.transfers, ("in_flight",)),
        (mover.records, ("_open",)),
        (process.scheduler.announcer, ("_expected", "_waiting")),
    ):
        for name in names:
            kept = getattr(owner, name)
            if kept:
                found.append(f"{type(owner).__name__}.{name} keeps {list(kept) if hasattr(kept, '__iter__') else kept}")
    for name in ("_cards", "_answered"):  # what is loaded of a peer may outlive it for a while
        dead = [rank.agent for rank in getattr(mover.transfers.reach, name) if rank.incarnation not in alive]
        if dead:
            found.append(f"Reach.{name} keeps {dead}, who are dead")
    for channel in (process.worker, process.scheduler):
        board = channel.switchboard
        if board.calling:
            found.append(f"{channel.name} still calls")
        dead = [session.rank.agent for session in board.sessions if session.rank.incarnation not in alive]
        if dead:
            found.append(f"{channel.name} keeps sessions with {dead}, who are dead")
    return found
