"""When decode is chosen: with prefill (early) or when prefill has answered (late).

Early overlaps: decode has its blocks and is registered before prefill is done, and in push chunks travel while others are
computed. Late knows more: the queue of a decode engine may have grown while the prompt was computed, and until then nothing is
held on any of them. *Adaptive* measures what both cost, which is the time to first token less the prefill leg's own, apart for
requests that found the decode engines' queues even and uneven and for prompts of different length, and takes what costs less;
now and then it takes the other one, so that both figures stay true. Where no decode engine has room, waiting for it would keep
prefill idle, and holding it would keep others waiting: late. ``docs/policies/timing.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvxfer.router.policies.decode import cost, has_room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engine import Engine
    from kvxfer.router.policies.asked import Asked

EXPLORE = 48
"""One in so many requests of a kind is sent the way of which less is known."""
_WEIGHT = 0.02
_SPREAD = 1.28
"""Standard deviations above the mean: the 90th percentile of a normal distribution, since it is the bad cases that count."""
_ENOUGH = 16
_CLEARLY = 0.9
"""Of early's figure: what late's must be below before it is taken."""


Context = tuple[bool, int]
"""Requests whose delays are comparable: whether the queues were uneven, and the prompt's length as a power of four."""


_FULL: Context = (True, -1)


class Timing(Protocol):
    """Decides when the decode engine of a request is chosen."""

    def late(self, decode: Sequence[Engine], asked: Asked) -> tuple[bool, Context]:
        """Whether to wait for prefill, and what to tell ``observed``. ``decode``: the engines that could be chosen now."""
        ...

    def observed(self, context: Context, *, late: bool, delay: float) -> None:
        """A request's first token came with so much time spent elsewhere than in its prefill leg, waits for room included."""
        ...


class Fixed:
    """Always early, or always late."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def late(self, decode: Sequence[Engine], asked: Asked) -> tuple[bool, Context]:  # noqa: ARG002
        """As it was made."""
        return self._late, (False, 0)

    def observed(self, context: Context, *, late: bool, delay: float) -> None:
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
    """Whichever of the two costs less, as measured; early where that is not clear."""

    def __init__(self) -> None:
        self._figures: dict[tuple[Context, bool], Figure] = {}
        self._asked: dict[Context, int] = {}

    def late(self, decode: Sequence[Engine], asked: Asked) -> tuple[bool, Context]:
        """The cheaper way, or now and then the other."""
        if decode and not any(has_room(one, asked) for one in decode):
            return True, _FULL
        costs = [cost(one, asked) for one in decode]
        uneven = bool(costs) and max(costs) - min(costs) > asked.tokens
        context = uneven, max(asked.tokens, 1).bit_length() // 2
        asks = self._asked[context] = self._asked.get(context, 0) + 1
        early, late = self._figure(context, late=False), self._figure(context, late=True)
        if asks % EXPLORE == 0:
            return early.count >= late.count, context  # the figure that is the less sure
        return late.count >= _ENOUGH and early.count >= _ENOUGH and late.bad < _CLEARLY * early.bad, context

    def observed(self, context: Context, *, late: bool, delay: float) -> None:
        """Learn."""
        self._figure(context, late=late).add(delay)

    def _figure(self, context: Context, *, late: bool) -> Figure:
        return self._figures.setdefault((context, late), Figure())
