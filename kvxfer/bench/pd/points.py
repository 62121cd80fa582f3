"""What is sent: points (how long, how fast, how many) and the requests of each, the same for every arm and never twice.

A point without a rate is *unloaded*: one request after another. One with a rate is a window of requests that arrive as a
Poisson process. Prompts and arrivals follow from the seed, the point and the number of the request or window alone, so that all
arms of a sitting get the same ones, and nobody gets one twice: a prefix cache, where one is on, finds nothing.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvxfer.bench.model import SPECIAL_TOKENS
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Trace = Literal["uniform", "mixed"]
TRACES: Final[tuple[Trace, ...]] = ("uniform", "mixed")
WARM_UP: Final = 1_000_000
"""Number of the first request that only warms up."""
_MIXED_INPUT, _MIXED_OUTPUT = 16, 4  # a mixed trace's shortest prompt and answer, as parts of the longest
_LOAD = re.compile(r"(?P<input>\d+)@(?P<qps>\d+(?:\.\d+)?)x(?P<requests>\d+)")


@dataclass(frozen=True, slots=True)
class Point:
    """One point: tokens of a prompt and of an answer (the longest, in a mixed trace), and the load.

    ``qps``: mean arrivals a second, None for one after another. ``requests``: of all that an arm is sent, or of one window.
    """

    input: int
    output: int
    requests: int
    qps: float | None = None
    trace: Trace = "uniform"

    @property
    def name(self) -> str:
        """The point in tables and file names: ``4000``, ``4000@8`` or ``mixed4000@8``."""
        kind = "" if self.trace == "uniform" else self.trace
        return f"{kind}{self.input}" + ("" if self.qps is None else f"@{self.qps:g}")


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: when, in seconds from the beginning of its window, and what. ``number`` tells it from its point's others."""

    number: int
    at: float
    prompt: list[int]
    output: int


def unloaded(inputs: Sequence[int], output: int, repeats: int) -> list[Point]:
    """Return a point without a load for each length."""
    return [Point(length, output, repeats) for length in inputs]


def loaded(text: str, output: int, trace: Trace) -> list[Point]:
    """Read points with a load, ``TOKENS@QPSxREQUESTS``, comma-separated: ``4000@8x48,16000@1.8x24``."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _LOAD.fullmatch(part)
        if match is None or not int(match["input"]) or not float(match["qps"]) or not int(match["requests"]):
            raise ConfigError(f"load {part!r} is not TOKENS@QPSxREQUESTS, as in 4000@8x48")
        found.append(Point(int(match["input"]), output, int(match["requests"]), float(match["qps"]), trace))
    return found


def one(point: Point, number: int, *, seed: int, vocab: int) -> Planned:
    """Return request ``number`` of a point that has no load."""
    return Planned(number, 0.0, tokens(point.input, (seed, point.input, number), vocab), point.output)


def window(point: Point, number: int, *, seed: int, vocab: int) -> list[Planned]:
    """Return the requests of window ``number`` of a point with a load, in the order of their arrival; the first comes at once."""
    assert point.qps is not None, "a window has a rate"
    dice = random.Random(f"{seed}/{point.name}/{number}")  # noqa: S311 - a plan, not a secret
    planned, at = [], 0.0
    for i in range(point.requests):
        length, output = point.input, point.output
        if point.trace == "mixed":
            length, output = _between(dice, length, _MIXED_INPUT), _between(dice, output, _MIXED_OUTPUT)
        which = number * point.requests + i
        key = (seed, point.input, which, int(point.qps * 1000), TRACES.index(point.trace) + 1)
        planned.append(Planned(which, at, tokens(length, key, vocab), output))
        at += dice.expovariate(point.qps)
    return planned


def tokens(length: int, key: Sequence[int], vocab: int) -> list[int]:
    """``length`` token ids below ``vocab``, without the bench models' special tokens; the same for the same key everywhere."""
    raw = np.random.PCG64([*key, length]).random_raw(length)
    ids: list[int] = (len(SPECIAL_TOKENS) + np.atleast_1d(raw) % (vocab - len(SPECIAL_TOKENS))).tolist()
    return ids


def _between(dice: random.Random, longest: int, part: int) -> int:
    """Draw a length log-uniformly: as many between 1,000 and 2,000 as between 2,000 and 4,000."""
    shortest = max(2, longest // part)
    return round(math.exp(dice.uniform(math.log(shortest), math.log(max(shortest, longest)))))
