"""One seed: engines, handoffs, trouble; then quiet, and the checks.

What is checked: ``wrong_bytes`` (decode reads what is not its own, or something lands in a block that is not lent to its
handoff), ``double_reports`` (a report that was not owed), ``leaked_blocks`` (a pool that is not full after everything has
ended), ``stuck`` (a request that is still open then), ``needless`` (a handoff that
fails in a world without trouble), ``leftovers`` (something inside that remembers what has ended) and
``defects`` (an exception that the product caught and logged as its own).
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.chaos.engine import DecodeEngine, PrefillEngine, Request
from kvxfer.chaos.fabric import Fabric
from kvxfer.chaos.network import Network
from kvxfer.chaos.process import BLOCK_SIZE, Process, settings_of
from kvxfer.chaos.trouble import Trouble
from kvxfer.chaos.world import World
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.peers import Timing
from kvxfer.transport.commands import EngineAddress

if TYPE_CHECKING:
    from kvxfer.chaos.world import Entry
    from kvxfer.protocol.auth import Secret

CHECKS = ("wrong_bytes", "leaked_blocks", "stuck", "double_reports", "needless", "leftovers", "defects")

BETWEEN = 0.15
"""Mean seconds between two handoffs, where transfers are quick and storms rare."""
BETWEEN_SLOW = 0.35
PATIENCE = 400.0
"""Seconds after the last trouble in which everything must have ended. Small pools that wait for each other go on by one hold
limit at a time."""
HALF = 0.5
LONGEST = 36
"""Tokens of the longest prompt."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What must not be. ``about``: the handoff's transfer id, or empty."""

    check: str
    about: str
    at: float
    what: str


@dataclass(frozen=True, slots=True)
class Handoff:
    """What both legs are about. Position p of its prompt is the tag ``tag + p``."""

    id: HandoffId
    tag: int
    tokens: int


@dataclass(slots=True)
class Result:
    """What became of one seed."""

    seed: int
    handoffs: int = 0
    moved: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
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
    """One seed's world. ``keep``: keep the trace's text. ``secret``: what all engines share."""

    connect_timeout = 3.0

    def __init__(self, seed: int, handoffs: int = 100, *, keep: bool = False, secret: Secret | None = None) -> None:
        self.secret = secret
        self.result = Result(seed)
        self.faults = self.result.faults
        world = self.world = World(seed, keep=keep)
        draw = world.random
        self.network = Network(world, self.faults)
        self.timing = Timing()
        self.settings = settings_of(
            draw.choice(("push", "push", "pull")),
            stream=draw.choice((True,) * 5 + (False,)),
            pull_lease=draw.choice((8.0, 8.0, 2.5)),
        )
        self.poll = draw.choice((0.0003, 0.0003, 0.02))
        self.fabric = Fabric(world, self.faults, late=0.9 * self.settings.drain_bound)
        self.slots: list[Slot] = []
        self._all: list[Process] = []  # the dead too: what they posted reads their memory
        for count, prefills in ((draw.randint(1, 3), True), (draw.randint(1, 3), False)):
            for i in range(count):
                self._build(f"{'p' if prefills else 'd'}{i}", prefills=prefills)
        self._wanted = handoffs
        self._handoffs: list[Handoff] = []
        self._numbers = 0
        self._legs_to_come = 0
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
        at, between = 0.5, BETWEEN if hurried else BETWEEN_SLOW
        for _ in range(self._wanted):
            at += world.random.expovariate(1 / between)
            world.at(at, self._arrive)
        self.trouble.begin(at)
        world.run_until(at)
        self.trouble.end()
        end = at + PATIENCE
        while world.now < end and not self._quiet():
            world.run_until(world.now + 1.0)
        # Sessions with the dead must end as well.
        world.run_until(world.now + self.timing.timeout + self.connect_timeout + 2.0)
        self._check()

    # --- engines ----------------------------------------------------------------------------------------------------

    def _build(self, host: str, *, prefills: bool) -> None:
        draw = self.world.random
        num_blocks = LONGEST // BLOCK_SIZE + (draw.randint(4, 10) if draw.random() < HALF else draw.randint(4, 32))
        process = Process(self, host, f"{host}-engine", 5600, num_blocks)
        engine = PrefillEngine(self, process, num_blocks) if prefills else DecodeEngine(self, process, num_blocks)
        self.slots.append(Slot(host, prefills, f"{host}-engine", num_blocks, process, engine))
        self._settle_in(self.slots[-1])

    def _settle_in(self, slot: Slot) -> None:
        self._all.append(slot.process)
        if isinstance(slot.engine, DecodeEngine):
            slot.engine.policy = self.world.random.choice(("recompute", "recompute", "fail"))

    def kill(self, slot: Slot) -> None:
        """Let a process die."""
        self.world.note(slot.host, "", "dies")
        slot.process.die()

    def restart(self, slot: Slot, *, renamed: bool) -> None:
        """Start another life at the same address."""
        if slot.process.alive:
            return
        if renamed:
            slot.engine_id += "'"
        self.world.note(slot.host, "", f"starts anew as {slot.engine_id}")
        process = slot.process = Process(self, slot.host, slot.engine_id, 5600, slot.num_blocks)
        kind = PrefillEngine if slot.prefills else DecodeEngine
        slot.engine = kind(self, process, slot.num_blocks)
        self._settle_in(slot)

    def living(self, *, prefills: bool | None = None) -> list[Slot]:
        """Return where engines live."""
        return [s for s in self.slots if s.process.alive and prefills in (None, s.prefills)]

    # --- requests ---------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        draw, trouble = self.world.random, self.trouble
        self.result.handoffs += 1
        if self._handoffs and trouble.strikes("repeated_id"):
            handoff = draw.choice(self._handoffs[-8:])
        else:
            number = len(self._handoffs) + 1
            handoff = Handoff(
                HandoffId(f"h{number}", draw.choice((0, 0, 1))), number << 10, draw.randint(1, LONGEST - 6)
            )
            self._handoffs.append(handoff)
        source = draw.choice([s for s in self.slots if s.prefills])
        sink = draw.choice([s for s in self.slots if not s.prefills])
        self._send_legs(handoff, source, sink)

    def _send_legs(self, handoff: Handoff, source: Slot, sink: Slot) -> None:
        world, trouble = self.world, self.trouble
        if not trouble.strikes("no_prefill_leg"):
            for _ in range(2 if trouble.strikes("double_prefill_leg") else 1):
                self._legs_to_come += 1
                world.after(trouble.leg_delay(), self._prefill_leg, source, handoff)
        if not trouble.strikes("no_decode_leg"):
            address = EngineAddress(source.host, 5600, source.engine_id)
            if trouble.strikes("wrong_engine"):
                address = EngineAddress(source.host, 5600, "somebody")
            elif trouble.strikes("wrong_port"):
                address = EngineAddress(source.host, 7, source.engine_id)
            for _ in range(2 if trouble.strikes("double_decode_leg") else 1):
                self._legs_to_come += 1
                world.after(trouble.leg_delay(), self._decode_leg, sink, handoff, address)

    def _retry(self, engine: DecodeEngine, request: Request) -> None:
        """A client tries again, with the same id, what has failed or what it has just given up."""
        if not self.trouble.strikes("retry_same_id"):
            return
        (sink,) = [s for s in self.slots if s.host == engine.name]
        self.result.handoffs += 1
        self._send_legs(request.handoff, self.world.random.choice([s for s in self.slots if s.prefills]), sink)

    def _prefill_leg(self, slot: Slot, handoff: Handoff) -> None:
        self._legs_to_come -= 1
        if slot.process.alive:
            request = Request(self._next("p"), handoff, slot.process.clock(), tokens=handoff.tokens)
            self.world.note(slot.host, handoff.id.transfer, f"{request.id}: prefill of {handoff.tokens} tokens")
            slot.process.awake(lambda: self._admit(slot, request))

    def _decode_leg(self, slot: Slot, handoff: Handoff, address: EngineAddress) -> None:
        self._legs_to_come -= 1
        if slot.process.alive:
            tokens = handoff.tokens
            if self.trouble.strikes("longer_prompt"):
                tokens += self.world.random.randint(1, 5)
            elif self.trouble.strikes("shorter_prompt"):
                tokens = max(1, tokens - self.world.random.randint(1, 5))
            request = Request(self._next("d"), handoff, slot.process.clock(), address, tokens)
            request.grow = self.world.random.randint(1, 5)
            self.world.note(slot.host, handoff.id.transfer, f"{request.id}: decode of {tokens} tokens from {address}")
            slot.process.awake(lambda: self._admit(slot, request))

    def _admit(self, slot: Slot, request: Request) -> None:
        engine = slot.engine
        engine.add(request)
        if self.trouble.strikes("abort_prefill" if slot.prefills else "abort_decode"):
            delay = self.world.random.choice((0.01, 0.1, 1.0, 6.0)) * self.world.random.random()
            self.world.after(delay, engine.process.awake, lambda: self._abort(engine, request))

    def _abort(self, engine: PrefillEngine | DecodeEngine, request: Request) -> None:
        if request.id in engine.requests:
            self.world.note(engine.name, request.handoff.id.transfer, f"aborts {request.id}, which is {request.state}")
            engine.abort(request)
            if isinstance(engine, DecodeEngine):
                self._retry(engine, request)

    def _next(self, kind: str) -> str:
        self._numbers += 1
        return f"{kind}{self._numbers}"

    # --- what is found out ------------------------------------------------------------------------------------------

    def outcome(self, engine: DecodeEngine, one: Request, reason: str | None) -> None:
        """A decode request was reported."""
        if reason is not None:
            self._retry(engine, one)
        self.result.moved += reason is None
        self.result.outcomes[(reason or "moved")[:40]] += 1
        if reason is not None and self.trouble.calm and "had no blocks" not in reason:
            self.violate(
                "needless", one.handoff.id.transfer, f"nothing went wrong, and yet {one.id} got nothing: {reason}"
            )

    def violate(self, check: str, about: str, what: str) -> None:
        """Note what must not be."""
        self.world.note("!!", about, f"{check}: {what}")
        self.result.violations.append(Violation(check, about, self.world.now, what))

    def _quiet(self) -> bool:
        return not self._legs_to_come and not any(
            s.process.asleep
            or s.engine.requests
            or s.process.results
            or len(s.process.mover.source)
            or len(s.process.mover.sink)
            for s in self.living()
        )

    def _check(self) -> None:
        alive = {s.process.me.incarnation for s in self.living()}
        for slot in self.living():
            process, engine = slot.process, slot.engine
            for one in engine.requests.values():
                mover = process.mover
                states = f"source {mover.source.state(one.handoff.id)}, sink {mover.sink.state(one.handoff.id)}"
                self.violate("stuck", one.handoff.id.transfer, f"{slot.host}: {one.id} is {one.state}; {states}")
            if not engine.requests and len(engine.pool.free) != slot.num_blocks:
                what = f"{slot.host}: {len(engine.pool.free)} of {slot.num_blocks} blocks are free"
                self.violate("leaked_blocks", "", what)
            if not engine.requests:
                for what in _leftovers(process, alive):
                    self.violate("leftovers", "", f"{slot.host}: {what}")


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
    for name in ("_cards", "_agents", "_answered"):
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
