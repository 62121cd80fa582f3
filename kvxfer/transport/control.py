"""The control channel: the one thread of a process that owns its sockets.

A ROUTER socket listens; a DEALER socket goes to each address that was called. What arrives goes to the ``Switchboard``, what
shall leave is queued by ``send``. Heartbeats run here and nowhere else, so neither a slow post nor a long forward ever delays
one. Nothing that a peer sends ends this thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from kvxfer.addresses import bare, endpoint, shown_at
from kvxfer.errors import RemoteProtocolError, TransportError
from kvxfer.protocol.fields import MAX_MESSAGE_BYTES
from kvxfer.transport.suspects import Answer
from kvxfer.transport.switchboard import Listener, Switchboard
from kvxfer.transport.threads import run_on

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from kvxfer.layout.card import RankCard
    from kvxfer.protocol import messages
    from kvxfer.protocol.auth import Secret
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.peers import Timing
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.sessions import Sessions

logger = logging.getLogger("kvxfer.control")

_QUEUE = 100_000
"""Messages queued for one peer before the oldest wait is given up: more than a lost peer can collect before it is lost."""


_KNOCKS = 16
"""Knocks under way at a time: each is a thread for a second at most, or for as long as a name is looked up."""


class _Dealer(NamedTuple):
    """On whose behalf a DEALER was dialed, where to, and what hears of its connections."""

    address: EngineAddress
    where: tuple[str, int]
    monitor: zmq.Socket[bytes]


class ControlChannel(threading.Thread):
    """Listens at ``host``:``port`` (0 takes a free port, see ``port`` afterwards).

    Raises TransportError in the constructor when the address cannot be bound, naming who, where and what to change.
    """

    def __init__(
        self,
        me: RankId,
        host: str,
        port: int,
        listener: Listener,
        timing: Timing,
        connect_timeout: float = 5.0,
        cpus: Collection[int] | None = None,
        secret: Secret | None = None,
    ) -> None:
        super().__init__(name=f"kvxfer-control-{me.rank}", daemon=True)
        self.me = me
        self.host = host
        self._switchboard = Switchboard(me, listener, self, timing, connect_timeout, secret)
        self._todo: queue.SimpleQueue[Callable[[float], object] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._cpus = cpus
        self._zmq = zmq.Context()
        for cpu in cpus or ():
            self._zmq.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)  # its I/O thread would be born pinned as well
        self._dealers: dict[zmq.Socket[bytes], _Dealer] = {}
        self._monitors: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}
        self._heard: zmq.Frame | None = None
        self._knocks = threading.Semaphore(_KNOCKS)
        self._stopping = False
        self._router = self._zmq.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.set_hwm(_QUEUE)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            address = _numeric(host)
            self._router.setsockopt(zmq.IPV6, int(":" in address))
            self._router.bind(endpoint(address, port or "*"))
            bound: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
            self.port = int(bound.decode().rsplit(":", 1)[1].rstrip("\0"))
        except (zmq.ZMQError, OSError) as error:
            self._zmq.destroy(linger=0)
            raise TransportError(
                f"engine {me.engine!r} cannot listen for its peers at {shown_at(host, port)}: {error}. "
                "Another process has this port, or the host has no such address: set control_port (and control_host) in "
                "kv_connector_extra_config, or VLLM_NIXL_SIDE_CHANNEL_PORT and _HOST, to a free one"
            ) from error
        self._switchboard.sessions.port = self.port
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    # --- for other threads ------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> Sessions:
        """The open sessions, for looking at."""
        return self._switchboard.sessions

    @property
    def counters(self) -> dict[str, int]:
        """What was refused since the start."""
        return self._switchboard.counters

    def send(self, to: RankId, message: messages.Message) -> None:
        """Send to a peer with an open session; without one the message is dropped (its machines hear of the loss)."""
        self.call(lambda _now: self._switchboard.send(to, message))

    def connect(self, address: EngineAddress) -> None:
        """Connect an engine's ranks; the listener hears the outcome."""
        self.call(lambda now: self._switchboard.call(address, now))

    def keep(self, address: EngineAddress, *, lasting: bool = True) -> None:
        """Stay connected with an engine, from before the first request on; the listener hears every outcome."""
        self.call(lambda now: self._switchboard.keep(address, now, lasting=lasting))

    def present(self, card: RankCard) -> None:
        """Set what this rank tells of itself. Before it is set, nobody can open a session with this process."""
        self.call(lambda _now: setattr(self._switchboard.sessions, "card", card))

    def renew(self, card: RankCard) -> None:
        """Set what this rank tells of itself anew; all sessions end by it, since peers hold what is not true any more."""
        self.call(lambda now: self._switchboard.renew(card, now))

    def publish(self, directory: messages.Directory) -> None:
        """Set what WhoIs is answered with."""
        self.call(lambda _now: setattr(self._switchboard, "directory", directory))

    def call(self, act: Callable[[float], object], *, wake: bool = True) -> None:
        """Run ``act`` in the control thread, with the time; without ``wake`` when it wakes up next, before all else."""
        self._todo.put(act)
        if wake:
            self._ring()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread and close the sockets."""
        if self.is_alive():
            self._todo.put(None)
            self._ring()
            self.join(timeout)
        elif not self._zmq.closed:
            self._zmq.destroy(linger=0)

    def _ring(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:  # else the thread has ended, and the number may belong to another file by now
                os.eventfd_write(self._wake, 1)

    # --- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn rounds until stopped."""
        run_on(self._cpus)
        try:
            while not self._stopping:
                self._round()
        finally:
            self._zmq.destroy(linger=0)
            with self._wake_lock:
                os.close(self._wake)
                self._wake = -1

    def _round(self) -> None:
        ready = dict(self._poller.poll(self._wait_ms()))
        now = time.monotonic()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        self._run_todo(now)
        for ear in ready:
            if ear in self._monitors:
                self._watch(ear, now)
            elif isinstance(ear, zmq.Socket):
                self._drain(ear, now)
        self._switchboard.guarded(self._switchboard.tick, now)

    def _wait_ms(self) -> int | None:
        """Milliseconds until something is due; None when only a message or a command can make something happen."""
        if self._switchboard.hurried:
            return 50
        waits = [int(self.sessions.timing.interval * 250)] if any(True for _ in self.sessions) else []
        if (due := self._switchboard.due_at) is not None:
            waits.append(int((due - time.monotonic()) * 1000) + 1)
        return max(1, min(waits)) if waits else None

    def _run_todo(self, now: float) -> None:
        while True:
            try:
                act = self._todo.get_nowait()
            except queue.Empty:
                return
            if act is None:
                self._stopping = True
                return
            self._switchboard.guarded(act, now)

    def _drain(self, ear: zmq.Socket[bytes], now: float) -> None:
        for _ in range(1000):  # then give the others a turn
            if ear.closed:
                return
            try:
                frames = ear.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard = frames[-1]
            route: Hashable = (ear, frames[0].bytes) if ear is self._router else (ear, None)
            self._switchboard.guarded(self._switchboard.receive, frames[-1].bytes, route, now)

    def _watch(self, monitor: zmq.Socket[bytes], now: float) -> None:
        """Hear that a dialed connection broke."""
        dealer = self._monitors[monitor]
        with contextlib.suppress(zmq.Again):
            while True:
                monitor.recv_multipart(zmq.NOBLOCK)
        self._switchboard.guarded(self._switchboard.broken, (dealer, None), now)

    # --- Wires, for the switchboard: a route is (socket, the ROUTER's name for the peer) ----------------------------

    def dial(self, address: EngineAddress, host: str, port: int, first: bytes) -> None:
        """Open a DEALER to ``host``:``port``."""
        dealer = None
        try:
            dealer = self._zmq.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.set_hwm(_QUEUE)
            dealer.setsockopt(zmq.IPV6, int(":" in host))
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            dealer.connect(endpoint(host, port))
        except zmq.ZMQError as error:
            if dealer is not None:
                dealer.close()
            raise RemoteProtocolError(f"{shown_at(host, port)} cannot be connected: {error}") from error
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealers[dealer] = _Dealer(address, (host, port), monitor)
        self._monitors[monitor] = dealer
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self.put((dealer, None), first)

    def put(self, route: Hashable, packed: bytes) -> None:
        """Send; a full queue or a connection that is gone drops the message."""
        mouth, name = _parts(route)
        try:
            mouth.send_multipart([packed] if name is None else [name, packed], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("a message could not be sent: %s", error)

    def dialed(self, route: Hashable) -> EngineAddress | None:
        """Return the call on whose behalf a route was dialed."""
        dealer = self._dealers.get(_parts(route)[0])
        return None if dealer is None else dealer.address

    def where(self, route: Hashable) -> tuple[str, int] | None:
        """Return the address to which a route was dialed."""
        dealer = self._dealers.get(_parts(route)[0])
        return None if dealer is None else dealer.where

    def came_from(self, route: Hashable) -> str:
        """Return the host from which the message that is being received came."""
        if self._heard is None or _parts(route)[0] is not self._router:
            return ""
        try:
            return str(self._heard.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    def knock(self, rank: RankId, host: str, port: int) -> None:
        """Connect in a thread of its own: a name may have to be looked up, and a host that is gone answers nothing.

        With ``_KNOCKS`` under way, or no thread to be had, there is no answer; who is suspected is knocked at again.
        """

        def run() -> None:
            answer = Answer.ACCEPTS
            try:
                socket.create_connection((bare(host), port), timeout=1.0).close()
            except ConnectionRefusedError:
                answer = Answer.REFUSES
            except OSError:
                answer = Answer.NOTHING
            self._knocks.release()
            hear(answer)

        def hear(answer: Answer) -> None:
            self.call(lambda now: self._switchboard.knocked(rank, (host, port), now, answer))

        if not self._knocks.acquire(blocking=False):
            hear(Answer.NOTHING)
            return
        try:
            threading.Thread(target=run, name="kvxfer-knock", daemon=True).start()
        except RuntimeError:
            self._knocks.release()
            hear(Answer.NOTHING)

    def dialed_for(self, address: EngineAddress) -> Sequence[Hashable]:
        """Return the routes that were dialed for a call."""
        return [(dealer, None) for dealer, whose in self._dealers.items() if whose.address == address]

    def hang_up(self, route: Hashable) -> None:
        """Close a DEALER."""
        dealer = _parts(route)[0]
        known = self._dealers.pop(dealer, None)
        if known is not None:
            for ear in (known.monitor, dealer):
                self._poller.unregister(ear)
            del self._monitors[known.monitor]
            dealer.disable_monitor()
            dealer.close(linger=100)  # a last word, as Stale, should leave


def _parts(route: Hashable) -> tuple[Any, bytes | None]:
    assert isinstance(route, tuple)
    return route


def _numeric(host: str) -> str:
    """Resolve a host name: sockets are bound to addresses. A wildcard without a family is IPv4's."""
    if host in ("", "*"):
        return "0.0.0.0"  # noqa: S104 - asked for
    return str(socket.getaddrinfo(bare(host), None, type=socket.SOCK_STREAM)[0][4][0])
