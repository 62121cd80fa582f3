"""A simulated prefill engine: chunks, preemptions, and blocks that are held until decode has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.chaos.engine import Engine, Request
from kvxfer.chaos.process import BLOCK_SIZE
from kvxfer.chaos.reuse import Taking
from kvxfer.connector.pins import Pins
from kvxfer.layout.tables import packed
from kvxfer.protocol.actions import SinkFinished
from kvxfer.transport import commands as cmd

if TYPE_CHECKING:
    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation

CACHED = 0.2
"""Probability of a prompt of which prefill has something itself."""
LOST_LAST = "prefill was preempted while its last token was in flight"


class PrefillEngine(Engine):
    """Computes prompts in chunks; preempts the youngest when blocks run out, or when ``preempt_now`` says so.

    In push its blocks are pinned by the connector's own ``Pins``, and what is not pinned is withheld, as its scheduler half does.
    """

    def __init__(self, sim: Simulation, process: Process, num_blocks: int) -> None:
        super().__init__(sim, process, num_blocks)
        self._scheduled: dict[str, int] = {}
        self.pins = Pins(self.pool, int(sim.profile.pinned * num_blocks), ranks=len(process.ranks))
        self.taking = Taking(self) if sim.conversing else None
        process.scheduler.reuse = self.taking

    def add(self, one: Request) -> None:
        """Admit a request, as ``on_new_request`` does."""
        self.requests[one.id] = one
        self.waiting.append(one)
        if self.taking is not None:
            if one.tokens > 2 * BLOCK_SIZE and self.sim.world.chance(CACHED):
                one.cached = BLOCK_SIZE * self.sim.world.random.randrange(1, one.tokens // BLOCK_SIZE)
            self.taking.began(one)
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
        now, later = self.sim.world.now, set[str]()
        while (
            budget
            and not preempted
            and (ready := [one for one in self.waiting if one.not_before <= now and one.id not in later])
        ):
            # Who has loaded holds blocks that were promised the rest of their prompt's.
            one = next((one for one in ready if one.blocks), ready[0])
            if one.unfinished:
                self.finish(one, LOST_LAST)
                continue
            if self.taking is not None and not one.blocks:
                wanted = self.taking.wanted(one)
                if wanted is None:
                    later.add(one.id)
                    continue
                if wanted and not self._load(one, wanted, step):
                    break
                if wanted:
                    continue
                if self.blocks_missing(one, one.cached) <= len(self.pool.free):
                    one.blocks += self.pool.take(self.blocks_missing(one, one.cached))
                    self.write(one, 0, one.cached)  # as if the prefix cache had had it
                    one.computed = one.cached
            count = min(budget, one.tokens - one.computed)
            if self.blocks_missing(one, one.tokens if one.crowded else one.computed + count) > len(self.pool.free):
                if one.blocks and one.state == "waiting" and not one.load:
                    self.pool.give(one.blocks)
                    one.computed = 0
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
        if not one.has_blocks:
            new = list(one.blocks)
        one.has_blocks = True
        self._scheduled[one.id] = count
        if one.withheld is None and (self.sim.settings.mode == "pull" or self.pins.pin(one.id, new)):
            step.progress.append(cmd.SourceProgress(one.id, packed(new), one.computed))
        else:
            one.withheld = [*(one.withheld or ()), *new]

    def _load(self, one: Request, positions: int, step: cmd.Step) -> bool:
        """Have positions loaded behind those that are cached, if the whole prompt will find its place."""
        assert self.taking is not None
        if self.blocks_missing(one, one.tokens) + self.taking.reserved() > len(self.pool.free):
            return False
        end = one.cached + positions
        one.blocks += self.pool.take(self.blocks_missing(one, end))
        self.write(one, 0, one.cached)
        opened = self.taking.opened(one, positions)
        self.waiting.remove(one)
        one.state, one.load = "loading", (one.cached, end)
        one.owed, one.failed = set(range(len(self.process.ranks))), None
        blocks = one.blocks[one.cached // BLOCK_SIZE :]
        for rank in self.process.ranks:
            rank.lend(one.id, opened.handoff.transfer, blocks)
        what = f"opens {opened.handoff} for {one.id} [{one.cached}, {end}) in blocks {blocks}"
        self.sim.world.note(self.name, opened.handoff.transfer, what)
        step.opened.append(opened)
        return True

    def answer(self, step: cmd.Step) -> None:
        """Note what is computed."""
        del step
        scheduled, self._scheduled = self._scheduled, {}
        if self.taking is not None:
            self.taking.step(scheduled, sum(scheduled.values()))

    def preempt(self, one: Request, step: cmd.Step | None = None) -> None:
        """Give a running request's blocks away; it is computed again from the start."""
        self.sim.faults["preemption"] += 1
        self.sim.world.note(self.name, one.handoff.id.transfer, f"preempts {one.id}, blocks {one.blocks}")
        self.running.remove(one)
        self.waiting.appendleft(one)
        self.pool.give(one.blocks)
        one.state, one.computed, one.withheld, one.load = "waiting", 0, None, None
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
        loading = self.taking is not None and self.taking.finished(one)
        if loading:
            one.aborted = True
            self._step.cancelled.append(cmd.SinkCancel(one.id, f"prefill gave up: {aborted}"))
        held = bool(one.blocks) and not loading
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
        elif not loading:
            self.gone(one)

    def abort(self, one: Request) -> None:
        """The client went away."""
        if one.state in ("waiting", "running") or (one.state == "loading" and not one.aborted):
            self.finish(one, "prefill ended with FINISHED_ABORTED")
            self.stir()

    def reported(self, one: Request, result: object) -> None:
        """Free the blocks; or go on with what was read, or without it."""
        if isinstance(result, SinkFinished) != (one.state == "loading"):
            self.sim.violate("double_reports", one.handoff.id.transfer, f"{result} at a request that is {one.state}")
        if not isinstance(result, SinkFinished) or self.taking is None or one.load is None:
            self.gone(one)
            return
        self.taking.loaded(one, result.reason)
        self.sim.taken_back(one, result.reason)
        if one.aborted:
            self.gone(one)
            return
        one.computed = one.load[result.reason is None]
        one.state = "waiting"
        self.waiting.appendleft(one)
        self.stir()
