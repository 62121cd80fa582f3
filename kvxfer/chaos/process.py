"""One life of one simulated engine: its scheduler's and its worker's control channels, the real mover, memory, a clock, a device.

What threads do in the product, events do here: what the mover says reaches the control channel a moment later, what arrives
there is put into the mover's mailbox, and the mover takes a turn soon after something has changed. A process may be asleep
for seconds (everything waits, the device and the fabric go on) and may die at any moment.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.chaos.fabric import Agent
from kvxfer.chaos.network import Wires
from kvxfer.chaos.world import Clock
from kvxfer.connector.announce import Announcer
from kvxfer.layout.blocks import CacheLayout, Region
from kvxfer.layout.card import RankCard
from kvxfer.protocol.actions import SinkFinished
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Directory, RankAddress, Report
from kvxfer.transport import commands as cmd
from kvxfer.transport.mover import TICK, Mover, MoverSettings
from kvxfer.transport.switchboard import Switchboard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvxfer.chaos.simulation import Simulation
    from kvxfer.protocol.actions import SourceFinished, SourceQuiet
    from kvxfer.protocol.messages import AnyMessage, Message
    from kvxfer.protocol.peers import Timing
    from kvxfer.transport.dialer import Outcome
    from kvxfer.transport.suspects import Answer

BLOCK_SIZE = 4
"""Tokens in a block."""
BLOCK_BYTES = 4 * BLOCK_SIZE
"""A position holds one tag of 32 bits."""


class Channel:
    """A process's control channel: the product's switchboard, on simulated wires. ``listener`` hears what arrives."""

    def __init__(self, process: Process, me: RankId, port: int, timing: Timing, connect_timeout: float) -> None:
        self.process = process
        self.name = f"{process.name}{'' if me.rank >= 0 else '.s'}"
        self.host = process.host
        self.alive = True
        self.port = port
        network = process.sim.network
        self.switchboard = Switchboard(
            me,
            process if me.rank >= 0 else self,
            Wires(network, self),
            timing,
            connect_timeout,
            process.sim.secret,
        )
        self.announcer = Announcer(self, process.sim.settings.leg_timeout)  # type: ignore[arg-type]  # stands for one
        self._interval = timing.interval / 4
        self._todo: deque[Callable[[float], None]] = deque()
        self._inbox: deque[tuple[bytes, Hashable]] = deque()
        self.switchboard.sessions.port = port
        network.listeners[self.host, port] = self
        process.sim.world.after(process.sim.world.random.uniform(0.0, self._interval), self._round)

    # --- what the product asks of a control channel -----------------------------------------------------------------

    def send(self, to: RankId, message: Message) -> None:
        """Send to a peer, soon."""
        self.call(lambda _now: self.switchboard.send(to, message))

    def connect(self, address: cmd.EngineAddress) -> None:
        """Connect an engine, soon."""
        self.call(lambda now: self.switchboard.call(address, now))

    def call(self, act: Callable[[float], None]) -> None:
        """Run ``act`` soon, in order."""
        self._todo.append(act)
        if len(self._todo) == 1:
            self.process.soon(0.0005, self._run_todo)

    # --- events -----------------------------------------------------------------------------------------------------

    def hear(self, packed: bytes, route: Hashable) -> None:
        """Take what arrives; asleep, it waits in the socket."""
        if self.process.asleep or self._inbox:
            self._inbox.append((packed, route))
            return
        self.switchboard.guarded(self.switchboard.receive, packed, route, self.process.clock())

    def knocked(self, rank: RankId, answer: Answer) -> None:
        """Hear what became of a knock."""
        self.call(lambda now: self.switchboard.knocked(rank, now, answer))

    def broken(self, route: Hashable) -> None:
        """Hear that a dialed connection broke."""
        if self.alive:
            self.call(lambda now: self.switchboard.broken(route, now))

    def drain(self) -> None:
        """Take what waited in the socket."""
        while self._inbox and not self.process.asleep:
            packed, route = self._inbox.popleft()
            self.switchboard.guarded(self.switchboard.receive, packed, route, self.process.clock())

    def _run_todo(self) -> None:
        while self._todo:
            self.switchboard.guarded(self._todo[0], self.process.clock())
            self._todo.popleft()

    def _round(self) -> None:
        if not self.alive:
            return
        self.switchboard.tick(self.process.clock())
        self.process.sim.world.after(
            0.05 if self.switchboard.hurried else self._interval, self.process.awake, self._round
        )

    # --- the listener of a scheduler process ------------------------------------------------------------------------

    def on_message(self, frm: RankId, message: AnyMessage) -> None:
        """Nothing of a handoff is said to a scheduler."""
        raise AssertionError(f"{frm} sent {message} to a scheduler")

    def on_up(self, rank: RankId, card: RankCard | None) -> None:
        """Nothing to do."""

    def beating(self, now: float) -> bool:
        """A scheduler process has nothing that its peers wait for."""
        del now
        return True

    def on_ended(self, rank: RankId) -> None:
        """Nothing to do."""

    def on_lost(self, rank: RankId, reason: str, granted_until: float, *, dead: bool) -> None:
        """Forget the engine's ranks."""
        del reason, granted_until, dead
        self.announcer.on_lost(rank)

    def on_lease(self, rank: RankId, until: float, asked: float) -> None:
        """A scheduler posts nothing."""

    def on_outcome(self, outcome: Outcome) -> None:
        """Let the announcer say what waited."""
        self.announcer.on_outcome(outcome)

    def on_round(self, now: float) -> None:
        """Renew what decode expects."""
        self.announcer.on_round(now)

    def on_report(self, last: int) -> Report:
        """Nobody asks."""
        raise AssertionError(f"asked for {last} records")


class Device:
    """Work that is launched now and done later, in order. ``fence()`` passes when all that was launched is done."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._free_at = 0.0
        self.launched = 0
        self.completed = 0

    def launch(self, duration: float, work: list[Callable[[], None]]) -> None:
        """Launch work that takes so long."""
        world = self._process.sim.world
        self._free_at = max(self._free_at, world.now) + duration
        self.launched += 1
        world.at(self._free_at, self._complete, work)

    def _complete(self, work: list[Callable[[], None]]) -> None:
        if self._process.alive:
            for act in work:
                act()
            self.completed += 1
            self._process.wake()

    def fence(self) -> Fence:
        """Record a fence."""
        return Fence(self, self.launched)


class Fence:
    """Of a simulated device."""

    __slots__ = ("_behind", "_device")

    def __init__(self, device: Device, behind: int) -> None:
        self._device = device
        self._behind = behind

    def done(self) -> bool:
        """Tell whether all work that was launched before has been done."""
        return self._device.completed >= self._behind


class Process:
    """Both processes of an engine of one rank. ``port`` is the control address; the rank's own is the next one."""

    def __init__(self, sim: Simulation, host: str, engine: str, port: int, num_blocks: int) -> None:
        self.sim = sim
        self.host = host
        self.name = host
        self.alive = True
        self.clock = Clock(sim.world)
        self.device = Device(self)
        self.awake_at = 0.0
        incarnation = f"{sim.world.random.getrandbits(32):08x}"
        self.me = RankId(engine, incarnation, 0)
        self.memory = np.zeros(num_blocks * BLOCK_SIZE, dtype=np.uint32)
        self.cells = memoryview(self.memory)  # type: ignore[arg-type]  # arrays are buffers
        base = self.base = self.memory.ctypes.data
        self.loans: list[str | None] = [None] * num_blocks
        """Which handoff may write into each block."""
        self._lent: dict[str, list[int]] = {}
        layout = CacheLayout(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            dtype="uint32",
            layers=1,
            kv_heads=1,
            head_dim=1,
            interior="tags",
            memory="DRAM",
            regions=(Region("tags", base, BLOCK_BYTES, BLOCK_BYTES, 0),),
            spans=((base, self.memory.nbytes, 0),),
        )
        self.worker = Channel(self, self.me, port + 1, sim.timing, sim.connect_timeout)
        self.scheduler = Channel(self, RankId(engine, incarnation, -1), port, sim.timing, sim.connect_timeout)
        self.mover = Mover(
            self.me, layout, self._make_agent, sim.settings, self.worker.send, self.worker.connect, clock=self.clock
        )
        self.mover.prepare()
        card = RankCard(engine, "tags", 0, 1, 0, 1, "twin", layout, self.mover.transfers.keeper.metadata)
        self.worker.switchboard.sessions.card = card
        where = RankAddress(0, incarnation, 0, 0, "", port + 1)
        self.scheduler.switchboard.directory = Directory(engine, 1, 1, ready=True, ranks=(where,))
        self.address = cmd.EngineAddress(host, port, engine)
        self.results: deque[SourceFinished | SinkFinished | SourceQuiet] = deque()
        self.on_results: Callable[[], None] = lambda: None
        self._turn_at = float("inf")
        self._held_until = 0.0

    def _make_agent(self) -> Agent:
        self.sim.fabric.shores[self.me.agent] = self
        return Agent(self.me.agent, self.sim.fabric)

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
            for channel in (self.worker, self.scheduler):
                channel.drain()

    def die(self) -> None:
        """Go without a word."""
        self.alive = False
        for channel in (self.worker, self.scheduler):
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
        if self.asleep:
            self._turn_at = self.awake_at + 1e-6 + 0.005 * self.sim.world.random.random()
            self.sim.world.at(self._turn_at, self._turn, self._turn_at)
            return
        self._turn_at = float("inf")
        mover, world = self.mover, self.sim.world
        mover.turn()
        if world.chance(self.sim.trouble.late_mover):
            self.sim.faults["late_mover"] += 1
            self._held_until = world.now + world.random.uniform(0.0, 0.5)
        if mover.results:
            while mover.results:
                result = mover.results.popleft()
                if isinstance(result, SinkFinished):
                    self._end_loan(result)
                self.results.append(result)
            self.on_results()
        if len(mover.source) or len(mover.sink):
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

    def landed(self, handoff: str, address: int, length: int) -> None:
        """Check that these bytes may come."""
        for block in range((address - self.base) // BLOCK_BYTES, (address + length - self.base) // BLOCK_BYTES):
            lent_to = self.loans[block] if 0 <= block < len(self.loans) else None
            if lent_to is None or (handoff and lent_to != handoff):
                whose = lent_to or "the engine"
                what = f"bytes of {handoff or 'a read'} land in block {block} of {self.name}, which is {whose}'s"
                self.sim.violate("wrong_bytes", handoff or lent_to or "", what)

    # --- the mover's listener, as in transport/rank.py --------------------------------------------------------------

    def on_message(self, frm: RankId, message: AnyMessage) -> None:
        """Hand a peer's message to the mover."""
        self.post(cmd.Inbound(frm, message))

    def on_up(self, rank: RankId, card: RankCard | None) -> None:
        """Tell the mover of a peer's memory; scheduler processes have none."""
        if card is not None:
            self.post(cmd.PeerUp(rank, card))

    def beating(self, now: float) -> bool:
        """Movers of the simulation never hang."""
        del now
        return True

    def on_ended(self, rank: RankId) -> None:
        """Tell the mover that the process of a peer which was lost before has ended."""
        self.post(cmd.PeerEnded(rank))

    def on_lost(self, rank: RankId, reason: str, granted_until: float, *, dead: bool) -> None:
        """Tell the mover that a peer is lost."""
        self.sim.world.note(self.name, "", f"loses {rank.agent}: {reason}")
        self.post(cmd.PeerLost(rank, reason, granted_until, dead))

    def on_lease(self, rank: RankId, until: float, asked: float) -> None:
        """Tell the mover until when it may post."""
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


def packed(blocks: list[int]) -> bytes:
    """Pack block ids."""
    return array("i", blocks).tobytes()


def settings_of(mode: str, **changes: Any) -> MoverSettings:
    """Make a mover's settings, with times that suit a simulation of a minute."""
    return MoverSettings(
        **{"mode": mode, "leg_timeout": 6.0, "hold_limit": 8.0, "pull_lease": 8.0, "drain_bound": 2.0, **changes}
    )
