"""Proof that whoever speaks on the control channel knows the engines' shared secret, and speaks now.

Theory of operation
-------------------
A *link* is one dialed connection between two processes, however often its socket is made anew. It begins with a handshake::

    dialer                                              listener
    Knock      link = d                mac(knock)   ──▶            d: 16 random bytes
               ◀──  Challenge    link = d + c       mac(challenge) c: when it was issued, and a tag over that, the dialer and d
    any        link = d + c, number 1  mac(message) ──▶            the link is open

Every proof is an HMAC-SHA256 under a key that is derived from the secret, the wire version, the *full* identity of both
processes (engine, incarnation, rank) and what the key is for; a link's two keys, one for each direction, also from d and c.
A message's mac covers its number and its body. So everything that is acted upon is covered: sender, recipient, version,
direction, connection, order, content. Replayed, an envelope meets one of these:

* *At another process* (another rank, engine or incarnation): the identities differ, and the tag in c is of a key that the
  listener drew when it started and never tells.
* *At the same process, on any connection*: numbers only rise, so a number that was seen is dropped without a word. The same
  drop makes a message that a broken connection delivers twice harmless. There is no window for late ones: the machines
  above were built on an ordered session, and take a lost message better than one that comes after its successor.
* *At the same process, later, when the link has been forgotten*: a link is forgotten no earlier than ``CHALLENGE_LIFE``
  after its challenge was issued, and then the challenge opens nothing any more.
* *Before there is a session*: the same. Without an open link nothing is answered but a Knock with a valid proof, which gets
  a challenge and nothing else. The challenge is not remembered: memory is only spent on who has answered one.

No clock is compared with another host's: the age of c is measured by the clock of the process that issued it.

A process that does not know a link says so (``gone``): otherwise a peer would take five seconds of silence to notice that the
process at the address is a new one. That is never true of a link and false of it later, so saying it again harms nothing.

What is not protected: nothing is encrypted. Who sees the traffic sees the prompts' block ids and the engines' layouts, and who
sits on the path may drop and delay, as any cable may. All who know the secret are equal, and may call themselves any engine.
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from kvxfer.protocol.messages import WIRE_VERSION, Proof

if TYPE_CHECKING:
    from kvxfer.protocol.ids import RankId

MIN_SECRET_BYTES: Final = 16
"""Shortest secret: whoever records a handshake can try secrets at leisure."""

CHALLENGE_LIFE: Final = 30.0
"""Seconds within which a challenge must be answered, by the clock of the process that issued it."""

NONCE_BYTES: Final = 16
LINK_BYTES: Final = NONCE_BYTES + 8 + 16

_NUMBER = struct.Struct(">Q")
_ISSUED = struct.Struct(">d")


class Secret:
    """What the engines share. Never shown."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < MIN_SECRET_BYTES:
            raise ValueError(f"a secret of {len(value)} bytes; at least {MIN_SECRET_BYTES} are needed")
        self._value = value

    def __repr__(self) -> str:
        return "Secret(…)"

    def _key(self, use: str, *over: object) -> bytes:
        return hmac.digest(self._value, msgspec.msgpack.encode(["kvxfer", WIRE_VERSION, use, *over]), "sha256")

    def knock(self, dialer: RankId, nonce: bytes) -> Proof:
        """Prove a Knock: worthless but for a challenge, which only tells those who already know."""
        return Proof(nonce, 0, self._key("knock", dialer, nonce))

    def challenge(self, listener: RankId, dialer: RankId, link: bytes) -> Proof:
        """Prove a Challenge: that the listener, too, knows the secret, and answers this very Knock."""
        return Proof(link, 0, self._key("challenge", listener, dialer, link))

    def gone(self, listener: RankId, dialer: RankId, link: bytes) -> Proof:
        """Prove that the listener knows of no such link, and never will."""
        return Proof(link, 0, self._key("gone", listener, dialer, link))

    def keys(self, dialer: RankId, listener: RankId, link: bytes) -> tuple[bytes, bytes]:
        """Derive a link's keys: (what the dialer says, what the listener says)."""
        return self._key("there", dialer, listener, link), self._key("back", dialer, listener, link)


def mac(key: bytes, number: int, body: bytes | msgspec.Raw) -> bytes:
    """Prove one message of a link."""
    return hmac.digest(key, b"".join((_NUMBER.pack(number), body)), "sha256")


def same(mine: bytes, theirs: bytes) -> bool:
    """Compare macs in a time that tells nothing."""
    return hmac.compare_digest(mine, theirs)


class Challenges:
    """The challenges of one listening process. ``key`` is drawn at its start and told to nobody."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def issue(self, dialer: RankId, nonce: bytes, now: float) -> bytes:
        """Make the link that a dialer shall use."""
        issued = _ISSUED.pack(now)
        return nonce + issued + self._tag(dialer, nonce, issued)

    def answerable(self, dialer: RankId, link: bytes, now: float) -> bool:
        """Tell whether this process challenged this dialer with this link, and not too long ago."""
        if len(link) != LINK_BYTES:
            return False
        nonce, issued, tag = link[:NONCE_BYTES], link[NONCE_BYTES : NONCE_BYTES + 8], link[NONCE_BYTES + 8 :]
        if not same(self._tag(dialer, nonce, issued), tag):
            return False
        return now - float(_ISSUED.unpack(issued)[0]) <= CHALLENGE_LIFE

    def _tag(self, dialer: RankId, nonce: bytes, issued: bytes) -> bytes:
        return hmac.digest(self._key, msgspec.msgpack.encode([dialer, nonce, issued]), "sha256")[:16]
