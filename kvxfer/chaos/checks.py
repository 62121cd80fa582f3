"""What must be true of every process when everything has ended: nothing is open, nothing leaks, nothing is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation, Slot


def check(sim: Simulation) -> None:
    """Find what is left although everything has ended."""
    alive = {rank.me.incarnation for s in sim.living() for rank in s.process.ranks}
    missing = {s.host for s in sim.prefill_slots} - {s.host for s in sim.living()}
    for slot in sim.living():
        engine, ranks = slot.engine, slot.process.ranks
        for one in engine.requests.values():
            movers, handoff = [rank.mover for rank in ranks], one.handoff.id
            states = ", ".join(f"source {m.source.state(handoff)}, sink {m.sink.state(handoff)}" for m in movers)
            sim.violate("stuck", handoff.transfer, f"{slot.host}: {one.id} is {one.state}; {states}")
        if not engine.requests and len(engine.pool.free) != slot.num_blocks:
            what = f"{slot.host}: {len(engine.pool.free)} of {slot.num_blocks} blocks are free"
            sim.violate("leaked_blocks", "", what)
        if not engine.requests:
            for what in [*(one for rank in ranks for one in _leftovers(rank, alive, missing)), *_unknown(sim, slot)]:
                sim.violate("leftovers", "", f"{slot.host}: {what}")


def _unknown(sim: Simulation, slot: Slot) -> Iterator[str]:
    """Name the engines to which a decode engine was introduced, and with which it is not connected although they live."""
    if not sim.introduced or slot.prefills:
        return
    for other in sim.living(prefills=True):
        for channel in [channel for rank in slot.process.ranks for channel in rank.channels]:
            for peer in other.process.ranks:
                if not channel.switchboard.is_open(peer.me):
                    yield f"{channel.name} is not connected with {peer.me.agent}, to which it was introduced"


def _leftovers(process: Process, alive: set[str], missing: set[str]) -> list[str]:
    """Name what a process still remembers although everything has ended. It may call the ``missing``, if introduced to them."""
    mover, found = process.mover, []
    for owner, names in (
        (mover.source, ("_handoffs", "_by_request", "_transfers", "_granted")),
        (mover.sink, ("_handoffs", "_by_request", "_transfers", "_exposed", "_arriving")),
        (mover._openings, ("_open", "_called")),  # noqa: SLF001
        (mover, ("_steps",)),
        (mover._mirroring, ("_waiting", "_arriving", "_reads", "_granted")),  # noqa: SLF001
        (mover.transfers, ("in_flight",)),
        (mover.records, ("_open",)),
        *((channel.announcer, ("_expected",)) for channel in process.channels),
        *((channel.announcer._courier, ("_waiting",)) for channel in process.channels),  # noqa: SLF001
    ):
        for name in names:
            kept = getattr(owner, name)
            if kept:
                found.append(f"{type(owner).__name__}.{name} keeps {list(kept) if hasattr(kept, '__iter__') else kept}")
    dead = [rank.agent for rank in mover._approaches._wanted if rank.incarnation not in alive]  # noqa: SLF001
    if dead:
        found.append(f"Approaches wants to connect {dead}, who are dead")
    for name in ("_cards", "_answered"):  # what is loaded of a peer may outlive it for a while
        dead = [rank.agent for rank in getattr(mover.transfers.reach, name) if rank.incarnation not in alive]
        if dead:
            found.append(f"Reach.{name} keeps {dead}, who are dead")
    for channel in process.channels:
        board = channel.switchboard
        calls = [address for address in board.calls if address.host not in missing]
        if calls:
            found.append(f"{channel.name} still calls {calls}")
        dead = [session.rank.agent for session in board.sessions if session.rank.incarnation not in alive]
        if dead:
            found.append(f"{channel.name} keeps sessions with {dead}, who are dead")
    return found
