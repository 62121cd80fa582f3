"""A cache and its mirror: memory elsewhere, registered in the cache's place, in which each byte has the place that it has there.

Where the fabric cannot reach the memory that a cache is in, peers read and write its mirror in host memory, and the platform
copies between the two. The mirror is as large as the cache and laid out like it, block for block: so a rank card, plans, pins and
generations are of the mirror's addresses and else as they would be without it.

What is copied is planned as handoffs are, from a map to its own reflection, so that the same positions of the same heads move and
not a byte of the same block that belongs to somebody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.plan import Prepared
from kvxfer.layout.positions import unpacked
from kvxfer.layout.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvxfer.layout.maps import CacheMap, Offsets, Plane
    from kvxfer.layout.refine import Held
    from kvxfer.layout.repack import Call

    Copies = NDArray[np.int64]
    """N×6: address in the cache, in the mirror, bytes in a row, rows, from row to row in the cache, in the mirror."""

HOST: Final = "DRAM"
"""NIXL's name for the memory that a mirror is in."""
_NO_LIMIT: Final = 1 << 62
_LONGEST_PITCH: Final = (1 << 31) - 1
"""Between two rows of one copy, in bytes: what CUDA's driver takes."""


class Reflection:
    """Translates addresses between a cache's spans and their mirrors."""

    def __init__(self, spans: Iterable[tuple[int, int]], mirrors: Iterable[int]) -> None:
        areas = [(start, length, mirror) for (start, length), mirror in zip(spans, mirrors, strict=True)]
        self._to_mirror = _Shift(sorted(areas))
        self._to_cache = _Shift(sorted((mirror, length, start) for start, length, mirror in areas))

    def address(self, address: int) -> int:
        """Return where the mirror has what is at an address."""
        return int(self._to_mirror(np.array([address]))[0])

    def of(self, cache: CacheMap) -> CacheMap:
        """Return the map of a cache's mirror. Raises LayoutMismatchError for what lies outside the spans."""
        spans = tuple((self.address(start), length) for start, length in cache.spans)
        return _moved(cache, self._to_mirror, msgspec.structs.replace(cache, spans=spans, memory=HOST, device=0))

    def behind(self, mirror: CacheMap, like: CacheMap) -> CacheMap:
        """Return the map of what a mirror, or slots in one, is the mirror of; ``like``: a map in that memory."""
        kind = msgspec.structs.replace(mirror, spans=like.spans, memory=like.memory, device=like.device)
        return _moved(mirror, self._to_cache, kind)

    def call(self, call: Call) -> Call:
        """Return what the platform does in its own memory, of what was planned by the mirror's addresses."""
        bundles = tuple(
            one._replace(source=self._to_cache(one.source), sink=self._to_cache(one.sink))
            for one in call.pairing.bundles
        )
        return call._replace(pairing=call.pairing._replace(bundles=bundles))


class _Shift:
    """Moves addresses from areas, sorted (start, length, target), to their targets."""

    def __init__(self, areas: Sequence[tuple[int, int, int]]) -> None:
        self._starts, self._lengths, self._targets = np.array(areas, dtype=np.int64).reshape(-1, 3).T

    def __call__(self, addresses: Offsets) -> Offsets:
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = addresses - self._starts[at]
        if ((at < 0) | (inside >= self._lengths[at])).any():
            raise LayoutMismatchError("an address lies in no memory that has a mirror")
        moved: Offsets = inside + self._targets[at]
        return moved


def _moved(cache: CacheMap, shift: _Shift, target: CacheMap) -> CacheMap:
    """Move all planes. One that began in one span and ended in another would be torn: it is refused."""

    def plane(one: Plane, blocks: int) -> Plane:
        starts = np.array(one.bases, dtype=np.int64)
        last = (blocks - 1) * one.block_stride + one.block_span - 1
        bases = shift(starts)
        if (shift(starts + last) != bases + last).any():
            raise LayoutMismatchError(f"plane {one.name!r} lies in more than one span of memory, and has no mirror")
        return msgspec.structs.replace(one, bases=tuple(bases.tolist()))

    groups = tuple(
        msgspec.structs.replace(group, planes=tuple(plane(one, group.num_blocks) for one in group.planes))
        for group in cache.groups
    )
    return msgspec.structs.replace(target, groups=groups)


class Mirrored:
    """Plans copies between blocks (or slots) and their mirror. Used by one thread. ``share``: of which heads and layers."""

    def __init__(self, cache: CacheMap, mirror: CacheMap, share: Iterable[Held] | None = None) -> None:
        self._prepared = Prepared(cache, mirror, share)
        self._tables = Tables.of(cache)

    def copies(self, table: bytes, span: tuple[int, int], start: int, end: int, *, source: bool) -> Copies:
        """Plan the copy of positions [start, end) of a handoff of the positions ``span``.

        ``table``: packed tables; a ``source``'s begin at position 0, a sink's in the block that holds the span's first one.
        Raises ValueError when they do not fit.
        """
        first, last = (0, span[1]) if source else span
        tables = self._tables.read(table, first)
        plan = self._prepared.plan(
            tables, tables, start, end, prompt=last + 1, keep=first, exact=end < last, limit=_NO_LIMIT
        )
        return in_rows(plan.source[:, 0], plan.sink[:, 0], plan.sink[:, 1])


class MirroredSlots:
    """The same of a staging area's slots, whole ones."""

    def __init__(self, slots: CacheMap, mirror: CacheMap) -> None:
        self._prepared = Prepared(_unwindowed(slots), _unwindowed(mirror))
        self._groups = len(slots.groups)
        self._size = slots.block_size

    def copies(self, slots: bytes) -> Copies:
        """Plan the copy of these slots, packed ids."""
        table = unpacked(slots)
        tables = [table] * self._groups
        plan = self._prepared.plan(tables, tables, 0, self._size * len(table.ids), limit=_NO_LIMIT)
        return in_rows(plan.source[:, 0], plan.sink[:, 0], plan.sink[:, 1])


def _unwindowed(cache: CacheMap) -> CacheMap:
    groups = tuple(msgspec.structs.replace(group, window=None) for group in cache.groups)
    return msgspec.structs.replace(cache, groups=groups)


def in_rows(cache: NDArray[np.uint64], mirror: NDArray[np.uint64], length: NDArray[np.uint64]) -> Copies:
    """Take runs together that repeat themselves at equal distances: each such set are the rows of one copy.

    Runs come in the order of the mirror's addresses. Where layers lie apart, each has the same runs of blocks as the one before,
    as far away as that is from its own predecessor: 36 layers are one copy a run then, and not 36.
    """
    runs = np.stack([cache, mirror, length], axis=1).astype(np.int64)
    count = len(runs)
    for each in range(1, count // 2 + 1):
        # Runs [0, each) of one layer begin anew in the next: lengths tell most of the time that they do not.
        if count % each == 0 and runs[each, 2] == runs[0, 2] and (rows := _repeated(runs, each)) is not None:
            return rows
    return np.concatenate([runs, np.ones((count, 1), np.int64), np.zeros((count, 2), np.int64)], axis=1)


def _repeated(runs: NDArray[np.int64], each: int) -> Copies | None:
    """Return the copies if the runs are the first ``each`` of them, again and again; else None."""
    again = runs[each : 2 * each] - runs[:each]
    if (again != again[0]).any():
        return None
    lanes = runs.reshape(-1, each, 3)
    steps = np.diff(lanes, axis=0)
    (to_cache, to_mirror, longer), first = steps[0, 0].tolist(), lanes[0]
    if longer or (steps != steps[0, 0]).any():
        return None
    if not int(first[:, 2].max()) <= min(to_cache, to_mirror) <= max(to_cache, to_mirror) <= _LONGEST_PITCH:
        return None
    rows = np.broadcast_to([len(lanes), to_cache, to_mirror], (each, 3))
    copies: Copies = np.concatenate([first, rows], axis=1)
    return copies
