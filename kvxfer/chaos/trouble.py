"""What goes wrong in one seed, and how often: drawn once per seed, so that some worlds are calm and some are not.

Two kinds: chances, which are drawn whenever something happens that may go wrong (``strikes``), and events, which come at
random moments while handoffs arrive. When the last handoff has arrived, trouble ends, and what has begun must come to an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.chaos.engine import PrefillEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.simulation import Simulation

CHANCES = {
    "no_prefill_leg": 0.02,
    "no_decode_leg": 0.02,
    "late_leg": 0.06,
    "double_prefill_leg": 0.02,
    "double_decode_leg": 0.02,
    "repeated_id": 0.05,
    "retry_same_id": 0.3,
    "wrong_engine": 0.01,
    "wrong_port": 0.01,
    "longer_prompt": 0.01,
    "shorter_prompt": 0.05,
    "abort_prefill": 0.05,
    "abort_decode": 0.08,
}
"""Probability per handoff, in a world where this kind happens."""

EVENTS = {
    "break": 1.0,
    "break_doubled": 1.0,
    "stall": 8.0,
    "lag": 7.0,
    "cut": 10.0,
    "death": 9.0,
    "pause": 7.0,
    "forced_preemption": 0.25,
}
"""Mean seconds between two, in a world where this kind happens."""


class Trouble:
    """One seed's trouble."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        draw = sim.world.random
        calm = self.calm = draw.random() < 0.1  # noqa: PLR2004
        self._chances = {kind: p for kind, p in CHANCES.items() if not calm and draw.random() < 0.6}  # noqa: PLR2004
        storm = self.storm = draw.choice((1.0, 1.0, 0.5))
        self._events = {kind: storm * mean for kind, mean in EVENTS.items() if not calm and draw.random() < 0.4}  # noqa: PLR2004
        self._over = False
        faults = sim.fabric.faults
        faults.delay = draw.choice(((0.0001, 0.002), (0.0001, 0.05), (0.0005, 0.4), (0.001, 1.8), (0.2, 1.8)))
        faults.notification_delay = draw.choice(((0.0, 0.001), (0.0, 0.02), (0.0, 0.5)))
        for kind, p in (
            ("lose_notification", 0.02),
            ("double_notification", 0.2),
            ("fail_post", 0.02),
            ("fail_transfer", 0.03),
        ):
            setattr(faults, kind, p if not calm and draw.random() < 0.4 else 0.0)  # noqa: PLR2004
        sim.network.slow = 0.02 if not calm and draw.random() < 0.4 else 0.0  # noqa: PLR2004
        self.late_device = 0.02 if not calm and draw.random() < 0.5 else 0.0  # noqa: PLR2004
        self.late_mover = 0.01 if not calm and draw.random() < 0.5 else 0.0  # noqa: PLR2004

    def strikes(self, kind: str) -> bool:
        """Draw whether something goes wrong now."""
        if self._over or not self.sim.world.chance(self._chances.get(kind, 0.0)):
            return False
        self.sim.faults[kind] += 1
        return True

    def leg_delay(self) -> float:
        """How long after its time a leg comes."""
        draw = self.sim.world.random
        return draw.uniform(0.5, 8.0) if self.strikes("late_leg") else draw.uniform(0.0, 0.05)

    def begin(self, until: float) -> None:
        """Let events come until then."""
        draw = self.sim.world.random
        for kind, mean in self._events.items():
            act: Callable[[], None] = getattr(self, f"_{kind}")
            at = draw.expovariate(1 / mean)
            while at < until:
                self.sim.world.at(at, act)
                at += draw.expovariate(1 / mean)
        self._set_devices()

    def end(self) -> None:
        """No more of it; partitions heal, the dead whose return was not planned stay dead."""
        self._over = True
        self.sim.network.heal()
        faults = self.sim.fabric.faults
        faults.lose_notification = faults.fail_post = faults.fail_transfer = 0.0
        self.late_device = self.late_mover = 0.0
        self._set_devices()

    def _set_devices(self) -> None:
        for slot in self.sim.living():
            slot.engine.late = self.late_device

    # --- events -----------------------------------------------------------------------------------------------------

    def _note(self, kind: str, what: str) -> None:
        self.sim.faults[kind] += 1
        self.sim.world.note("world", "", what)

    def _break(self, *, doubled: bool = False) -> None:
        wires = self.sim.network.connected()
        busy = [wire for wire in wires if wire.there or wire.back] or wires
        if busy:
            wire = self.sim.world.random.choice(busy)
            self._note("doubled_break" if doubled else "break", f"breaks {wire.owner.name} to {wire.where}")
            self.sim.network.break_wire(wire, doubled=doubled)

    def _break_doubled(self) -> None:
        self._break(doubled=True)

    def _pair(self) -> tuple[str, str, float]:
        draw = self.sim.world.random
        one = draw.choice([s for s in self.sim.slots if s.prefills])
        other = draw.choice([s for s in self.sim.slots if not s.prefills])
        return one.host, other.host, self.sim.world.now + draw.choice((0.5, 2.0, 4.0, 7.0)) * (0.5 + draw.random())

    def _stall(self) -> None:
        one, other, until = self._pair()
        ways = self.sim.world.random.choice(((True, False), (False, True), (True, True)))
        self._note("stall", f"stalls what {one} and {other} say until {until:.3f}, directions {ways}")
        if ways[0]:
            self.sim.network.stall(one, other, until)
        if ways[1]:
            self.sim.network.stall(other, one, until)

    def _lag(self) -> None:
        one, other, until = self._pair()
        draw = self.sim.world.random
        frm, to = draw.choice(((one, other), (other, one)))
        seconds = draw.uniform(0.2, 4.8)
        self._note("lag", f"what {frm} says to {to} takes {seconds:.3f} s until {until:.3f}")
        self.sim.network.lag(frm, to, until + seconds, seconds)

    def _cut(self) -> None:
        one, other, until = self._pair()
        self._note("cut", f"cuts {one} off {other} until {until:.3f}")
        self.sim.network.cut(one, other, until)

    def _death(self) -> None:
        draw = self.sim.world.random
        slot = draw.choice(self.sim.slots)
        if not slot.process.alive:
            return
        self._note("death", f"{slot.host} dies")
        self.sim.kill(slot)
        others = [s for s in self.sim.living() if s.prefills == slot.prefills]
        if others and draw.random() < 0.15:  # noqa: PLR2004
            self.sim.faults["never_back"] += 1
            return
        renamed = draw.random() < 0.3  # noqa: PLR2004
        self.sim.faults["restart_renamed" if renamed else "restart"] += 1
        self.sim.world.after(draw.choice((0.05, 0.5, 3.0, 7.0)), self._restart, slot.host, renamed)

    def _restart(self, host: str, renamed: bool) -> None:
        (slot,) = [s for s in self.sim.slots if s.host == host]
        self.sim.restart(slot, renamed=renamed)
        slot.engine.late = self.late_device

    def _pause(self) -> None:
        draw = self.sim.world.random
        slot = draw.choice(self.sim.slots)
        seconds = draw.choice((0.3, 2.0, 5.0, 9.0)) * (0.5 + draw.random())
        self._note("pause", f"{slot.host} sleeps for {seconds:.3f} s")
        slot.process.pause(seconds)

    def _forced_preemption(self) -> None:
        """Preempt somebody; best of all somebody who is computed whole and may be under way already."""
        engines = [
            slot.engine
            for slot in self.sim.living(prefills=True)
            if isinstance(slot.engine, PrefillEngine) and slot.engine.running and not slot.process.asleep
        ]
        choices = [(engine, one) for engine in engines for one in engine.running]
        whole = [(engine, one) for engine, one in choices if one.unfinished]
        if choices:
            engine, one = self.sim.world.random.choice(whole or choices)
            self.sim.faults["forced_preemption"] += 1
            engine.preempt(one)
            engine.stir()
