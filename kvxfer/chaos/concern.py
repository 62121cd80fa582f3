"""Which handoffs a fault concerns, and in which states they are at that moment: ``source/final``, ``sink/fencing``, ...

A read for a conversation has its ends the other way round, and names of its own for them: it is held by decode's process
(``holder/final``) for prefill's (``reader/reading``). Beside the machines' states it has ``reader/asked``, while a question is
open, and ``holder/pinned``, while a lease keeps blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.chaos.engine import Request
    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation, Slot
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.protocol.source import State


NAME = "reuse-"
"""How the transfer ids of reads for conversations begin."""


def is_reuse(handoff: HandoffId) -> bool:
    """Tell a read for a conversation from the handoff of a prompt."""
    return handoff.transfer.startswith(NAME)


def at_its_source(handoff: HandoffId, state: str) -> str:
    """Name a state of a handoff at its source."""
    return f"{'holder' if is_reuse(handoff) else 'source'}/{state}"


def at_its_sink(handoff: HandoffId, state: str) -> str:
    """Name a state of a handoff at its sink."""
    return f"{'reader' if is_reuse(handoff) else 'sink'}/{state}"


def host_of(rank: RankId) -> str:
    """Return where a rank lives: engines are named after their hosts."""
    return rank.engine.partition("-")[0]


def ends(one: str, other: str) -> tuple[str, str]:
    """Return two hosts as (source, sink): prefill engines live at p0, p1, ..., decode engines at d0, d1, ..."""
    return (one, other) if one.startswith("p") else (other, one)


def of_process(sim: Simulation, host: str) -> set[str]:
    """Return the states of all open handoffs in which a host takes part, at both ends."""
    return {state for here, there, state in _open(sim) if here == host or host in there}


def of_partners(sim: Simulation, host: str) -> set[str]:
    """Return the states, at their other ends, of all open handoffs in which a host takes part."""
    return {state for _, there, state in _open(sim) if host in there}


def of_pair(sim: Simulation, one: str, other: str) -> set[str]:
    """Return the states of all open handoffs between two hosts."""
    return {
        state
        for here, there, state in _open(sim)
        if (here == one and other in there) or (here == other and one in there)
    }


def own(process: Process) -> set[str]:
    """Return the states of all open handoffs of one process, at its own end."""
    mover = process.mover
    found = {at_its_source(name, one.state.value) for name, one in mover.source._handoffs.items()}  # noqa: SLF001 - looked at, not touched
    found.update(at_its_sink(name, one.state.value) for name, one in mover.sink._handoffs.items())  # noqa: SLF001
    found.update(_of_scheduler(process.ranks[0]).values())
    return found


def _of_scheduler(process: Process) -> dict[HandoffId, str]:
    """Return the states of conversations in a scheduler process."""
    reuse = process.scheduler.reuse
    return {} if reuse is None else {name: f"{reuse.side}/{state}" for name, state in reuse.states().items()}


def of_attempt(source: Process, sink: Process, handoff: HandoffId, attempt: int) -> set[str]:
    """Return the states of one attempt at its two processes. An attempt that is over has no state of its own."""
    found = set()
    one = source.mover.source._handoffs.get(handoff)  # noqa: SLF001
    mine = None if one is None else one.sinks.get(sink.me)
    if source.alive and one is not None and mine is not None and mine.attempt == attempt:
        found.add(at_its_source(handoff, one.state.value))
    other = sink.mover.sink._handoffs.get(handoff)  # noqa: SLF001
    if sink.alive and other is not None and other.attempt == attempt:
        found.add(at_its_sink(handoff, other.state.value))
    return found


def of_handoff(sim: Simulation, handoff: HandoffId, source: str, sink: str) -> set[str]:
    """Return the states of a handoff between two hosts, or, of a read for a conversation, wherever.

    A source knows what has ended.
    """
    found: set[str] = set()
    if is_reuse(handoff):
        source, sink = sim.readers[handoff.transfer]
        found.update(
            state for s in sim.living() if (state := _of_scheduler(s.process.ranks[0]).get(handoff)) is not None
        )
    for slot in sim.living():
        if slot.host == source:
            states = [rank.mover.source.state(handoff) for rank in slot.process.ranks]
            found.update(at_its_source(handoff, state.value) for state in states if state is not None)
        elif slot.host == sink and source_of(slot, handoff) == source:
            others = [rank.mover.sink.state(handoff) for rank in slot.process.ranks]
            found.update(at_its_sink(handoff, state.value) for state in others if state is not None)
    return found


def of_reader(sim: Simulation, slot: Slot, request_id: str) -> set[str]:
    """Return the states of the read for a request of a prefill engine; none where nothing was asked."""
    reuse = slot.process.scheduler.reuse
    handoff = None if reuse is None else reuse.handoff_of(request_id)
    return set() if handoff is None else of_handoff(sim, handoff, "", "")


def of_prefill(sim: Simulation, slot: Slot, request: Request) -> set[str]:
    """Return the states of the handoff that a prefill request which waits or runs is for; none for a second of its name."""
    handoff = request.handoff.id
    one = slot.process.mover.source._handoffs.get(handoff)  # noqa: SLF001
    if one is None or one.request_id not in (None, request.id):
        return set()
    found = {f"source/{one.state.value}"}
    for other in [
        rank for s in sim.living(prefills=False) if source_of(s, handoff) == slot.host for rank in s.process.ranks
    ]:
        sink = other.mover.sink._handoffs.get(handoff)  # noqa: SLF001
        mine = one.sinks.get(other.me)
        if sink is not None and (not one.sinks or (mine is not None and mine.attempt == sink.attempt)):
            found.add(f"sink/{sink.state.value}")
    if not one.sinks:
        found.discard("sink/reading")  # what an earlier request of this name has granted
    return found


def at_source(sim: Simulation, slot: Slot) -> Iterator[tuple[HandoffId, set[str], State]]:
    """Return a source's open handoffs, with the hosts of their sinks: of those that have registered, or of all that may."""
    for process in slot.process.ranks:
        for handoff, one in process.mover.source._handoffs.items():  # noqa: SLF001
            yield handoff, {host_of(rank) for rank in one.sinks} or sim.sinks_of(handoff), one.state


def source_of(slot: Slot, handoff: HandoffId) -> str | None:
    """Return the host that a sink's open handoff is to come from."""
    if is_reuse(handoff):
        return slot.engine.sim.readers[handoff.transfer][0]
    ids = [rank.mover.sink.request(handoff) for rank in slot.process.ranks]
    request = slot.engine.requests.get(next((one for one in ids if one is not None), ""))
    return None if request is None or request.address is None else request.address.host


def _open(sim: Simulation) -> Iterator[tuple[str, set[str], str]]:
    """Return (host, hosts of the other end, state) for each end of each open handoff."""
    for slot in sim.living():
        for handoff, hosts, state in at_source(sim, slot):
            yield slot.host, hosts, at_its_source(handoff, state.value)
        for process in slot.process.ranks:
            for handoff, other in process.mover.sink._handoffs.items():  # noqa: SLF001
                host = source_of(slot, handoff)
                yield slot.host, set() if host is None else {host}, at_its_sink(handoff, other.state.value)
        for handoff, what in _of_scheduler(slot.process.ranks[0]).items():
            yield slot.host, set(sim.readers[handoff.transfer]) - {slot.host}, what
