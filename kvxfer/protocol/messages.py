"""What crosses the control channel, and the one notification that follows data over NIXL.

msgpack with a schema (msgspec tagged unions), a size limit, and the wire version outside everything else, so that two
versions which cannot understand each other at least say so. Nothing is ever unpickled.

An envelope names its sender and the incarnation that it is meant for: a socket library may deliver what was meant for a
process that has since been replaced at the same address, and acting on it would be acting for the dead.

Times are seconds of the *sender's* monotonic clock; receivers only echo them. Positions are tokens. Block ids are
little-endian int32, packed in bytes: they are forwarded whole and looked at only where descriptors are made.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol.ids import HandoffId, RankId

WIRE_VERSION = 1
"""Raised whenever a message changes in a way that the previous version cannot read."""

MAX_MESSAGE_BYTES = 8 << 20
"""Largest envelope accepted: two million block ids, or any card."""


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything that is sent over the control channel."""


# --- who is there -----------------------------------------------------------------------------------------------------


class RankAddress(msgspec.Struct, frozen=True):
    """Where one worker rank's control thread listens. An empty host means: where the engine itself was reached."""

    rank: int
    incarnation: str
    tp_rank: int
    pp_rank: int
    host: str
    port: int


class WhoIs(Message, frozen=True, tag="whois"):
    """Asks an engine's control address for its directory. Needs no session."""


class Directory(Message, frozen=True, tag="directory"):
    """An engine's ranks. ``ready`` is false until every rank has reported; ask again then."""

    engine: str
    tp_size: int
    pp_size: int
    ready: bool
    ranks: tuple[RankAddress, ...]


class Hello(Message, frozen=True, tag="hello"):
    """Opens a session. ``card`` is the rank card (see ``kvxfer.layout.card``), empty from a scheduler process.

    ``interval`` and ``timeout`` are the sender's, in seconds: two sides that would think each other dead refuse at once.
    """

    card: dict[str, Any]
    sent: float
    interval: float = 0.0
    timeout: float = 0.0


class Welcome(Message, frozen=True, tag="welcome"):
    """Accepts a session; the same two fields of the accepting rank, and the stamp of the Hello it answers."""

    card: dict[str, Any]
    sent: float
    echo: float
    lease: float
    interval: float = 0.0
    timeout: float = 0.0


class Refused(Message, frozen=True, tag="refused"):
    """Ends a session before it began, with a reason that names both sides' values and the cure."""

    reason: str


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Proves life, and grants: the receiver may post until ``lease`` seconds after the moment ``echo`` at which it asked."""

    sent: float
    echo: float
    lease: float


class Stale(Message, frozen=True, tag="stale"):
    """Answers an envelope meant for an earlier incarnation, or one without a session: that life is over."""


# --- one handoff ------------------------------------------------------------------------------------------------------


class Expect(Message, frozen=True, tag="expect"):
    """Sink to source: a decode leg exists, though it has no blocks yet; keep the KV for ``ttl`` seconds."""

    handoff: HandoffId
    ttl: float


class Register(Message, frozen=True, tag="register"):
    """Sink to source: these blocks of mine shall receive positions [start, end) of the handoff.

    ``blocks`` covers the span from the block that contains ``start``. In pull mode the same message asks for the source's
    blocks; ``asked`` is when, and sending it again renews the lease that the source's Grant gives.

    ``prompt`` digests everything that shapes the prompt's KV: only a source with an equal one may answer; empty for unknown.

    ``again`` marks what was said before. It never begins anything: overtaken by the end of its attempt, it could otherwise
    register blocks that are the engine's again, with a later prefill of the same name.
    """

    handoff: HandoffId
    attempt: int
    mode: str
    start: int
    end: int
    blocks: bytes
    asked: float
    again: bool = False
    prompt: bytes = b""


class Grant(Message, frozen=True, tag="grant"):
    """Source to sink (pull): my ``blocks`` hold positions [0, tokens) and stay until ``lease`` seconds after ``asked``."""

    handoff: HandoffId
    attempt: int
    generation: int
    tokens: int
    blocks: bytes
    asked: float
    lease: float


class Seal(Message, frozen=True, tag="seal"):
    """Source to sink (push): for positions [0, tokens) what was written under ``generation`` is the truth."""

    handoff: HandoffId
    attempt: int
    generation: int
    tokens: int


class Cancel(Message, frozen=True, tag="cancel"):
    """Sink to source: stop; answer when nothing of this attempt is or will be in flight."""

    handoff: HandoffId
    attempt: int
    reason: str


class CancelAck(Message, frozen=True, tag="cancelack"):
    """Source to sink: nothing of this attempt is or will be in flight."""

    handoff: HandoffId
    attempt: int


class Release(Message, frozen=True, tag="release"):
    """Sink to source: nothing (more) is wanted; the blocks may go. Also from a scheduler that never registered."""

    handoff: HandoffId
    reason: str


class Failed(Message, frozen=True, tag="failed"):
    """Source to sink: this attempt will not succeed, and nothing of it is or will be in flight."""

    handoff: HandoffId
    attempt: int
    reason: str


# --- for people -------------------------------------------------------------------------------------------------------


class ReportAsk(Message, frozen=True, tag="reportask"):
    """Asks a rank for its handoff records. Needs no session."""

    last: int


class Report(Message, frozen=True, tag="report"):
    """A rank's handoff records, oldest first, and its card."""

    rank: int
    card: dict[str, Any]
    counters: dict[str, int]
    records: list[dict[str, Any]]


AnyMessage = (
    WhoIs
    | Directory
    | Hello
    | Welcome
    | Refused
    | Heartbeat
    | Stale
    | Expect
    | Register
    | Grant
    | Seal
    | Cancel
    | CancelAck
    | Release
    | Failed
    | ReportAsk
    | Report
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """``body`` is a packed message. ``to`` is the incarnation meant, empty while the sender does not know one."""

    wire: int
    sender: RankId
    to: str
    body: msgspec.Raw


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The notification that follows a WRITE: positions [start, end) of the attempt have landed, from this generation."""

    handoff: HandoffId
    attempt: int
    generation: int
    rank: int
    start: int
    end: int


_encoder = msgspec.msgpack.Encoder()
_body = msgspec.msgpack.Decoder(AnyMessage)
_envelope = msgspec.msgpack.Decoder(Envelope)
_wire = msgspec.msgpack.Decoder(list[msgspec.Raw])
_written = msgspec.msgpack.Decoder(Written)


def pack(sender: RankId, to: str, message: Message) -> bytes:
    """Put a message into its envelope."""
    packed = _encoder.encode(Envelope(WIRE_VERSION, sender, to, msgspec.Raw(_encoder.encode(message))))
    if len(packed) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(packed):,} bytes is above the limit of {MAX_MESSAGE_BYTES:,}"
        )
    return packed


def unpack(packed: bytes) -> tuple[Envelope, AnyMessage]:
    """Open an envelope. Raises RemoteProtocolError for anything that is not one of ours, saying what is wrong with it."""
    if len(packed) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"message of {len(packed):,} bytes is above the limit of {MAX_MESSAGE_BYTES:,}")
    try:
        envelope = _envelope.decode(packed)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(_why_not_an_envelope(packed, error)) from None
    if envelope.wire != WIRE_VERSION:
        raise RemoteProtocolError(_wire_mismatch(envelope.wire))
    try:
        return envelope, _body.decode(envelope.body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message from {envelope.sender}: {error}") from None


def _wire_mismatch(theirs: int) -> str:
    return (
        f"the peer speaks wire version {theirs}, this process {WIRE_VERSION}: "
        "install kvxfer releases with the same wire version on both engines"
    )


def _why_not_an_envelope(packed: bytes, error: Exception) -> str:
    """A future version may change the envelope itself, but never that the wire version comes first in an array."""
    try:
        theirs = msgspec.msgpack.decode(_wire.decode(packed)[0], type=int)
    except (msgspec.MsgspecError, IndexError, RecursionError):
        return f"not a kvxfer message: {error}"
    return _wire_mismatch(theirs) if theirs != WIRE_VERSION else f"malformed envelope: {error}"


def pack_written(written: Written) -> bytes:
    """Encode a write's notification."""
    return _encoder.encode(written)


def unpack_written(packed: bytes) -> Written:
    """Decode a write's notification. Raises RemoteProtocolError when it is not one."""
    if len(packed) > MAX_ID_BYTES:
        raise RemoteProtocolError(f"notification of {len(packed):,} bytes is above the limit of {MAX_ID_BYTES:,}")
    try:
        return _written.decode(packed)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed notification: {error}") from None


MAX_ID_BYTES = 4096
"""Largest notification: an id of 512 characters and five numbers fit several times over."""
