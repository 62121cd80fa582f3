"""Descriptors against a copy that is done byte by byte, on real memory of random geometry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.layout.blocks import CacheLayout, Region, block_span, plan_blocks


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class Memory:
    """A rank's memory, and the layout over it: regions one behind the other, with gaps."""

    def __init__(self, num_blocks: int, sizes: list[int], paddings: list[int], gap: int, seed: int) -> None:
        at, places = gap, []
        for size, padding in zip(sizes, paddings, strict=True):
            places.append((at, size + padding, size))
            at += num_blocks * (size + padding) + gap
        self.bytes = np.random.default_rng(seed).integers(0, 256, size=at, dtype=np.uint8)
        self.base = self.bytes.ctypes.data
        self.layout = CacheLayout(
            block_size=4,
            num_blocks=num_blocks,
            dtype="float32",
            layers=len(sizes),
            kv_heads=1,
            head_dim=1,
            interior="test",
            memory="DRAM",
            regions=tuple(Region(f"r{i}", self.base + a, s, b, 7) for i, (a, s, b) in enumerate(places)),
            spans=((self.base, at, 7),),
        )
        self.places = places

    def where(self, region: int, block: int) -> slice:
        at, stride, size = self.places[region]
        return slice(at + block * stride, at + block * stride + size)


RUNS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=6)


@st.composite
def cases(draw):
    regions = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 9), min_size=regions, max_size=regions))
    make = []
    for seed in (1, 2):
        padded = draw(st.booleans())
        paddings = draw(st.lists(st.integers(0, 3), min_size=regions, max_size=regions)) if padded else [0] * regions
        make.append(Memory(draw(st.integers(12, 20)), sizes, paddings, draw(st.integers(0, 5)), seed))
    local, remote = make
    # Ids in runs, as an allocator gives them, cut differently on both sides; a destination is named once.
    source = [min(start + i, local.layout.num_blocks - 1) for start, length in draw(RUNS) for i in range(length)]
    order = list(range(remote.layout.num_blocks))
    if draw(st.booleans()):
        turn = draw(st.integers(0, len(order) - 1))
        order = order[turn:] + order[:turn]
    else:
        order = draw(st.permutations(order))
    count = min(len(source), len(order))
    limit = draw(st.sampled_from([1, 5, 16, 30, 1 << 30]))
    return local, ids(*source[:count]), remote, ids(*order[:count]), limit


def naive(local: Memory, local_ids, remote: Memory, remote_ids) -> np.ndarray:
    result = remote.bytes.copy()
    for region in range(len(local.places)):
        for mine, theirs in zip(local_ids.tolist(), remote_ids.tolist(), strict=True):
            result[remote.where(region, theirs)] = local.bytes[local.where(region, mine)]
    return result


def carried_out(local: Memory, remote: Memory, rows, their_rows) -> np.ndarray:
    result = remote.bytes.copy()
    for (mine, length, _), (theirs, their_length, _) in zip(rows.tolist(), their_rows.tolist(), strict=True):
        assert length == their_length > 0
        assert 0 <= mine - local.base <= len(local.bytes) - length
        assert 0 <= theirs - remote.base <= len(result) - length
        result[theirs - remote.base : theirs - remote.base + length] = local.bytes[
            mine - local.base : mine - local.base + length
        ]
    return result


def fewest(local: Memory, local_ids, remote: Memory, remote_ids, limit: int) -> int:
    """Count, block by block, the pieces that no descriptor of at most ``limit`` bytes can join."""
    count = 0
    for (_, stride, size), (_, their_stride, _) in zip(local.places, remote.places, strict=True):
        length = 0
        for i in range(len(local_ids)):
            joins = (
                length > 0
                and stride == their_stride == size
                and local_ids[i] == local_ids[i - 1] + 1
                and remote_ids[i] == remote_ids[i - 1] + 1
                and (length + 1) * size <= limit
            )
            length = length + 1 if joins else 1
            count += not joins
    return count


@given(cases())
def test_every_byte_goes_where_it_belongs_and_no_other_changes(case) -> None:
    local, local_ids, remote, remote_ids, limit = case
    rows, their_rows = plan_blocks(local.layout, local_ids, remote.layout, remote_ids, limit)
    assert np.array_equal(carried_out(local, remote, rows, their_rows), naive(local, local_ids, remote, remote_ids))


@given(cases())
def test_there_are_no_more_descriptors_than_runs_on_both_sides(case) -> None:
    local, local_ids, remote, remote_ids, limit = case
    rows, their_rows = plan_blocks(local.layout, local_ids, remote.layout, remote_ids, limit)
    assert len(rows) == len(their_rows) == fewest(local, local_ids, remote, remote_ids, limit)
    largest = max([limit, *(size for _, _, size in local.places)])
    assert (rows[:, 1] <= largest).all(), "a descriptor is longer than the limit and more than a block"


@given(cases())
def test_descriptors_are_what_nixl_takes(case) -> None:
    local, local_ids, remote, remote_ids, limit = case
    for rows in plan_blocks(local.layout, local_ids, remote.layout, remote_ids, limit):
        assert rows.dtype == np.uint64
        assert rows.shape == (len(rows), 3)
        assert (rows[:, 2] == 7).all()


def test_addresses_above_two_to_the_63_are_exact() -> None:
    layout = Memory(4, [8], [0], 0, 1).layout
    high = 2**64 - 64
    far = CacheLayout(
        **{f: getattr(layout, f) for f in layout.__struct_fields__} | {"regions": (Region("r", high, 8, 8, 0),)}
    )
    rows, _ = plan_blocks(far, ids(3), layout, ids(0))
    assert int(rows[0, 0]) == high + 24


def test_nothing_to_copy_makes_no_descriptor() -> None:
    memory = Memory(4, [8, 8], [0, 0], 0, 1)
    for layout in (
        memory.layout,
        CacheLayout(**{f: getattr(memory.layout, f) for f in memory.layout.__struct_fields__} | {"regions": ()}),
    ):
        rows, their_rows = plan_blocks(layout, ids(), layout, ids())
        assert rows.shape == their_rows.shape == (0, 3)


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        (ids(0, 1), ids(0), "2 local blocks cannot be paired with 1 remote ones"),
        (ids(0, 4), ids(0, 1), "local block 4 is outside a cache of 4 blocks"),
        (ids(0, 1), ids(-1, 3), "remote block -1 is outside a cache of 4 blocks"),
        (ids(2**31 - 1), ids(0), "local block 2147483647 is outside"),
    ],
)
def test_ids_that_cannot_be_are_refused(mine, theirs, text) -> None:
    layout = Memory(4, [8], [0], 0, 1).layout
    with pytest.raises(ValueError, match=text):
        plan_blocks(layout, mine, layout, theirs)


def test_layouts_with_different_numbers_of_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        plan_blocks(Memory(4, [8], [0], 0, 1).layout, ids(0), Memory(4, [8, 8], [0, 0], 0, 1).layout, ids(0))


# --- spans of positions -----------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 30), st.integers(0, 5), st.integers(0, 3))
def test_block_span_takes_exactly_the_blocks_that_hold_the_positions(block_size, start, length, before, after) -> None:
    first = max(0, start // block_size - before) * block_size
    end = start + length
    low, high = start // block_size, -(-end // block_size)
    held = np.arange(first // block_size, max(low, high) + after, dtype=np.int32)
    assert block_span(held.tobytes(), first, start, end, block_size).tolist() == list(range(low, high))


@pytest.mark.parametrize(("first", "start", "end"), [(0, 0, 13), (8, 4, 12), (0, 12, 16), (4, 3, 8)])
def test_positions_outside_the_ids_are_refused(first, start, end) -> None:
    with pytest.raises(
        ValueError, match=rf"positions \[{start}, {end}\) need blocks .* holds 3 from position {first} on"
    ):
        block_span(ids(1, 2, 3).tobytes(), first, start, end, 4)


def test_bytes_that_are_no_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        block_span(b"12345", 0, 0, 4, 4)


@given(st.integers(0, 60), st.integers(0, 60))
def test_blocks_and_bytes_of_a_span_count_the_blocks_it_touches(start, end) -> None:
    layout = Memory(4, [8, 5], [0, 2], 0, 1).layout
    touched = {p // 4 for p in range(start, end)}
    assert layout.blocks_for(start, end) == len(touched)
    assert layout.bytes_for(start, end) == len(touched) * 13


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 4))
def test_a_regions_span_ends_with_its_last_blocks_last_byte(num_blocks, size, padding) -> None:
    start, length = Region("r", 1000, size + padding, size, 0).span(num_blocks)
    touched = {1000 + b * (size + padding) + i for b in range(num_blocks) for i in range(size)}
    assert (start, start + length - 1) == (min(touched), max(touched))
