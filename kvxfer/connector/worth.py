"""From how many tokens on it is quicker to fetch KV than to compute it.

A number from the configuration; or, for ``auto``, what was measured here: how many tokens a second this engine computes in
steps that are full of prompts, how many a second came from that peer, and how long that peer takes to answer. Fetching n tokens
takes ``answer + n / fetched``, computing them ``n / computed``, so that it is worth while from
``answer / (1 / computed - 1 / fetched)`` on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.transport.commands import EngineAddress

DEFAULT = 64
"""Tokens, where nothing was set or measured: upstream's."""

FULL_STEP = 64
"""Tokens from which on a step says something of the speed of prompts."""

NEW = 0.2
"""What the latest measurement counts for in an average."""

AGAIN = 30.0
"""Seconds after which a peer that was too slow is tried again."""


@dataclass(slots=True)
class _Peer:
    """``seconds`` a token, ``answer`` seconds an answer; ``at`` is when that was measured."""

    seconds: float
    answer: float
    at: float


class Worth:
    """Of one engine. Times are monotonic seconds.

    ``batches``: as many steps are launched before the engine core waits for the first of them.
    """

    def __init__(self, setting: int | str, batches: int = 1) -> None:
        self.measures = setting == "auto"
        self._fixed = DEFAULT if isinstance(setting, str) else setting
        self._computing: float | None = None  # seconds a token
        self._begun = 0.0
        self._steps: deque[int] = deque(maxlen=batches)  # tokens of those that may be under way, the oldest first
        self._peers: dict[EngineAddress, _Peer] = {}

    def threshold(self, peer: EngineAddress, now: float) -> float:
        """Return the least number of tokens that is worth fetching; infinity for none."""
        known = self._peers.get(peer)
        if not self.measures or self._computing is None or known is None or now - known.at > AGAIN:
            return self._fixed
        saved = self._computing - known.seconds
        return max(1.0, known.answer / saved) if saved > 0 else math.inf

    def step(self, tokens: int, now: float) -> None:
        """Note that a step of so many tokens begins.

        As many are launched by then as may be, so the oldest of them has ended, and took the time since the last was launched:
        that one had waited for the one before the oldest, or both were launched at once.
        """
        if len(self._steps) == self._steps.maxlen and self._steps[0] >= FULL_STEP:
            self._computing = _averaged(self._computing, (now - self._begun) / self._steps[0])
        self._begun = now
        self._steps.append(tokens)

    def fetched(self, peer: EngineAddress, tokens: int, seconds: float, answer: float, now: float) -> None:
        """Note that so many tokens came from a peer, in so many seconds after its answer, and how long that took."""
        known = self._peers.get(peer)
        each = seconds / tokens
        if known is None:
            self._peers[peer] = _Peer(each, answer, now)
        else:
            known.seconds, known.answer, known.at = (
                _averaged(known.seconds, each),
                _averaged(known.answer, answer),
                now,
            )


def _averaged(old: float | None, new: float) -> float:
    return new if old is None else old + NEW * (new - old)
