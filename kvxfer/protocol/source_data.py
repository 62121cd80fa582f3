"""What a source remembers of one handoff: the request at its engine, and the registration of each sink rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.protocol.intervals import IntervalSet

if TYPE_CHECKING:
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.protocol.messages import Seal
    from kvxfer.protocol.source_states import State


@dataclass(slots=True)
class Registration:
    """One sink rank's registration of a handoff: where to, and what has been posted of it."""

    rank: RankId
    attempt: int
    mode: str
    start: int
    end: int
    blocks: bytes
    asked: float
    prompt: bytes
    written: IntervalSet = field(default_factory=IntervalSet)  # terminal, under the current generation
    posted: IntervalSet = field(default_factory=IntervalSet)  # posted, under the current generation
    in_flight: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """Transfer → positions [a, b) that it writes, whatever the generation, and when it was posted."""
    announced: int = 0  # writes that the sink was told of
    served: bool = False  # nothing is owed to this rank any more
    seal: Seal | None = None  # what it was told at last
    cancelled: bool = False
    grant_due: bool = True  # pull: asked for, or asked for again
    granted_until: float = 0.0
    failure: str | None = None
    quiet_at: float = 0.0  # a failed write may have been posted in part: until then something may still land


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks that the request does not have any more, kept by its engine while these transfers read them."""

    token: int
    transfers: frozenset[int]


@dataclass(slots=True)
class SourceHandoff:
    """One handoff at its source."""

    id: HandoffId
    state: State
    deadline: float  # of the leg that has not come
    hold_until: float = math.inf  # however often the sink announces itself
    until: float = math.inf  # of what is held for a reuse: no grant may outlast it
    request_id: str | None = None
    prompt_tokens: int = 0
    prompt: tuple[bytes, ...] = ()
    """Digests of its prompt, of it without the last token, and so on; () when they are not known."""
    generation: int = 0
    final: int = 0  # positions [0, final) are final under this generation
    blocks: bytes = b""  # its tables under this generation, packed
    pins: list[Pin] = field(default_factory=list)
    held: bool = False  # the engine has finished and waits for SourceFinished
    engine: str = ""  # of the sink that announced itself first
    sinks: dict[RankId, Registration] = field(default_factory=dict)
    declined: set[RankId] = field(default_factory=set)  # sink ranks that want nothing, and had not registered
    takers: int | None = None  # how many sink ranks take their share from this one; None until one of them has spoken
    reason: str = ""

    @property
    def attended(self) -> bool:
        """Whether every sink rank that takes its share here has registered, or said that it wants nothing."""
        return self.takers is not None and len(self.sinks) + len(self.declined) >= self.takers

    def owned_by(self, engine: str) -> bool:
        """Tell whether the sinks of this handoff are, or may become, ranks of this engine."""
        return next((rank.engine for rank in self.sinks), self.engine) in ("", engine)

    def in_flight(self) -> set[int]:
        """Return the writes that are not terminal, to all sink ranks."""
        return {transfer for sink in self.sinks.values() for transfer in sink.in_flight}
