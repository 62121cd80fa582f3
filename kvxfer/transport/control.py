"""The control channel: the one thread of a process that owns its sockets.

A ROUTER socket listens; a DEALER socket goes to each address that was called. What arrives is handed to a ``Listener`` (a
worker's mover, a scheduler half), what shall leave is queued by ``send``. Heartbeats run here and nowhere else, so neither a
slow post nor a long forward ever delays one.

Wire safety is that of ``protocol.messages``: everything is decoded by schema, an envelope for another incarnation is
answered with Stale and dropped, nothing a peer sends ends this thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from kvxfer.errors import RemoteProtocolError, TransportError
from kvxfer.protocol import messages
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import pack, unpack
from kvxfer.transport.dialer import Dialer
from kvxfer.transport.sessions import Lost, Session, Sessions
from kvxfer.transport.threads import run_on

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

    from kvxfer.layout.card import RankCard
    from kvxfer.protocol.peers import Timing
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.dialer import Outcome

logger = logging.getLogger("kvxfer.control")

_QUEUE = 100_000
"""Messages queued for one peer before the oldest wait is given up: more than a lost peer can collect before it is lost."""


class Listener(Protocol):
    """Who hears what arrives. Called in the control thread; must return at once."""

    def on_message(self, frm: RankId, message: messages.AnyMessage) -> None:
        """A peer with a session says something about a handoff."""

    def on_up(self, rank: RankId, card: RankCard | None) -> None:
        """A session was opened, or opened again by another route."""

    def on_lost(self, rank: RankId, reason: str, granted_until: float) -> None:
        """A session ended."""

    def on_lease(self, rank: RankId, until: float) -> None:
        """The process may post against the peer's memory until then."""

    def on_outcome(self, outcome: Outcome) -> None:
        """A call that was asked for by ``connect`` has ended."""

    def on_round(self, now: float) -> None:
        """The thread has turned a round: a chance to do what is due. Comes often; must be cheap."""

    def on_report(self, last: int) -> messages.Report:
        """Somebody asks for the handoff records."""


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
    ) -> None:
        super().__init__(name=f"kvxfer-control-{me.rank}", daemon=True)
        self.me = me
        self.host = host
        self.sessions = Sessions(me, timing)
        self.directory = messages.Directory(me.engine, 1, 1, ready=False, ranks=())
        self._listener = listener
        self._dialer = Dialer(self, connect_timeout)
        self._todo: queue.SimpleQueue[Callable[[float], None] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._cpus = cpus
        self._context = zmq.Context()
        for cpu in cpus or ():
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)  # its I/O thread would be born pinned as well
        self._dealers: dict[zmq.Socket[bytes], EngineAddress] = {}
        self._askers: dict[EngineAddress, zmq.Socket[bytes]] = {}
        self._stopping = False
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.set_hwm(_QUEUE)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        try:
            address = _numeric(host)
            self._router.setsockopt(zmq.IPV6, int(":" in address))
            self._router.bind(f"tcp://{_bracket(address)}:{port or '*'}")
            endpoint: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
            self.port = int(endpoint.decode().rsplit(":", 1)[1].rstrip("\0"))
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise TransportError(
                f"engine {me.engine!r} cannot listen for its peers at {host}:{port}: {error}. "
                "Another process has this port, or the host has no such address: set control_port (and control_host) in "
                "kv_connector_extra_config, or VLLM_NIXL_SIDE_CHANNEL_PORT and _HOST, to a free one"
            ) from error
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    # --- for other threads ------------------------------------------------------------------------------------------

    def send(self, to: RankId, message: messages.Message) -> None:
        """Send to a peer with an open session; without one the message is dropped (its machines hear of the loss)."""
        self._do(lambda _now: self._send_to(to, message))

    def connect(self, address: EngineAddress) -> None:
        """Connect an engine's ranks; the listener hears the outcome."""
        self._do(lambda now: self._dialer.call(address, now))

    def call(self, act: Callable[[float], None]) -> None:
        """Run ``act`` in the control thread, with the time."""
        self._do(act)

    def present(self, card: RankCard) -> None:
        """Set what this rank tells of itself. Before it is set, nobody can open a session with this process."""
        self._do(lambda _now: setattr(self.sessions, "card", card))

    def publish(self, directory: messages.Directory) -> None:
        """Set what WhoIs is answered with."""
        self._do(lambda _now: setattr(self, "directory", directory))

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread and close the sockets."""
        if self.is_alive():
            self._todo.put(None)
            self._ring()
            self.join(timeout)
        elif not self._context.closed:
            self._context.destroy(linger=0)

    def _do(self, act: Callable[[float], None]) -> None:
        self._todo.put(act)
        self._ring()

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
            self._context.destroy(linger=0)
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
            if isinstance(ear, zmq.Socket):
                self._drain(ear, now)
        self._beat(now)
        self._report(self._dialer.tick(now))
        self._guarded(self._listener.on_round, now)

    def _wait_ms(self) -> int | None:
        """Milliseconds until something is due; None when only a message or a command can make something happen."""
        if len(self._dialer):
            return 50
        if not any(True for _ in self.sessions):
            return None
        return max(1, int(self.sessions.timing.interval * 250))

    def _run_todo(self, now: float) -> None:
        while True:
            try:
                act = self._todo.get_nowait()
            except queue.Empty:
                return
            if act is None:
                self._stopping = True
                return
            self._guarded(act, now)

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except RemoteProtocolError as error:
            logger.warning("refused what a peer sent: %s", error)
        except Exception:
            logger.exception("defect in the control channel")

    def _drain(self, ear: zmq.Socket[bytes], now: float) -> None:
        for _ in range(1000):  # then give the others a turn
            if ear.closed:
                return
            try:
                frames = ear.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route: Hashable = (ear, frames[0]) if ear is self._router else (ear, None)
            self._guarded(self._receive, frames[-1], route, now)

    def _beat(self, now: float) -> None:
        for session, beat in self.sessions.beats_due(now):
            self._send_by(session.route, session.rank.incarnation, beat)
        self._lose(self.sessions.silent(now))

    # --- what arrives -----------------------------------------------------------------------------------------------

    def _receive(self, packed: bytes, route: Hashable, now: float) -> None:
        envelope, message = unpack(packed)
        sender = envelope.sender
        if envelope.to and envelope.to != self.me.incarnation:
            if not isinstance(message, messages.Stale):
                self._send_by(route, sender.incarnation, messages.Stale())
            return
        match message:
            case messages.WhoIs():
                self._send_by(route, sender.incarnation, self.directory)
            case messages.ReportAsk(last):
                self._send_by(route, sender.incarnation, self._listener.on_report(last))
            case messages.Hello():
                self._hello(sender, message, route, now)
            case messages.Directory() | messages.Welcome() | messages.Refused():
                self._answer(sender, message, route, now)
            case messages.Stale():
                self._lose(self.sessions.forgotten(sender))
                self._lose(self.sessions.replaced(sender))
            case _:
                session = self.sessions.get(sender)
                if session is None:
                    self._send_by(route, sender.incarnation, messages.Stale())
                    return
                session.liveness.touch(now)
                assert isinstance(route, tuple)
                if route[0] is self._router:
                    session.route = route  # a peer that connected anew after a broken connection has a new identity
                if isinstance(message, messages.Heartbeat):
                    self._heard(session, message, now)
                else:
                    self._listener.on_message(sender, message)

    def _hello(self, sender: RankId, message: messages.Hello, route: Hashable, now: float) -> None:
        if self.sessions.card is None and self.me.rank >= 0:
            return  # still starting; the caller asks again
        self._lose(self.sessions.begun_anew(sender, message.sent))
        self._lose(self.sessions.replaced(sender))
        answer = self.sessions.accept(sender, message, route, now)
        self._send_by(route, sender.incarnation, answer)
        if isinstance(answer, messages.Refused):
            logger.warning("refused %s: %s", sender, answer.reason)
            return
        session = self.sessions.get(sender)
        assert session is not None
        self._listener.on_up(sender, session.card)

    def _answer(
        self,
        sender: RankId,
        message: messages.Directory | messages.Welcome | messages.Refused,
        route: Hashable,
        now: float,
    ) -> None:
        """Handle what answers a call of ours. It must have come through the socket that made the call."""
        assert isinstance(route, tuple)
        address = self._dealers.get(route[0])
        if address is None:
            raise RemoteProtocolError(f"{sender} sent {type(message).__name__} without having been asked")
        match message:
            case messages.Directory():
                self._close_asker(address)
                for rank in message.ranks:
                    self._lose(self.sessions.replaced(RankId(message.engine, rank.incarnation, rank.rank)))
                self._report(self._dialer.directory(address, message, now))
            case messages.Refused(reason):
                self._close_dealer(route[0])
                self._report(self._dialer.refused(address, reason))
            case messages.Welcome():
                try:
                    session = self.sessions.welcomed(sender, message, route, now)
                except RemoteProtocolError as error:
                    self._close_dealer(route[0])
                    self._report(self._dialer.refused(address, str(error)))
                    return
                # At once, so that the peer holds a lease before the first registration reaches it.
                self._send_by(session.route, sender.incarnation, session.liveness.beat(now))
                self._listener.on_up(sender, session.card)
                self._listener.on_lease(sender, session.liveness.may_post_until)
                self._report(self._dialer.opened(sender))

    def _heard(self, session: Session, beat: messages.Heartbeat, now: float) -> None:
        session.liveness.hear(beat.sent, beat.echo, beat.lease, now)
        if session.liveness.may_post_until > now:
            self._listener.on_lease(session.rank, session.liveness.may_post_until)

    def _lose(self, lost: Iterable[Lost]) -> None:
        for one in lost:
            session = one.session
            logger.warning("lost %s: %s", session.rank, one.reason)
            if isinstance(session.route, tuple) and session.route[0] in self._dealers:
                self._close_dealer(session.route[0])
            self._guarded(self._listener.on_lost, session.rank, one.reason, session.liveness.granted_until)

    def _report(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._close_asker(outcome.address)
            used = {session.route[0] for session in self.sessions if isinstance(session.route, tuple)}
            for dealer in [d for d, a in self._dealers.items() if a == outcome.address and d not in used]:
                self._close_dealer(dealer)
            if outcome.reason is not None:
                logger.warning("cannot exchange KV with %s: %s", outcome.address, outcome.reason)
            self._listener.on_outcome(outcome)

    # --- what leaves ------------------------------------------------------------------------------------------------

    def _send_to(self, to: RankId, message: messages.Message) -> None:
        session = self.sessions.get(to)
        if session is None:
            logger.debug("no session with %s: dropped %s", to, type(message).__name__)
            return
        self._send_by(session.route, to.incarnation, message)

    def _send_by(self, route: Hashable, incarnation: str, message: messages.Message) -> None:
        assert isinstance(route, tuple)
        mouth, identity = route
        packed = pack(self.me, incarnation, message)
        try:
            mouth.send_multipart([packed] if identity is None else [identity, packed], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Its queue is full, or its connection is gone: the silence will be noticed.
            logger.debug("%s could not be sent: %s", type(message).__name__, error)

    # --- Wires, for the dialer --------------------------------------------------------------------------------------

    def ask(self, address: EngineAddress) -> None:
        """Send WhoIs to an engine's control address."""
        if address not in self._askers:
            self._askers[address] = self._dealer(address, address.host, address.port)
        self._send_by((self._askers[address], None), "", messages.WhoIs())

    def greet(self, address: EngineAddress, rank: RankId, host: str, port: int) -> None:
        """Send Hello to a rank's address."""
        dealer = self._dealer(address, host, port)
        self._send_by((dealer, None), rank.incarnation, self.sessions.hello(time.monotonic()))

    def is_open(self, rank: RankId) -> bool:
        """Tell whether a session with this rank is open."""
        return self.sessions.get(rank) is not None

    def _dealer(self, address: EngineAddress, host: str, port: int) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.set_hwm(_QUEUE)
        dealer.setsockopt(zmq.IPV6, int(":" in host))
        dealer.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        try:
            dealer.connect(f"tcp://{_bracket(host)}:{port}")
        except zmq.ZMQError as error:
            dealer.close()
            raise RemoteProtocolError(f"{host}:{port} is not an address: {error}") from error
        self._dealers[dealer] = address
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _close_asker(self, address: EngineAddress) -> None:
        dealer = self._askers.pop(address, None)
        if dealer is not None:
            self._close_dealer(dealer)

    def _close_dealer(self, dealer: zmq.Socket[bytes]) -> None:
        if self._dealers.pop(dealer, None) is not None:
            self._poller.unregister(dealer)
            dealer.close()


def _numeric(host: str) -> str:
    """Resolve a host name: sockets are bound to addresses."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
