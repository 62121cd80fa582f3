"""What the machines ask their driver to do. The driver executes every action, in order, before it feeds the next event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``to`` over the control channel; if that session is gone, drop it."""

    to: RankId
    message: Message


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Write positions [start, end) from the source's blocks into the sink's, notify, and report back under ``transfer``.

    The lease that allows it ends at ``until``: the driver looks at the clock again right before it posts.

    ``source_blocks`` are the source's packed tables, ``registered`` what the sink registered for the positions ``span``: packed
    tables of its blocks, or ids of slots of its staging area.
    """

    transfer: int
    to: RankId
    handoff: HandoffId
    attempt: int
    generation: int
    start: int
    end: int
    source_blocks: bytes
    registered: bytes
    span: tuple[int, int]
    until: float


@dataclass(frozen=True, slots=True)
class PostRead:
    """Read positions [start, end) out of the source's blocks into the sink's, and report back under ``transfer``.

    Blocks are named as in ``PostWrite``.
    """

    transfer: int
    frm: RankId
    handoff: HandoffId
    attempt: int
    start: int
    end: int
    source_blocks: bytes
    registered: bytes
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Make the keys of this rank's memory others than they were, so that nothing posted under the old ones lands any more.

    When it is done, the driver fails every transfer of this rank that was not terminal, and calls ``Sink.revoked``.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class SourceQuiet:
    """Nothing reads any more from the blocks that a request had before the preemption, or end, that gave this ``token``."""

    token: int


@dataclass(frozen=True, slots=True)
class SourceFinished:
    """The engine may have the source's blocks back (vLLM: finished_sending)."""

    handoff: HandoffId
    request_id: str


@dataclass(frozen=True, slots=True)
class SinkFinished:
    """The sink's blocks are the engine's again (vLLM: finished_recving).

    ``reason`` is None when all positions are valid; otherwise none of the registered positions counts, and it says why.
    """

    handoff: HandoffId
    request_id: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Note:
    """A moment worth recording: ``what`` is a stage name of the handoff records."""

    side: str
    handoff: HandoffId
    what: str
    detail: str = ""


Action = Send | PostWrite | PostRead | Revoke | SourceQuiet | SourceFinished | SinkFinished | Note
