"""Simulated connections that carry control messages, with what sockets under ZeroMQ may do to them.

A ``Wire`` is a DEALER connected to an address. Within a connection order is kept; between connections it is not. A connection
that breaks loses what is under way in both directions, some of which may have arrived; the dialer connects anew by itself, what
it sends meanwhile waits for whoever listens there by then, and the listener sees a new route. Where nobody listens, connecting
is tried again for as long as the wire is open. A partition stalls what an engine says to another, in one direction or in both,
which then comes late and at once; or lets it take seconds; or breaks their connections until it is over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvxfer.chaos import concern
from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol.messages import unpack
from kvxfer.transport.suspects import Answer

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvxfer.chaos.simulation import Simulation
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.transport.commands import EngineAddress

ASTRAY = 0.3
"""Probability of a replayed message that is said to somebody else; and of one that comes by its own connection."""
DOUBLED = 3
"""Messages under way that come twice, at most, when a connection breaks and is made anew."""


class Ear(Protocol):
    """A process's control channel, as the network sees it."""

    name: str
    host: str
    alive: bool

    def hear(self, packed: bytes, route: Hashable) -> None:
        """Take what arrives."""

    def knocked(self, rank: RankId, where: tuple[str, int], answer: Answer) -> None:
        """Hear what became of a knock."""

    def broken(self, route: Hashable) -> None:
        """Hear that a dialed connection broke."""


@dataclass(eq=False, slots=True)
class Wire:
    """One dialed connection, and all that are made anew in its place. ``life`` counts them."""

    number: int
    owner: Ear
    address: EngineAddress
    where: tuple[str, int]
    open: bool = True
    life: int = 0
    peer: Ear | None = None
    waiting: list[bytes] = field(default_factory=list)  # not connected: kept until it is
    there: deque[bytes] = field(default_factory=deque)  # under way to the peer
    back: deque[bytes] = field(default_factory=deque)
    last_there: float = 0.0
    last_back: float = 0.0


class Network:
    """All wires, all listeners. ``delay`` is the range of a message's way in seconds."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.world = sim.world
        self.faults = sim.faults
        self.delay = (0.0001, 0.004)
        self.reconnect = (0.02, 1.0)
        self.retry = (0.05, 0.4)
        self.slow = 0.0  # probability of a message that takes up to a second
        self.slow_about: set[str] = set()  # handoffs whose next message does
        self.listeners: dict[tuple[str, int], Ear] = {}
        self.wires: dict[int, Wire] = {}
        self._stalled: dict[tuple[str, str], float] = {}  # from, to
        self._lagging: dict[tuple[str, str], tuple[float, float]] = {}  # from, to: until, seconds
        self._cut: dict[frozenset[str], float] = {}
        self._numbers = 0
        self._overheard: deque[tuple[str, bytes, Wire]] = deque(maxlen=400)

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def connected(self) -> list[Wire]:
        """Return the wires that could break."""
        return [wire for wire in self.wires.values() if wire.open and wire.peer is not None]

    def break_wire(self, wire: Wire, *, doubled: bool = False) -> None:
        """Break a connection. What is under way is lost; or, ``doubled``, some of it arrives now and again later."""
        if doubled and wire.there and wire.peer is not None:
            again = list(wire.there)[:DOUBLED]
            self.faults["doubled"] += len(again)
            for packed in again:
                self._hand_over(wire, packed, there=True)
            wire.waiting[:0] = again
        self.faults["lost_words"] += len(wire.there) + len(wire.back)
        wire.life += 1
        wire.peer = None
        self.world.after(self.world.random.uniform(*self.delay), wire.owner.broken, ("out", wire.number, 0))
        wire.there.clear()
        wire.back.clear()
        self.world.after(self.world.random.uniform(*self.reconnect), self._connect, wire)

    def stall(self, one: str, other: str, until: float) -> None:
        """Let what one host says to another wait until then."""
        self._stalled[one, other] = until

    def lag(self, one: str, other: str, until: float, seconds: float) -> None:
        """Let what one host says to another take so long, until then."""
        self._lagging[one, other] = until, seconds

    def cut(self, one: str, other: str, until: float) -> None:
        """Break the connections between two hosts; none is made until then."""
        self._cut[frozenset((one, other))] = until
        for wire in self.connected():
            if {wire.owner.host, wire.where[0]} == {one, other}:
                self.break_wire(wire)

    def replay(self, about: str) -> bool:
        """Say something again that was said; about a handoff, if anything was. False when nothing has been overheard."""
        heard = [one for one in self._overheard if one[0] == about] if about else []
        if not (heard or self._overheard) or not self.listeners:
            return False
        draw = self.world.random
        _, packed, wire = draw.choice(heard or list(self._overheard))
        ear = self.listeners.get(wire.where)
        if ear is None or draw.random() < ASTRAY:
            ear = draw.choice(list(self.listeners.values()))
        self.sim.struck("replayed", concern.of_pair(self.sim, wire.owner.host, wire.where[0]))
        mine = ("in", wire.number, wire.life) if ear is wire.peer and draw.random() < ASTRAY else ("in", -1, 0)
        ear.hear(packed, mine)
        return True

    def heal(self) -> None:
        """End every partition."""
        self._stalled.clear()
        self._lagging.clear()
        self._cut.clear()
        self.slow = 0.0
        self.slow_about.clear()

    def gone(self, ear: Ear) -> None:
        """A process has died: its wires and its ear go with it."""
        for where in [w for w, listener in self.listeners.items() if listener is ear]:
            del self.listeners[where]
        for wire in list(self.wires.values()):
            if wire.owner is ear:
                self.close(wire)
            elif wire.peer is ear:
                self.break_wire(wire)

    # --- for the ends -----------------------------------------------------------------------------------------------

    def dial(self, owner: Ear, address: EngineAddress, where: tuple[str, int], first: bytes) -> Wire:
        """Begin to connect."""
        self._numbers += 1
        wire = self.wires[self._numbers] = Wire(self._numbers, owner, address, where)
        wire.waiting.append(first)
        self.world.after(self.world.random.uniform(*self.delay), self._connect, wire)
        return wire

    def send(self, wire: Wire, packed: bytes, *, there: bool) -> None:
        """Put a message on its way."""
        if there and wire.peer is None:
            wire.waiting.append(packed)
            return
        at = self.world.now + (self._slow_way(wire, packed) or self.world.random.uniform(*self.delay))
        if self._lagging:
            until, seconds = self._lagging.get(self._ends(wire, there=there), (0.0, 0.0))
            at += seconds if until > at else 0.0
        if there:
            wire.last_there = at = max(at, wire.last_there + 1e-6)
            wire.there.append(packed)
        else:
            wire.last_back = at = max(at, wire.last_back + 1e-6)
            wire.back.append(packed)
        self.world.at(at, self._arrive, wire, wire.life, there)

    def knock(self, owner: Ear, rank: RankId, where: tuple[str, int]) -> None:
        """Let ``owner`` hear, a moment later, whether anybody listens at an address, if that can be seen from there."""
        self.world.after(self.world.random.uniform(*self.delay), self._knocked, owner, rank, where)

    def _knocked(self, owner: Ear, rank: RankId, where: tuple[str, int]) -> None:
        if not owner.alive:
            return
        unseen = self._cut.get(frozenset((owner.host, where[0])), 0.0) > self.world.now
        listens = Answer.ACCEPTS if where in self.listeners else Answer.REFUSES
        owner.knocked(rank, where, Answer.NOTHING if unseen else listens)

    def close(self, wire: Wire) -> None:
        """Close a wire; what has left still arrives."""
        wire.open = False
        wire.waiting.clear()
        wire.back.clear()
        self.wires.pop(wire.number, None)

    # --- inside -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _ends(wire: Wire, *, there: bool) -> tuple[str, str]:
        return (wire.owner.host, wire.where[0]) if there else (wire.where[0], wire.owner.host)

    def _slow_way(self, wire: Wire, packed: bytes) -> float:
        """Return how long a slow message takes; 0.0 for one that is as quick as most."""
        slow = self.world.chance(self.slow)
        if not slow and not self.slow_about:
            return 0.0
        handoff = _handoff(packed)
        if handoff is not None and handoff.transfer in self.slow_about:
            self.slow_about.discard(handoff.transfer)
        elif not slow:
            return 0.0
        source, sink = concern.ends(wire.owner.host, wire.where[0])
        states = set() if handoff is None else concern.of_handoff(self.sim, handoff, source, sink)
        self.sim.struck("slow_word", states)
        return self.world.random.uniform(0.01, 1.0)

    def _connect(self, wire: Wire) -> None:
        if not wire.open or wire.peer is not None:
            return
        peer = self.listeners.get(wire.where)
        pair = frozenset((wire.owner.host, wire.where[0]))
        stalled = self._stalled.get(self._ends(wire, there=True), 0.0) > self.world.now
        if peer is None or stalled or self._cut.get(pair, 0.0) > self.world.now:
            self.faults["refused_connection"] += 1
            self.world.after(self.world.random.uniform(*self.retry), self._connect, wire)
            return
        wire.peer = peer
        waiting, wire.waiting = wire.waiting, []
        for packed in waiting:
            self.send(wire, packed, there=True)

    def _arrive(self, wire: Wire, life: int, there: bool) -> None:
        if life != wire.life:
            return
        until = self._stalled.get(self._ends(wire, there=there), 0.0) if self._stalled else 0.0
        if until > self.world.now:
            self.world.at(until, self._arrive, wire, life, there)
            return
        under_way = wire.there if there else wire.back
        if under_way:
            self._hand_over(wire, under_way.popleft(), there=there)

    def _tell(self, ear: Ear, packed: bytes) -> None:
        try:
            envelope, message = unpack(packed)
        except RemoteProtocolError as error:
            self.world.note(ear.name, "", f"hears a refusal: {error}")
            return
        handoff = getattr(message, "handoff", None)
        if handoff is not None:
            self.world.note(ear.name, handoff.transfer, f"hears {message} from {envelope.sender.agent}")
        elif type(message).__name__ != "Heartbeat":
            self.world.note(ear.name, "", f"hears {type(message).__name__} from {envelope.sender.agent}")

    def _hand_over(self, wire: Wire, packed: bytes, *, there: bool) -> None:
        ear = wire.peer if there else wire.owner
        if ear is None or not ear.alive:
            return
        if there and self.sim.secret is not None:
            named = _handoff(packed)
            self._overheard.append(("" if named is None else named.transfer, packed, wire))
        if self.world.keep:
            self._tell(ear, packed)
        ear.hear(packed, ("in", wire.number, wire.life) if there else ("out", wire.number, 0))


def _handoff(packed: bytes) -> HandoffId | None:
    """Return the handoff that a message is about, if it is about one."""
    try:
        return getattr(unpack(packed)[1], "handoff", None)
    except RemoteProtocolError:
        return None  # a refusal


class Wires:
    """One process's side of the network, as its switchboard wants it. A route: (direction, wire, life of the wire)."""

    def __init__(self, network: Network, owner: Ear) -> None:
        self._network = network
        self._owner = owner
        self._mine: dict[int, Wire] = {}

    def dial(self, address: EngineAddress, host: str, port: int, first: bytes) -> None:
        """Open a wire."""
        wire = self._network.dial(self._owner, address, (host, port), first)
        self._mine[wire.number] = wire

    def put(self, route: Hashable, packed: bytes) -> None:
        """Send; to a route that is gone, nothing."""
        assert isinstance(route, tuple)
        direction, number, life = route
        if direction == "out":
            wire = self._mine.get(number)
            if wire is not None:
                self._network.send(wire, packed, there=True)
            return
        wire = self._network.wires.get(number)
        if wire is not None and wire.life == life and wire.peer is self._owner:
            self._network.send(wire, packed, there=False)

    def where(self, route: Hashable) -> tuple[str, int] | None:
        """Return the address to which a route was dialed."""
        assert isinstance(route, tuple)
        wire = self._mine.get(route[1]) if route[0] == "out" else None
        return None if wire is None else wire.where

    def came_from(self, route: Hashable) -> str:
        """Return the host at the other end of a wire that somebody else dialed."""
        assert isinstance(route, tuple)
        wire = self._network.wires.get(route[1]) if route[0] != "out" else None
        return "" if wire is None else wire.owner.host

    def knock(self, rank: RankId, host: str, port: int) -> None:
        """Find out whether anybody listens there."""
        self._network.knock(self._owner, rank, (host, port))

    def dialed(self, route: Hashable) -> EngineAddress | None:
        """Return the call on whose behalf a route was dialed."""
        assert isinstance(route, tuple)
        wire = self._mine.get(route[1]) if route[0] == "out" else None
        return None if wire is None else wire.address

    def dialed_for(self, address: EngineAddress) -> Sequence[Hashable]:
        """Return the routes that were dialed for a call."""
        return [("out", number, 0) for number, wire in self._mine.items() if wire.address == address]

    def hang_up(self, route: Hashable) -> None:
        """Close a wire."""
        assert isinstance(route, tuple)
        wire = self._mine.pop(route[1], None) if route[0] == "out" else None
        if wire is not None:
            self._network.close(wire)
