"""Peers that may have ended: whose connection broke, or who are silent. Their ports are knocked at until that is known.

Silence is no proof of death, and a fence that rests on silence is long, or ends in a revocation. A port that *refuses* is a
proof: a process that is stopped or out of hearing keeps its port, and the kernel accepts for it. So a process that was killed
is known to have ended within moments, and one that only sleeps is not taken for dead.

No sockets here: the switchboard knocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.protocol.ids import RankId

AGAIN = 0.25
"""Seconds between two knocks: a process that is being killed closes its connections before its port, or after it."""


class Answer(Enum):
    """What became of a knock."""

    ACCEPTS = "accepts"
    REFUSES = "refuses"
    NOTHING = "nothing"


@dataclass(slots=True)
class _Suspect:
    host: str
    port: int
    knock_at: float
    until: float


class Suspects:
    """``patience`` is for how many seconds after the last suspicion a peer is knocked at."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._suspects: dict[RankId, _Suspect] = {}

    def add(self, rank: RankId, where: tuple[str, int], now: float) -> None:
        """Suspect a peer that listened at ``where``."""
        known = self._suspects.get(rank)
        if known is None:
            self._suspects[rank] = _Suspect(*where, now, now + self._patience)
        else:
            known.until = now + self._patience

    def where(self, rank: RankId) -> tuple[str, int] | None:
        """Return where a suspect listened; None for who is none."""
        one = self._suspects.get(rank)
        return None if one is None else (one.host, one.port)

    def clear(self, rank: RankId) -> None:
        """A peer was heard, or is known to have ended."""
        self._suspects.pop(rank, None)

    def due(self, now: float) -> Iterator[tuple[RankId, str, int]]:
        """Return whom to knock at now, and where."""
        for rank, one in list(self._suspects.items()):
            if one.until <= now:
                del self._suspects[rank]
            elif one.knock_at <= now:
                one.knock_at = now + AGAIN
                yield rank, one.host, one.port

    def __len__(self) -> int:
        """Return how many are suspected."""
        return len(self._suspects)
