"""A simulated decode engine: it loads prompts, reads every position of them, and generates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.chaos.engine import Engine, Request
from kvxfer.chaos.process import BLOCK_SIZE
from kvxfer.chaos.reuse import Holding
from kvxfer.chaos.turns import SPAN
from kvxfer.layout.tables import packed
from kvxfer.protocol.actions import SinkFinished
from kvxfer.transport import commands as cmd

if TYPE_CHECKING:
    from kvxfer.chaos.process import Process
    from kvxfer.chaos.simulation import Simulation


class DecodeEngine(Engine):
    """Loads prompts from prefill engines, computes them itself when that fails or when ``policy`` is fail drops them."""

    policy = "recompute"

    def __init__(self, sim: Simulation, process: Process, num_blocks: int) -> None:
        super().__init__(sim, process, num_blocks)
        self.holding = Holding(self) if sim.conversing else None
        process.scheduler.reuse = self.holding

    def add(self, one: Request) -> None:
        """Admit a request, as ``on_new_request`` does."""
        self.requests[one.id] = one
        self.waiting.append(one)
        if self.holding is not None:
            self.holding.began(one)
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
        if self.waiting and self.holding is not None:
            self.holding.let_go()
        while self.waiting and self.blocks_missing(self.waiting[0], self.waiting[0].tokens) <= len(self.pool.free):
            self._begin_one(self.waiting.popleft(), step)

    def _begin_one(self, one: Request, step: cmd.Step) -> None:
        world, cached = self.sim.world, 0
        if self.holding is not None:
            one.blocks += self.holding.cached(one)
            cached = len(one.blocks) * BLOCK_SIZE
        one.blocks += self.pool.take(self.blocks_missing(one, one.tokens))
        if self.holding is not None:
            self._begin_cached(one, cached, step)
            return
        if one.address is not None and one.tokens > 2 * BLOCK_SIZE and world.chance(0.15):
            cached = BLOCK_SIZE * world.random.randrange(1, one.tokens // BLOCK_SIZE)
        if one.address is None or one.tokens == 1 or world.chance(0.02):
            if one.address is not None:
                self._release(one, "decode has the prompt in its prefix cache, or but a token to compute")
            self._local(one, 0)
            return
        self.write(one, 0, cached)  # as if the prefix cache had had it
        self._open(one, cached, step)

    def _begin_cached(self, one: Request, cached: int, step: cmd.Step) -> None:
        """Begin with what the prefix cache has."""
        if one.address is None or one.tokens == 1 or (cached and one.tokens - cached <= BLOCK_SIZE):
            if one.address is not None:
                self._release(one, "decode computes what it lacks itself")
            self._local(one, cached, check=cached)
        else:
            self._open(one, cached, step)

    def _open(self, one: Request, cached: int, step: cmd.Step) -> None:
        """Register what is behind the cached positions."""
        world = self.sim.world
        assert one.address is not None
        end = one.tokens - 1  # the last one is computed here
        one.state, one.load = "loading", (cached, end)
        one.owed, one.failed = set(range(len(self.process.ranks))), None
        self.process.scheduler.announcer.settle(one.handoff.id, one.id)
        blocks = one.blocks[cached // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        for rank in self.process.ranks:
            rank.lend(one.id, one.handoff.id.transfer, blocks)
        world.note(self.name, one.handoff.id.transfer, f"opens {one.id} [{cached}, {end}) in blocks {blocks}")
        now = self.process.clock()
        step.opened.append(
            cmd.SinkOpen(
                one.handoff.id,
                one.id,
                one.address,
                cached,
                end,
                packed(blocks),
                one.heard,
                now,
                b"".join(one.prompt[1:2]),
            )
        )

    def _release(self, one: Request, reason: str) -> None:
        assert one.address is not None
        self.process.scheduler.announcer.release(one.handoff.id, one.id, one.address, reason)
        one.address = None

    def answer(self, step: cmd.Step) -> None:
        """Answer what was asked of conversations."""
        if self.holding is not None:
            scheduled = [one.id for one in self.running if self._forward]
            self.holding.serve(scheduled, step)

    def pending(self) -> bool:
        """Tell whether somebody has asked."""
        return self.holding is not None and self.holding.pending()

    def gone(self, one: Request) -> None:
        """Free what a request holds; what it has computed may be found again."""
        if self.holding is not None:
            self.holding.finished(one)
        super().gone(one)

    def evict(self) -> None:
        """Compute a prompt of somebody's, into free blocks, and forget it: launched by itself, before any next step."""
        if self.holding is not None:
            self.holding.let_go()
        draw, most = self.sim.world.random, len(self.pool.free)
        blocks = self.pool.take(draw.choice((most, most, draw.randint(0, most))))
        other = Request("other", None, 0.0)  # type: ignore[arg-type]  # of nobody
        mine, self._forward = self._forward, {}
        for at in range(0, len(blocks), SPAN // BLOCK_SIZE):
            other.blocks = blocks[at : at + SPAN // BLOCK_SIZE]
            self.write(other, 0, len(other.blocks) * BLOCK_SIZE)
        for rank in self.process.ranks:
            if work := self._forward.get(rank.me.rank):
                rank.device.launch(draw.uniform(*self.sim.profile.step), work)
        self._forward = mine
        self.pool.give(blocks)
        self.stir()

    def _local(self, one: Request, start: int, check: int = 0) -> None:
        """Compute the prompt here, into the blocks that the request has."""
        self.write(one, start, one.tokens, check=check)
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
            if self.holding is not None and one.said is one.handoff.prompt:
                self.sim.legs.answered.append((one.handoff, self.process.host))

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
            one.state, one.computed = "running", one.load[1]
            self.running.append(one)
        else:
            self._local(one, one.load[0])
