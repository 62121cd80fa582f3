"""A simulated prefill engine: chunks, preemptions, and blocks that are held until decode has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.chaos.engine import Engine, Request
from kvxfer.connector.pins import Pins
from kvxfer.layout.tables import packed
from kvxfer.protocol.actions import SinkFinished
from kvxfer.transport import commands as cmd

if TYPE_CHECKING:
    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation

LOST_LAST = "prefill was preempted while its last token was in flight"


class PrefillEngine(Engine):
    """Computes prompts in chunks; preempts the youngest when blocks run out, or when ``preempt_now`` says so.

    In push its blocks are pinned by the connector's own ``Pins``, and what is not pinned is withheld, as its scheduler half does.
    """

    def __init__(self, sim: Simulation, process: Process, num_blocks: int) -> None:
        super().__init__(sim, process, num_blocks)
        self.pins = Pins(self.pool, int(sim.profile.pinned * num_blocks), ranks=len(process.ranks))

    def add(self, one: Request) -> None:
        """Admit a request, as ``on_new_request`` does."""
        self.requests[one.id] = one
        self.waiting.append(one)
        self._step.started.append(cmd.SourceStart(one.handoff.id, one.id, one.tokens, one.heard, one.prompt))
        self.stir()

    def schedule(self, step: cmd.Step) -> None:
        """Chunks for running requests first, then for waiting ones, in order."""
        budget, preempted = self.sim.profile.budget, False
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
        now = self.sim.world.now
        while budget and not preempted and (ready := [one for one in self.waiting if one.not_before <= now]):
            one = ready[0]
            if one.unfinished:
                self.finish(one, LOST_LAST)
                continue
            count = min(budget, one.tokens)
            if self.blocks_missing(one, one.tokens if one.crowded else count) > len(self.pool.free):
                break
            self.waiting.remove(one)
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
        if one.withheld is None and (self.sim.settings.mode == "pull" or self.pins.pin(one.id, new)):
            step.progress.append(cmd.SourceProgress(one.id, packed(new), one.computed))
        else:
            one.withheld = [*(one.withheld or ()), *new]

    def preempt(self, one: Request, step: cmd.Step | None = None) -> None:
        """Give a running request's blocks away; it is computed again from the start."""
        self.sim.faults["preemption"] += 1
        self.sim.world.note(self.name, one.handoff.id.transfer, f"preempts {one.id}, blocks {one.blocks}")
        self.running.remove(one)
        self.waiting.appendleft(one)
        self.pool.give(one.blocks)
        one.state, one.computed, one.withheld = "waiting", 0, None
        if one.has_blocks:
            one.has_blocks = False
            step = step or self._step
            step.preempted.append(one.id)
            token = self.pins.orphan(one.id)
            if token:
                step.tokens[one.id] = token

    def quiet(self, token: int) -> None:
        """Free what was pinned; others may fit now."""
        self.pins.quiet({token: 1})
        self.stir()

    def update(self) -> None:
        """Finish what is computed whole; the engine may notice a step later."""
        for one in [r for r in self.running if r.computed == r.tokens]:
            if one.unfinished == 0 and self.sim.world.chance(self.sim.profile.unnoticed):
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
        withheld = None
        if held and one.withheld is not None and one.computed == one.tokens:
            withheld = cmd.SourceProgress(one.id, packed(one.withheld), one.tokens)
        self.pins.let_go(one.id)  # held, or nothing was ever told of them
        self._step.finished.append(cmd.SourceFinish(one.id, aborted, held, withheld=withheld))
        self.sim.world.note(
            self.name, one.handoff.id.transfer, f"{one.id} finishes, {aborted or 'whole'}, held: {held}"
        )
        if held:
            one.state, one.owed = "held", set(range(len(self.process.ranks)))
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
