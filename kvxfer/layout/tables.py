"""A request's block tables, one for each of its cache's groups, packed into bytes: how commands and messages carry them.

Whoever packs and whoever reads knows the cache's groups (of a peer's, from its rank card); who only carries the bytes need not.
So ids are four bytes each, little-endian, and no object is made, or pickled, for a block.

* One group without a window: its ids and nothing else. Where they begin is known: a source's at position 0, what a sink
  registers in the block that holds the first position.
* Several groups, or a window: for each group in the cache's order two words, the index of its first block in the request's
  table and the number of its ids; then all ids. A group with a window begins with the first block that is still wanted.

``read`` takes nothing for granted: what a peer sends either is such tables, of as many groups as its card has, or is refused.
Whether ids and positions fit the cache is checked where they are used (``positions``).
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

from kvxfer.layout.positions import Table, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvxfer.layout.maps import CacheMap


def packed(blocks: Iterable[int]) -> bytes:
    """Pack the ids of one table."""
    return array("i", blocks).tobytes()


class Shape(NamedTuple):
    """A group as far as its tables are concerned: tokens in a block, and how many positions attention looks back."""

    block_size: int
    window: int | None = None

    def first_block(self, prompt: int) -> int:
        """Return the index of the first block that the last token of a prompt of so many tokens looks back to."""
        return 0 if self.window is None else max(0, prompt - self.window) // self.block_size


class Tables:
    """The packed form of the tables of a cache with these groups."""

    def __init__(self, groups: Iterable[Shape]) -> None:
        self.groups = tuple(groups)
        self.plain = len(self.groups) == 1 and self.groups[0].window is None
        """One group without a window: ids and nothing else."""
        self.windowed = any(group.window is not None for group in self.groups)
        self.step = math.lcm(*(group.block_size for group in self.groups))
        """Every so many tokens a block of every group ends."""
        self.streams = any(group.window is None for group in self.groups)
        """Some group moves whole, so that there is something to move before a prompt's end."""

    @classmethod
    def of(cls, cache: CacheMap) -> Tables:
        """Return those of a rank's cache."""
        return cls(Shape(group.block_size, group.window) for group in cache.groups)

    def pack(self, ids: Sequence[Iterable[int]], first: Sequence[int]) -> bytes:
        """Pack a table for each group, of blocks from these indices on."""
        if self.plain:
            return packed(ids[0])
        tables = [packed(one) for one in ids]
        head = [word for index, table in zip(first, tables, strict=True) for word in (index, len(table) // 4)]
        return b"".join((packed(head), *tables))

    def spanning(self, ids: Sequence[Sequence[int]], start: int, end: int) -> bytes:
        """Pack those blocks of whole tables that positions [start, end) are received in, of a prompt that has one token more."""
        first = [max(start // group.block_size, group.first_block(end + 1)) for group in self.groups]
        last = [-(-end // group.block_size) for group in self.groups]
        return self.pack([one[low:high] for one, low, high in zip(ids, first, last, strict=True)], first)

    def read(self, table: bytes, start: int = 0) -> tuple[Table, ...]:
        """Read packed tables; a single one begins in the block that holds position ``start``. Raises ValueError (see above)."""
        if self.plain:
            return (unpacked(table, start - start % self.groups[0].block_size),)
        words = unpacked(table).ids
        size = 2 * len(self.groups)
        head = words[:size].tolist()
        first, counts = head[::2], head[1::2]
        if len(head) < size or min(head) < 0 or sum(counts) != len(words) - size:
            raise ValueError(
                f"{len(table):,} bytes that begin with {head[:8]} are not the tables of {len(self.groups)} groups"
            )
        tables, at = [], size
        for group, index, count in zip(self.groups, first, counts, strict=True):
            tables.append(Table(words[at : at + count], index * group.block_size))
            at += count
        return tuple(tables)

    def join(self, table: bytes, more: bytes) -> bytes:
        """Extend packed tables, b"" for none yet, by the blocks that follow. Raises ValueError where they do not follow."""
        if self.plain or not table:
            return table + more
        ids, first = [], []
        for group, ours, theirs in zip(self.groups, self.read(table), self.read(more), strict=True):
            begin = ours.first if len(ours.ids) else theirs.first
            if len(theirs.ids) and theirs.first != begin + len(ours.ids) * group.block_size:
                raise ValueError(
                    f"blocks from position {theirs.first} on do not follow {len(ours.ids)} from position {begin} on"
                )
            ids.append([*ours.ids.tolist(), *theirs.ids.tolist()])
            first.append(begin // group.block_size)
        return self.pack(ids, first)
