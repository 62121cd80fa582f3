"""What goes wrong in one seed, and how often: drawn once per seed, so that some worlds are calm and some are not.

Two kinds: chances, which are drawn whenever something happens that may go wrong (``draws``), and events, which come at random
moments while handoffs arrive; most of these then wait until a handoff is in a certain state (``aims``). Trouble ends before the
last handoffs arrive, and what has begun must come to an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.chaos import concern
from kvxfer.chaos.aims import Aim, Aims, Target
from kvxfer.chaos.engine import LATE
from kvxfer.chaos.possible import POSSIBLE, REUSE
from kvxfer.chaos.strikes import Strikes
from kvxfer.protocol.sink import State

if TYPE_CHECKING:
    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation

CHANCES = {
    "no_prefill_leg": 0.14,
    "no_decode_leg": 0.04,
    "late_leg": 0.06,
    "double_prefill_leg": 0.02,
    "double_decode_leg": 0.02,
    "repeated_id": 0.05,
    "retry_same_id": 0.4,
    "wrong_engine": 0.04,
    "wrong_port": 0.04,
    "longer_prompt": 0.04,
    "shorter_prompt": 0.035,
    "other_prompt": 0.045,
    "abort_prefill": 0.05,
    "abort_decode": 0.08,
    "lost_notification": 0.045,
    "doubled_notification": 0.2,
    "failed_post": 0.03,
    "torn_transfer": 0.03,
    "slow_word": 0.02,
    "late_device": 0.02,
    "late_mover": 0.01,
}
"""Probability per occasion, in a world where this kind happens."""

EVENTS = {
    "break": 1.5,
    "doubled_break": 1.5,
    "stall": 9.0,
    "lag": 7.0,
    "cut": 10.0,
    "slow_word": 3.0,
    "death": 7.0,
    "usurped": 12.0,
    "pause": 7.0,
    "late_mover": 3.0,
    "late_device": 2.0,
    "forced_preemption": 0.5,
    "abort_prefill": 1.0,
    "abort_decode": 1.5,
    "double_prefill_leg": 3.0,
    "double_decode_leg": 3.0,
    "repeated_id": 3.0,
}
"""Mean seconds between two, in a world where this kind happens."""

REUSE_EVENTS = {"eviction": 4.0, "abort_reader": 3.0}
"""The same, in worlds with conversations."""

REUSE_CHANCES = {"wrong_holder": 0.06, "slow_read": 0.3}
"""Probability per occasion, in every world with conversations that is not calm."""

WEIGHTS_OF_REUSE = {
    "reader/asked": 2.0,
    "reader/opening": 8.0,
    "reader/registered": 6.0,
    "reader/reading": 4.0,
    "reader/cancelling": 8.0,
    "reader/fencing": 7.0,
    "holder/expected": 7.0,
}
"""How much likelier than others a state of a read for a conversation is that an event waits for: these pass soon."""

WEIGHTS = {"sink/cancelling": 3.0, "sink/fencing": 2.5, "sink/reading": 5.5, "sink/opening": 1.5, "source/served": 1.5}
"""How much likelier than others a state is that an event waits for."""

LATE_GRANT = 0.15
"""Probability of a grant behind a step that is late, where it is not calm: then who reads registers first."""

SOON = 0.2
"""Seconds before the end of a fence in which something else is made to happen."""

AIMED = 0.8
"""Probability of an event that waits for a handoff in a certain state, instead of striking anybody at once."""


class Trouble:
    """One seed's trouble."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.over = False
        self.aims = Aims(sim)
        self.strikes = Strikes(sim)
        draw, profile = sim.world.random, sim.profile
        self.calm = profile.others == 0.0
        self._chances = {kind: p for kind, p in CHANCES.items() if draw.random() < profile.others} | dict(
            profile.chances
        )
        self.storm = profile.storm or draw.choice((1.0, 1.0, 0.5))
        if sim.conversing:
            self._chances |= REUSE_CHANCES if profile.others else {}
        events = {kind: self.storm * mean for kind, mean in EVENTS.items() if draw.random() < profile.others}
        if sim.conversing:
            events |= {kind: self.storm * mean for kind, mean in REUSE_EVENTS.items() if profile.others}
        self._events = events | dict(profile.events)
        self._set_fabric()
        sim.network.slow = self._chances.get("slow_word", 0.0)
        if profile.reconnect is not None:
            sim.network.reconnect = sim.network.retry = profile.reconnect
        self.late_device = self._chances.get("late_device", 0.0) if profile.late_device is None else profile.late_device
        self.late_mover = self._chances.get("late_mover", 0.0) if profile.late_mover is None else profile.late_mover

    def _set_fabric(self) -> None:
        draw, profile, fabric = self.sim.world.random, self.sim.profile, self.sim.fabric
        faults = fabric.faults
        faults.delay = profile.delay or draw.choice(
            ((0.0001, 0.002), (0.0001, 0.05), (0.0005, 0.4), (0.001, 1.8), (0.2, 1.8))
        )
        faults.notification_delay = profile.notification_delay or draw.choice(((0.0, 0.001), (0.0, 0.02), (0.0, 0.5)))
        faults.lose_notification = self._chances.get("lost_notification", 0.0)
        faults.double_notification = self._chances.get("doubled_notification", 0.0)
        faults.fail_post = self._chances.get("failed_post", 0.0)
        faults.fail_transfer = self._chances.get("torn_transfer", 0.0)
        fabric.slow_tail = profile.slow_tail

    def draws(self, kind: str) -> bool:
        """Draw whether something goes wrong now."""
        return not self.over and self.sim.world.chance(self._chances.get(kind, 0.0))

    def begin(self, until: float) -> None:
        """Let events come until then."""
        draw = self.sim.world.random
        for kind, mean in self._events.items():
            at = draw.expovariate(1 / mean)
            while at < until:
                self.sim.world.at(at, self._event, kind)
                at += draw.expovariate(1 / mean)
        self._set_devices()

    def end(self) -> None:
        """No more of it; partitions heal, the dead whose return was not planned stay dead, the usurped die."""
        self.over = True
        self.aims.clear()
        self.sim.network.heal()
        faults = self.sim.fabric.faults
        faults.lose_notification = faults.fail_post = faults.fail_transfer = 0.0
        self.late_device = self.late_mover = 0.0
        self._set_devices()

    def _set_devices(self) -> None:
        for slot in self.sim.living():
            slot.engine.late = self.late_device

    def after_turn(self, process: Process) -> None:
        """A mover has turned a round: strike what has waited for that, and perhaps the mover itself."""
        self.aims.look(process)
        if not self.over and self.sim.settings.revoke and process.mover.sink.receiving():
            self._before_a_revocation(process)
        if self.sim.world.chance(self.late_mover):
            self.sim.struck("late_mover", concern.own(process))
            process.hold_mover(self.sim.world.random.uniform(0.0, 0.5))

    def after_grant(self, process: Process) -> None:
        """A lease was given to a reader: perhaps what its step launches begins late, and with it the grant of the ranks."""
        if not self.over and not self.calm and self.sim.world.chance(LATE_GRANT):
            for rank in process.ranks:
                self.sim.struck("late_device", concern.own(rank))
                rank.device.delay(self.sim.world.random.uniform(*LATE))

    def _before_a_revocation(self, process: Process) -> None:
        """Let a client go away whose handoff is beside one whose fence is about to end by a revocation."""
        handoffs, now = process.mover.sink._handoffs, process.clock()  # noqa: SLF001 - looked at, not touched
        soon = any(
            one.state is State.FENCING
            and any(p.lost and not p.dead and 0.0 < p.until - now < SOON for p in one.parts.values())
            for one in handoffs.values()
        )
        if not soon or process.fence_seen > now - 1.0:
            return
        process.fence_seen = now
        slot, world = self.sim.slot(process.host), self.sim.world
        for handoff in [handoff for handoff, one in handoffs.items() if one.state is State.REGISTERED]:
            host = concern.source_of(slot, handoff)
            if host is not None and world.chance(0.9) and self.strikes.abort_decode(Target(None, slot, slot, handoff)):
                # What cancels it comes too late.
                self.sim.network.stall(process.host, host, world.now + 0.3 + SOON)

    def _event(self, kind: str) -> None:
        draw, act = self.sim.world.random, self.strikes.by_name[kind]
        if draw.random() >= AIMED:
            act(self.strikes.anybody())
            return
        if kind not in REUSE_EVENTS:
            self.aims.add(Aim(self.state_for(kind), act))
        if self.sim.conversing and (states := [state for state in POSSIBLE[kind] if state in REUSE]):
            state = draw.choices(states, [WEIGHTS_OF_REUSE.get(state, 1.0) for state in states])[0]
            self.aims.add(Aim(state, act))

    def state_for(self, kind: str, side: str = "") -> str:
        """Draw a handoff's state in which a fault shall strike, rather one that passes soon; none that this world never sees."""
        never = {"source/closed"} if self.sim.settings.mode == "pull" else {"source/closed", "sink/reading"}
        never.update(REUSE)
        states = [state for state in POSSIBLE[kind] if state not in never and state.startswith(side)]
        return self.sim.world.random.choices(states, [WEIGHTS.get(state, 1.0) for state in states])[0]
