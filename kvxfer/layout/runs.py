"""Runs of bytes to copy, joined as far as memory allows.

A run is (address on the source, address on the sink, length). Which runs make up a copy is not unique; the *fewest* are: of
all bytes to copy, those whose predecessor in both memories is not copied onto the other each begin one. Runs in the order of the
sink's addresses are joined with their neighbour alone, and nothing is missed, since no byte of the sink is written twice.
That last is checked here: two runs onto one byte would be silent wrong KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvxfer.errors import LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvxfer.layout.maps import Offsets

    Descriptors = NDArray[np.uint64]
    """N×3: address, length in bytes, device id. What NIXL takes."""


class Runs(NamedTuple):
    """Arrays of equal length: row i copies ``length[i]`` bytes from ``source[i]`` to ``sink[i]``."""

    source: Offsets
    sink: Offsets
    length: Offsets

    def shifted(self, source: Offsets, sink: Offsets) -> Runs:
        """Repeat all runs at each pair of the given offsets, the runs of one pair beside each other."""
        return Runs(
            np.add.outer(source, self.source).ravel(),
            np.add.outer(sink, self.sink).ravel(),
            np.broadcast_to(self.length, (len(source), len(self.length))).ravel(),
        )


EMPTY = Runs(*(np.empty(0, dtype=np.int64),) * 3)


def gathered(parts: Sequence[Runs]) -> Runs:
    """Put lists of runs behind each other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return EMPTY
    return Runs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def joined(runs: Runs) -> Runs:
    """Return the fewest runs that copy the same, in the order of the sink's addresses.

    Raises LayoutMismatchError when two runs would write one byte of the sink.
    """
    source, sink, length = runs
    if len(sink) < 2:  # noqa: PLR2004 - nothing to join
        return runs
    if (sink[1:] < sink[:-1]).any():
        order = np.argsort(sink, kind="stable")
        source, sink, length = source[order], sink[order], length[order]
    ends = sink + length
    gaps = sink[1:] - ends[:-1]
    if (gaps < 0).any():
        at = int(np.flatnonzero(gaps < 0)[0])
        raise LayoutMismatchError(
            f"two runs write the byte at {int(sink[at + 1]):#x} of the sink: a block is named twice, or planes overlap"
        )
    # Where the sink's gap is zero and the source moved as far as the sink, the two runs are one.
    breaks = (gaps != 0) | (np.diff(source - sink) != 0)
    if breaks.all():
        return Runs(source, sink, length)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Runs(source[starts], sink[starts], np.add.reduceat(length, starts))


def capped(runs: Runs, limit: int) -> Runs:
    """Cut runs that are longer than ``limit`` bytes."""
    source, sink, length = runs
    if not len(length) or int(length.max()) <= limit:
        return runs
    pieces = -(-length // limit)
    skip = (np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
    left = np.repeat(length, pieces) - skip
    return Runs(np.repeat(source, pieces) + skip, np.repeat(sink, pieces) + skip, np.minimum(left, limit))


def rows(address: Offsets, length: Offsets, device: int) -> Descriptors:
    """Make descriptors of one side."""
    result = np.empty((len(address), 3), dtype=np.uint64)
    result[:, 0] = address
    result[:, 1] = length
    result[:, 2] = device
    return result
