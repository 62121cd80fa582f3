"""Axes in digits, and layouts in words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.layout.maps import CacheMap, Group, Plane, extent, numbers, offsets, reach, spell


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_an_axis_counts_its_digits_as_a_number_is_read(digits) -> None:
    sizes = [size for size, _ in digits]
    expected = [sum(d * s for d, (_, s) in zip(index, digits, strict=True)) for index in np.ndindex(*sizes)]
    assert offsets(digits).tolist() == expected
    assert extent(digits) == len(expected)
    assert reach(digits) == max(expected)


@pytest.mark.parametrize(
    ("values", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 8), "0-2, 8"), ((5, 4, 5, 6), "5, 4-6")]
)
def test_numbers_are_shortened_to_ranges(values, text) -> None:
    assert numbers(values) == text


def plane(name: str, bases, block: int, head: int, token: int, heads=(0, 1), interior: str = "") -> Plane:
    inside = ((), ((4096, 1),)) if interior else (((16, token),), ((128, 2),))
    return Plane(
        name,
        "bfloat16",
        1 if interior else 2,
        tuple(range(len(bases))),
        tuple(bases),
        heads,
        8,
        block,
        head,
        *inside,
        interior,
    )


def spelled(*planes: Plane, window: int | None = None) -> str:
    return spell(CacheMap((Group(16, 64, planes, window),), (), "DRAM"))


def test_axes_are_named_from_the_outermost_to_the_innermost() -> None:
    page, far = 16 * 512 * 2, 1 << 30
    k, v = (plane(n, (0 + o, page + o), 2 * page, page // 2, 512) for n, o in (("k", 0), ("v", 256)))
    assert spelled(k, v) == (
        "k+v of layers 0-1, heads 0-1 as [block][layer][head][token 16][k+v][channel 128] bfloat16"
    )
    k, v = (plane(n, (o, o + 2 * far), page // 2, 256, 512) for n, o in (("k", 0), ("v", far)))
    assert spelled(k, v, window=512) == (
        "k+v of layers 0-1, heads 0-1 as [layer][k+v][block][token 16][head][channel 128] bfloat16, window 512"
    )
    wild = plane("k", (0, far, 5 * far), page, 0, 256, heads=(3,))
    assert spelled(wild) == "k of layers 0-2, heads 3 as [layer][block][token 16][channel 128] bfloat16"
    apart = plane("v", (9 * far, 2 * far, 7 * far), page, 0, 256, heads=(3,))
    assert spelled(wild, apart).startswith("k+v of layers 0-2, heads 3 as [layer][k+v][block]")
    assert spelled(plane("kv", (0, far), page, page // 2, 0, interior="vec")) == (
        "kv of layers 0-1, heads 0-1 as [layer][block][head] opaque cells 'vec' of 16 tokens"
    )
    assert spelled(plane("a", (0,), page, 0, 256), plane("b", (1,), page, 1, 128)).count(" and ") == 1
    assert spell(CacheMap((), (), "DRAM")) == "no planes"


def test_a_block_has_the_bytes_of_its_cells() -> None:
    group = Group(16, 64, (plane("k", (0, 1 << 30), 1, 1, 1), plane("v", (0,), 1, 1, 1, heads=(3,), interior="tiles")))
    assert group.block_bytes == 2 * 2 * 16 * 128 * 2 + 4096


def test_positions_are_counted_in_blocks_of_the_first_group() -> None:
    group = Group(16, 64, (plane("k", (0,), 1, 1, 1),))
    cache = CacheMap((group, Group(32, 9, (plane("v", (0,), 1, 1, 1),))), (), "DRAM")
    assert (cache.block_size, cache.num_blocks) == (16, 64)
    counts = [cache.blocks_for(*span) for span in ((0, 0), (5, 5), (0, 1), (0, 16), (15, 17), (16, 32), (20, 21))]
    assert counts == [0, 0, 1, 1, 2, 1, 1]
    assert cache.bytes_for(15, 17) == 2 * cache.block_bytes == 2 * sum(group.block_bytes for group in cache.groups)
