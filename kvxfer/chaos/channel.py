"""A process's control channel: the product's switchboard, on simulated wires, in the time of its process."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvxfer.chaos.network import Wires
from kvxfer.connector.announce import Announcer
from kvxfer.transport.switchboard import Switchboard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvxfer.chaos.process import Process
    from kvxfer.chaos.reuse import Holding, Taking
    from kvxfer.layout.card import RankCard
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import AnyMessage, Message, Report
    from kvxfer.protocol.peers import Timing
    from kvxfer.transport import commands as cmd
    from kvxfer.transport.dialer import Outcome
    from kvxfer.transport.suspects import Answer


class Channel:
    """A process's control channel: the product's switchboard, on simulated wires. ``listener`` hears what arrives."""

    def __init__(self, process: Process, me: RankId, port: int, timing: Timing, connect_timeout: float) -> None:
        self.process = process
        self.name = f"{process.name}{'' if me.rank >= 0 else '.s'}"
        self.host = process.host
        self.alive = True
        self.port = port
        network = process.sim.network
        listener = process if me.rank >= 0 else self
        self.switchboard = Switchboard(me, listener, Wires(network, self), timing, connect_timeout, process.sim.secret)
        self.switchboard.sessions.port = port
        self.announcer = Announcer(self, process.sim.settings.leg_timeout)  # type: ignore[arg-type]  # stands for one
        self.reuse: Taking | Holding | None = None  # of a scheduler process, in a world with conversations
        self._interval = timing.interval / 4
        self._todo: deque[Callable[[float], None]] = deque()
        self._inbox: deque[tuple[bytes, Hashable]] = deque()
        network.listeners[self.host, port] = self
        process.sim.world.after(process.sim.world.random.uniform(0.0, self._interval), self._round)

    # --- what the product asks of a control channel -----------------------------------------------------------------

    def send(self, to: RankId, message: Message) -> None:
        """Send to a peer, soon."""
        self.call(lambda _now: self.switchboard.send(to, message))

    def connect(self, address: cmd.EngineAddress) -> None:
        """Connect an engine, soon."""
        self.call(lambda now: self.switchboard.call(address, now))

    def keep(self, address: cmd.EngineAddress) -> None:
        """Stay connected with an engine, soon."""
        self.call(lambda now: self.switchboard.keep(address, now, lasting=True))

    def call(self, act: Callable[[float], None], *, wake: bool = True) -> None:
        """Run ``act`` soon, in order; something may always wake a control thread at once."""
        del wake
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

    def knocked(self, rank: RankId, where: tuple[str, int], answer: Answer) -> None:
        """Hear what became of a knock."""
        self.call(lambda now: self.switchboard.knocked(rank, where, now, answer))

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
        """Hear of conversations; nothing else is said to a scheduler."""
        if self.reuse is None:
            raise AssertionError(f"{frm} sent {message} to a scheduler")
        self.reuse.on_message(frm, message)

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
        if self.reuse is not None:
            self.reuse.on_lost(rank)

    def on_lease(self, rank: RankId, until: float, asked: float) -> None:
        """A scheduler posts nothing."""

    def on_outcome(self, outcome: Outcome) -> None:
        """Let the announcer, or who asks for conversations, say what waited."""
        if not outcome.address.front:
            self.announcer.on_outcome(outcome)
        elif self.reuse is not None:
            self.reuse.on_outcome(outcome)

    def on_round(self, now: float) -> None:
        """Renew what decode expects, and what is held for readers."""
        self.announcer.on_round(now)
        if self.reuse is not None:
            self.reuse.on_round(now)

    def on_report(self, last: int) -> Report:
        """Nobody asks."""
        raise AssertionError(f"asked for {last} records")
