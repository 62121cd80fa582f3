"""Simulated engines: block pool, scheduler, steps and forwards, with the connector's order of hooks and its decisions.

A step is what vLLM's is to a connector: requests that ended since the last one, preemptions, new chunks; then ``StepBegin``
behind a fence for everything launched before, the forward, ``StepEnd`` behind a fence for its work, and last the reports that
the mover owed. The forward writes a tag at each position, when the device comes to it; blocks that a preemption or an abort
gave away have other owners by then. Decode's forward reads every position first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvxfer.chaos import concern
from kvxfer.chaos.pool import Pool
from kvxfer.chaos.process import BLOCK_SIZE, HEAD
from kvxfer.chaos.turns import Prompt, fresh
from kvxfer.protocol.actions import SinkFinished, SourceQuiet
from kvxfer.transport import commands as cmd

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.legs import Handoff
    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation
    from kvxfer.protocol.actions import SourceFinished

LATE = (0.1, 2.0)
"""Seconds that a step takes the device when it is late."""
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
    tag: int = 0  # names its prompt
    prompt: tuple[bytes, ...] = ()  # its digest, that of all but its last token, and so on
    said: Prompt = field(default_factory=lambda: fresh(0))
    before: cmd.EngineAddress | None = None  # prefill: where the conversation's last turn was decoded
    cached: int = 0  # prefill: positions that its own prefix cache has
    misled: bool = False  # its prompt is not the handoff's: it must never be moved
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    has_blocks: bool = False  # the mover knows of blocks
    unfinished: int = 0  # prefill: all is computed, and so many steps go by before the engine notices
    withheld: list[int] | None = None  # prefill: blocks that could not be pinned; told when the request has ended
    not_before: float = 0.0  # prefill: preempted for others, who come first until then
    crowded: bool = False  # prefill: preempted for want of blocks; comes back when its whole prompt fits
    grow: int = 0  # decode: tokens still to generate
    load: tuple[int, int] | None = None
    aborted: bool = False
    owed: set[int] = field(default_factory=set)  # ranks that have not reported
    failed: str | None = None  # why its load failed on the first rank on which it did


class Engine:
    """What both kinds share: steps, and the reports that are owed."""

    def __init__(self, sim: Simulation, process: Process, num_blocks: int) -> None:
        self.sim = sim
        self.process = process
        self.pool = Pool(num_blocks, stack=sim.stack)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.late = 0.0  # probability of a step that takes the device long
        for rank in process.ranks:
            rank.on_results = self.stir
        self._step = cmd.Step()
        self._forward: dict[int, list[Callable[[], None]]] = {}  # by rank
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
        if any(rank.device.launched - rank.device.completed >= AHEAD for rank in self.process.ranks):
            self.process.soon(0.01, self._begin)
            return
        step, self._step = self._step, cmd.Step()
        self.schedule(step)
        self.answer(step)
        if step:
            for rank in self.process.ranks:
                rank.post(cmd.StepBegin(step, rank.device.fence()))
        self.process.soon(0.002, lambda: self._end(computing=step.computing))

    def _end(self, *, computing: bool) -> None:
        world, ranks = self.sim.world, self.process.ranks
        busy = computing or bool(self._forward or any(rank.results for rank in ranks))
        forward, self._forward = self._forward, {}
        for rank in ranks:
            work = forward.get(rank.me.rank)
            if work:
                duration = world.random.uniform(*self.sim.profile.step)
                if world.chance(self.late):
                    self.sim.struck("late_device", concern.own(rank))
                    duration = world.random.uniform(*LATE)
                rank.device.launch(duration, work)
            if computing:
                rank.post(cmd.StepEnd(rank.device.fence()))
        self.update()
        for rank in ranks:
            while rank.results:
                self._take(rank.results.popleft(), rank.me.rank)
        self._stepping = False
        if self.sim.conversing:
            self.sim.trouble.aims.look(ranks[0])
        if busy or self._step or self.pending():
            self.stir()
        elif self.waiting or self.running:
            # A real engine would spin until somebody gives blocks back.
            world.after(0.2, self.process.awake, self.stir)

    def quiet(self, token: int) -> None:
        """Nothing reads any more from the blocks that were kept under this token."""
        raise NotImplementedError

    def _take(self, result: SourceFinished | SinkFinished | SourceQuiet, rank: int) -> None:
        """Take what a rank reports. As in vLLM, a request is reported when all ranks have, and failed when one has failed."""
        if isinstance(result, SourceQuiet):
            self.quiet(result.token)
            return
        request_id, reason = result.request_id, getattr(result, "reason", None)
        one = self.requests.get(request_id)
        about = one.handoff.id.transfer if one is not None else ""
        self.sim.world.note(self.name, about, f"{request_id}: {type(result).__name__} {reason or ''}")
        if one is None or rank not in one.owed:
            self.sim.violate("double_reports", about, f"{self.name}: {result} was not owed")
            return
        one.owed.discard(rank)
        one.failed = one.failed or reason
        if not one.owed:
            self.reported(one, replace(result, reason=one.failed) if isinstance(result, SinkFinished) else result)

    def write(self, one: Request, start: int, end: int, *, check: int = 0) -> None:
        """Put into this step's forward: read positions [0, check), write [start, end)."""
        for rank in self.process.ranks:
            for number, head in enumerate(rank.heads):
                self._write(one, rank, (number, head), (start, end), check)

    def _write(self, one: Request, rank: Process, head: tuple[int, int], span: tuple[int, int], check: int) -> None:
        (start, end), tags, head_tag = span, one.said.tags, head[1] * HEAD
        stride, first = len(rank.heads) * BLOCK_SIZE, head[0] * BLOCK_SIZE
        blocks, cells, seen, unseen = list(one.blocks), rank.cells, rank.seen, rank.unseen

        def act() -> None:
            for p in range(check):
                cell = blocks[p // BLOCK_SIZE] * stride + first + p % BLOCK_SIZE
                if (seen(cell) if cell in unseen else cells[cell]) != tags[p] + head_tag:
                    self.sim.violate(
                        "wrong_bytes",
                        one.handoff.id.transfer,
                        f"{rank.name}: {one.id} reads at position {p}, block {blocks[p // BLOCK_SIZE]}, what is not its own",
                    )
                    break
            for p in range(start, end):
                cell = blocks[p // BLOCK_SIZE] * stride + first + p % BLOCK_SIZE
                cells[cell] = tags[p] + head_tag
                if cell in unseen:
                    del unseen[cell]

        self._forward.setdefault(rank.me.rank, []).append(act)

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

    def answer(self, step: cmd.Step) -> None:
        """End a step's scheduling with what is asked by others."""

    def pending(self) -> bool:
        """Tell whether a step is needed that no request asks for."""
        return False

    def update(self) -> None:
        """Take the step's outputs."""

    def reported(self, one: Request, result: object) -> None:
        """A request's blocks are the engine's again."""
        raise NotImplementedError

    def abort(self, one: Request) -> None:
        """The client went away."""
        raise NotImplementedError
