"""Faults that strike processes, the network, or one handoff: each is a method that takes its target, and says whether it could.

``faults[kind]`` is counted here, with the states of the handoffs that it concerned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.chaos import concern
from kvxfer.chaos.aims import Aim, Target
from kvxfer.chaos.decode import DecodeEngine
from kvxfer.chaos.engine import LATE
from kvxfer.chaos.prefill import PrefillEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation, Slot


AT_ONCE = 0.6
"""Probability of a life that begins while its last one's handoffs are in the states in which its death has met them."""
STARVED = 0.7
"""Probability of a usurped process whose mover does not run before its leases end."""
OTHER_END = 0.7
"""Probability of a source that is struck for what its sink is in."""
SLOW_CANCEL = 0.9
"""Probability of a decode that is aborted while the network is slow, so that cancelling lasts."""


class Strikes:
    """Everything that can be done to a simulation."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.by_name: dict[str, Callable[[Target], bool]] = {
            "break": lambda target: self._break(target, doubled=False),
            "doubled_break": lambda target: self._break(target, doubled=True),
            "stall": self._stall,
            "lag": self._lag,
            "cut": self.cut,
            "slow_word": self._slow_word,
            "replayed": self._replayed,
            "death": self._death,
            "usurped": self._usurped,
            "pause": self._pause,
            "late_mover": self._late_mover,
            "late_device": self._late_device,
            "forced_preemption": self._forced_preemption,
            "abort_prefill": self._abort_prefill,
            "abort_decode": self.abort_decode,
            "double_prefill_leg": lambda target: self._double(target, "double_prefill_leg"),
            "double_decode_leg": lambda target: self._double(target, "double_decode_leg"),
            "repeated_id": self._repeated_id,
            "eviction": self.evict,
            "abort_reader": self._abort_reader,
        }

    def anybody(self) -> Target:
        """Return a target without regard to any state."""
        draw = self.sim.world.random
        source, sink = draw.choice(self.sim.prefill_slots), draw.choice(self.sim.decode_slots)
        return Target(source, sink, draw.choice((source, sink)))

    def _note(self, kind: str, states: set[str], what: str) -> None:
        self.sim.struck(kind, states)
        self.sim.world.note("world", "", what)

    # --- the network ------------------------------------------------------------------------------------------------

    def _break(self, target: Target, *, doubled: bool) -> bool:
        wires = self.sim.network.connected()
        if target.handoff is not None:
            if target.source is None or target.sink is None:
                return False
            pair = {target.source.host, target.sink.host}
            wires = [wire for wire in wires if {wire.owner.host, wire.where[0]} == pair]
        busy = [wire for wire in wires if wire.there or wire.back] or wires
        if not busy:
            return False
        wire = self.sim.world.random.choice(busy)
        states = concern.of_pair(self.sim, wire.owner.host, wire.where[0])
        self._note("doubled_break" if doubled else "break", states, f"breaks {wire.owner.name} to {wire.where}")
        self.sim.network.break_wire(wire, doubled=doubled)
        return True

    def _pair(self, target: Target) -> tuple[str, str, float] | None:
        if target.source is None or target.sink is None:
            return None
        draw = self.sim.world.random
        until = self.sim.world.now + draw.choice((0.5, 2.0, 4.0, 7.0)) * (0.5 + draw.random())
        return target.source.host, target.sink.host, until

    def _stall(self, target: Target) -> bool:
        if (pair := self._pair(target)) is None:
            return False
        one, other, until = pair
        ways = self.sim.world.random.choice(((True, False), (False, True), (True, True)))
        what = f"stalls what {one} and {other} say until {until:.3f}, directions {ways}"
        self._note("stall", concern.of_pair(self.sim, one, other), what)
        if ways[0]:
            self.sim.network.stall(one, other, until)
        if ways[1]:
            self.sim.network.stall(other, one, until)
        return True

    def _lag(self, target: Target) -> bool:
        if (pair := self._pair(target)) is None:
            return False
        one, other, until = pair
        draw = self.sim.world.random
        frm, to = draw.choice(((one, other), (other, one)))
        seconds = draw.uniform(0.2, 4.8)
        if draw.random() < self.sim.profile.deaf:
            until = self.sim.world.now + draw.uniform(6.0, 10.0)
            self._note("stall", concern.of_pair(self.sim, one, other), f"{frm} hears nothing of {to} until {until:.3f}")
            self.sim.network.stall(to, frm, until)
        what = f"what {frm} says to {to} takes {seconds:.3f} s until {until:.3f}"
        self._note("lag", concern.of_pair(self.sim, one, other), what)
        self.sim.network.lag(frm, to, until + seconds, seconds)
        return True

    def cut(self, target: Target) -> bool:
        """Cut two hosts off each other."""
        if (pair := self._pair(target)) is None:
            return False
        one, other, until = pair
        self._note("cut", concern.of_pair(self.sim, one, other), f"cuts {one} off {other} until {until:.3f}")
        self.sim.network.cut(one, other, until)
        return True

    def _slow_word(self, target: Target) -> bool:
        if target.handoff is not None:
            self.sim.network.slow_about.add(target.handoff.transfer)
        return target.handoff is not None

    def _replayed(self, target: Target) -> bool:
        """Say again something that somebody has said: of the aimed handoff if possible, to its receiver or to anybody."""
        network = self.sim.network
        about = "" if target.handoff is None else target.handoff.transfer
        return network.replay(about)

    # --- processes --------------------------------------------------------------------------------------------------

    def _victim(self, target: Target) -> Slot | None:
        """Pick one end; of a handoff that its sink has in a certain state, rather the source."""
        draw = self.sim.world.random
        living = [s for s in (target.source, target.sink) if s is not None and s.process.alive]
        if target.handoff is not None and target.aimed is target.sink and draw.random() < OTHER_END:
            return living[0] if living else None
        return draw.choice(living) if living else None

    def _death(self, target: Target) -> bool:
        draw, slot = self.sim.world.random, self._victim(target)
        if slot is None:
            return False
        self._note("death", concern.of_process(self.sim, slot.host), f"{slot.host} dies")
        dead = slot.process
        self.sim.kill(slot)
        others = [s for s in self.sim.living() if s.prefills == slot.prefills]
        if others and draw.random() < 0.15:  # noqa: PLR2004
            self.sim.struck("never_back")
            return True
        renamed = draw.random() < self.sim.profile.renamed

        def come_back(_target: Target | None) -> bool:
            if slot.process is dead:
                self.sim.restart(slot, renamed=renamed)
            return True

        aims = self.sim.trouble.aims
        if slot.prefills and draw.random() < 0.4:  # noqa: PLR2004
            aims.add(Aim("sink/registered", self.abort_decode, about=slot.host))
        if concern.of_partners(self.sim, slot.host) and draw.random() < AT_ONCE:
            self.sim.world.after(0.02 * draw.random() ** 2, come_back, None)
        else:
            state = self.sim.trouble.state_for("death", "sink" if slot.prefills else "source")
            aims.add(Aim(state, come_back, about=slot.host))
            self.sim.world.after(draw.choice((0.05, 3.0, 7.0)), come_back, None)
        return True

    def _usurped(self, target: Target) -> bool:
        """Start another life at the addresses of one that goes on; some of its connections break, and lead to the other."""
        draw, slot = self.sim.world.random, self._victim(target)
        if slot is None:
            return False
        self._note("usurped", concern.of_process(self.sim, slot.host), f"another life takes {slot.host}'s place")
        old = slot.process
        self.sim.usurp(slot, seconds=draw.uniform(1.0, 8.0))
        starved = draw.random() < STARVED
        if starved:
            for rank in old.ranks:
                self.sim.world.after(0.2, self._starve, rank)
        for wire in self.sim.network.connected():
            if slot.host in (wire.owner.host, wire.where[0]) and (starved or draw.random() < 0.7):  # noqa: PLR2004
                wait = 0.15 if starved else draw.choice((0.0, 1.0))
                self.sim.world.after(wait * draw.random(), self.sim.network.break_wire, wire)
        return True

    def _starve(self, old: Process) -> None:
        """Let a mover not run until one of its leases is about to end; it then posts all that has become final meanwhile."""
        now, draw = old.clock(), self.sim.world.random
        sinks = {rank for one in old.mover.source._handoffs.values() for rank in one.sinks}  # noqa: SLF001
        sessions = [old.worker.switchboard.sessions.get(rank) for rank in sorted(sinks)]
        leases = [session.liveness.may_post_until for session in sessions if session is not None]
        if old.alive and leases:
            seconds = (draw.choice(leases) - now) / old.clock.rate - 0.1 * draw.random()
            self.sim.struck("late_mover", concern.own(old))
            old.hold_mover(max(0.0, seconds))

    def _pause(self, target: Target) -> bool:
        draw, slot = self.sim.world.random, self._victim(target)
        if slot is None:
            return False
        seconds = draw.choice((0.3, 2.0, 5.0, 9.0)) * (0.5 + draw.random())
        if self.sim.profile.sleep is not None:
            seconds = draw.uniform(*self.sim.profile.sleep)
            slot = target.source if target.source is not None and target.source.process.alive else slot
        self._note("pause", concern.of_process(self.sim, slot.host), f"{slot.host} sleeps for {seconds:.3f} s")
        for rank in self._some(slot.process.ranks):
            rank.pause(seconds)
        return True

    def _some(self, ranks: list[Process]) -> list[Process]:
        """Pick all ranks of an engine, or one of them."""
        draw = self.sim.world.random
        return ranks if len(ranks) == 1 or draw.random() < 0.5 else [draw.choice(ranks)]  # noqa: PLR2004

    def _late_mover(self, target: Target) -> bool:
        for process in self._some(target.aimed.process.ranks):
            if process.alive:
                self.sim.struck("late_mover", concern.own(process))
                process.hold_mover(self.sim.world.random.uniform(0.0, 0.5))
        return target.aimed.process.alive

    def _late_device(self, target: Target) -> bool:
        for process in self._some(target.aimed.process.ranks):
            if process.alive:
                self.sim.struck("late_device", concern.own(process))
                process.device.delay(self.sim.world.random.uniform(*LATE))
        return target.aimed.process.alive

    # --- one handoff ------------------------------------------------------------------------------------------------

    def _forced_preemption(self, target: Target) -> bool:
        """Preempt a request; without an aim, best of all one that is computed whole and may be under way already."""
        slots = [target.aimed] if target.handoff is not None else self.sim.living(prefills=True)
        choices = [
            (slot, slot.engine, one)
            for slot in slots
            if isinstance(slot.engine, PrefillEngine) and not slot.process.asleep
            for one in slot.engine.running
            if target.handoff in (None, one.handoff.id)
        ]
        if target.handoff is not None and target.source is not None and target.aimed is not target.source:
            return self._forced_preemption(Target(target.source, target.sink, target.source, target.handoff))
        if not choices:
            return False
        slot, engine, one = self.sim.world.random.choice([c for c in choices if c[2].unfinished] or choices)
        # A mover that is behind with its mailbox hears of the start before it hears of this.
        states = concern.of_prefill(self.sim, slot, one) - {"source/expected"}
        self.sim.struck("forced_preemption", states)
        engine.preempt(one)
        one.not_before = self.sim.world.now + self.sim.world.random.choice((0.0, 0.3)) * self.sim.world.random.random()
        engine.stir()
        return True

    def _abort_prefill(self, target: Target) -> bool:
        slot = target.source
        if slot is None or not slot.process.alive or slot.process.asleep:
            return False
        requests = [
            one
            for one in slot.engine.requests.values()
            if one.state in ("waiting", "running") and target.handoff in (None, one.handoff.id)
        ]
        if requests:
            self.sim.legs.abort(slot, slot.engine, self.sim.world.random.choice(requests))
        return bool(requests)

    def abort_decode(self, target: Target) -> bool:
        """Let a client of decode go away."""
        slot = target.sink
        if slot is None or not slot.process.alive or slot.process.asleep:
            return False
        assert isinstance(slot.engine, DecodeEngine)
        requests = [
            one
            for one in slot.engine.requests.values()
            if not one.aborted and one.state in ("waiting", "loading") and target.handoff in (None, one.handoff.id)
        ]
        if requests:
            one = self.sim.world.random.choice(requests)
            if self.sim.world.random.random() < SLOW_CANCEL:
                self.sim.network.slow_about.add(one.handoff.id.transfer)
            self.sim.legs.abort(slot, slot.engine, one)
        return bool(requests)

    # --- conversations ----------------------------------------------------------------------------------------------

    def evict(self, target: Target) -> bool:
        """Let somebody's prompt take what is free in decode's cache."""
        slot = target.source if target.handoff is not None else target.sink
        if slot is None or not slot.process.alive or slot.process.asleep:
            return False
        assert isinstance(slot.engine, DecodeEngine)
        states = {
            state for state in concern.of_process(self.sim, slot.host) if state.startswith(("holder/", "reader/"))
        }
        self._note("eviction", states, f"{slot.host} computes what needs all that is free")
        slot.engine.evict()
        return True

    def _abort_reader(self, target: Target) -> bool:
        """Let a client of prefill go away whose conversation is asked for, or read."""
        slot = target.sink if target.handoff is not None else target.source
        if slot is None or not slot.process.alive or slot.process.asleep:
            return False
        assert isinstance(slot.engine, PrefillEngine)
        taking = slot.engine.taking
        name = None if taking is None or target.handoff is None else taking.request_of(target.handoff)
        requests = [
            one
            for one in slot.engine.requests.values()
            if not one.aborted and one.state in ("waiting", "loading") and name in (None, one.id)
        ]
        if requests:
            self.sim.legs.abort(slot, slot.engine, self.sim.world.random.choice(requests))
        return bool(requests)

    def _double(self, target: Target, fault: str) -> bool:
        if target.handoff is None or target.source is None or target.sink is None:
            return False
        self.sim.legs.double(fault, target.handoff, target.source, target.sink)
        return True

    def _repeated_id(self, target: Target) -> bool:
        if target.handoff is None:
            return False
        self.sim.legs.repeat(self.sim.legs.handoff(target.handoff))
        return True
