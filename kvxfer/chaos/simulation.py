"""One seed: engines, handoffs, trouble; then quiet, and the checks.

What is checked: ``wrong_bytes`` (decode reads what is not its own, something lands in a block that is not lent to its handoff,
or a write carries what is not its request's), ``double_reports`` (a report that was not owed), ``leaked_blocks`` (a pool that
is not full after everything has ended), ``stuck`` (a request that is still open then), ``leases`` (the right to post ends later
at its holder than at who granted it), ``obituaries`` (a process that lives is thought to have ended), ``needless`` (a handoff
that fails in a world without trouble), ``caught`` (a peer is connected early that may not answer), ``leftovers`` (something
inside that remembers what has ended) and ``defects`` (an exception that the product caught and logged as its own).
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.chaos import concern
from kvxfer.chaos.checks import check
from kvxfer.chaos.decode import DecodeEngine
from kvxfer.chaos.fabric import Fabric
from kvxfer.chaos.legs import LONGEST, PORT, Legs
from kvxfer.chaos.network import Network
from kvxfer.chaos.outcomes import kind_of
from kvxfer.chaos.possible import POSSIBLE
from kvxfer.chaos.prefill import PrefillEngine
from kvxfer.chaos.process import BLOCK_SIZE, Process, settings_of
from kvxfer.chaos.profile import HEADS, Profile, introduced, parallel, profile_of
from kvxfer.chaos.trouble import Trouble
from kvxfer.chaos.world import World
from kvxfer.protocol.auth import Secret
from kvxfer.transport import commands as cmd

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.chaos.engine import Request
    from kvxfer.chaos.world import Entry
    from kvxfer.protocol.ids import HandoffId, RankId

CHECKS = (
    "wrong_bytes",
    "leaked_blocks",
    "stuck",
    "double_reports",
    "leases",
    "obituaries",
    "needless",
    "caught",
    "leftovers",
    "defects",
)

BETWEEN = 0.2
"""Mean seconds between two handoffs, where transfers are quick and storms rare."""
BETWEEN_SLOW = 0.4
DRAINED = 0.92
"""Part of the drain bound in which everything has landed, even by clocks that are much too fast."""
TROUBLED = 0.75
"""Part of the time in which handoffs arrive and there is trouble; what comes later shows that everybody recovers."""
SECRET = Secret(b"what the engines share")
PATIENCE = 400.0
"""Seconds after the last trouble in which everything must have ended. Small pools that wait for each other go on by one hold
limit at a time."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What must not be. ``about``: the handoff's transfer id, or empty."""

    check: str
    about: str
    at: float
    what: str


@dataclass(slots=True)
class Result:
    """What became of one seed."""

    seed: int
    handoffs: int = 0
    moved: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    struck: dict[str, Counter[str]] = field(default_factory=lambda: {fault: Counter() for fault in POSSIBLE})
    """Fault → state → how often it concerned a handoff in that state."""
    violations: list[Violation] = field(default_factory=list)
    digest: int = 0
    events: int = 0
    trace: list[Entry] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Slot:
    """A place where an engine runs, in one life after another."""

    host: str
    prefills: bool
    engine_id: str
    num_blocks: int
    process: Process
    engine: PrefillEngine | DecodeEngine


class _Defects(logging.Handler):
    """Hears what the product logs as its own defect."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(logging.ERROR)
        self._sim = sim

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = f"{record.getMessage()}: {type(error).__name__}: {error}" if error else record.getMessage()
        self._sim.violate("defects", "", text)


class Simulation:
    """One seed's world. ``keep``: keep the trace's text. ``profile``: another kind of world than the seed's own.

    ``mirrored``: the fabric does not reach the engines' memory, and KV is copied through mirrors of it.
    """

    connect_timeout = 3.0

    def __init__(
        self,
        seed: int,
        handoffs: int = 100,
        *,
        keep: bool = False,
        profile: Profile | None = None,
        mirrored: bool = False,
    ) -> None:
        self.mirrored = mirrored
        self.result = Result(seed)
        self.faults = self.result.faults
        profile = self.profile = profile or profile_of(seed)
        self.secret = SECRET if profile.secret else None
        self.introduced = introduced(seed)
        self.parallel = parallel(seed)
        self.heads = 1 if self.parallel == (1, 1) else HEADS
        world = self.world = World(seed, keep=keep)
        draw = world.random
        self.network = Network(self)
        self.timing = profile.timing
        self.settings = settings_of(
            profile.mode or draw.choice(("push", "push", "pull")),
            stream=draw.choice((True,) * 5 + (False,)),
            pull_lease=profile.pull_lease or draw.choice((8.0, 8.0, 2.5)),
            revoke=profile.revoke,
            eager=self.introduced,
            slice_tokens=2 * BLOCK_SIZE if mirrored else None,
        )
        self.poll = draw.choice((0.0003, 0.0003, 0.02))
        self.stack = draw.random() < 0.5 if profile.stack is None else profile.stack  # noqa: PLR2004
        self.fabric = Fabric(self, drained=DRAINED * self.settings.drain_bound)
        self.slots: list[Slot] = []
        self._all: list[Process] = []  # the dead too: what they posted reads their memory
        for count, prefills in ((draw.randint(*profile.sources), True), (draw.randint(1, 3), False)):
            for i in range(count):
                self._build(f"{'p' if prefills else 'd'}{i}", prefills=prefills)
        self.prefill_slots = [s for s in self.slots if s.prefills]
        self.decode_slots = [s for s in self.slots if not s.prefills]
        self._wanted = handoffs
        self.legs = Legs(self)
        self.trouble = Trouble(self)

    def run(self) -> Result:
        """Run to the end, and check."""
        logger = logging.getLogger("kvxfer")
        handler, level, propagate = _Defects(self), logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            self._run()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        self.result.digest, self.result.events = self.world.digest, self.world.events
        self.result.trace = self.world.trace
        return self.result

    def _run(self) -> None:
        world = self.world
        hurried = self.fabric.faults.delay[1] < 1.0 and self.trouble.storm == 1.0
        at, between = 0.5, self.profile.between or (BETWEEN if hurried else BETWEEN_SLOW)
        for _ in range(self._wanted):
            at += world.random.expovariate(1 / between)
            world.at(at, self.legs.arrive)
        self.trouble.begin(TROUBLED * at)
        world.run_until(TROUBLED * at)
        self.trouble.end()
        world.run_until(at)
        end = at + PATIENCE
        while world.now < end and not self._quiet():
            world.run_until(world.now + 1.0)
        # Sessions with the dead must end as well.
        world.run_until(world.now + self.timing.timeout + self.connect_timeout + 2.0)
        check(self)

    # --- engines ----------------------------------------------------------------------------------------------------

    def _build(self, host: str, *, prefills: bool) -> None:
        draw = self.world.random
        num_blocks = LONGEST // BLOCK_SIZE + draw.choice((draw.randint(4, 10), draw.randint(4, 32)))
        num_blocks += 0 if prefills else self.profile.more_blocks
        process = Process(self, host, f"{host}-engine", PORT, num_blocks)
        engine = PrefillEngine(self, process, num_blocks) if prefills else DecodeEngine(self, process, num_blocks)
        self.slots.append(Slot(host, prefills, f"{host}-engine", num_blocks, process, engine))
        self._settle_in(self.slots[-1])

    def _settle_in(self, slot: Slot) -> None:
        self._all.extend(slot.process.ranks)
        if isinstance(slot.engine, DecodeEngine):
            slot.engine.policy = self.world.random.choice(("recompute", "recompute", "fail"))
            self._introduce(slot.process)

    def _introduce(self, decode: Process) -> None:
        """Let all processes of a decode engine stay connected with every prefill engine."""
        for slot in self.slots if self.introduced else ():
            if slot.prefills:
                for channel in [channel for rank in decode.ranks for channel in rank.channels]:
                    channel.keep(cmd.EngineAddress(slot.host, PORT, ""))

    def kill(self, slot: Slot) -> None:
        """Let a process die."""
        self.world.note(slot.host, "", "dies")
        for rank in slot.process.ranks:
            rank.die()

    def restart(self, slot: Slot, *, renamed: bool) -> None:
        """Start another life at the same address, after the last one's death."""
        self.struck("restart_renamed" if renamed else "restart", concern.of_partners(self, slot.host))
        if renamed:
            slot.engine_id += "'"
        self._start(slot)

    def usurp(self, slot: Slot, seconds: float) -> None:
        """Start another life at the address of one that goes on for a while."""
        old = slot.process
        self._start(slot)
        self.world.after(seconds, self._end, old)

    def _end(self, process: Process) -> None:
        if process.alive:
            self.world.note(process.host, "", f"{process.me.agent}, whose place was taken, dies")
            for rank in process.ranks:
                rank.die()

    def _start(self, slot: Slot) -> None:
        self.world.note(slot.host, "", f"starts anew as {slot.engine_id}")
        process = slot.process = Process(self, slot.host, slot.engine_id, PORT, slot.num_blocks)
        kind = PrefillEngine if slot.prefills else DecodeEngine
        slot.engine = kind(self, process, slot.num_blocks)
        slot.engine.late = self.trouble.late_device
        self._settle_in(slot)

    def slot(self, host: str) -> Slot:
        """Return a host's."""
        return next(s for s in self.slots if s.host == host)

    def ranks_at(self, host: str) -> int:
        """Return how many tensor-parallel ranks an engine has."""
        return self.parallel[host.startswith("d")]

    def drift_at(self, host: str) -> float | None:
        """Return by how much a host's clock is wrong; None for a little."""
        drift = self.profile.drift
        return drift if drift is None or host.startswith("d") else -drift

    def sinks_of(self, handoff: HandoffId) -> set[str]:
        """Return the hosts that decode legs of a handoff have been sent to."""
        return self.legs.sinks_of(handoff)

    def living(self, *, prefills: bool | None = None) -> list[Slot]:
        """Return where engines live."""
        return [s for s in self.slots if s.process.alive and prefills in (None, s.prefills)]

    # --- what is found out ------------------------------------------------------------------------------------------

    def outcome(self, engine: DecodeEngine, one: Request, reason: str | None) -> None:
        """A decode request was reported."""
        if reason is not None:
            self.legs.retry(self.slot(engine.name), one.handoff)
        self.result.moved += reason is None
        self.result.outcomes[kind_of(reason or "moved")] += 1
        if reason is None and one.misled:
            self.violate("wrong_bytes", one.handoff.id.transfer, f"{one.id} has a prompt of its own, and was moved")
        if reason is not None and self.trouble.calm and "had no blocks" not in reason:
            self.violate(
                "needless", one.handoff.id.transfer, f"nothing went wrong, and yet {one.id} got nothing: {reason}"
            )

    def process_of(self, rank: RankId) -> Process | None:
        """Return the process, if it lives, that a worker rank is."""
        return next((one for one in reversed(self._all) if one.alive and one.me == rank), None)

    def anybody(self, rank: RankId) -> Process:
        """Return the process, whether or not it lives, that a worker rank is, or was."""
        return next(one for one in reversed(self._all) if one.me == rank)

    def struck(self, fault: str, states: Iterable[str] = ()) -> None:
        """Count a fault, and the states of the handoffs that it concerns."""
        self.faults[fault] += 1
        for state in set(states):
            self.result.struck[fault][state] += 1

    def violate(self, check: str, about: str, what: str) -> None:
        """Note what must not be."""
        self.world.note("!!", about, f"{check}: {what}")
        self.result.violations.append(Violation(check, about, self.world.now, what))

    def _quiet(self) -> bool:
        return not self.legs.to_come and not any(
            s.engine.requests
            or any(r.asleep or r.results or len(r.mover.source) or len(r.mover.sink) for r in s.process.ranks)
            for s in self.living()
        )
