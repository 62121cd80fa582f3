"""Mirrors of caches: where things lie in them, and which copies move positions between a cache and its mirror."""

from __future__ import annotations

import ctypes
import random

import msgspec
import numpy as np
import pytest

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.card import RankCard, connected
from kvxfer.layout.check import check
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.mirror import Mirrored, MirroredSlots, Reflection, in_rows
from kvxfer.layout.refine import Held
from kvxfer.layout.repack import STRIDED
from kvxfer.layout.route import StagingArea
from kvxfer.layout.tables import Tables

BLOCKS, TOKENS, HEADS, ROW = 12, 4, 2, 16
LAYERS = 3


class Cache:
    """Layers [block, head, token, channel], each in memory of its own, or all of a block together; and its mirror."""

    def __init__(self, *, block_major=False, window=None, interior="") -> None:
        cell = HEADS * TOKENS * ROW
        if block_major:
            self.memory = [np.zeros((BLOCKS, LAYERS, cell), dtype=np.uint8)]
            layers = [self.memory[0][:, layer] for layer in range(LAYERS)]
        else:
            self.memory = layers = [np.zeros((BLOCKS, cell), dtype=np.uint8) for _ in range(LAYERS)]
        axes = {"tokens": ((TOKENS, ROW),), "channels": ((ROW, 1),)}
        if interior:
            axes = {"tokens": (), "channels": ((TOKENS * ROW, 1),)}
        plane = Plane(
            name="kv", dtype="uint8", item=1, layers=tuple(range(LAYERS)), bases=tuple(one.ctypes.data for one in layers),
            heads=(0, 1), total_heads=HEADS, block_stride=layers[0].strides[0], head_stride=TOKENS * ROW,
            interior=interior, **axes,
        )  # fmt: skip
        spans = tuple((one.ctypes.data, one.nbytes) for one in self.memory)
        self.map = CacheMap((Group(TOKENS, BLOCKS, (plane,), window),), spans, "VRAM", 5)
        self.mirror = [np.zeros_like(one) for one in self.memory]
        self.reflection = Reflection(spans, [one.ctypes.data for one in self.mirror])
        self.reflected = self.reflection.of(self.map)
        self.layers = layers

    def fill(self, seed=1) -> None:
        for one in self.memory:
            one[:] = np.random.default_rng(seed).integers(1, 256, size=one.shape)

    def copied(self) -> list[tuple[int, int]]:
        """Which (layer, block) cells of the mirror have anything."""
        there = self.mirror[0].transpose(1, 0, 2) if len(self.mirror) == 1 else np.stack(self.mirror)
        return [(int(layer), int(block)) for layer, block in np.argwhere(there.any(axis=2))]


def carry_out(copies, *, inward=False) -> None:
    for device, mirror, length, rows, far, near in copies.tolist():
        for row in range(rows):
            sides = (device + row * far, mirror + row * near)
            ctypes.memmove(*(sides if inward else sides[::-1]), length)


@pytest.mark.parametrize("block_major", [False, True])
def test_a_mirror_has_each_byte_at_its_place_and_is_host_memory(block_major) -> None:
    cache = Cache(block_major=block_major)
    check(cache.reflected)
    assert (cache.reflected.memory, cache.reflected.device) == ("DRAM", 0)
    assert cache.reflection.behind(cache.reflected, cache.map) == cache.map
    for ours, theirs in zip(cache.memory, cache.mirror, strict=True):
        assert cache.reflection.address(ours.ctypes.data + 7) == theirs.ctypes.data + 7


@pytest.mark.parametrize("block_major", [False, True])
@pytest.mark.parametrize("source", [False, True])
def test_positions_are_copied_and_nothing_else(block_major, source) -> None:
    draw = random.Random(3)
    for _ in range(60):
        cache = Cache(block_major=block_major)
        cache.fill()
        first = 0 if source else draw.randrange(0, 9)
        last = draw.randrange(first + 1, 33)
        start = draw.randrange(first, last)
        end = draw.choice([last, draw.randrange(start + 1, last + 1)])
        ids = draw.sample(range(BLOCKS), -(-last // TOKENS) - first // TOKENS)
        table = Tables.of(cache.map).pack([ids], [0])
        copies = Mirrored(cache.map, cache.reflected).copies(table, (first, last), start, end, source=source)
        carry_out(copies)
        until = -(-end // TOKENS) * TOKENS if end == last else end
        expected = [np.zeros_like(one) for one in cache.memory]
        views = [expected[0][:, layer] for layer in range(LAYERS)] if block_major else expected
        for layer in range(LAYERS):
            for position in range(start, until):
                block, token = ids[position // TOKENS - first // TOKENS], position % TOKENS
                for head in range(HEADS):
                    at = (head * TOKENS + token) * ROW
                    views[layer][block, at : at + ROW] = cache.layers[layer][block, at : at + ROW]
        if not block_major:
            cache.layers = np.stack(cache.memory)
        for ours, wanted in zip(cache.mirror, expected, strict=True):
            assert np.array_equal(ours, wanted)
        for one in cache.memory:
            one[:] = 0
        carry_out(copies, inward=True)
        for ours, wanted in zip(cache.memory, expected, strict=True):
            assert np.array_equal(ours, wanted)


def test_only_a_peers_share_is_copied() -> None:
    cache = Cache()
    cache.fill()
    share = (Held("kv", (0, 2), (1,)),)
    table = Tables.of(cache.map).pack([[7]], [0])
    carry_out(Mirrored(cache.map, cache.reflected, share).copies(table, (0, 4), 0, 4, source=True))
    assert cache.copied() == [(0, 7), (2, 7)]
    assert not cache.mirror[0][7, : TOKENS * ROW].any()
    assert np.array_equal(cache.mirror[0][7, TOKENS * ROW :], cache.memory[0][7, TOKENS * ROW :])


def test_of_a_window_only_what_is_wanted_is_copied_and_never_the_null_block() -> None:
    cache = Cache(window=5)
    cache.fill()
    tables = Tables.of(cache.map)
    table = tables.spanning([[0, 0, 0, 4, 9]], 0, 19)
    carry_out(Mirrored(cache.map, cache.reflected).copies(table, (0, 19), 0, 19, source=True))
    assert cache.copied() == [(layer, block) for layer in range(LAYERS) for block in (4, 9)]


def test_opaque_blocks_are_copied_whole() -> None:
    cache = Cache(interior="tiles")
    cache.fill()
    table = Tables.of(cache.map).pack([[3, 5]], [0])
    carry_out(Mirrored(cache.map, cache.reflected).copies(table, (0, 6), 1, 6, source=True))
    assert cache.copied() == [(layer, block) for layer in range(LAYERS) for block in (3, 5)]


def test_tables_that_do_not_fit_are_refused() -> None:
    cache = Cache()
    plan = Mirrored(cache.map, cache.reflected)
    with pytest.raises(ValueError, match="blocks"):
        plan.copies(Tables.of(cache.map).pack([[BLOCKS]], [0]), (0, 4), 0, 4, source=True)


def test_memory_without_a_mirror_is_refused() -> None:
    cache = Cache()
    beyond = msgspec.structs.replace(cache.map, spans=((64, 64),))
    with pytest.raises(LayoutMismatchError, match="no memory that has a mirror"):
        cache.reflection.of(beyond)
    with pytest.raises(LayoutMismatchError, match="no memory that has a mirror"):
        cache.reflection.address(cache.map.spans[0][0] + cache.map.spans[0][1])


def test_a_plane_over_two_spans_is_refused() -> None:
    cache = Cache(block_major=True)
    (at, length), mirror = cache.map.spans[0], cache.mirror[0].ctypes.data
    half = length // 2
    torn = Reflection([(at, half), (at + half, length - half)], [mirror + half, mirror])
    with pytest.raises(LayoutMismatchError, match="more than one span"):
        torn.of(cache.map)


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(runs) -> list[list[int]]:
    return in_rows(*np.array(runs, dtype=np.uint64).reshape(-1, 3).T).tolist()


def test_layers_that_lie_apart_are_the_rows_of_one_copy() -> None:
    cache = Cache()
    far = 100_000
    runs = [[far * layer + at, 1000 * layer + at, size] for layer in range(36) for at, size in ((0, 64), (128, 32))]
    assert rows_of(runs) == [[0, 0, 64, 36, far, 1000], [128, 128, 32, 36, far, 1000]]
    table = Tables.of(cache.map).pack([[1, 2, 3, 8]], [0])
    assert len(Mirrored(cache.map, cache.reflected).copies(table, (0, 16), 0, 16, source=True)) <= 2 * LAYERS


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [[0, 0, 64]],
        [[0, 0, 64], [128, 128, 32]],
        [[0, 0, 64], [100, 100, 64], [300, 200, 64]],
        [[0, 0, 64], [1 << 31, 100, 64]],
        [[500, 0, 64], [0, 100, 64]],
        [[0, 0, 64], [100, 100, 32], [500, 500, 64], [600, 600, 33]],
    ],
    ids=["none", "one", "lengths", "steps", "too far", "backwards", "length inside"],
)
def test_what_does_not_repeat_itself_is_a_copy_each(runs) -> None:
    assert rows_of(runs) == [[*run, 1, 0, 0] for run in runs]


# --- slots ------------------------------------------------------------------------------------------------------------


def test_slots_are_copied_whole_and_by_the_devices_addresses_re_packed() -> None:
    cache, theirs = Cache(), Cache()
    inside = {"tokens": ((8, 1),), "channels": ((ROW, 8),), "head_stride": 8 * ROW, "block_stride": HEADS * 8 * ROW}
    (group,) = theirs.map.groups
    plane = msgspec.structs.replace(group.planes[0], **inside)
    other = msgspec.structs.replace(theirs.map, groups=(Group(8, BLOCKS // 2, (plane,)),), memory="DRAM", device=0)
    area, mirror = np.arange(1 << 16, dtype=np.uint16).view(np.uint8), np.zeros(1 << 17, dtype=np.uint8)
    spans = [*cache.map.spans, (area.ctypes.data, area.nbytes)]
    both = Reflection(spans, [*(one.ctypes.data for one in cache.mirror), mirror.ctypes.data])
    card = RankCard("d", "m", 0, 1, 0, 1, "twin", both.of(cache.map), b"")
    card = msgspec.structs.replace(card, staging=StagingArea(mirror.ctypes.data, mirror.nbytes, (STRIDED,)))
    route = connected(RankCard("p", "m", 0, 1, 0, 1, "twin", other, b""), card)
    slots = MirroredSlots(both.behind(route.geometry, cache.map), route.geometry)
    picked = np.array([4, 1], dtype=np.int32).tobytes()
    carry_out(slots.copies(picked))
    size = HEADS * 8 * ROW
    stretch = -(-route.slots * size // 64) * 64
    expected = np.zeros_like(mirror)
    for layer in range(LAYERS):
        for slot in (4, 1):
            at = layer * stretch + slot * size
            expected[at : at + size] = area[at : at + size]
    assert np.array_equal(mirror, expected)
    (call,) = route.calls(picked, Tables.of(cache.map).pack([[1, 2, 3]], [0]), (0, 12))
    moved = both.call(call)
    for bundle in moved.pairing.bundles:
        assert all(area.ctypes.data <= at < area.ctypes.data + area.nbytes for at in bundle.source.tolist())
        assert set(bundle.sink.tolist()) == set(cache.map.groups[0].planes[0].bases)
