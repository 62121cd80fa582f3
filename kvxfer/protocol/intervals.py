"""Sets of token positions, as sorted, disjoint, non-touching half-open intervals.

Deciding that a handoff is complete by counting messages or bytes is how engines end up decoding from KV that never came:
doubled and reordered notifications then count twice. A union of intervals is the same however often a part of it is added.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Span = tuple[int, int]
"""Token positions [first, second) of a prompt."""


class IntervalSet:
    """A set of token positions. Adding costs O(log n + merged)."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add positions [start, end). Raises ValueError when the span is reversed or negative."""
        if start < 0 or end < start:
            raise ValueError(f"[{start}, {end}) is not a span of positions")
        if start == end:
            return
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def remove(self, start: int, end: int) -> None:
        """Take positions [start, end) out, as far as they are in."""
        kept = [(a, min(b, start)) for a, b in self if a < start] + [(max(a, end), b) for a, b in self if b > end]
        kept = kept if start < end else list(self)
        self._starts, self._ends = [a for a, _ in kept], [b for _, b in kept]

    def covers(self, start: int, end: int) -> bool:
        """Tell whether every position of [start, end) is in the set; an empty span always is."""
        if start >= end:
            return True
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._ends[at] >= end

    def missing(self, start: int, end: int) -> list[Span]:
        """Return the parts of [start, end) that are not in the set, in order."""
        gaps = []
        at = start
        for begin, stop in self:
            if stop <= at:
                continue
            if begin >= end:
                break
            if begin > at:
                gaps.append((at, begin))
            at = max(at, stop)
        if at < end:
            gaps.append((at, end))
        return gaps

    def __iter__(self) -> Iterator[Span]:
        """Iterate over the maximal spans in order."""
        return iter(zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        """Return the number of positions in the set."""
        return sum(self._ends) - sum(self._starts)

    def __eq__(self, other: object) -> bool:
        """Compare as sets of positions."""
        return isinstance(other, IntervalSet) and self._starts == other._starts and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show the spans."""
        return "IntervalSet(" + ", ".join(f"[{a}, {b})" for a, b in self) + ")"
