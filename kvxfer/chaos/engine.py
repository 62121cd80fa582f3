"""Simulated engines: block pool, scheduler, steps and forwards, with the connector's order of hooks and its decisions.

A step is what vLLM's is to a connector: requests that ended since the last one, preemptions, new chunks; then ``StepBegin``
behind a fence for everything launched before, the forward, ``StepEnd`` behind a fence for its work, and last the reports that
the mover owed. Blocks are freed first in first out. The forward writes a tag at each position, when the device comes to it;
blocks that a preemption or an abort gave away have other owners by then. Decode's forward reads every position first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.chaos.process import BLOCK_SIZE, packed
from kvxfer.protocol.actions import SinkFinished
from kvxfer.transport import commands as cmd

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Handoff, Simulation

BUDGET = 12
"""Tokens in a step."""
LOST_LAST = "prefill was preempted while its last token was in flight"
AHEAD = 2
"""Steps that may be launched while the device still works on earlier ones."""


@dataclass(eq=False, slots=True)
class Request:
    """A request of an engine. ``state``: waiting, running, loading (decode: blocks are with kvxfer), held (prefill), gone."""

    id: str
    handoff: Handoff
    heard: float
    address: cmd.EngineAddress | None = None  # of decode's source; None: nothing is handed over any more
    tokens: int = 0
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    has_blocks: bool = False  # the mover knows of blocks
    unfinished: int = 0  # prefill: all is computed, and so many steps go by before the engine notices
    crowded: bool = False  # prefill: preempted for want of blocks; comes back when its whole prompt fits
    grow: int = 0  # decode: tokens still to generate
    load: tuple[int, int] | None = None
    aborted: bool = False
    owed: bool = False


class Pool:
    """Free blocks, first in first out."""

    def __init__(self, num_blocks: int) -> None:
        self.size = num_blocks
        self.free = deque(range(num_blocks))

    def take(self, count: int) -> list[int]:
        """Take so many."""
        return [self.free.popleft() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        """Take them back, the last one first."""
        self.free.extend(reversed(blocks))
        blocks.clear()
        assert len(self.free) <= self.size, "a block was freed twice"


class Engine:
    """What both kinds share: steps, and the reports that are owed."""

    def __init__(self, sim: Simulation, process: Process, num_blocks: int) -> None:
        self.sim = sim
        self.process = process
        self.pool = Pool(num_blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.late = 0.0  # probability of a step that takes the device long
        process.on_results = self.stir
        self._step = cmd.Step()
        self._forward: list[Callable[[], None]] = []
        self._stepping = False

    @property
    def name(self) -> str:
        """Of the process."""
        return self.process.name

    def stir(self) -> None:
        """There is something to do: step, unless a step is under way."""
        if not self._stepping:
            self._stepping = True
            self.process.soon(0.01, self._begin)

    def _begin(self) -> None:
        if self.process.device.launched - self.process.device.completed >= AHEAD:
            self.process.soon(0.01, self._begin)
            return
        step, self._step = self._step, cmd.Step()
        self.schedule(step)
        if step:
            self.process.post(cmd.StepBegin(step, self.process.device.fence()))
        self.process.soon(0.002, lambda: self._end(computing=bool(step.progress)))

    def _end(self, *, computing: bool) -> None:
        device, world = self.process.device, self.sim.world
        busy = computing or bool(self._forward or self.process.results)
        if self._forward:
            work, self._forward = self._forward, []
            duration = world.random.uniform(0.001, 0.02)
            if world.chance(self.late):
                self.sim.faults["late_device"] += 1
                duration = world.random.uniform(0.1, 2.0)
            device.launch(duration, work)
        if computing:
            self.process.post(cmd.StepEnd(device.fence()))
        self.update()
        while self.process.results:
            self._take(self.process.results.popleft())
        self._stepping = False
        if busy or self._step:
            self.stir()
        elif self.waiting or self.running:
            # A real engine would spin until somebody gives blocks back.
            world.after(0.2, self.process.awake, self.stir)

    def _take(self, result: object) -> None:
        request_id = getattr(result, "request_id", "")
        one = self.requests.get(request_id)
        reason = getattr(result, "reason", None)
        about = one.handoff.id.transfer if one is not None else ""
        self.sim.world.note(self.name, about, f"{request_id}: {type(result).__name__} {reason or ''}")
        if one is None or not one.owed:
            self.sim.violate("double_reports", about, f"{self.name}: {result} was not owed")
            return
        one.owed = False
        self.reported(one, result)

    def write(self, one: Request, start: int, end: int, *, check: int = 0) -> None:
        """Put into this step's forward: read positions [0, check), write [start, end)."""
        blocks, tag, cells = list(one.blocks), one.handoff.tag, self.process.cells

        def act() -> None:
            for p in range(check):
                if cells[blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] != tag + p:
                    self.sim.violate(
                        "wrong_bytes",
                        one.handoff.id.transfer,
                        f"{self.name}: {one.id} reads at position {p}, block {blocks[p // BLOCK_SIZE]}, what is not its own",
                    )
                    break
            for p in range(start, end):
                cells[blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] = tag + p

        self._forward.append(act)

    def blocks_missing(self, one: Request, length: int) -> int:
        """How many blocks a request needs to hold so many positions."""
        return max(0, -(-length // BLOCK_SIZE) - len(one.blocks))

    def gone(self, one: Request) -> None:
        """Free what a request holds, and forget it."""
        self.pool.give(one.blocks)
        one.state = "gone"
        del self.requests[one.id]

    def withdraw(self, one: Request) -> None:
        """Take a request out of the scheduler's lists."""
        if one in self.running:
            self.running.remove(one)
        if one in self.waiting:
            self.waiting.remove(one)

    def schedule(self, step: cmd.Step) -> None:
        """Decide what a step does."""
        raise NotImplementedError

    def update(self) -> None:
        """Take the step's outputs."""

    def reported(self, one: Request, result: object) -> None:
        """A request's blocks are the engine's again."""
        raise NotImplementedError

    def abort(self, one: Request) -> None:
        """The client went away."""
        raise NotImplementedError


class PrefillEngine(Engine):
    """Computes prompts in chunks; preempts the youngest when blocks run out, or when ``preempt_now`` says so."""

    def add(self, one: Request) -> None:
        """Admit a request, as ``on_new_request`` does."""
        self.requests[one.id] = one
        self.waiting.append(one)
        self._step.started.append(cmd.SourceStart(one.handoff.id, one.id, one.tokens, one.heard))
        self.stir()

    def schedule(self, step: cmd.Step) -> None:
        """Chunks for running requests first, then for waiting ones, in order."""
        budget, preempted = BUDGET, False
        for one in list(self.running):
            if one not in self.running or one.unfinished or budget == 0:
                continue
            count = min(budget, one.tokens - one.computed)
            while one in self.running and self.blocks_missing(one, one.computed + count) > len(self.pool.free):
                self.running[-1].crowded = preempted = True
                self.preempt(self.running[-1], step)
            if one in self.running:
                budget -= count
                self._compute(one, count, step)
        while self.waiting and budget and not preempted:
            one = self.waiting[0]
            if one.unfinished:
                self.finish(one, LOST_LAST)
                continue
            count = min(budget, one.tokens)
            if self.blocks_missing(one, one.tokens if one.crowded else count) > len(self.pool.free):
                break
            self.waiting.popleft()
            self.running.append(one)
            one.state = "running"
            budget -= count
            self._compute(one, count, step)

    def _compute(self, one: Request, count: int, step: cmd.Step) -> None:
        new = self.pool.take(self.blocks_missing(one, one.computed + count))
        one.blocks += new
        self.write(one, one.computed, one.computed + count, check=one.computed)
        one.computed += count
        one.has_blocks = True
        step.progress.append(cmd.SourceProgress(one.id, tuple(new), one.computed))

    def preempt(self, one: Request, step: cmd.Step | None = None) -> None:
        """Give a running request's blocks away; it is computed again from the start."""
        self.sim.faults["preemption"] += 1
        self.sim.world.note(self.name, one.handoff.id.transfer, f"preempts {one.id}, blocks {one.blocks}")
        self.running.remove(one)
        self.waiting.appendleft(one)
        self.pool.give(one.blocks)
        one.state, one.computed = "waiting", 0
        if one.has_blocks:
            one.has_blocks = False
            (step or self._step).preempted.append(one.id)

    def update(self) -> None:
        """Finish what is computed whole; the engine may notice a step later."""
        for one in [r for r in self.running if r.computed == r.tokens]:
            if one.unfinished == 0 and self.sim.world.chance(0.2):
                one.unfinished = self.sim.world.random.randint(2, 5)
            if one.unfinished > 1:
                one.unfinished -= 1
                continue
            self.finish(one, None)
        for one in [r for r in self.waiting if r.unfinished]:
            self.finish(one, LOST_LAST)

    def finish(self, one: Request, aborted: str | None) -> None:
        """A request ends, as ``request_finished`` is told."""
        self.withdraw(one)
        held = bool(one.blocks)
        self._step.finished.append(cmd.SourceFinish(one.id, aborted, held))
        self.sim.world.note(
            self.name, one.handoff.id.transfer, f"{one.id} finishes, {aborted or 'whole'}, held: {held}"
        )
        if held:
            one.state, one.owed = "held", True
        else:
            self.gone(one)

    def abort(self, one: Request) -> None:
        """The client went away."""
        if one.state in ("waiting", "running"):
            self.finish(one, "prefill ended with FINISHED_ABORTED")
            self.stir()

    def reported(self, one: Request, result: object) -> None:
        """Free the blocks."""
        if isinstance(result, SinkFinished):
            self.sim.violate("double_reports", one.handoff.id.transfer, f"{result} at a source")
        self.gone(one)


class DecodeEngine(Engine):
    """Loads prompts from prefill engines, computes them itself when that fails or when ``policy`` is fail drops them."""

    policy = "recompute"

    def add(self, one: Request) -> None:
        """Admit a request, as ``on_new_request`` does."""
        self.requests[one.id] = one
        self.waiting.append(one)
        if one.address is not None:
            self.process.scheduler.announcer.expect(one.handoff.id, one.id, one.address)
        self.stir()

    def schedule(self, step: cmd.Step) -> None:
        """Grow what runs, then give blocks to what waits."""
        for one in list(self.running):
            if one not in self.running or one.computed >= one.tokens + one.grow:
                continue
            while one in self.running and self.blocks_missing(one, one.computed + 1) > len(self.pool.free):
                self._preempt(self.running[-1])
            if one in self.running:
                one.blocks += self.pool.take(self.blocks_missing(one, one.computed + 1))
                self.write(one, one.computed, one.computed + 1, check=one.computed)
                one.computed += 1
        while self.waiting and self.blocks_missing(self.waiting[0], self.waiting[0].tokens) <= len(self.pool.free):
            self._begin_one(self.waiting.popleft(), step)

    def _begin_one(self, one: Request, step: cmd.Step) -> None:
        one.blocks += self.pool.take(self.blocks_missing(one, one.tokens))
        world, cached = self.sim.world, 0
        if one.address is not None and one.tokens > 2 * BLOCK_SIZE and world.chance(0.15):
            cached = BLOCK_SIZE * world.random.randrange(1, one.tokens // BLOCK_SIZE)
        if one.address is None or world.chance(0.02):
            if one.address is not None:
                self._release(one, "decode has the prompt in its prefix cache")
            self._local(one, 0)
            return
        self.write(one, 0, cached)  # as if the prefix cache had had it
        one.state, one.owed, one.load = "loading", True, (cached, one.tokens)
        self.process.scheduler.announcer.settle(one.handoff.id, one.id)
        blocks = one.blocks[cached // BLOCK_SIZE :]
        self.process.lend(one.id, one.handoff.id.transfer, blocks)
        world.note(self.name, one.handoff.id.transfer, f"opens {one.id} [{cached}, {one.tokens}) in blocks {blocks}")
        now = self.process.clock()
        step.opened.append(
            cmd.SinkOpen(one.handoff.id, one.id, one.address, cached, one.tokens, packed(blocks), one.heard, now)
        )

    def _release(self, one: Request, reason: str) -> None:
        assert one.address is not None
        self.process.scheduler.announcer.release(one.handoff.id, one.id, one.address, reason)
        one.address = None

    def _local(self, one: Request, start: int) -> None:
        """Compute the prompt here, into the blocks that the request has."""
        self.write(one, start, one.tokens)
        one.state, one.computed = "running", one.tokens
        self.running.append(one)

    def _preempt(self, one: Request) -> None:
        self.running.remove(one)
        self.pool.give(one.blocks)
        one.state, one.computed = "waiting", 0
        self.waiting.appendleft(one)

    def update(self) -> None:
        """Finish what has generated all it should."""
        for one in [r for r in self.running if r.computed >= r.tokens + r.grow]:
            self.running.remove(one)
            self.gone(one)

    def abort(self, one: Request) -> None:
        """The client went away."""
        if one.aborted or one.state == "gone":
            return
        one.aborted = True
        self.withdraw(one)
        if one.state == "loading":
            self._step.cancelled.append(cmd.SinkCancel(one.id, "decode gave up: FINISHED_ABORTED"))
        else:
            if one.state == "waiting" and one.address is not None and one.load is None:
                self._release(one, "decode gave up: FINISHED_ABORTED")
            self.gone(one)
        self.stir()

    def reported(self, one: Request, result: object) -> None:
        """Go on with what was received; or recompute at once into the same blocks, or drop it."""
        if not isinstance(result, SinkFinished) or one.load is None:
            self.sim.violate("double_reports", one.handoff.id.transfer, f"{result} at a sink")
            return
        self.sim.outcome(self, one, result.reason)
        one.address = None
        if one.aborted or (result.reason is not None and self.policy == "fail"):
            self.gone(one)
        elif result.reason is None:
            one.state, one.computed = "running", one.tokens
            self.running.append(one)
        else:
            self._local(one, one.load[0])
