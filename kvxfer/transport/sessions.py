"""The sessions of a control channel: who is connected, by which route, alive until when.

Kept apart from the thread that owns the sockets (``control``): here are no sockets, only names of routes, so that opening,
replacing and losing sessions can be read and tested by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.errors import RemoteProtocolError
from kvxfer.layout.card import RankCard, refusals
from kvxfer.protocol import messages, peers
from kvxfer.protocol.ids import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from kvxfer.protocol.ids import RankId

MAX_SESSIONS = 1024
"""Peers of one process. Without a secret anybody may greet; a table without end would be theirs to fill."""


@dataclass(slots=True)
class Session:
    """One peer process. ``route`` is where messages for it go; ``since`` the peer's stamp of what opened the session."""

    rank: RankId
    route: Hashable
    liveness: peers.Peer
    card: RankCard | None
    since: float
    listens: tuple[str, int] | None = None
    """Where the peer's process listens, if it was called there, or was seen to listen there."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A session that has just ended."""

    session: Session
    reason: str
    dead: bool = False
    """The peer's process is known to have ended."""


class Sessions:
    """All sessions of one process. ``card`` is what this process tells of itself: empty for a scheduler process."""

    def __init__(self, me: RankId, timing: peers.Timing) -> None:
        self.me = me
        self.timing = timing
        self.card: RankCard | None = None
        self.port = 0
        """Where this process listens, for peers that it calls."""
        self._by_rank: dict[RankId, Session] = {}

    def get(self, rank: RankId) -> Session | None:
        """Return a peer's session."""
        return self._by_rank.get(rank)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over all sessions."""
        return iter(list(self._by_rank.values()))

    def hello(self, now: float) -> messages.Hello:
        """Make the message that opens a session."""
        return messages.Hello(self._card(), now, self.timing.interval, self.timing.timeout, self.port)

    def accept(
        self, rank: RankId, message: messages.Hello, route: Hashable, now: float
    ) -> messages.Welcome | messages.Refused:
        """Answer a Hello. On success the session is open and the peer may be written to."""
        try:
            card = self._fits(rank, message)
        except RemoteProtocolError as error:
            return messages.Refused(str(error))
        session = self._open(rank, route, card, message.sent, now)
        session.liveness.hear(message.sent, 0.0, 0.0, now)
        beat = session.liveness.beat(now)
        return messages.Welcome(self._card(), now, beat.echo, beat.lease, self.timing.interval, self.timing.timeout)

    def welcomed(self, rank: RankId, message: messages.Welcome, route: Hashable, now: float) -> Session:
        """Open the session whose Hello was answered. Raises RemoteProtocolError when the peer must not be talked to."""
        session = self._open(rank, route, self._fits(rank, message), message.sent, now)
        session.liveness.hear(message.sent, message.echo, message.lease, now)
        return session

    def beats_due(self, now: float) -> Iterator[tuple[Session, messages.Heartbeat]]:
        """Make the heartbeats that are due."""
        for session in self:
            if session.liveness.due(now):
                yield session, session.liveness.beat(now)

    def silent(self, now: float) -> Iterator[Lost]:
        """End the sessions whose peers have been silent for too long."""
        for session in self:
            if session.liveness.silent(now):
                del self._by_rank[session.rank]
                yield Lost(session, f"nothing heard from it for {self.timing.timeout:g} s")

    def replaced(self, rank: RankId) -> Iterator[Lost]:
        """End the sessions with earlier incarnations of a rank that now answers as ``rank``.

        That proves nothing of the earlier process: an address may have moved to another host while it runs on.
        """
        for session in self:
            same = (session.rank.engine, session.rank.rank) == (rank.engine, rank.rank)
            if same and session.rank.incarnation != rank.incarnation and session.liveness.replaced():
                del self._by_rank[session.rank]
                yield Lost(session, "another process has taken its place")

    def forgotten(self, rank: RankId) -> Iterator[Lost]:
        """End a session that the peer says it does not have."""
        session = self._by_rank.get(rank)
        if session is not None and session.liveness.replaced():
            del self._by_rank[rank]
            yield Lost(session, "it has no session with this process")

    def ended(self, rank: RankId) -> Iterator[Lost]:
        """End the session with a peer whose process is known to have ended."""
        session = self._by_rank.get(rank)
        if session is not None and session.liveness.replaced():
            del self._by_rank[rank]
            yield Lost(session, "its process has ended: the port at which it listened refuses connections", dead=True)

    def quiet(self, now: float) -> Iterator[Session]:
        """Iterate over the sessions whose peers missed a beat."""
        for session in self:
            if now - session.liveness.last_heard > 2 * self.timing.interval:
                yield session

    def all(self, reason: str) -> Iterator[Lost]:
        """End all sessions."""
        for session in self:
            if session.liveness.replaced():
                del self._by_rank[session.rank]
                yield Lost(session, reason)

    def begun_anew(self, rank: RankId, sent: float) -> Iterator[Lost]:
        """End the session with a peer that greets again: it has lost the old one, and whatever was registered under it.

        This process may only have been asleep, and would otherwise go on where it stopped, with a fresh lease, and write into
        blocks that the peer has given back. A greeting from before the session, which crossed with ours, is not meant.
        """
        session = self._by_rank.get(rank)
        if session is not None and sent > session.since and session.liveness.replaced():
            del self._by_rank[rank]
            yield Lost(session, "it began its session with this process anew")

    def _open(self, rank: RankId, route: Hashable, card: RankCard | None, sent: float, now: float) -> Session:
        session = self._by_rank.get(rank)
        if session is None:
            session = self._by_rank[rank] = Session(rank, route, peers.Peer(self.timing, now), card, sent)
        session.route = route
        session.card = card or session.card
        return session

    def _card(self) -> dict[str, Any]:
        return {} if self.card is None else self.card.to_builtins()

    def _fits(self, rank: RankId, message: messages.Hello | messages.Welcome) -> RankCard | None:
        if rank not in self._by_rank and len(self._by_rank) >= MAX_SESSIONS:
            raise RemoteProtocolError(f"{self.me} has sessions with {MAX_SESSIONS:,} peers and takes no more")
        clash = self.timing.clash(message.interval, message.timeout)
        if clash:
            raise RemoteProtocolError(f"{self.me.engine} and {rank.engine} would think each other dead: {clash}")
        if not message.card:
            return None
        theirs = RankCard.from_builtins(message.card)
        if theirs.engine != rank.engine:
            raise RemoteProtocolError(f"{rank} shows the card of {shown(theirs.engine)}")
        reasons = [] if self.card is None else refusals(self.card, theirs)
        if reasons:
            raise RemoteProtocolError("; ".join(reasons)[: messages.MAX_REASON])
        return theirs
