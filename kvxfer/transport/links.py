"""The links of a process that shares a secret with its peers: handshakes, and who may say what on which route.

``protocol.auth`` says why this is safe; here are the tables. A link is found by its name, not by the socket that it comes by:
a connection that broke and was made anew goes on with its link by another route. What a process has dialed and what dialed it
are kept apart, so nothing can be reflected.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol import auth, messages
from kvxfer.protocol.messages import Proof, pack, read_body

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import AnyMessage, Envelope, Message
    from kvxfer.transport.commands import EngineAddress

MAX_LINKS = 4096
"""Links of those who dialed this process. Only who knows the secret takes a place."""

CURE = "give both engines the same secret (secret_file in kv_connector_extra_config, or KVXFER_SECRET_FILE), or neither of them"


class NotAdmittedError(RemoteProtocolError):
    """What arrived has no valid proof. ``tell``: an honest peer could be set up so, and shall hear the reason."""

    def __init__(self, reason: str, *, tell: bool) -> None:
        self.tell = tell
        super().__init__(reason)


@dataclass(slots=True, eq=False)
class Link:
    """One dialed connection, over all its routes. ``born`` is when its challenge was answered."""

    name: bytes
    peer: RankId
    send_key: bytes
    receive_key: bytes
    route: Hashable
    born: float
    sent: int = 0
    received: int = 0

    def prove(self, body: bytes) -> Proof:
        """Prove the next message."""
        self.sent += 1
        return Proof(self.name, self.sent, auth.mac(self.send_key, self.sent, body))


@dataclass(frozen=True, slots=True)
class _Knocked:
    """A connection that was dialed and not challenged yet: whom it is for, if known, and what shall be said on it."""

    address: EngineAddress
    to: RankId | None
    first: Message


class Links:
    """``put`` sends on a route; ``fresh`` makes that many random bytes."""

    def __init__(
        self,
        me: RankId,
        secret: auth.Secret,
        put: Callable[[Hashable, bytes], None],
        fresh: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.me = me
        self.repeated = 0
        """Envelopes dropped because they, or later ones, had come before: doubled by a connection, or replayed."""
        self._secret = secret
        self._put = put
        self._fresh = fresh
        self._challenges = auth.Challenges(fresh(32))
        self._knocked: dict[bytes, _Knocked] = {}
        self._dialed: dict[bytes, Link] = {}
        self._heard: OrderedDict[bytes, Link] = OrderedDict()  # by last use
        self._by_route: dict[Hashable, Link] = {}

    def __len__(self) -> int:
        """Return the number of links and of knocks that wait for an answer."""
        return len(self._knocked) + len(self._dialed) + len(self._heard)

    # --- what leaves ------------------------------------------------------------------------------------------------

    def knock(self, address: EngineAddress, to: RankId | None, first: Message) -> bytes:
        """Make what a dialed connection begins with; ``first`` follows when it is answered."""
        nonce = self._fresh(auth.NONCE_BYTES)
        self._knocked[nonce] = _Knocked(address, to, first)
        proof = self._secret.knock(self.me, nonce)
        return pack(self.me, "", messages.Knock(), lambda _body: proof)

    def pack(self, route: Hashable, message: Message, heard: float = 0.0) -> bytes | None:
        """Make an envelope for whoever is at the other end of a route; None where no link is."""
        link = self._by_route.get(route)
        return None if link is None else pack(self.me, link.peer.incarnation, message, link.prove, heard)

    def call_ended(self, address: EngineAddress) -> None:
        """Forget the connections dialed for a call that nobody has answered."""
        for nonce in [nonce for nonce, one in self._knocked.items() if one.address == address]:
            del self._knocked[nonce]

    def hung_up(self, route: Hashable) -> None:
        """Forget a dialed connection."""
        link = self._by_route.get(route)
        if link is not None and self._dialed.pop(link.name, None) is not None:
            del self._by_route[route]

    # --- what arrives -----------------------------------------------------------------------------------------------

    def admit(self, envelope: Envelope, route: Hashable, now: float, *, dialed: bool) -> AnyMessage | None:
        """Return the message that shall be acted upon; None when there is none. Raises NotAdmittedError.

        A Stale of another incarnation says that the process at the other end of a dialed link is a new one.
        """
        proof = envelope.proof
        if proof is None:
            raise NotAdmittedError(f"{envelope.sender} has no shared secret, {self.me} asks for one: {CURE}", tell=True)
        if proof.number == 0:
            return self._shake_hands(envelope, proof, route, now, dialed=dialed)
        link = (self._dialed if dialed else self._heard).get(proof.link)
        if link is None and not dialed:
            link = self._answered(envelope, proof, route, now)
            if link is None:
                gone = self._secret.gone(self.me, envelope.sender, proof.link)
                self._put(route, pack(self.me, envelope.sender.incarnation, messages.Stale(), lambda _body: gone))
                return None
        if link is None or not self._holds(link, envelope, proof):
            raise NotAdmittedError(f"an envelope in the name of {envelope.sender} is forged or damaged", tell=False)
        if proof.number <= link.received:
            self.repeated += 1
            return None
        link.received = proof.number
        if not dialed:
            self._heard.move_to_end(proof.link)
            self._move(link, route)
        return read_body(envelope)

    def _holds(self, link: Link, envelope: Envelope, proof: Proof) -> bool:
        mine = auth.mac(link.receive_key, proof.number, messages.proven(envelope.body, envelope.heard))
        names = link.peer == envelope.sender and envelope.to == self.me.incarnation
        return names and auth.same(mine, proof.mac)

    def _answered(self, envelope: Envelope, proof: Proof, route: Hashable, now: float) -> Link | None:
        """Open the link whose challenge is answered by this; None when the challenge is not ours, or too old."""
        if not self._challenges.answerable(envelope.sender, proof.link, now):
            return None
        there, back = self._secret.keys(envelope.sender, self.me, proof.link)
        link = Link(proof.link, envelope.sender, back, there, route, now)
        if not self._holds(link, envelope, proof):
            raise NotAdmittedError(f"an envelope in the name of {envelope.sender} is forged or damaged", tell=False)
        self._make_room(now)
        self._heard[proof.link] = link
        return link

    def _make_room(self, now: float) -> None:
        if len(self._heard) < MAX_LINKS:
            return
        oldest = next(iter(self._heard.values()))
        if now - oldest.born <= auth.CHALLENGE_LIFE:
            # Forgotten now, it could be opened again with the same envelopes.
            raise NotAdmittedError(f"{self.me} has {MAX_LINKS:,} connections of the last seconds", tell=True)
        del self._heard[oldest.name]
        if self._by_route.get(oldest.route) is oldest:
            del self._by_route[oldest.route]

    def _move(self, link: Link, route: Hashable) -> None:
        if link.route != route and self._by_route.get(link.route) is link:
            del self._by_route[link.route]
        link.route = route
        self._by_route[route] = link

    # --- handshakes -------------------------------------------------------------------------------------------------

    def _shake_hands(
        self, envelope: Envelope, proof: Proof, route: Hashable, now: float, *, dialed: bool
    ) -> AnyMessage | None:
        message = read_body(envelope)
        match message:
            case messages.Knock() if not dialed:
                self._challenge(envelope, proof, route, now)
                return None
            case messages.Challenge() if dialed:
                self._challenged(envelope, proof, route, now)
                return None
            case messages.Stale() if dialed:
                link = self._by_route.get(route)
                if link is not None and link.name == proof.link and self._is_gone(link, envelope, proof):
                    return message
        raise NotAdmittedError(f"a handshake in the name of {envelope.sender} is forged or damaged", tell=False)

    def _challenge(self, envelope: Envelope, proof: Proof, route: Hashable, now: float) -> None:
        dialer = envelope.sender
        if len(proof.link) != auth.NONCE_BYTES or not auth.same(self._secret.knock(dialer, proof.link).mac, proof.mac):
            raise NotAdmittedError(f"{dialer} and {self.me} have different shared secrets: {CURE}", tell=True)
        link = self._challenges.issue(dialer, proof.link, now)
        answer = self._secret.challenge(self.me, dialer, link)
        self._put(route, pack(self.me, dialer.incarnation, messages.Challenge(), lambda _body: answer))

    def _challenged(self, envelope: Envelope, proof: Proof, route: Hashable, now: float) -> None:
        nonce, listener = proof.link[: auth.NONCE_BYTES], envelope.sender
        knocked = self._knocked.get(nonce)
        if knocked is None:
            self.repeated += 1
            return
        if not auth.same(self._secret.challenge(listener, self.me, proof.link).mac, proof.mac):
            raise NotAdmittedError(f"{self.me} and {listener} have different shared secrets: {CURE}", tell=True)
        del self._knocked[nonce]
        if knocked.to not in (None, listener):
            raise NotAdmittedError(
                f"at the address of {knocked.to} lives {listener} now: it has started anew, or the address is another's",
                tell=True,
            )
        there, back = self._secret.keys(self.me, listener, proof.link)
        link = self._dialed[proof.link] = self._by_route[route] = Link(proof.link, listener, there, back, route, now)
        self._put(route, pack(self.me, listener.incarnation, knocked.first, link.prove))

    def _is_gone(self, link: Link, envelope: Envelope, proof: Proof) -> bool:
        sender = envelope.sender
        return (sender.engine, sender.rank) == (link.peer.engine, link.peer.rank) and auth.same(
            self._secret.gone(sender, self.me, proof.link).mac, proof.mac
        )
