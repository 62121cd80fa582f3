"""The in-memory twin of a fabric: real bytes between real addresses of one process, with faults on demand.

It is part of the package, not a mock in a test: simulations and tests drive the real mover over it. A ``TwinFabric`` joins
``TwinAgent``s; each transfer becomes terminal after ``Faults.delay`` seconds by the fabric's clock, copies its bytes at that
moment (so a source that is overwritten too early shows), and delivers its notification. Faults are drawn from a seeded
generator: the same seed gives the same run.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.errors import TransportError
from kvxfer.transport.agent import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.layout.runs import Descriptors


@dataclass(slots=True)
class Faults:
    """What goes wrong. Times in seconds, probabilities from 0 to 1."""

    delay: tuple[float, float] = (0.0, 0.0)
    """A transfer becomes terminal after a time drawn from this range: transfers overtake each other."""
    notification_delay: tuple[float, float] = (0.0, 0.0)
    """A notification arrives after its transfer by a time drawn from this range: notifications overtake each other."""
    lose_notification: float = 0.0
    double_notification: float = 0.0
    fail_post: float = 0.0
    fail_transfer: float = 0.0
    """A failing transfer copies a prefix of its descriptors, as a torn one does."""


class _Metadata(msgspec.Struct):
    name: str
    key: int
    spans: list[tuple[int, int, int]]


@dataclass(slots=True, eq=False)
class TwinTransfer:
    """A posted transfer."""

    operation: str
    local: Any
    remote: Any
    peer: str
    sender: str
    notification: bytes
    key: int
    """Of the peer's memory, as the sender knew it."""
    origin: TwinAgent
    status: Status = Status.PENDING


@dataclass(slots=True)
class TwinFabric:
    """Joins agents. ``clock`` is the time by which delays run; ``seed`` decides every fault. Safe to share among threads."""

    faults: Faults = field(default_factory=Faults)
    clock: Callable[[], float] = time.monotonic
    seed: int = 0
    agents: dict[str, TwinAgent] = field(default_factory=dict)
    last_due: float = 0.0
    """When the transfer that was posted last is, or was, due."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _random: random.Random = field(init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        """Seed the faults."""
        self._random = random.Random(self.seed)  # noqa: S311 - faults, not secrets

    def progress(self) -> None:
        """Let everything happen whose time has come."""
        with self._lock:
            while self._events and self._events[0][0] <= self.clock():
                heapq.heappop(self._events)[2]()

    def next_event(self) -> float | None:
        """When something happens next, by the fabric's clock; None when nothing is under way."""
        with self._lock:
            return self._events[0][0] if self._events else None

    def kill(self, name: str) -> None:
        """Take an agent away, as when its process dies: what it posted may still land, what is posted to it fails."""
        with self._lock:
            self.agents.pop(name, None)

    def reachable(self, transfer: TwinTransfer) -> TwinAgent | None:
        """Return the agent that a transfer goes to; None when it, or the sender, was closed since: keys open nothing then."""
        peer = self.agents.get(transfer.peer)
        return None if peer is None or peer.key != transfer.key or transfer.origin.closed else peer

    def _post(self, transfer: TwinTransfer) -> None:
        with self._lock:
            if self._draw(self.faults.fail_post):
                raise TransportError(f"the post to {transfer.peer} failed, as the faults demand")
            self.last_due = self._after(self.faults.delay, lambda: self._finish(transfer))

    def _finish(self, transfer: TwinTransfer) -> None:
        peer = self.reachable(transfer)
        torn = self._draw(self.faults.fail_transfer)
        rows = list(zip(transfer.local, transfer.remote, strict=True))
        if peer is None or torn:
            rows = rows[: self._random.randrange(len(rows) + 1)] if peer is not None else []
        for (mine, length, _), (theirs, _, _) in rows:
            target, origin = (theirs, mine) if transfer.operation == "WRITE" else (mine, theirs)
            ctypes.memmove(int(target), int(origin), int(length))
        if peer is None or torn:
            transfer.status = Status.FAILED
            return
        transfer.status = Status.DONE
        if transfer.notification:
            copies = 0 if self._draw(self.faults.lose_notification) else 1 + self._draw(self.faults.double_notification)
            for _ in range(copies):
                self._after(
                    self.faults.notification_delay,
                    lambda: peer.inbox.append((transfer.sender, transfer.notification)),
                )

    def _draw(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

    def _after(self, delay: tuple[float, float], happen: Callable[[], None]) -> float:
        at = self.clock() + self._random.uniform(*delay)
        heapq.heappush(self._events, (at, next(self._numbers), happen))
        return at


class TwinAgent:
    """An agent of the twin: the same contract as NIXL's, addresses included."""

    backend = "twin"

    def __init__(self, name: str, fabric: TwinFabric) -> None:
        self.name = name
        self.fabric = fabric
        self.inbox: list[tuple[str, bytes]] = []
        self.spans: list[tuple[int, int, int]] = []
        self.peers: dict[str, _Metadata] = {}
        self.key = next(fabric._numbers)  # noqa: SLF001 - the two are one
        self.closed = False
        fabric.agents[name] = self

    def register(self, spans: Sequence[tuple[int, int, int]], memory: str) -> None:
        """Remember the spans; posts outside them are refused."""
        if memory != "DRAM":
            raise TransportError(f"the twin moves host memory, not {memory}")
        self.spans.extend(spans)

    def metadata(self) -> bytes:
        """Return name, key and spans."""
        return msgspec.msgpack.encode(_Metadata(self.name, self.key, self.spans))

    def add_peer(self, metadata: bytes, name: str = "") -> str:
        """Learn a peer's name, key and spans."""
        del name
        try:
            peer = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise TransportError(f"not a twin's metadata: {error}") from None
        self.peers[peer.name] = peer
        return peer.name

    def meet(self, name: str) -> bool:
        """A twin can meet anybody."""
        del name
        return False

    def lost(self, name: str) -> None:
        """Nothing to do: what is posted to an agent that is gone fails by itself."""

    def interrupt(self, name: str) -> None:
        """A twin's calls return."""

    def disturbed(self) -> bool:
        """A twin's failures have owners."""
        return False

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""
        self.peers.pop(name, None)

    def post(
        self, operation: str, local: Descriptors, remote: Descriptors, memory: str, peer: str, notification: bytes = b""
    ) -> TwinTransfer:
        """Post a transfer; every descriptor must lie within registered memory, as on a fabric with protection keys."""
        del memory
        if peer not in self.peers:
            raise TransportError(f"{self.name} does not know {peer}")
        _check(local, self.spans, self.name)
        _check(remote, self.peers[peer].spans, peer)
        transfer = TwinTransfer(
            operation, local.copy(), remote.copy(), peer, self.name, notification, self.peers[peer].key, self
        )
        self.fabric._post(transfer)  # noqa: SLF001 - the two are one
        return transfer

    def status(self, transfer: TwinTransfer) -> Status:
        """Progress the fabric and look."""
        self.fabric.progress()
        return transfer.status

    def release(self, transfer: TwinTransfer) -> None:
        """Nothing to let go of, but a transfer in flight must not be released."""
        if transfer.status is Status.PENDING:
            raise TransportError("released a transfer that is in flight")

    def notifications(self) -> list[tuple[str, bytes]]:
        """Progress the fabric and take what has arrived."""
        self.fabric.progress()
        arrived, self.inbox = self.inbox, []
        return arrived

    def close(self) -> None:
        """Leave the fabric: nothing that was posted to it, or by it, moves bytes any more."""
        self.closed = True
        if self.fabric.agents.get(self.name) is self:
            self.fabric.kill(self.name)


def _check(rows: Descriptors, spans: Sequence[tuple[int, int, int]], whose: str) -> None:
    for address, length, _ in rows.tolist():
        if not any(start <= address and address + length <= start + size for start, size, _ in spans):
            raise TransportError(f"[{address:#x}, +{length}) is outside what {whose} has registered")
