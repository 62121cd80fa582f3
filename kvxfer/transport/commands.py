"""What is put into a mover's mailbox, and by whom. Blocks are named by a request's packed tables (``layout/tables``).

A ``Step`` is carried by vLLM from the scheduler's process to the workers, in one string of bytes (``connector/metadata.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvxfer.addresses import shown_at
from kvxfer.protocol.ids import HandoffId, shown

if TYPE_CHECKING:
    from kvxfer.layout.card import RankCard
    from kvxfer.platform import Fence
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import AnyMessage


LESS = (0, 1, 2)
"""By how many tokens a prefill leg's prompt may be longer than what decode wants moved, which is decode's prompt less one.

So decode's prompt may be a token longer or shorter than prefill's, as where a proxy or a template adds one on one side.
"""


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine's control channel listens, and which engine is expected there (empty: any)."""

    host: str
    port: int
    engine: str
    front: bool = False
    """Meant is the engine's scheduler process itself, which lives at this address, and not its ranks."""

    def __str__(self) -> str:
        """For messages that people read."""
        return f"{shown(self.engine) or 'an engine'} at {shown_at(shown(self.host), self.port)}"


# --- from the engine thread: what a scheduler decided, made by the scheduler half and carried by vLLM ---------------------


class SourceStart(msgspec.Struct, frozen=True):
    """A request whose KV another engine wants was admitted; ``heard`` is when (monotonic seconds).

    ``prompt`` digests everything that shapes the KV of the prompt, of the prompt without its last token, and so on; empty when
    it is not known. ``trace``: see HandoffRecord.
    """

    handoff: HandoffId
    request_id: str
    prompt_tokens: int
    heard: float
    prompt: tuple[bytes, ...] = ()
    trace: str = ""


class SourceProgress(msgspec.Struct, frozen=True):
    """After this step positions [0, final) are final; ``blocks`` (packed) extend the request's block tables."""

    request_id: str
    blocks: bytes
    final: int


class SourceFinish(msgspec.Struct, frozen=True):
    """The engine is done with a source's request; ``held``: it keeps the blocks until told otherwise.

    ``token``: of blocks that the request does not have any more (see Step). ``withheld``: progress that was not told before,
    since the blocks could not be pinned; they are held now.
    """

    request_id: str
    aborted: str | None
    held: bool
    token: int = 0
    withheld: SourceProgress | None = None


class SourceHeld(msgspec.Struct, frozen=True):
    """Blocks of no request are kept for the READ of a handoff until ``until``: positions [0, tokens) are final in them.

    ``computing``: this step may still write into them, so that its own fence has to pass first.
    """

    handoff: HandoffId
    tokens: int
    blocks: bytes
    until: float
    computing: bool


class SinkOpen(msgspec.Struct, frozen=True):
    """``blocks`` (packed tables) were allocated for positions [start, end) of a request that another engine prefills.

    ``prompt`` digests everything that shapes the KV of positions [0, end); empty when it is not known. ``mode`` is who moves
    it, where that is not as the engine does. ``trace``: see HandoffRecord.
    """

    handoff: HandoffId
    request_id: str
    source: EngineAddress
    start: int
    end: int
    blocks: bytes
    heard: float
    allocated: float
    prompt: bytes = b""
    mode: str = ""
    trace: str = ""


class SinkCancel(msgspec.Struct, frozen=True):
    """The engine wants a sink's request no more."""

    request_id: str
    reason: str


class Step(msgspec.Struct):
    """What one engine step changes. An empty step is not sent.

    ``introduced``: engines to stay connected with from now on.
    ``tokens``: preempted request → under what its blocks are kept for writes that still read them, see SourceQuiet.
    ``bell``: in the first of all, what to ring when there are results (``connector/idling.py``).
    """

    preempted: list[str] = []
    tokens: dict[str, int] = {}
    started: list[SourceStart] = []
    finished: list[SourceFinish] = []
    progress: list[SourceProgress] = []
    opened: list[SinkOpen] = []
    cancelled: list[SinkCancel] = []
    introduced: list[EngineAddress] = []
    held: list[SourceHeld] = []

    bell: str = ""

    @property
    def computing(self) -> bool:
        """Whether something of this step waits for the fence behind its own work."""
        return bool(self.progress) or any(one.computing for one in self.held)

    def __bool__(self) -> bool:
        """Tell whether anything changed."""
        changes = self.preempted or self.started or self.finished or self.progress or self.opened or self.cancelled
        return bool(changes or self.introduced or self.held)


@dataclass(frozen=True, slots=True)
class StepBegin:
    """A step's changes. ``fence`` passes when everything launched before this step has finished."""

    step: Step
    fence: Fence


@dataclass(frozen=True, slots=True)
class StepEnd:
    """``fence`` passes when the last begun step's own work has finished."""

    fence: Fence


# --- from the control thread ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """All ranks of an engine are connected."""

    address: EngineAddress
    ranks: tuple[RankId, ...]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An engine's ranks cannot be connected, or refuse us."""

    address: EngineAddress
    reason: str


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A session with a worker rank was opened."""

    rank: RankId
    card: RankCard


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A session ended; the peer may have posted until ``granted_until``. ``dead``: its process is known to have ended."""

    rank: RankId
    reason: str
    granted_until: float
    dead: bool = False


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """The process of a peer that was lost before is known to have ended."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class Leased:
    """The rank that receives this may post against a peer's memory until ``until``; the peer lived after ``asked``."""

    rank: RankId
    until: float
    asked: float


@dataclass(frozen=True, slots=True)
class Inbound:
    """A peer's message about a handoff."""

    frm: RankId
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Stop:
    """End the mover."""


Command = StepBegin | StepEnd | Connected | Unreachable | PeerUp | PeerLost | PeerEnded | Leased | Inbound | Stop
