"""One life of one simulated engine: its scheduler's and its workers' control channels, real movers, memory, a clock, devices.

What threads do in the product, events do here: what the mover says reaches the control channel a moment later, what arrives
there is put into the mover's mailbox, and the mover takes a turn soon after something has changed. A process may be asleep
for seconds (everything waits, the device and the fabric go on) and may die at any moment.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvxfer.chaos.callers import Watched
from kvxfer.chaos.channel import Channel
from kvxfer.chaos.device import Device
from kvxfer.chaos.fabric import Agent
from kvxfer.chaos.mirror import Mirror
from kvxfer.chaos.world import Clock
from kvxfer.layout.card import RankCard
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.mirror import Reflection
from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.protocol.actions import SinkFinished
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Directory, RankAddress, Report
from kvxfer.transport import commands as cmd
from kvxfer.transport.mirroring import HostMirror
from kvxfer.transport.mover import Mover
from kvxfer.transport.mover_settings import TICK, MoverSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.simulation import Simulation
    from kvxfer.protocol.actions import SourceFinished, SourceQuiet
    from kvxfer.protocol.ids import HandoffId
    from kvxfer.protocol.messages import AnyMessage, Written
    from kvxfer.transport.dialer import Outcome

BLOCK_SIZE = 4
"""Tokens in a block."""
BLOCK_BYTES = 4 * BLOCK_SIZE
"""Of one head: a position holds one tag of 32 bits."""
HEAD = 1 << 28
"""Between the tags of two heads at one position."""
_SEEN = (0.0, 0)


class Process:
    """A worker process of an engine; the ``lead``, of rank 0, is also its scheduler process, and makes the others of its size.

    ``port`` is the control address of the scheduler; the ranks' own are the next ones.
    """

    def __init__(
        self, sim: Simulation, host: str, engine: str, port: int, num_blocks: int, *, lead: Process | None = None
    ) -> None:
        self.sim = sim
        self.host = host
        self.ranks: list[Process] = [self] if lead is None else lead.ranks
        """All processes of the engine, in the order of ranks."""
        shard = Shard(0 if lead is None else len(lead.ranks), sim.ranks_at(host))
        self.name = f"{host}.{shard.rank}" if shard.rank else host
        self.alive = True
        self.clock: Clock = Clock(sim.world, sim.drift_at(host)) if lead is None else lead.clock
        self.device = Device(self)
        self.awake_at = 0.0
        incarnation = f"{sim.world.random.getrandbits(32):08x}"
        self.me = RankId(engine, incarnation, shard.rank)
        self.heads = heads_of(sim.heads, shard)
        self.block_bytes = len(self.heads) * BLOCK_BYTES
        self.memory = np.zeros(num_blocks * len(self.heads) * BLOCK_SIZE, dtype=np.uint32)
        self.cells = memoryview(self.memory)  # type: ignore[arg-type]  # arrays are buffers
        base = self.base = self.memory.ctypes.data
        self.loans: list[str | None] = [None] * num_blocks
        """Which handoff may write into each block."""
        self.unseen: dict[int, tuple[float, int]] = {}
        """Cells that have been written from elsewhere: until when they look as they looked before."""
        self.hidden = self.unseen
        self._lent: dict[str, list[int]] = {}
        item = self.memory.itemsize
        tags = Plane(
            "tags", "uint32", item, (0,), (base,), self.heads, sim.heads, self.block_bytes, BLOCK_BYTES,
            ((BLOCK_SIZE, item),), ((1, item),),
        )  # fmt: skip
        cache = CacheMap((Group(BLOCK_SIZE, num_blocks, (tags,)),), ((base, self.memory.nbytes),), "DRAM")
        card = RankCard(engine, "tags", *shard, 0, 1, "twin", cache, b"")
        self.shore = self.cells
        mirror = None
        if sim.mirrored:
            memory = Mirror(self)
            mirror = HostMirror(cache, Reflection(cache.spans, memory.addresses), memory)
            card = mirror.of(card)
            self.base, self.hidden, self.shore = memory.base, {}, memoryview(memory.cells)  # type: ignore[arg-type]
        self.port = port + 1 + shard.rank
        self.worker = Channel(self, self.me, self.port, sim.timing, sim.connect_timeout)
        self.channels = [self.worker]
        if lead is None:
            self.scheduler = Channel(self, RankId(engine, incarnation, -1), port, sim.timing, sim.connect_timeout)
            self.channels.append(self.scheduler)
        self.mover = Mover(
            self.me,
            card,
            self._make_agent,
            sim.settings,
            self.worker.send,
            self.worker.connect,
            clock=self.clock,
            renewed=self._renew,
            mirror=mirror,
        )
        approaches = self.mover._approaches  # noqa: SLF001 - watched
        approaches._connector = Watched(self, self.mover.transfers)  # noqa: SLF001
        self.turned_at = sim.world.now
        self.mover.prepare()
        self.worker.switchboard.sessions.card = msgspec.structs.replace(
            card, agent=self.mover.transfers.keeper.metadata
        )
        self.results: deque[SourceFinished | SinkFinished | SourceQuiet] = deque()
        self.on_results: Callable[[], None] = lambda: None
        self._turn_at = float("inf")
        self._held_until = 0.0
        self.fence_seen = -1.0  # by its clock: when trouble last came before the end of a fence
        if lead is None:
            for _ in range(1, shard.size):
                self.ranks.append(Process(sim, host, engine, port, num_blocks, lead=self))
            where = tuple(RankAddress(r.me.rank, r.me.incarnation, r.me.rank, 0, "", r.port) for r in self.ranks)
            self.scheduler.switchboard.directory = Directory(engine, shard.size, 1, ready=True, ranks=where)

    def _make_agent(self) -> Agent:
        self.sim.fabric.shores[self.me.agent] = self
        return Agent(self.me.agent, self.sim.fabric)

    def _renew(self, metadata: bytes, *, anew: bool) -> None:
        """Tell peers of another agent; all sessions begin anew."""
        assert anew, "agents of the simulation meet anybody"
        card = self.worker.switchboard.sessions.card
        assert card is not None
        renewed = msgspec.structs.replace(card, agent=metadata)
        self.sim.faults["revocation"] += 1
        self.sim.world.note(self.name, "", "has revoked the keys of its memory")
        self.worker.call(lambda now: self.worker.switchboard.renew(renewed, now))

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """Whether it is paused."""
        return self.sim.world.now < self.awake_at

    def soon(self, within: float, act: Callable[[], None]) -> None:
        """Let a thread of this process do something within so many seconds."""
        world = self.sim.world
        world.after(within * world.random.random(), self.awake, act)

    def awake(self, act: Callable[[], None]) -> None:
        """Do something if this process lives; when it is asleep, after it has woken up."""
        if not self.alive:
            return
        if self.asleep:
            world = self.sim.world
            world.at(self.awake_at + 1e-6 + 0.005 * world.random.random(), self.awake, act)
            return
        act()

    def pause(self, seconds: float) -> None:
        """Fall asleep."""
        world = self.sim.world
        self.awake_at = max(self.awake_at, world.now + seconds)
        world.at(self.awake_at, self._woken)

    def _woken(self) -> None:
        if self.alive:
            for channel in self.channels:
                channel.drain()

    def hold_mover(self, seconds: float) -> None:
        """Let the mover's thread not run for a while."""
        self._held_until = self.sim.world.now + seconds

    def die(self) -> None:
        """Go without a word."""
        self.alive = False
        for channel in self.channels:
            channel.alive = False
            self.sim.network.gone(channel)
        self.sim.fabric.kill(self.me.agent)

    # --- the mover --------------------------------------------------------------------------------------------------

    def post(self, command: cmd.Command) -> None:
        """Put a command into the mover's mailbox; it takes a turn soon."""
        self.mover.post(command)
        self.wake()

    def wake(self, delay: float = 0.0) -> None:
        """Let the mover take a turn soon."""
        world = self.sim.world
        at = max(world.now + delay, self._held_until) + self.sim.poll * world.random.random()
        if at < self._turn_at:
            self._turn_at = at
            world.at(at, self._turn, at)

    def _turn(self, scheduled: float) -> None:
        if not self.alive or scheduled != self._turn_at:
            return
        mover, world = self.mover, self.sim.world
        free_at = max(self.awake_at, self._held_until)
        if world.now < free_at:
            self._turn_at = free_at + 1e-6 + 0.005 * world.random.random()
            world.at(self._turn_at, self._turn, self._turn_at)
            return
        self._turn_at = float("inf")
        self.turned_at = world.now
        mover.turn()
        self.sim.trouble.after_turn(self)
        if mover.results:
            while mover.results:
                result = mover.results.popleft()
                if isinstance(result, SinkFinished):
                    self._end_loan(result)
                self.results.append(result)
            self.on_results()
        if mover._mirroring.busy():  # noqa: SLF001
            self.wake(TICK / 25)
        if len(mover.source) or len(mover.sink) or len(mover._approaches):  # noqa: SLF001
            self.wake(TICK)

    # --- memory -----------------------------------------------------------------------------------------------------

    def lend(self, request_id: str, handoff: str, blocks: list[int]) -> None:
        """Let a handoff write into blocks."""
        self._lent[request_id] = blocks
        for block in blocks:
            self.loans[block] = handoff

    def _end_loan(self, result: SinkFinished) -> None:
        """From this moment the blocks are the engine's, whether or not it has looked."""
        for block in self._lent.pop(result.request_id, ()):
            self.loans[block] = None

    def landed(self, written: Written | None, address: int, length: int) -> None:
        """Check that these bytes may come: of a peer's write, or (None) of a read of ours."""
        handoff = "" if written is None else written.handoff.transfer
        for block in self._blocks(address, length):
            lent_to = self.loans[block] if 0 <= block < len(self.loans) else None
            if lent_to is None or (handoff and lent_to != handoff):
                whose = lent_to or "the engine"
                what = f"bytes of {handoff or 'a read'} land in block {block} of {self.name}, which is {whose}'s"
                self.sim.violate("wrong_bytes", handoff or lent_to or "", what)
                return
        if written is not None:
            one = self.mover.sink._handoffs.get(written.handoff)  # noqa: SLF001 - looked at, not touched
            if one is None or one.attempt != written.attempt:
                now = "over" if one is None else f"at attempt {one.attempt}"
                what = f"bytes of attempt {written.attempt} of {handoff} land in {self.name}, where it is {now}"
                self.sim.violate("wrong_bytes", handoff, what)

    def hide(self, address: int, length: int, until: float) -> None:
        """Let these bytes look as they do now until then, whatever is written there from elsewhere."""
        first = (address - self.base) // 4
        for cell in range(max(0, first), min(first + length // 4, len(self.memory))):
            self.hidden[cell] = until, self.landed_as(cell)

    def seen(self, cell: int) -> int:
        """Return what this process's device sees in a cell of its memory."""
        until, before = self.unseen.get(cell, _SEEN)
        return before if until > self.sim.world.now else self.cells[cell]

    def landed_as(self, cell: int) -> int:
        """Return what it sees where the fabric writes: the same, unless that is its memory's mirror."""
        until, before = self.hidden.get(cell, _SEEN)
        return before if until > self.sim.world.now else self.shore[cell]

    def reading(self, address: int) -> tuple[HandoffId, int] | None:
        """Return the handoff, and its attempt, into whose blocks a read goes."""
        lent_to = self.loans[(address - self.base) // self.block_bytes]
        for handoff, one in self.mover.sink._handoffs.items():  # noqa: SLF001
            if handoff.transfer == lent_to:
                return handoff, one.attempt
        return None

    def _blocks(self, address: int, length: int) -> range:
        return range((address - self.base) // self.block_bytes, -(-(address + length - self.base) // self.block_bytes))

    # --- the mover's listener, as in transport/rank.py --------------------------------------------------------------

    def on_message(self, frm: RankId, message: AnyMessage) -> None:
        """Hand a peer's message to the mover."""
        self.post(cmd.Inbound(frm, message))

    def on_up(self, rank: RankId, card: RankCard | None) -> None:
        """Tell the mover of a peer's memory; scheduler processes have none."""
        if card is not None:
            self.post(cmd.PeerUp(rank, card))

    def beating(self, now: float) -> bool:
        """Movers of the simulation do not hang."""
        del now
        return True

    def on_lost(self, rank: RankId, reason: str, granted_until: float, *, dead: bool) -> None:
        """Tell the mover that a peer is lost."""
        self.sim.world.note(self.name, "", f"loses {rank.agent}: {reason}")
        if dead:
            self._check_obituary(rank)
        self.post(cmd.PeerLost(rank, reason, granted_until, dead))

    def on_ended(self, rank: RankId) -> None:
        """Tell the mover that the process of a peer which was lost before has ended."""
        self._check_obituary(rank)
        self.post(cmd.PeerEnded(rank))

    def _check_obituary(self, rank: RankId) -> None:
        """Who is thought to have ended has; unless its address has moved to somebody else meanwhile."""
        peer = self.sim.process_of(rank)
        if peer is not None and peer.worker in self.sim.network.listeners.values():
            self.sim.violate("obituaries", "", f"{self.me.agent} thinks that {rank.agent} has ended, which lives")

    def on_lease(self, rank: RankId, until: float, asked: float) -> None:
        """Tell the mover until when it may post. That must end before the peer thinks that it ends, by whatever clocks."""
        peer = self.sim.process_of(rank)
        session = None if peer is None else peer.worker.switchboard.sessions.get(self.me)
        if peer is not None and session is not None:
            late = self.clock.when(until) - peer.clock.when(session.liveness.granted_until)
            if late > 1e-6:  # noqa: PLR2004
                what = f"{self.me.agent} may post against {rank.agent} for {late:.3f} s longer than that has granted"
                self.sim.violate("leases", "", what)
        self.post(cmd.Leased(rank, until, asked))

    def on_outcome(self, outcome: Outcome) -> None:
        """Tell the mover how a call ended."""
        if outcome.reason is None:
            self.post(cmd.Connected(outcome.address, outcome.ranks))
        else:
            self.post(cmd.Unreachable(outcome.address, outcome.reason))

    def on_round(self, now: float) -> None:
        """Nothing is due here."""

    def on_report(self, last: int) -> Report:
        """Nobody asks."""
        raise AssertionError(f"asked for {last} records")


def settings_of(mode: str, **changes: Any) -> MoverSettings:
    """Make a mover's settings, with times that suit a simulation of a minute."""
    return MoverSettings(
        **{"mode": mode, "leg_timeout": 6.0, "hold_limit": 8.0, "pull_lease": 8.0, "drain_bound": 2.0, **changes}
    )
