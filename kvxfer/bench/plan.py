"""What it costs to plan one handoff's descriptors: how many there are, processor time, memory.

16,384 tokens of 64 layers with 8 heads of 128, bfloat16, blocks of 16 tokens, from a rank to one of the same layout: 4.29 GB,
block-major and layer-major, each with blocks in a row and with blocks that never follow each other. Runs are not cut at
the longest descriptor here, so that their number is that of the memory, not of a limit.
"""

from __future__ import annotations

import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvxfer.layout.describe import Content, Heads, Tensor, strided
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, LAYERS, HEADS, HEAD_SIZE, BLOCK, ITEM = 16_384, 64, 8, 128, 16, 2
REPEATS: Final = 20
_NEEDED = TOKENS // BLOCK
_BLOCKS = 4 * _NEEDED
_UNCUT: Final = 1 << 62


def cache(*, block_major: bool, base: int) -> CacheMap:
    """Lay out a cache as vLLM does for BLHNC, or for LBHNC."""
    page = HEADS * BLOCK * 2 * HEAD_SIZE * ITEM
    block_stride, layer_stride = (LAYERS * page, page) if block_major else (page, _BLOCKS * page)
    shape = (_BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE)
    strides = (block_stride, BLOCK * 2 * HEAD_SIZE * ITEM, 2 * HEAD_SIZE * ITEM, ITEM)
    tensors = [Tensor(layer, base + layer * layer_stride, shape, strides) for layer in range(LAYERS)]
    contents = [Content("k", HEAD_SIZE), Content("v", HEAD_SIZE)]
    heads = Heads(tuple(range(HEADS)), HEADS)
    planes = strided(tensors, "BHNC", contents, dtype="bfloat16", item=ITEM, heads=heads)
    return CacheMap((Group(BLOCK, _BLOCKS, planes),), ((base, LAYERS * page * _BLOCKS),), "VRAM")


def tables(*, contiguous: bool) -> tuple[list[Table], list[Table]]:
    """Return both sides' block tables; scattered ones have even ids only, so that no block follows another."""
    if contiguous:
        return [Table(np.arange(100, 100 + _NEEDED, dtype=np.int32))], [
            Table(np.arange(7, 7 + _NEEDED, dtype=np.int32))
        ]
    rng = np.random.default_rng(1)
    even = np.arange(0, _BLOCKS, 2, dtype=np.int32)
    return [Table(rng.permutation(even)[:_NEEDED])], [Table(rng.permutation(even)[:_NEEDED])]


def run() -> list[dict[str, Any]]:
    """Measure the four cases."""
    results = []
    for layout, block_major in (("block-major", True), ("layer-major", False)):
        source, sink = (cache(block_major=block_major, base=base) for base in (1 << 40, 1 << 44))
        preparing = _best(partial(prepare, source, sink))
        prepared = prepare(source, sink)
        for order in ("contiguous", "scattered"):
            plan = partial(prepared.plan, *tables(contiguous=order == "contiguous"), 0, TOKENS, limit=_UNCUT)
            made = plan()
            results.append(
                {
                    "case": f"{layout} {order}",
                    "descriptors": made.count,
                    "bytes": made.bytes,
                    "cpu_ms": round(_best(plan) * 1e3, 4),
                    "prepare_cpu_ms": round(preparing * 1e3, 3),
                    "peak_bytes": _peak(plan),
                    "estimated_ms": round(made.seconds() * 1e3, 1),
                }
            )
    return results


def _best(call: Callable[[], object]) -> float:
    """Return the least processor time of this thread, in seconds, that a call took."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


def _peak(call: Callable[[], object]) -> int:
    """Return the most memory that a call held at once, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
