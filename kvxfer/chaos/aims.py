"""Trouble that waits for its moment: a fault that is to strike when a handoff is in a certain state.

Left to chance, a process dies often while handoffs are computed, and hardly ever in the milliseconds in which one is cancelled.
An aim looks at a mover after each of its rounds until there is a handoff in the state that it waits for, and strikes a little
later, if the handoff is in that state still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.chaos import concern

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation, Slot
    from kvxfer.protocol.ids import HandoffId

DELAYS = (0.0, 0.0, 0.001, 0.02, 0.5)
"""Seconds, at most, between the moment in which a state is seen and the strike."""


@dataclass(slots=True)
class Target:
    """Whom a fault is to strike. ``handoff`` is None for any; ``aimed`` is where the state was seen."""

    source: Slot | None
    sink: Slot | None
    aimed: Slot
    handoff: HandoffId | None = None


class Aim:
    """A fault that waits. ``act`` says whether it could strike; ``about`` the host, ``handoff`` the handoff that it must be."""

    __slots__ = ("about", "act", "handoff", "side", "state")

    def __init__(
        self, state: str, act: Callable[[Target], bool], *, about: str = "", handoff: HandoffId | None = None
    ) -> None:
        self.side, _, self.state = state.partition("/")
        self.act = act
        self.about = about
        self.handoff = handoff


class Aims:
    """The aims of one simulation."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._waiting: dict[str, list[Aim]] = {"source": [], "sink": [], "holder": [], "reader": []}

    def add(self, aim: Aim) -> None:
        """Let a fault wait; it may strike at once."""
        self._waiting[aim.side].append(aim)
        for slot in self._sim.living():
            for process in slot.process.ranks:
                self.look(process)

    def clear(self) -> None:
        """Let nothing wait."""
        for waiting in self._waiting.values():
            waiting.clear()

    def look(self, process: Process) -> None:
        """Look at what a mover, or a scheduler, has just done."""
        for side, waiting in self._waiting.items():
            if not waiting:
                continue
            handoffs = self._handoffs(process, side)
            states = handoffs.values()
            for aim in [aim for aim in waiting if aim.state in states]:
                for handoff, state in handoffs.items():
                    if state == aim.state and aim.handoff in (None, handoff):
                        waiting.remove(aim)
                        self._wait(aim, process, handoff)
                        break

    def _wait(self, aim: Aim, process: Process, handoff: HandoffId) -> None:
        world = self._sim.world
        world.after(world.random.choice(DELAYS) * world.random.random(), self._fire, aim, process, handoff)

    def _fire(self, aim: Aim, process: Process, handoff: HandoffId) -> None:
        if self._sim.trouble.over:
            return
        slot = next((s for s in self._sim.living() if process in s.process.ranks), None)
        if slot is None or not self._struck(aim, slot, process, handoff):
            self._waiting[aim.side].append(aim)

    def _struck(self, aim: Aim, slot: Slot, process: Process, handoff: HandoffId) -> bool:
        if self._handoffs(process, aim.side).get(handoff) != aim.state:
            return False
        target = self._target(slot, handoff, at_sink=aim.side in ("sink", "reader"))
        if aim.about and aim.about not in {s.host for s in (target.source, target.sink) if s is not None}:
            return False
        return aim.act(target)

    @staticmethod
    def _handoffs(process: Process, side: str) -> dict[HandoffId, str]:
        """Return the states of a process's handoffs on that side."""
        mover, of_reuse = process.mover, side in ("holder", "reader")
        handoffs: dict[HandoffId, Any] = (mover.sink if side in ("sink", "reader") else mover.source)._handoffs  # noqa: SLF001
        reuse = process.ranks[0].scheduler.reuse if of_reuse else None
        found = {} if reuse is None or reuse.side != side else reuse.states()
        for handoff, one in handoffs.items():
            if concern.is_reuse(handoff) == of_reuse:
                found[handoff] = one.state.value
        return found

    def _target(self, slot: Slot, handoff: HandoffId, *, at_sink: bool) -> Target:
        sim = self._sim
        if concern.is_reuse(handoff):
            holder, reader = sim.readers[handoff.transfer]
            return Target(sim.slot(holder), sim.slot(reader), slot, handoff)
        if at_sink:
            host = concern.source_of(slot, handoff)
            return Target(None if host is None else sim.slot(host), slot, slot, handoff)
        hosts = next((hosts for one, hosts, _ in concern.at_source(sim, slot) if one == handoff), set())
        other = sim.slot(sim.world.random.choice(sorted(hosts))) if hosts else None
        return Target(slot, other, slot, handoff)
