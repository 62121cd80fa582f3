"""Which positions move, and which stretches of which blocks they are.

A position is a token's index in the prompt. Positions [start, end) move, less what nobody needs and plus what cannot be
left out:

* Of a group with a window only positions that the prompt's last token, or one after it, still looks back to: from ``prompt -
  window`` on, rounded down to where a block of the sink begins, since a full block is one that vLLM's prefix cache gives to
  others. vLLM keeps no blocks before them: its tables have the null block there, which is never copied.
* The last block is filled: ``end`` is rounded up to where the source's or the sink's block ends, whichever is first. Positions
  behind ``end`` are nobody's yet, in a block that is not full and so cannot be shared, while a block cut short would fall
  into a run for each layer and head. ``exact`` turns this off: for a stretch whose continuation is written by itself.
* Where interiors are opaque, whole blocks move: ``start`` is rounded down and ``end`` up in any case. Rounding down
  would write over positions before ``start``; it is refused where those are below ``keep``, the end of what the sink's
  own prefix cache gave, since that block may be another request's as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvxfer.layout.refine import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvxfer.layout.refine import Pairing

    BlockIds = NDArray[np.int32]


NULL_BLOCK: Final = 0
"""What stands in a table for a block that its window has passed (vLLM 0.29 v1/core/block_pool.py; vllm-neuron as well)."""


class Table(NamedTuple):
    """A request's blocks in one group, in the order of positions; the first of them holds position ``first``."""

    ids: BlockIds
    first: int = 0


class Span(NamedTuple):
    """Positions [start, end)."""

    start: int
    end: int


class Segments(NamedTuple):
    """Segments of one kind: pairs of blocks."""

    kind: Kind
    source: NDArray[np.int64]
    sink: NDArray[np.int64]


def unpacked(packed: bytes, first: int = 0) -> Table:
    """Read a table that crossed the wire. Raises ValueError when the bytes are no int32."""
    return Table(np.frombuffer(packed, dtype="<i4"), first)


def moving(pairing: Pairing, start: int, end: int, *, prompt: int, keep: int = 0, exact: bool = False) -> Span:
    """Return which positions of this pairing's groups move when [start, end) shall. Raises ValueError (see above)."""
    if not 0 <= keep <= start <= end:
        raise ValueError(f"positions [{start}, {end}) cannot be written by a handoff that may write from {keep} on")
    low = start
    if pairing.window is not None:
        theirs = pairing.block_sizes[1]
        low = max(start, (prompt - pairing.window) // theirs * theirs)
    if low >= end:
        return Span(end, end)
    if not pairing.whole:
        return Span(low, end if exact else min(-(-end // size) * size for size in pairing.block_sizes))
    size = pairing.block_sizes[0]
    down, up = low // size * size, -(-end // size) * size
    if down < keep:
        raise ValueError(
            f"position {low} is in a block of {size} tokens that begins at {down}, and the sink keeps its own positions "
            f"below {keep}: whole blocks move here, so hand off from {down} on, or from the next block"
        )
    return Span(down, up)


def segments(pairing: Pairing, span: Span, source: Table, sink: Table) -> Iterator[Segments]:
    """Cut positions at both sides' block boundaries, and gather the segments by kind.

    Raises ValueError when a table does not reach that far, or names blocks that its cache does not have.
    """
    if span.start == span.end:
        return
    ours = _taken(source, span, pairing.block_sizes[0], pairing.num_blocks[0], "source")
    theirs = _taken(sink, span, pairing.block_sizes[1], pairing.num_blocks[1], "sink")
    if pairing.block_sizes[0] == pairing.block_sizes[1]:
        cut = _equal(span, pairing.block_sizes[0], ours, theirs)
    else:
        cut = _unequal(span, *pairing.block_sizes, ours, theirs)
    yield from cut if pairing.window is None else map(_without_null, cut)


def kinds(source: int, sink: int) -> Iterator[tuple[Kind, int]]:
    """Return the kinds of segments between blocks of two sizes that any long stretch has, and how often each comes."""
    span = Span(0, int(np.lcm(source, sink)))
    zeros = np.zeros(span.end // min(source, sink), dtype=np.int64)
    cut = _equal if source == sink else lambda span, _, ours, theirs: _unequal(span, source, sink, ours, theirs)
    for found in cut(span, source, zeros, zeros):
        yield found.kind, len(found.source)


def _without_null(found: Segments) -> Segments:
    kept = found.sink != NULL_BLOCK
    if not found.source[kept].all():
        raise ValueError("the source has let go of blocks that are still in the sink's window")
    return Segments(found.kind, found.source[kept], found.sink[kept])


def _equal(span: Span, size: int, ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> Iterator[Segments]:
    first, last = span.start // size, (span.end - 1) // size
    head, tail = span.start % size, span.end % size
    if first == last and span.end - span.start < size:
        yield Segments(Kind(head, head, span.end - span.start), ours[:1], theirs[:1])
        return
    low, high = int(head > 0), last - first + int(tail == 0)
    if head:
        yield Segments(Kind(head, head, size - head), ours[:1], theirs[:1])
    if low < high:
        yield Segments(Kind(0, 0, size), ours[low:high], theirs[low:high])
    if tail:
        yield Segments(Kind(0, 0, tail), ours[high : high + 1], theirs[high : high + 1])


def _unequal(
    span: Span, size: int, their_size: int, ours: NDArray[np.int64], theirs: NDArray[np.int64]
) -> Iterator[Segments]:
    start, end = span
    cuts = np.union1d(_boundaries(span, size), _boundaries(span, their_size))
    lengths = np.diff(np.append(cuts, end))
    offset, their_offset = cuts % size, cuts % their_size
    blocks, their_blocks = cuts // size - start // size, cuts // their_size - start // their_size
    # Sizes are at most 2**16, so the three numbers of a kind fit into one of 63 bits.
    keys = (offset << 40) | (their_offset << 20) | lengths
    for key in np.unique(keys).tolist():
        chosen = keys == key
        kind = Kind(key >> 40, key >> 20 & 0xFFFFF, key & 0xFFFFF)
        yield Segments(kind, ours[blocks[chosen]], theirs[their_blocks[chosen]])


def _boundaries(span: Span, size: int) -> NDArray[np.int64]:
    """Return where blocks begin within the span, and the span's own start."""
    bounds = np.arange(span.start // size, -(-span.end // size), dtype=np.int64) * size
    bounds[0] = span.start
    return bounds


def _taken(table: Table, span: Span, size: int, num_blocks: int, whose: str) -> NDArray[np.int64]:
    """Take the ids of the blocks that hold the span out of a table."""
    if table.first % size or table.first < 0:
        raise ValueError(f"the {whose}'s blocks begin at position {table.first}, inside a block of {size} tokens")
    low, high = (span.start - table.first) // size, -((table.first - span.end) // size)
    if low < 0 or high > len(table.ids):
        raise ValueError(
            f"positions [{span.start}, {span.end}) need the {whose}'s blocks {low} to {high} of a list that holds "
            f"{len(table.ids)} from position {table.first} on"
        )
    ids = table.ids[low:high].astype(np.int64)
    if int(ids.view(np.uint64).max()) >= num_blocks:  # a negative id is a huge one there
        wrong = ids[(ids < 0) | (ids >= num_blocks)]
        raise ValueError(f"the {whose}'s block {int(wrong[0])} is outside a cache of {num_blocks} blocks")
    return ids
