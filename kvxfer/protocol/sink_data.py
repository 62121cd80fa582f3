"""What a sink remembers of one handoff: its own request, and what each source rank contributes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.protocol.sink_states import State

if TYPE_CHECKING:
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.protocol.intervals import IntervalSet


@dataclass(slots=True)
class Part:
    """What one source rank contributes: its data by generation, its seal, and whether it still may write."""

    blocks: bytes = b""  # what is registered with it
    valid: dict[int, IntervalSet] = field(default_factory=dict)
    sealed: int | None = None  # the generation that counts
    posted: int = 0  # writes that it said it has posted
    notified: int = 0  # writes whose notification has come
    quiet: bool = False  # acknowledged: nothing of the attempt is or will be in flight
    lost: bool = False  # its session is lost, and not begun anew
    dead: bool = False  # lost, and its process is known to have ended
    reading: int | None = None  # pull: our posted read
    read_at: float = 0.0  # pull: when it was posted
    valid_until: float = 0.0  # pull: what is read from this rank by then is its handoff's
    lease: float = math.inf  # pull: seconds that the last grant gave, from when it was asked for
    released: bool = False  # pull: told that we read no more
    until: float = 0.0  # lost: when what it may have posted has landed or never will, if it posts no more


@dataclass(slots=True)
class SinkHandoff:
    """One handoff at its sink."""

    id: HandoffId
    request_id: str
    mode: str
    start: int
    end: int
    blocks: bytes
    attempt: int
    state: State = State.OPENING
    parts: dict[RankId, Part] = field(default_factory=dict)
    asked: float = 0.0
    fence_at: float = 0.0  # of reads that failed
    called_back: bool = False  # a lost source was called, to be asked
    revoking: bool = False  # the driver was told to revoke this rank's keys
    sealed_at: float = 0.0
    looked: int = 0  # ticks since then: how often somebody has looked for notifications
    prompt: bytes = b""
    reason: str | None = None

    def reading(self) -> bool:
        """Tell whether a read of ours is posted and not terminal, from any rank."""
        return any(part.reading is not None for part in self.parts.values())

    def shortest_lease(self) -> float:
        """Return the shortest lease that a rank not read to the end has granted; infinity without one."""
        return min((part.lease for part in self.parts.values() if not part.quiet), default=math.inf)
