"""The host's re-packing of random strided layouts in real memory, against numpy's own indexing."""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import PlatformError
from kvxfer.layout.describe import Content, Heads, Tensor, opaque, strided
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.layout.positions import Table
from kvxfer.layout.repack import STRIDED, Repacking
from kvxfer_host.repack import OFFERS, repack, vec

HEADS, DIM, BLOCKS, LAYERS = 2, 3, 9, 2
TABLE = Table(np.array([5, 2, 7, 8, 1, 3], dtype=np.int32))


class Cache:
    """Arrays [layer, block, head, token, k + v] in an order of axes of their own."""

    def __init__(self, block: int, order, item: str) -> None:
        shape = (LAYERS, BLOCKS, HEADS, block, 2 * DIM)
        physical = np.zeros([shape[axis] for axis in order], dtype=item)
        self.memory, self.block = physical, block
        self.array = physical.transpose(np.argsort(order))

    def map(self) -> CacheMap:
        tensors = [Tensor(i, one.ctypes.data, one.shape, one.strides) for i, one in enumerate(self.array)]
        contents, heads = [Content("k", DIM), Content("v", DIM)], Heads(tuple(range(HEADS)), HEADS)
        planes = strided(tensors, "BHNC", contents, dtype="x", item=self.memory.itemsize, heads=heads)
        return CacheMap((Group(self.block, BLOCKS, planes),), ((self.memory.ctypes.data, self.memory.nbytes),), "DRAM")

    def tokens(self) -> np.ndarray:
        """What the request's positions hold: [layer, head, position, content]."""
        return np.concatenate([self.array[:, block] for block in TABLE.ids.tolist()], axis=2)


def carry_out(plan) -> None:
    for (ours, length, _), (theirs, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True):
        ctypes.memmove(theirs, ours, length)


ORDERS = st.sampled_from(
    [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 2, 4, 3), (1, 2, 0, 3, 4)]
)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), ORDERS, ORDERS, st.sampled_from(["u1", "i2", "i4"]), st.data())
def test_tokens_arrive_where_they_belong_and_nothing_else_changes(
    block, theirs, order, their_order, item, data
) -> None:
    source, sink = Cache(block, order, item), Cache(theirs, their_order, item)
    source.memory[...] = np.random.default_rng(0).integers(1, 127, size=source.memory.shape)
    end = data.draw(st.integers(0, min(block, theirs) * len(TABLE.ids)))
    start = data.draw(st.integers(0, end))
    slots = data.draw(st.integers(1, 6))
    size = Repacking(source.map(), sink.map(), OFFERS, base=0, slots=slots).size
    staging = np.zeros(size, dtype=np.uint8)
    repacking = Repacking(source.map(), sink.map(), OFFERS, base=staging.ctypes.data, slots=slots)
    for span in repacking.rounds(start, end):
        staged = repacking.plan([TABLE], [TABLE], *span)
        carry_out(staged.transfer)
        for call in staged.calls:
            repack(call)
    arrived = sink.tokens()
    assert (arrived[:, :, start:end] == source.tokens()[:, :, start:end]).all()
    assert not arrived[:, :, :start].any()
    assert not arrived[:, :, end:].any()
    others = [block for block in range(BLOCKS) if block not in TABLE.ids]
    assert not sink.array[:, others].any()


def test_vec_is_k_transposed_and_v_behind_it() -> None:
    tensors = [Tensor(3, 1 << 40, (BLOCKS, HEADS, 32, 128), (HEADS * 8192, 8192, 256, 2))]
    k, v = vec(tensors, 32, 64, dtype="bfloat16", item=2, heads=Heads((0, 1), 2))
    assert (k.bases, k.tokens, k.channels) == ((1 << 40,), ((32, 2),), ((64, 64),))
    assert (v.bases, v.tokens, v.channels) == (((1 << 40) + 4096,), ((32, 128),), ((64, 2),))
    assert (k.block_stride, k.head_stride) == (v.block_stride, v.head_stride) == (HEADS * 8192, 8192)


def test_what_was_not_offered_is_refused() -> None:
    assert OFFERS == (STRIDED,)
    cache = Cache(4, (0, 1, 2, 3, 4), "i2")
    one = cache.map()
    (group,) = one.groups
    tensors = [Tensor(i, a.ctypes.data, a.shape, a.strides) for i, a in enumerate(cache.array)]
    tiles = opaque(tensors, "BHNC", name="kv", dtype="x", interior="amx", item=2, heads=Heads((0, 1), 2))
    split = tuple(msgspec.structs.replace(p, tokens=((2, 24), (2, 12))) for p in group.planes)
    for planes, offers in ((tiles, [("amx", "amx")]), (split, OFFERS)):
        other = msgspec.structs.replace(one, groups=(msgspec.structs.replace(group, planes=planes),))
        repacking = Repacking(other, other, offers, base=cache.memory.ctypes.data, slots=1)
        (call,) = repacking.plan([TABLE], [TABLE], 0, 4).calls
        with pytest.raises(PlatformError, match="not laid out by one stride a token and one a channel"):
            repack(call)
