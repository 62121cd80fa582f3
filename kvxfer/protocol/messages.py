"""What crosses the control channel, and the one notification that follows data over NIXL.

msgpack with a schema (msgspec tagged unions) and limits on every size and number; nothing is ever unpickled. What a field may
hold is said at the field: numbers that become deadlines are finite, texts that people read are cut and made printable
when they are read (``ids.shown``).

**What never changes**, so that two versions which cannot understand each other at least say so: everything is one msgpack
array whose first element is the wire version, an integer; and ``[version, "refused", reason]`` is a refusal in every version.

An envelope names its sender and the incarnation that it is meant for: a socket library may deliver what was meant for a
process that has since been replaced at the same address, and acting on it would be acting for the dead.

``proof`` is there where engines share a secret (``auth``); it is checked before the body is read.

Times are seconds of the *sender's* monotonic clock; receivers only echo them. Positions are tokens. Block tables are packed
in bytes, words of four (``layout/tables``): they are forwarded whole and looked at only where descriptors are made.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol.fields import MAX_MESSAGE_BYTES, MAX_RANKS, Blocks, Card, Count, Duration, Position, Stamp
from kvxfer.protocol.ids import HandoffId, Name, RankId, shown

if TYPE_CHECKING:
    from collections.abc import Callable

WIRE_VERSION = 7
"""Raised whenever a message changes in a way that the previous version cannot read, or means something else by."""

MAX_CARD_BYTES = 1 << 20
"""Largest Hello and Welcome: a card with its NIXL metadata, which a process keeps of every peer."""

MAX_SMALL_BYTES = 64 << 10
"""Largest of all other messages that carry no blocks, no records and no directory."""

MAX_RECORDS = 4096
"""Records in one report: some 0.5 KB each, of long prompts up to 8 KB; what does not fit into a message is left out."""


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything that is sent over the control channel."""


# --- who is there -----------------------------------------------------------------------------------------------------


class RankAddress(msgspec.Struct, frozen=True):
    """Where one worker rank's control thread listens. An empty host means: where the engine itself was reached."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    incarnation: Name
    tp_rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    pp_rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]


class Knock(Message, frozen=True, tag="knock"):
    """Asks for a challenge, on a connection that was just dialed, where engines share a secret (``auth``)."""


class Challenge(Message, frozen=True, tag="challenge"):
    """Answers a Knock: the proof's link names this connection from now on."""


class WhoIs(Message, frozen=True, tag="whois"):
    """Asks an engine's control address for its directory. Needs no session."""


class Directory(Message, frozen=True, tag="directory"):
    """An engine's ranks. ``ready`` is false until every rank has reported; ask again then."""

    engine: Name
    tp_size: Annotated[int, Meta(gt=0, le=MAX_RANKS)]
    pp_size: Annotated[int, Meta(gt=0, le=MAX_RANKS)]
    ready: bool
    ranks: Annotated[tuple[RankAddress, ...], Meta(max_length=MAX_RANKS)]


class Hello(Message, frozen=True, tag="hello"):
    """Opens a session. ``card`` is the rank card (see ``kvxfer.layout.card``), empty from a scheduler process.

    ``interval`` and ``timeout`` are the sender's, in seconds: two sides that would think each other dead refuse at once.
    ``port`` is where the sender's own process listens, on the host from which this comes; 0 where it does not say.
    """

    card: Card
    sent: Stamp
    interval: Duration = 0.0
    timeout: Duration = 0.0
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0


class Welcome(Message, frozen=True, tag="welcome"):
    """Accepts a session; the same two fields of the accepting rank, and the stamp of the Hello it answers."""

    card: Card
    sent: Stamp
    echo: Stamp
    lease: Duration
    interval: Duration = 0.0
    timeout: Duration = 0.0


class Refused(Message, frozen=True, tag="refused"):
    """Ends a session before it began, with a reason that names both sides' values and the cure."""

    reason: str


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Proves life, and grants: the receiver may post until ``lease`` seconds after the moment ``echo`` at which it asked."""

    sent: Stamp
    echo: Stamp
    lease: Duration


class Stale(Message, frozen=True, tag="stale"):
    """Answers an envelope meant for an earlier incarnation, or one without a session: that life is over."""


class Approach(Message, frozen=True, tag="approach"):
    """Of the NIXL connection that its asker is about to make: the other's agent must make progress for it meanwhile.

    ``ask``: will you? ``come``: from now on I do; this answers what was asked at ``asked``. ``done``: you need not any more.
    """

    what: Literal["ask", "come", "done"]
    asked: Stamp


# --- one handoff ------------------------------------------------------------------------------------------------------


class Expect(Message, frozen=True, tag="expect"):
    """Sink to source: a decode leg exists, though it has no blocks yet; keep the KV for ``ttl`` seconds."""

    handoff: HandoffId
    ttl: Duration


class Register(Message, frozen=True, tag="register"):
    """Sink to source: these blocks of mine shall receive positions [start, end) of the handoff.

    ``blocks`` covers the span from the block that contains ``start``. In pull mode the same message asks for the source's
    blocks; ``asked`` is when, and sending it again renews the lease that the source's Grant gives.

    ``prompt`` digests everything that shapes the KV of positions [0, end): only a source of these may answer; empty for unknown.

    ``again`` marks what was said before. It never begins anything: overtaken by the end of its attempt, it could otherwise
    register blocks that are the engine's again, with a later prefill of the same name.
    """

    handoff: HandoffId
    attempt: Count
    mode: Annotated[str, Meta(max_length=16)]
    start: Position
    end: Position
    blocks: Blocks
    asked: Stamp
    again: bool = False
    prompt: Annotated[bytes, Meta(max_length=64)] = b""


class Grant(Message, frozen=True, tag="grant"):
    """Source to sink (pull): my ``blocks`` hold positions [0, tokens) and stay until ``lease`` seconds after ``asked``."""

    handoff: HandoffId
    attempt: Count
    generation: Count
    tokens: Position
    blocks: Blocks
    asked: Stamp
    lease: Duration


class Posted(Message, frozen=True, tag="posted"):
    """Source to sink (push): so many writes of this attempt have been posted. A hint: look closely until as many have notified.

    All of them are counted, so that one that is lost or doubled changes nothing, and one that was not posted can be taken back.
    """

    handoff: HandoffId
    attempt: Count
    writes: Count


class Seal(Message, frozen=True, tag="seal"):
    """Source to sink (push): for positions [0, tokens) what was written under ``generation`` is the truth."""

    handoff: HandoffId
    attempt: Count
    generation: Count
    tokens: Position


class Cancel(Message, frozen=True, tag="cancel"):
    """Sink to source: stop; answer when nothing of this attempt is or will be in flight."""

    handoff: HandoffId
    attempt: Count
    reason: str


class CancelAck(Message, frozen=True, tag="cancelack"):
    """Source to sink: nothing of this attempt is or will be in flight."""

    handoff: HandoffId
    attempt: Count


class Release(Message, frozen=True, tag="release"):
    """Sink to source: nothing (more) is wanted; the blocks may go. Also from a scheduler that never registered."""

    handoff: HandoffId
    reason: str


class Failed(Message, frozen=True, tag="failed"):
    """Source to sink: this attempt will not succeed, and nothing of it is or will be in flight."""

    handoff: HandoffId
    attempt: Count
    reason: str


# --- reuse: between the scheduler processes of two engines ---------------------------------------------------------------


class Ask(Message, frozen=True, tag="ask"):
    """Prefill to decode: say what you hold of this conversation, beyond the positions [0, ``start``) that I have.

    ``chain`` are its digests (``protocol/chain``) behind ``start``. What is held is kept for the READ of this handoff.
    """

    handoff: HandoffId
    start: Position
    chain: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]
    asked: Stamp


class Held(Message, frozen=True, tag="held"):
    """Decode to prefill: positions up to ``tokens`` are there, and stay until ``lease`` seconds after ``asked``.

    0 tokens when nothing is there, or it cannot be kept: ``reason`` says why.
    """

    handoff: HandoffId
    tokens: Position
    asked: Stamp
    lease: Duration
    reason: str = ""


# --- for people -------------------------------------------------------------------------------------------------------


class ReportAsk(Message, frozen=True, tag="reportask"):
    """Asks a rank for its handoff records. Needs no session."""

    last: Count


class Report(Message, frozen=True, tag="report"):
    """A rank's handoff records, oldest first, and its card. ``now``: when that was so, by the clock of the records."""

    rank: Annotated[int, Meta(ge=-1, lt=MAX_RANKS)]
    card: Card
    counters: Annotated[dict[str, int], Meta(max_length=1000)]
    records: Annotated[list[dict[str, Any]], Meta(max_length=MAX_RECORDS)]
    now: Stamp = 0.0


AnyMessage = (
    Knock
    | Challenge
    | WhoIs
    | Directory
    | Hello
    | Welcome
    | Refused
    | Heartbeat
    | Stale
    | Approach
    | Expect
    | Register
    | Grant
    | Posted
    | Seal
    | Cancel
    | CancelAck
    | Release
    | Failed
    | Ask
    | Held
    | ReportAsk
    | Report
)


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """That the sender knows the secret: see ``auth``. ``number`` 0 is the handshake's; then each message's is higher."""

    link: Annotated[bytes, Meta(max_length=64)]
    number: Count
    mac: Annotated[bytes, Meta(max_length=32)]


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """``body`` is a packed message. ``to`` is the incarnation meant, empty while the sender does not know one.

    ``heard``, in what belongs to a session, is the latest stamp of the receiver's that the sender has heard. So a receiver that
    has ended a session, and opened another with the same process since, knows a word of the old one by a stamp from before.
    """

    wire: int
    sender: RankId
    to: Name
    body: msgspec.Raw
    proof: Proof | None = None
    heard: Stamp = 0.0


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """What is answered when no envelope can be: another wire version, no secret or another one. Read by every version."""

    wire: int
    what: Literal["refused"]
    reason: str


class WireVersionError(RemoteProtocolError):
    """An envelope of another wire version. ``sender`` is who says that it is its sender, as far as that can be read."""

    def __init__(self, theirs: int, sender: RankId | None, mine: str = "this process") -> None:
        self.theirs = theirs
        self.sender = sender
        super().__init__(
            f"{sender or 'the peer'} speaks wire version {theirs}, {mine} speaks {WIRE_VERSION}: "
            "install kvxfer releases with the same wire version on both engines"
        )


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The notification that follows a WRITE: positions [start, end) of the attempt have landed, from this generation."""

    handoff: HandoffId
    attempt: Count
    generation: Count
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    start: Position
    end: Position


_HEARD = struct.Struct("<d")
_encoder = msgspec.msgpack.Encoder()
_body = msgspec.msgpack.Decoder(AnyMessage)
_envelope = msgspec.msgpack.Decoder(Envelope)
_refusal = msgspec.msgpack.Decoder(Refusal)
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_sender = msgspec.msgpack.Decoder(RankId)
_written = msgspec.msgpack.Decoder(Written)


def pack(
    sender: RankId,
    to: str,
    message: Message,
    prove: Callable[[bytes], Proof] | None = None,
    heard: float = 0.0,
) -> bytes:
    """Put a message into its envelope; ``prove`` makes the proof for what is ``proven``."""
    body = msgspec.Raw(_encoder.encode(message))
    proof = None if prove is None else prove(proven(body, heard))
    packed = _encoder.encode(Envelope(WIRE_VERSION, sender, to, body, proof, heard))
    if len(packed) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(packed):,} bytes is above the limit of {MAX_MESSAGE_BYTES:,}"
        )
    return packed


def proven(body: msgspec.Raw, heard: float) -> bytes:
    """Return the bytes of an envelope that a proof covers, beside the names that its key stands for."""
    return b"".join((_HEARD.pack(heard), body))


def pack_refusal(reason: str) -> bytes:
    """Say to a peer of any version, with or without a secret, why it is not listened to."""
    return _encoder.encode(Refusal(WIRE_VERSION, "refused", reason))


def open_envelope(packed: bytes) -> Envelope | Refusal:
    """Open an envelope, or a refusal, without reading its message.

    Raises WireVersionError for another version's, RemoteProtocolError for anything else that is not one of ours.
    """
    if len(packed) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"message of {len(packed):,} bytes is above the limit of {MAX_MESSAGE_BYTES:,}")
    try:
        envelope = _envelope.decode(packed)
    except (msgspec.MsgspecError, RecursionError) as error:
        return _not_an_envelope(packed, error)
    if envelope.wire != WIRE_VERSION:
        raise WireVersionError(envelope.wire, envelope.sender)
    return envelope


def read_body(envelope: Envelope) -> AnyMessage:
    """Read the message in an envelope. Raises RemoteProtocolError that says what is wrong with it."""
    try:
        message = _body.decode(envelope.body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message from {envelope.sender}: {shown(str(error), 300)}") from None
    size = memoryview(envelope.body).nbytes
    if size > MAX_SMALL_BYTES and size > (limit := _LIMITS.get(type(message), MAX_SMALL_BYTES)):
        what = type(message).__name__
        raise RemoteProtocolError(f"{what} of {size:,} bytes from {envelope.sender} is above its limit of {limit:,}")
    if isinstance(message, _WITH_A_REASON):
        if not message.reason.isprintable() or len(message.reason) > MAX_REASON:
            message = msgspec.structs.replace(message, reason=shown(message.reason, MAX_REASON))
    elif isinstance(message, (Register, Grant)) and len(message.blocks) % 4:
        raise RemoteProtocolError(
            f"{envelope.sender} names blocks in {len(message.blocks)} bytes: ids are of four each"
        )
    return message


def unpack(packed: bytes) -> tuple[Envelope, AnyMessage]:
    """Open an envelope whose proof nobody asks for, and read it. A refusal, too, is raised as RemoteProtocolError."""
    envelope = open_envelope(packed)
    if isinstance(envelope, Refusal):
        raise RemoteProtocolError(envelope.reason)
    return envelope, read_body(envelope)


MAX_REASON = 2000
"""Characters of a peer's reason that are kept."""

_WITH_A_REASON = (Refused, Cancel, Release, Failed, Held)

_LIMITS: dict[type, int] = {
    Hello: MAX_CARD_BYTES,
    Welcome: MAX_CARD_BYTES,
    Directory: MAX_CARD_BYTES,
    Register: MAX_MESSAGE_BYTES,
    Grant: MAX_MESSAGE_BYTES,
    Ask: MAX_MESSAGE_BYTES,
    Report: MAX_MESSAGE_BYTES,
}


def _not_an_envelope(packed: bytes, error: Exception) -> Refusal:
    """Return the refusal that this is; otherwise raise why it is nothing, or that it is another version's."""
    try:
        refusal = _refusal.decode(packed)
        return Refusal(refusal.wire, refusal.what, shown(refusal.reason, MAX_REASON))
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        parts = _parts.decode(packed)
        theirs = msgspec.msgpack.decode(parts[0], type=int)
    except (msgspec.MsgspecError, IndexError, RecursionError):
        raise RemoteProtocolError(f"not a kvxfer message: {shown(str(error), 300)}") from None
    if theirs == WIRE_VERSION:
        raise RemoteProtocolError(f"malformed envelope: {shown(str(error), 300)}") from None
    sender = None
    with contextlib.suppress(msgspec.MsgspecError, IndexError, RecursionError):
        sender = _sender.decode(parts[1])
    raise WireVersionError(theirs, sender) from None


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
        raise RemoteProtocolError(f"malformed notification: {shown(str(error), 300)}") from None


MAX_ID_BYTES = 4096
"""Largest notification: an id of 512 characters and five numbers fit several times over."""
