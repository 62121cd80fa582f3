"""What a process does with its control messages: sessions opened and lost, engines called, heartbeats, everything handed on.

Everything but the sockets and the thread, which ``control`` adds: here a *route* is only something that a message can be put
on, so a simulation can carry the messages instead. One owner calls it; times are passed in.

Wire safety is that of ``protocol.messages``: everything is decoded by schema, an envelope for another incarnation is answered
with Stale and dropped, and nothing that a peer sends raises more than RemoteProtocolError.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol import messages
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import pack, unpack
from kvxfer.transport.dialer import Dialer
from kvxfer.transport.sessions import Lost, Session, Sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from kvxfer.layout.card import RankCard
    from kvxfer.protocol.peers import Timing
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.dialer import Outcome

logger = logging.getLogger("kvxfer.control")


class Listener(Protocol):
    """Who hears what arrives. Called by the switchboard's owner; must return at once."""

    def on_message(self, frm: RankId, message: messages.AnyMessage) -> None:
        """A peer with a session says something about a handoff."""

    def on_up(self, rank: RankId, card: RankCard | None) -> None:
        """A session was opened, or opened again by another route."""

    def beating(self, now: float) -> bool:
        """Tell whether this process does what its peers wait for; if not, it stops beating. Must be cheap."""

    def on_lost(self, rank: RankId, reason: str, granted_until: float, *, dead: bool) -> None:
        """A session ended. ``dead``: the peer's process is known to have ended."""

    def on_ended(self, rank: RankId) -> None:
        """The process of a peer that was lost before is known to have ended."""

    def on_lease(self, rank: RankId, until: float) -> None:
        """The process may post against the peer's memory until then."""

    def on_outcome(self, outcome: Outcome) -> None:
        """A call that was asked for has ended."""

    def on_round(self, now: float) -> None:
        """Time has passed: a chance to do what is due. Comes often; must be cheap."""

    def on_report(self, last: int) -> messages.Report:
        """Somebody asks for the handoff records."""


class Wires(Protocol):
    """What carries the messages."""

    def dial(self, address: EngineAddress, host: str, port: int, first: bytes) -> None:
        """Open a wire to ``host``:``port`` on behalf of a call to ``address``, and put ``first`` on it."""

    def put(self, route: Hashable, packed: bytes) -> None:
        """Send on a route; what cannot be sent is dropped, and the silence will be noticed."""

    def dialed(self, route: Hashable) -> EngineAddress | None:
        """Return the call on whose behalf a route was dialed; None for one that a peer opened."""

    def dialed_for(self, address: EngineAddress) -> Sequence[Hashable]:
        """Return the routes that were dialed for a call."""

    def hang_up(self, route: Hashable) -> None:
        """Close a wire that was dialed."""


class Switchboard:
    """One process's control messages. ``me`` is a worker rank, or a scheduler process (rank -1)."""

    def __init__(self, me: RankId, listener: Listener, wires: Wires, timing: Timing, connect_timeout: float) -> None:
        self.me = me
        self.sessions = Sessions(me, timing)
        self.directory = messages.Directory(me.engine, 1, 1, ready=False, ranks=())
        self._listener = listener
        self._wires = wires
        self._dialer = Dialer(self, connect_timeout)

    # --- what the owner asks for ------------------------------------------------------------------------------------

    def call(self, address: EngineAddress, now: float) -> None:
        """Connect an engine's ranks; the listener hears the outcome."""
        self._dialer.call(address, now)

    def send(self, to: RankId, message: messages.Message) -> None:
        """Send to a peer with an open session; without one the message is dropped (its machines hear of the loss)."""
        session = self.sessions.get(to)
        if session is None:
            logger.debug("no session with %s: dropped %s", to, type(message).__name__)
            return
        self._say(session.route, to.incarnation, message)

    def renew(self, card: RankCard) -> None:
        """Tell peers something else of this process from now on: all sessions end, here and there, and begin anew."""
        self.sessions.card = card
        for session in self.sessions:
            self._say(session.route, session.rank.incarnation, messages.Stale())
        self._lose(self.sessions.all("this process has revoked the keys of its memory"))

    def tick(self, now: float) -> None:
        """Send the heartbeats that are due, end what was silent for too long, and let the listener do what is due."""
        if self._listener.beating(now):
            for session, beat in self.sessions.beats_due(now):
                self._say(session.route, session.rank.incarnation, beat)
        self._lose(self.sessions.silent(now))
        self._report(self._dialer.tick(now))
        self.guarded(self._listener.on_round, now)

    @property
    def calling(self) -> bool:
        """Whether a call is under way."""
        return len(self._dialer) > 0

    def guarded(self, act: Callable[..., object], *args: Any) -> None:
        """Run ``act``: neither a peer's nonsense nor a defect in one handoff may end what serves all the others."""
        try:
            act(*args)
        except RemoteProtocolError as error:
            logger.warning("refused what a peer sent: %s", error)
        except Exception:
            logger.exception("defect in the control channel")

    # --- what arrives -----------------------------------------------------------------------------------------------

    def receive(self, packed: bytes, route: Hashable, now: float) -> None:
        """Handle one envelope. Raises RemoteProtocolError for what a peer should not have sent."""
        envelope, message = unpack(packed)
        sender = envelope.sender
        if envelope.to and envelope.to != self.me.incarnation:
            if not isinstance(message, messages.Stale):
                self._say(route, sender.incarnation, messages.Stale())
            return
        match message:
            case messages.WhoIs():
                self._say(route, sender.incarnation, self.directory)
            case messages.ReportAsk(last):
                self._say(route, sender.incarnation, self._listener.on_report(last))
            case messages.Hello():
                self._hello(sender, message, route, now)
            case messages.Directory() | messages.Welcome() | messages.Refused():
                self._answer(sender, message, route, now)
            case messages.Stale():
                self._lose(self.sessions.forgotten(sender))
                self._lose(self.sessions.replaced(sender))
            case _:
                self._from_session(sender, message, route, now)

    def _from_session(self, sender: RankId, message: messages.AnyMessage, route: Hashable, now: float) -> None:
        session = self.sessions.get(sender)
        if session is None:
            self._say(route, sender.incarnation, messages.Stale())
            return
        session.liveness.touch(now)
        if self._wires.dialed(route) is None:
            session.route = route  # a peer that connected anew after a broken connection comes by a new route
        if not isinstance(message, messages.Heartbeat):
            self._listener.on_message(sender, message)
            return
        session.liveness.hear(message.sent, message.echo, message.lease, now)
        if session.liveness.may_post_until > now:
            self._listener.on_lease(sender, session.liveness.may_post_until)

    def _hello(self, sender: RankId, message: messages.Hello, route: Hashable, now: float) -> None:
        if self.sessions.card is None and self.me.rank >= 0:
            return  # still starting; the caller asks again
        self._lose(self.sessions.begun_anew(sender, message.sent))
        self._lose(self.sessions.replaced(sender))
        answer = self.sessions.accept(sender, message, route, now)
        self._say(route, sender.incarnation, answer)
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
        """Handle what answers a call of ours. It must have come by a route that the call dialed."""
        address = self._wires.dialed(route)
        if address is None:
            raise RemoteProtocolError(f"{sender} sent {type(message).__name__} without having been asked")
        match message:
            case messages.Directory():
                self._wires.hang_up(route)
                for rank in message.ranks:
                    self._lose(self.sessions.replaced(RankId(message.engine, rank.incarnation, rank.rank)))
                self._report(self._dialer.directory(address, message, now))
            case messages.Refused(reason):
                self._wires.hang_up(route)
                self._report(self._dialer.refused(address, reason))
            case messages.Welcome():
                self._welcome(sender, message, address, route, now)

    def _welcome(
        self, sender: RankId, message: messages.Welcome, address: EngineAddress, route: Hashable, now: float
    ) -> None:
        try:
            session = self.sessions.welcomed(sender, message, route, now)
        except RemoteProtocolError as error:
            self._wires.hang_up(route)
            self._report(self._dialer.refused(address, str(error)))
            return
        # At once, so that the peer holds a lease before the first registration reaches it.
        self._say(session.route, sender.incarnation, session.liveness.beat(now))
        self._listener.on_up(sender, session.card)
        self._listener.on_lease(sender, session.liveness.may_post_until)
        self._report(self._dialer.opened(sender))

    def _lose(self, lost: Iterable[Lost]) -> None:
        for one in lost:
            session: Session = one.session
            logger.warning("lost %s: %s", session.rank, one.reason)
            if self._wires.dialed(session.route) is not None:
                self._wires.hang_up(session.route)
            self.guarded(self._on_lost, session.rank, one.reason, session.liveness.granted_until, one.dead)

    def _on_lost(self, rank: RankId, reason: str, granted_until: float, dead: bool) -> None:
        self._listener.on_lost(rank, reason, granted_until, dead=dead)

    def _report(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            used = {session.route for session in self.sessions}
            for route in self._wires.dialed_for(outcome.address):
                if route not in used:
                    self._wires.hang_up(route)
            if outcome.reason is not None:
                logger.warning("cannot exchange KV with %s: %s", outcome.address, outcome.reason)
            self._listener.on_outcome(outcome)

    def _say(self, route: Hashable, incarnation: str, message: messages.Message) -> None:
        self._wires.put(route, pack(self.me, incarnation, message))

    # --- for the dialer ---------------------------------------------------------------------------------------------

    def ask(self, address: EngineAddress) -> None:
        """Ask an engine's control address who is there."""
        self._wires.dial(address, address.host, address.port, pack(self.me, "", messages.WhoIs()))

    def greet(self, address: EngineAddress, rank: RankId, host: str, port: int, now: float) -> None:
        """Greet a rank."""
        self._wires.dial(address, host, port, pack(self.me, rank.incarnation, self.sessions.hello(now)))

    def is_open(self, rank: RankId) -> bool:
        """Tell whether a session with this rank is open."""
        return self.sessions.get(rank) is not None
