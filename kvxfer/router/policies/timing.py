"""When decode is chosen: with prefill (early) or when prefill has answered (late).

Early overlaps: decode has its blocks and is registered before prefill is done, and in push chunks travel while others are
computed. Late knows more: the queue of a decode engine may have grown while the prompt was computed, and until then nothing is
held on any of them. *Adaptive* measures what both cost, which is the delay from prefill's end to the first token, apart for
requests that found the decode engines' queues even and uneven, and takes what costs less; now and then it takes the other one,
so that both figures stay true.
``docs/policies/timing.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvxfer.router.policies.decode import cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engine import Engine
    from kvxfer.router.policies.asked import Asked

EXPLORE = 24
"""One in so many requests is sent the way that is thought to be the worse one."""
_WEIGHT = 0.05
_SPREAD = 1.28
"""Standard deviations above the mean: the 90th percentile of a normal distribution, since it is the bad cases that count."""
_ENOUGH = 4


class Timing(Protocol):
    """Decides when the decode engine of a request is chosen."""

    def late(self, decode: Sequence[Engine], asked: Asked) -> bool:
        """Whether to wait for prefill. ``decode``: the engines that could be chosen now."""
        ...

    def observed(self, *, late: bool, delay: float) -> None:
        """A request had its first token ``delay`` seconds after its prefill ended."""
        ...


class Fixed:
    """Always early, or always late."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def late(self, decode: Sequence[Engine], asked: Asked) -> bool:  # noqa: ARG002
        """As it was made."""
        return self._late

    def observed(self, *, late: bool, delay: float) -> None:
        """Nothing is learned."""


@dataclass(slots=True)
class Figure:
    """A moving mean and variance of delays."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        """Take one more in."""
        self.count += 1
        weight = max(_WEIGHT, 1 / self.count)
        off = value - self.mean
        self.mean += weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)

    @property
    def bad(self) -> float:
        """What a bad case costs, in seconds."""
        return self.mean + _SPREAD * math.sqrt(self.variance)


class Adaptive:
    """Whichever of the two costs less, as measured."""

    def __init__(self) -> None:
        self._figures = {(uneven, late): Figure() for uneven in (False, True) for late in (False, True)}
        self._uneven = False
        self._asked = 0

    def late(self, decode: Sequence[Engine], asked: Asked) -> bool:
        """The cheaper way, or now and then the other."""
        costs = [cost(one, asked) for one in decode]
        self._uneven = bool(costs) and max(costs) - min(costs) > asked.tokens
        early, late = self._figures[self._uneven, False], self._figures[self._uneven, True]
        self._asked += 1
        if early.count < _ENOUGH or late.count < _ENOUGH:
            return late.count < early.count
        better = late.bad < early.bad
        return not better if self._asked % EXPLORE == 0 else better

    def observed(self, *, late: bool, delay: float) -> None:
        """Learn."""
        self._figures[self._uneven, late].add(delay)
