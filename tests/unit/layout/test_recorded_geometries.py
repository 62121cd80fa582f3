"""Handoffs between caches as real engines laid them out, against a copy made element by element.

``recorded`` has the maps that workers of real engines published (``tests/e2e/recording.py``): of each model, version, number of
ranks and block size that the matrix and the other models' e2e tests ran. Any two of the same model are source and sink here, in
memory of the recorded size and strides; what must be re-packed the host's platform re-packs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.check import check
from kvxfer.layout.maps import CacheMap, offsets
from kvxfer.layout.positions import NULL_BLOCK
from kvxfer.layout.ranks import Shard, share
from kvxfer.layout.route import Route, StagingArea
from kvxfer.layout.tables import Tables
from kvxfer_host import HostPlatform
from tests.e2e.matrix.cover import UNREACHED, cover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.layout.maps import Group, Plane

    Key = tuple[str, int, int]
    """A plane's name, a layer, a head."""

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
LONGEST = 420
STAGED = 24 << 20


@dataclass(frozen=True)
class Engine:
    name: str
    model: str
    vllm: str
    ranks: int
    stages: int
    caches: tuple[CacheMap, ...]

    def shard(self, rank: int) -> Shard:
        return Shard(rank % self.ranks, self.ranks)


def read(path: Path) -> Engine:
    found = json.loads(path.read_text())
    caches = tuple(msgspec.convert(found["caches"], list[CacheMap]))
    return Engine(path.stem, found["model"], found["vllm"], found["ranks"], found["stages"], caches)


def likeness(engine: Engine) -> str:
    """What is left of an engine's maps without the addresses that its processes happened to have."""

    def of(cache: CacheMap) -> object:
        spans = sorted(cache.spans)

        def place(base: int) -> tuple[int, int]:
            return next((n, base - start) for n, (start, length) in enumerate(spans) if start <= base < start + length)

        planes = [
            [
                (msgspec.structs.replace(plane, bases=()), [place(base) for base in plane.bases])
                for plane in group.planes
            ]
            for group in cache.groups
        ]
        shapes = [(group.block_size, group.num_blocks, group.window) for group in cache.groups]
        return planes, shapes, [length for _, length in spans]

    return repr((engine.model, engine.ranks, engine.stages, [of(cache) for cache in engine.caches]))


ENGINES = [read(path) for path in RECORDED]
DISTINCT = list({likeness(engine): engine for engine in reversed(ENGINES)}.values())
"""Of recordings that differ in nothing but addresses, one: two versions of vLLM may lay a model out alike."""

ALL = [
    (ours, theirs)
    for ours, theirs in itertools.product(DISTINCT, repeat=2)
    if ours.model == theirs.model and theirs.stages == 1
]


def windows_fit(source: Engine, sink: Engine) -> bool:
    """Whether the sink's last window begins where the source still has a block (docs/layout.md)."""
    windowed = any(group.window is not None for group in sink.caches[0].groups)
    return not windowed or source.caches[0].block_size % sink.caches[0].block_size == 0


PAIRS = [pytest.param(*pair, id=f"{pair[0].name}-to-{pair[1].name}") for pair in ALL if windows_fit(*pair)]
REFUSED = [pytest.param(*pair, id=f"{pair[0].name}-to-{pair[1].name}") for pair in ALL if not windows_fit(*pair)]


class Memory:
    """The spans of a rank's map, anew, each in a file of its own: of what nothing touches there is nothing."""

    def __init__(self, cache: CacheMap) -> None:
        self._files = [os.memfd_create("cache") for _ in cache.spans]
        for file, (_, length) in zip(self._files, cache.spans, strict=True):
            os.ftruncate(file, length)
        maps = [mmap.mmap(file, length) for file, (_, length) in zip(self._files, cache.spans, strict=True)]
        self.bytes = [np.frombuffer(one, dtype=np.uint8) for one in maps]
        moved = [
            (old, length, new.ctypes.data - old) for (old, length), new in zip(cache.spans, self.bytes, strict=True)
        ]

        def there(base: int) -> int:
            return base + next(by for old, length, by in moved if old <= base < old + length)

        groups = tuple(
            msgspec.structs.replace(
                group,
                planes=tuple(
                    msgspec.structs.replace(plane, bases=tuple(map(there, plane.bases))) for plane in group.planes
                ),
            )
            for group in cache.groups
        )
        spans = tuple((old + by, length) for old, length, by in moved)
        self.cache = msgspec.structs.replace(cache, groups=groups, spans=spans)
        check(self.cache)

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def empty(self) -> bool:
        """Whether every byte is zero."""
        return not any(
            whole[low:high].any()
            for file, whole in zip(self._files, self.bytes, strict=True)
            for low, high in extents(file, len(whole))
        )

    def cells(self, tables: list[array]) -> Iterator[tuple[Key, Group, Plane, np.ndarray]]:
        """Go through the addresses [block, token, channel] of every plane, layer and head, in a request's blocks."""
        for group, ids in zip(self.cache.groups, tables, strict=True):
            blocks = np.array(ids, dtype=np.int64)
            for plane in group.planes:
                inside = np.add.outer(offsets(plane.tokens), offsets(plane.channels))
                for layer, base in zip(plane.layers, plane.bases, strict=True):
                    for slot, head in enumerate(plane.heads):
                        at = base + blocks * plane.block_stride + slot * plane.head_stride
                        yield (plane.name, layer, head), group, plane, np.add.outer(at, inside)

    def elements(self, tables: list[array], end: int) -> Iterator[tuple[Key, int, np.ndarray, int]]:
        """Go through where each element of positions [0, end) lies: whose it is, the first row, addresses [row, channel], bytes.

        Rows are positions; of an opaque plane they are blocks, whatever is in them. Of a window its last blocks alone are there.
        """
        for key, group, plane, at in self.cells(tables):
            first = 0 if group.window is None else max(0, end + 1 - group.window) // group.block_size
            if plane.interior:
                yield key, first, at[first:, 0], plane.item
            else:
                rows = at.reshape(-1, at.shape[-1])
                yield key, first * group.block_size, rows[first * group.block_size : end], plane.item


def extents(file: int, length: int) -> Iterator[tuple[int, int]]:
    """Go through the stretches of a sparse file that something has touched."""
    at = 0
    with contextlib.suppress(OSError):  # no more data
        while at < length:
            low = os.lseek(file, at, os.SEEK_DATA)
            at = os.lseek(file, low, os.SEEK_HOLE)
            yield low, at


def view(addresses: np.ndarray, item: int, memory: Memory) -> tuple[np.ndarray, np.ndarray]:
    """The memory that elements lie in, as items, and their indices in it."""
    for whole in memory.bytes:
        start = whole.ctypes.data
        if start <= addresses.min() and addresses.max() + item <= start + len(whole):
            by = addresses - start
            assert not (by % item).any()
            return whole[: len(whole) // item * item].view(f"u{item}"), by // item
    raise AssertionError("an element outside all spans")


def tables_for(cache: CacheMap, end: int, random: np.random.Generator) -> list[array]:
    """Block ids of each group, as vLLM has them: none twice in any group, and the null block where a window has passed."""
    ids = random.permutation(np.arange(1, cache.num_blocks)).tolist()
    found = []
    for group in cache.groups:
        count = -(-end // group.block_size)
        mine, ids = ids[:count], ids[count:]
        gone = 0 if group.window is None else max(0, end + 1 - group.window) // group.block_size
        found.append(array("i", [NULL_BLOCK] * gone + mine[gone:]))
    return found


def carry_out(plan) -> None:
    for (ours, length, _), (theirs, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True):
        ctypes.memmove(theirs, ours, length)


def hand_over(ours: tuple[Memory, list[array], Shard], theirs: tuple[Memory, list[array], Shard], end: int) -> None:
    """From one rank to another: straight, or through slots that the host's platform then re-packs."""
    (source, held, mine), (sink, wanted, its) = ours, theirs
    part = share(source.cache, mine, sink.cache, its)
    if not part:
        return
    slots = HostPlatform().staging(STAGED, 0)
    route = Route(source.cache, sink.cache, part, area=StagingArea(slots.address, slots.size, HostPlatform.offers))
    packed = [Tables.of(one.cache).spanning(ids, 0, end) for one, ids in ((source, held), (sink, wanted))]
    count = route.slots_for(0, end)
    registered = array("i", range(count)).tobytes() if count else packed[1]
    carry_out(route.plan(packed[0], registered, (0, end), 0, end))
    for call in route.calls(registered, packed[1], (0, end)):
        HostPlatform().repack(call)


@pytest.mark.parametrize(("source", "sink"), PAIRS)
@settings(max_examples=3, deadline=None)
@given(end=st.integers(1, LONGEST), seed=st.integers(0, 1 << 32))
def test_what_arrives_is_what_a_copy_of_each_element_makes(source: Engine, sink: Engine, end: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ours, theirs = ([Memory(cache) for cache in one.caches] for one in (source, sink))
    held, wanted = (tables_for(one.caches[0], end, random) for one in (source, sink))
    values: dict[Key, np.ndarray] = {}
    for rank in ours:
        for key, first, at, item in rank.elements(held, end):
            if key not in values:  # replicas hold the same
                values[key] = random.integers(1, 1 << 8 * item, (first + len(at), at.shape[1]), dtype=f"u{item}")
            memory, indices = view(at, item, rank)
            memory[indices] = values[key][first:]
    for number, rank in enumerate(theirs):
        for giver, other in enumerate(ours):
            hand_over((other, held, source.shard(giver)), (rank, wanted, sink.shard(number)), end)
        for key, first, at, item in rank.elements(wanted, end):
            memory, indices = view(at, item, rank)
            assert np.array_equal(memory[indices], values[key][first:]), key
        for _, _, plane, at in rank.cells(wanted):
            memory, indices = view(at, plane.item, rank)
            memory[indices] = 0
        assert rank.empty(), "something was written outside the request's blocks"
    for rank in (*ours, *theirs):
        rank.close()


@pytest.mark.parametrize(("source", "sink"), REFUSED)
def test_a_window_whose_blocks_do_not_fit_is_refused(source: Engine, sink: Engine) -> None:
    part = share(source.caches[0], source.shard(0), sink.caches[0], sink.shard(0))
    area = StagingArea(1 << 40, STAGED, HostPlatform.offers)
    with pytest.raises(LayoutMismatchError, match="or a larger multiple on prefill"):
        Route(source.caches[0], sink.caches[0], part, area=area)


def test_both_engines_of_every_cell_of_the_matrix_are_recorded() -> None:
    """Of each of its models so both versions, one rank and two, and two sizes of blocks."""
    names = {engine.name for engine in ENGINES}
    for cell in cover():
        if cell.name not in UNREACHED:
            for side in zip(cell.vllm, cell.sizes, cell.block_sizes, strict=True):
                version, ranks, block = side
                assert f"{version}_{cell.model}_{ranks}_{block}" in names, cell.name
