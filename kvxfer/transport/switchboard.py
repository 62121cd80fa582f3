"""What a process does with its control messages: sessions opened and lost, engines called, heartbeats, everything handed on.

Everything but the sockets and the thread, which ``control`` adds: here a *route* is only something that a message can be put
on, so a simulation can carry the messages instead. One owner calls it; times are passed in.

Wire safety is that of ``protocol.messages``: everything is decoded by schema, an envelope for another incarnation is answered
with Stale and dropped, and nothing that a peer sends raises more than RemoteProtocolError. A session's words end with it: what
a connection still delivers later, when the same two processes have long opened another, names a stamp from before the end, and
is dropped. With a shared secret, nothing is acted upon that ``links`` has not admitted. What is refused is said once and
counted (``refusals``).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol import messages
from kvxfer.protocol.ids import RankId, shown
from kvxfer.protocol.messages import Refusal, WireVersionError, open_envelope, pack, pack_refusal, read_body
from kvxfer.transport.dialer import Dialer
from kvxfer.transport.introductions import Introductions
from kvxfer.transport.links import CURE, Links, NotAdmittedError
from kvxfer.transport.refusals import Refusals
from kvxfer.transport.sessions import Lost, Session, Sessions
from kvxfer.transport.suspects import Answer, Suspects

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from kvxfer.layout.card import RankCard
    from kvxfer.protocol.auth import Secret
    from kvxfer.protocol.messages import Envelope
    from kvxfer.protocol.peers import Timing
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.dialer import Outcome

logger = logging.getLogger("kvxfer.control")


ENDED = 4096
"""Peers of which it is remembered when their last session ended."""


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

    def on_lease(self, rank: RankId, until: float, asked: float) -> None:
        """The process may post against the peer's memory until then; the peer has answered what was said at ``asked``."""

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

    def where(self, route: Hashable) -> tuple[str, int] | None:
        """Return the address to which a route was dialed; None for one that a peer opened."""

    def came_from(self, route: Hashable) -> str:
        """Return the numeric host from which the message that is being received came; empty where that is not known."""

    def knock(self, rank: RankId, host: str, port: int) -> None:
        """Find out whether a port takes connections, and say so to ``knocked``; return at once, and raise nothing."""

    def dialed(self, route: Hashable) -> EngineAddress | None:
        """Return the call on whose behalf a route was dialed; None for one that a peer opened."""

    def dialed_for(self, address: EngineAddress) -> Sequence[Hashable]:
        """Return the routes that were dialed for a call."""

    def hang_up(self, route: Hashable) -> None:
        """Close a wire that was dialed."""


class Switchboard:
    """One process's control messages. ``me`` is a worker rank, or a scheduler process (rank -1)."""

    def __init__(
        self,
        me: RankId,
        listener: Listener,
        wires: Wires,
        timing: Timing,
        connect_timeout: float,
        secret: Secret | None = None,
    ) -> None:
        self.me = me
        self.sessions = Sessions(me, timing)
        self.directory = messages.Directory(me.engine, 1, 1, ready=False, ranks=())
        self._listener = listener
        self._wires = wires
        self._dialer = Dialer(self, connect_timeout)
        self._introductions = Introductions()
        self._suspects = Suspects(3 * timing.timeout)
        self._said: dict[RankId, tuple[str, int]] = {}  # where a peer says that it listens, until it has been seen
        self._links = None if secret is None else Links(me, secret, wires.put)
        self._refusals = Refusals(logger)
        self._now = 0.0
        self._renewed_at = 0.0
        self._ended: OrderedDict[RankId, float] = OrderedDict()

    # --- what the owner asks for ------------------------------------------------------------------------------------

    def call(self, address: EngineAddress, now: float) -> None:
        """Connect an engine's ranks; the listener hears the outcome."""
        self._dialer.call(address, now)

    def keep(self, address: EngineAddress, now: float, *, lasting: bool) -> None:
        """Connect an engine's ranks, and again whenever one is lost (``introductions``); the listener hears every outcome."""
        self._introductions.keep(address, now, lasting=lasting)

    def send(self, to: RankId, message: messages.Message) -> None:
        """Send to a peer with an open session; without one the message is dropped (its machines hear of the loss)."""
        session = self.sessions.get(to)
        if session is None:
            logger.debug("no session with %s: dropped %s", to, type(message).__name__)
            return
        self._say_in(session, message)

    def renew(self, card: RankCard, now: float) -> None:
        """Tell peers something else of this process from now on: all sessions end, here and there, and begin anew."""
        self._now = self._renewed_at = now
        self.sessions.card = card
        for session in self.sessions:
            self._say(session.route, session.rank.incarnation, messages.Stale())
        self._lose(self.sessions.all("this process has revoked the keys of its memory"))

    def tick(self, now: float) -> None:
        """Send the heartbeats that are due, end what was silent for too long, and let the listener do what is due."""
        self._now = now
        for session in self.sessions.quiet(now):
            self._suspect(session)
        self._lose(self.sessions.silent(now))
        if self._listener.beating(now):
            for session, beat in self.sessions.beats_due(now):
                self._say_in(session, beat)
        for suspect in self._suspects.due(now):
            self._wires.knock(*suspect)
        self._report(self._dialer.tick(now))
        for address in self._introductions.due(now):
            self.guarded(self._dialer.call, address, now)
        self.guarded(self._listener.on_round, now)

    def broken(self, route: Hashable, now: float) -> None:
        """Hear that a dialed route's connection broke. It is made anew by itself, unless the peer's process has ended."""
        self._now = now
        for session in self.sessions:
            if session.listens is not None and session.listens == self._wires.where(route):
                self._suspect(session)
        for suspect in self._suspects.due(now):
            self._wires.knock(*suspect)

    def knocked(self, rank: RankId, where: tuple[str, int], now: float, answer: Answer) -> None:
        """Hear what became of a knock. Where somebody listened, and nobody does, his process has ended."""
        self._now = now
        if self._said.get(rank) == where:
            # The first look, while it lives: behind an address translation it does not listen where it seems to be.
            del self._said[rank]
            session = self.sessions.get(rank)
            if session is not None and session.listens is None and answer is Answer.ACCEPTS:
                session.listens = where
            return
        if answer is not Answer.REFUSES or self._suspects.where(rank) != where:
            return
        self._suspects.clear(rank)
        if self.is_open(rank):
            self._lose(self.sessions.ended(rank))
        else:
            self._listener.on_ended(rank)

    def _suspect(self, session: Session) -> None:
        if session.listens is not None:
            self._suspects.add(session.rank, session.listens, self._now)

    @property
    def calling(self) -> bool:
        """Whether a call is under way."""
        return len(self._dialer) > 0

    @property
    def calls(self) -> list[EngineAddress]:
        """Whom is called now."""
        return list(self._dialer)

    @property
    def hurried(self) -> bool:
        """Whether ``tick`` is due often: a call is under way, or somebody is suspected of having ended."""
        return self.calling or len(self._suspects) > 0

    @property
    def due_at(self) -> float | None:
        """When ``tick`` is due although nothing happens; None when it need not be."""
        return self._introductions.next_at()

    @property
    def counters(self) -> dict[str, int]:
        """What was refused, and what was dropped as said before, since the start."""
        return {"control_refused": self._refusals.count, "control_repeated": self._links.repeated if self._links else 0}

    def guarded(self, act: Callable[..., object], *args: Any) -> None:
        """Run ``act``: neither a peer's nonsense nor a defect in one handoff may end what serves all the others."""
        try:
            act(*args)
        except RemoteProtocolError as error:
            self._refusals.note("", type(error).__name__, error, self._now)
        except Exception:
            logger.exception("defect in the control channel")

    # --- what arrives -----------------------------------------------------------------------------------------------

    def receive(self, packed: bytes, route: Hashable, now: float) -> None:
        """Handle one envelope. What a peer should not have sent is refused, and changes nothing."""
        self._now = now
        sender = None
        try:
            envelope = open_envelope(packed)
            if isinstance(envelope, Refusal):
                self._refused(envelope.reason, route)
                return
            sender = envelope.sender
            message = self._admit(envelope, route, now)
            if message is not None:
                self._hear(envelope, message, route, now)
        except WireVersionError as error:
            self._turn_away(error.sender, WireVersionError(error.theirs, error.sender, str(self.me)), route)
        except NotAdmittedError as error:
            if error.tell:
                self._turn_away(sender, error, route)
            else:
                self._refusals.note(str(sender), "proof", error, now)
        except RemoteProtocolError as error:
            self._refusals.note(str(sender), "message", error, now)

    def _admit(self, envelope: Envelope, route: Hashable, now: float) -> messages.AnyMessage | None:
        """Return the message if it may be acted upon."""
        if self._links is not None:
            return self._links.admit(envelope, route, now, dialed=self._wires.dialed(route) is not None)
        if envelope.proof is not None:
            raise NotAdmittedError(f"{envelope.sender} has a shared secret, {self.me} has none: {CURE}", tell=True)
        return read_body(envelope)

    def _turn_away(self, sender: RankId | None, error: RemoteProtocolError, route: Hashable) -> None:
        """Refuse a process that cannot be talked to, and let both sides know why."""
        self._refusals.note(str(sender), type(error).__name__, error, self._now)
        if self._wires.dialed(route) is None or isinstance(error, NotAdmittedError):
            self._wires.put(route, pack_refusal(str(error)))
        self._end_call(route, str(error))

    def _refused(self, reason: str, route: Hashable) -> None:
        """Hear that this process cannot be talked to. Proves nothing, so it ends a call and no session."""
        self._refusals.note(str(self._wires.dialed(route)), "refused by", reason, self._now)
        self._end_call(route, reason)

    def _end_call(self, route: Hashable, reason: str) -> None:
        address = self._wires.dialed(route)
        if address is not None and all(session.route != route for session in self.sessions):
            self._hang_up(route)
            self._report(self._dialer.refused(address, reason))

    def _hear(self, envelope: Envelope, message: messages.AnyMessage, route: Hashable, now: float) -> None:
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
            case messages.Knock() | messages.Challenge() | messages.Report():
                raise RemoteProtocolError(f"{sender} sent {type(message).__name__} without having been asked")
            case _:
                self._from_session(envelope, message, route, now)

    def _from_session(self, envelope: Envelope, message: messages.AnyMessage, route: Hashable, now: float) -> None:
        sender = envelope.sender
        session = self.sessions.get(sender)
        if session is None:
            self._say(route, sender.incarnation, messages.Stale())
            return
        if envelope.heard < self._ended.get(sender, 0.0):
            return  # said in an earlier session: nobody waits for it, and its registrations are over
        session.liveness.touch(now)
        self._suspects.clear(sender)
        if self._wires.dialed(route) is None:
            session.route = route  # a peer that connected anew after a broken connection comes by a new route
        if not isinstance(message, messages.Heartbeat):
            self._listener.on_message(sender, message)
            return
        session.liveness.hear(message.sent, message.echo, message.lease, now)
        if session.liveness.may_post_until > now:
            self._listener.on_lease(sender, session.liveness.may_post_until, message.echo)

    def _hello(self, sender: RankId, message: messages.Hello, route: Hashable, now: float) -> None:
        if self.sessions.card is None and self.me.rank >= 0:
            return  # still starting; the caller asks again
        self._lose(self.sessions.begun_anew(sender, message.sent))
        self._lose(self.sessions.replaced(sender))
        answer = self.sessions.accept(sender, message, route, now)
        self._say(route, sender.incarnation, answer)
        if isinstance(answer, messages.Refused):
            self._refusals.note(str(sender), "hello", f"{sender}: {answer.reason}", now)
            return
        session = self.sessions.get(sender)
        assert session is not None
        host = self._wires.came_from(route)
        if session.listens is None and host and message.port and sender not in self._said:
            self._said[sender] = (host, message.port)
            self._wires.knock(sender, host, message.port)
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
                self._hang_up(route)
                if message.engine != sender.engine:
                    raise RemoteProtocolError(f"{sender} sent the directory of {shown(message.engine)}")
                if message.engine == self.me.engine:
                    self._introductions.forget(address)
                    self._report(self._dialer.refused(address, "that is this engine itself"))
                    return
                self._lose(self.sessions.replaced(sender))
                for rank in message.ranks:
                    self._lose(self.sessions.replaced(RankId(message.engine, rank.incarnation, rank.rank)))
                self._report(self._dialer.directory(address, message, now, sender))
            case messages.Refused(reason):
                self._hang_up(route)
                self._report(self._dialer.refused(address, reason))
            case messages.Welcome():
                self._welcome(sender, message, address, route, now)

    def _welcome(
        self, sender: RankId, message: messages.Welcome, address: EngineAddress, route: Hashable, now: float
    ) -> None:
        where = self._wires.where(route)
        if message.echo < self._renewed_at and where is not None:
            # It answers a greeting from before this process told something else of itself, and knows what is not true.
            self._say(route, sender.incarnation, messages.Stale())
            self._hang_up(route)
            self.greet(address, sender, *where, now)
            return
        try:
            session = self.sessions.welcomed(sender, message, route, now)
        except RemoteProtocolError as error:
            self._hang_up(route)
            self._report(self._dialer.refused(address, str(error)))
            return
        session.listens = where
        self._suspects.clear(sender)
        # At once, so that the peer holds a lease before the first registration reaches it.
        self._say_in(session, session.liveness.beat(now))
        self._listener.on_up(sender, session.card)
        self._listener.on_lease(sender, session.liveness.may_post_until, message.echo)
        self._report(self._dialer.opened(sender))

    def _lose(self, lost: Iterable[Lost]) -> None:
        for one in lost:
            session: Session = one.session
            self._said.pop(session.rank, None)
            self._refusals.line(f"lost {session.rank}: {one.reason}", self._now)
            if one.dead:
                self._suspects.clear(session.rank)
            else:
                self._suspect(session)
            if self._wires.dialed(session.route) is not None:
                self._hang_up(session.route)
            self._ended[session.rank] = self._now
            self._ended.move_to_end(session.rank)
            self._introductions.lost(session.rank, self._now)
            if len(self._ended) > ENDED:
                self._ended.popitem(last=False)
            self.guarded(self._on_lost, session.rank, one.reason, session.liveness.granted_until, one.dead)

    def _on_lost(self, rank: RankId, reason: str, granted_until: float, dead: bool) -> None:
        self._listener.on_lost(rank, reason, granted_until, dead=dead)

    def _report(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if self._links is not None:
                self._links.call_ended(outcome.address)
            used = {session.route for session in self.sessions}
            for route in self._wires.dialed_for(outcome.address):
                if route not in used:
                    self._hang_up(route)
            if self._introductions.outcome(outcome, self._now) and outcome.reason is not None:
                logger.warning("cannot exchange KV with %s: %s", outcome.address, outcome.reason)
            for rank in outcome.ranks:
                if not self.is_open(rank):  # lost while the others were still called
                    self._introductions.lost(rank, self._now)
            self._listener.on_outcome(outcome)
            if outcome.ranks and not outcome.address.engine:  # requests will name it
                named = structs.replace(outcome.address, engine=outcome.ranks[0].engine)
                self._listener.on_outcome(replace(outcome, address=named))

    def _say_in(self, session: Session, message: messages.Message) -> None:
        """Say what belongs to a session."""
        self._say(session.route, session.rank.incarnation, message, session.liveness.heard)

    def _say(self, route: Hashable, incarnation: str, message: messages.Message, heard: float = 0.0) -> None:
        links = self._links
        packed = (
            pack(self.me, incarnation, message, None, heard) if links is None else links.pack(route, message, heard)
        )
        if packed is None:
            logger.debug("no link by this route: dropped %s", type(message).__name__)
            return
        self._wires.put(route, packed)

    def _hang_up(self, route: Hashable) -> None:
        if self._links is not None:
            self._links.hung_up(route)
        self._wires.hang_up(route)

    # --- for the dialer ---------------------------------------------------------------------------------------------

    def ask(self, address: EngineAddress) -> None:
        """Ask an engine's control address who is there."""
        self._dial(address, address.host, address.port, None, messages.WhoIs())

    def greet(self, address: EngineAddress, rank: RankId, host: str, port: int, now: float) -> None:
        """Greet a rank."""
        # Stamped now, though with a secret it leaves later: a session that is opened meanwhile is not begun anew by it.
        self._dial(address, host, port, rank, self.sessions.hello(now))

    def _dial(self, address: EngineAddress, host: str, port: int, to: RankId | None, first: messages.Message) -> None:
        if self._links is not None:
            packed = self._links.knock(address, to, first)
        else:
            packed = pack(self.me, "" if to is None else to.incarnation, first)
        self._wires.dial(address, host, port, packed)

    def is_open(self, rank: RankId) -> bool:
        """Tell whether a session with this rank is open."""
        return self.sessions.get(rank) is not None
