"""Simulated time: an event heap, one generator of random numbers, and a trace of what happened.

Everything that happens is an event at a moment of the world's time; processes see it only through clocks of their own, which
start anywhere and run a little too fast or too slow. Nothing here asks the machine for the time or for randomness, so a
seed replays exactly: ``World.digest`` is the same number on every run of the same code.
"""

from __future__ import annotations

import heapq
import itertools
import random
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

DRIFT = 200e-6
"""How much faster or slower a process's clock runs than the world's, at most, on a machine that is well."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the trace. ``about``: a handoff's transfer id; empty for what concerns a whole process or the world."""

    at: float
    who: str
    about: str
    what: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.at:10.4f}  {self.who:<12} {self.about:<8} {self.what}"


class World:
    """Time, chance, and the trace. ``keep``: keep the trace's text, for people; its digest is always made."""

    def __init__(self, seed: int, *, keep: bool = False) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation, not secrets
        self.now = 0.0
        self.keep = keep
        self.trace: list[Entry] = []
        self.digest = 0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, act: Callable[..., object], *args: Any) -> None:
        """Let something happen at a moment; moments of the past are now."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), act, args))

    def after(self, delay: float, act: Callable[..., object], *args: Any) -> None:
        """Let something happen after a while."""
        heapq.heappush(self._heap, (self.now + delay, next(self._numbers), act, args))

    def run_until(self, end: float) -> None:
        """Let everything happen that happens before ``end``."""
        heap = self._heap
        while heap and heap[0][0] < end:
            self.now, _, act, args = heapq.heappop(heap)
            self.events += 1
            act(*args)
        self.now = end

    def note(self, who: str, about: str, what: str) -> None:
        """Write into the trace."""
        self.digest = zlib.crc32(f"{self.now!r}{who}{about}{what}".encode(), self.digest)
        if self.keep:
            self.trace.append(Entry(self.now, who, about, what))

    def chance(self, probability: float) -> bool:
        """Draw."""
        return probability > 0.0 and self.random.random() < probability


class Clock:
    """A process's own clock: it starts anywhere and drifts, by ``drift`` seconds a second if that is not left to chance."""

    __slots__ = ("_offset", "_world", "rate")

    def __init__(self, world: World, drift: float | None = None) -> None:
        self._world = world
        self._offset = world.random.uniform(10.0, 1e6)
        self.rate = 1.0 + (world.random.uniform(-DRIFT, DRIFT) if drift is None else drift)

    def __call__(self) -> float:
        """Return the seconds that this process sees."""
        return self._offset + self.rate * self._world.now

    def when(self, seconds: float) -> float:
        """Return the world's time at which this process sees so many seconds."""
        return (seconds - self._offset) / self.rate
