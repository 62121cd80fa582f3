"""CUDA's re-packing, by torch in host memory, of random strided layouts against numpy's own indexing."""

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
from kvxfer.layout.repack import Repacking
from kvxfer_cuda import repack as module
from kvxfer_cuda.repack import OFFERS, DeviceMemory, repack

torch = pytest.importorskip("torch")

HEADS, DIM, BLOCKS, LAYERS = 2, 4, 9, 2
TABLE = Table(np.array([5, 2, 7, 8, 1, 3], dtype=np.int32))


class Cache:
    """Arrays [layer, block, head, token, k + v] in an order of axes of their own; ``split`` cuts a block into kernel blocks."""

    def __init__(self, block: int, order, item: str, split: int = 1) -> None:
        shape = (LAYERS, BLOCKS, split, HEADS, block, 2 * DIM)
        axes = {"L": 0, "B": 1, "S": 2, "H": 3, "N": 4, "C": 5}
        physical = torch.zeros([shape[axes[axis]] for axis in order], dtype=getattr(torch, item))
        self.memory, self.block = physical, block * split
        self.array = physical.numpy().transpose([order.index(axis) for axis in "LBSHNC"])

    def map(self) -> CacheMap:
        tensors = [Tensor(i, one.ctypes.data, one.shape, one.strides) for i, one in enumerate(self.array)]
        contents, heads = [Content("k", DIM), Content("v", DIM)], Heads(tuple(range(HEADS)), HEADS)
        planes = strided(tensors, "BNHNC", contents, dtype="x", item=self.memory.element_size(), heads=heads)
        return CacheMap((Group(self.block, BLOCKS, planes),), ((self.memory.data_ptr(), self.memory.nbytes),), "VRAM")

    def tokens(self) -> np.ndarray:
        """What the request's positions hold: [layer, head, position, content]."""
        whole = np.moveaxis(self.array, 3, 2).reshape(LAYERS, BLOCKS, HEADS, self.block, 2 * DIM)
        return np.concatenate([whole[:, block] for block in TABLE.ids.tolist()], axis=2)


ORDERS = st.sampled_from(["LBSHNC", "LBSNHC", "BLSHNC", "LHBSNC", "LBSHCN", "BSHLNC"])


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(1, 7), st.integers(1, 3), ORDERS),
    st.tuples(st.integers(1, 7), st.integers(1, 3), ORDERS),
    st.sampled_from(["uint8", "int16", "int32"]),
    st.sampled_from([1, 3, 1 << 22]),
    st.data(),
)
def test_tokens_arrive_where_they_belong_and_nothing_else_changes(ours, theirs, item, at_once, data) -> None:
    (block, split, order), (their_block, their_split, their_order) = ours, theirs
    source, sink = Cache(block, order, item, split), Cache(their_block, their_order, item, their_split)
    source.array[...] = np.random.default_rng(0).integers(1, 127, size=source.array.shape)
    end = data.draw(st.integers(0, min(source.block, sink.block) * len(TABLE.ids)))
    start = data.draw(st.integers(0, end))
    slots = data.draw(st.integers(1, 6))
    size = Repacking(source.map(), sink.map(), OFFERS, base=0, slots=slots).size
    staging = torch.zeros(size, dtype=torch.uint8)
    repacking = Repacking(source.map(), sink.map(), OFFERS, base=staging.data_ptr(), slots=slots)
    memory = DeviceMemory([sink.memory.untyped_storage()])
    memory.add(staging.untyped_storage())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", at_once)
        for span in repacking.rounds(start, end):
            staged = repacking.plan([TABLE], [TABLE], *span)
            for (here, length, _), (there, _, _) in zip(
                staged.transfer.source.tolist(), staged.transfer.sink.tolist(), strict=True
            ):
                ctypes.memmove(there, here, length)
            for call in staged.calls:
                repack(call, memory)
    arrived = sink.tokens()
    assert (arrived[:, :, start:end] == source.tokens()[:, :, start:end]).all()
    assert not arrived[:, :, :start].any()
    assert not arrived[:, :, end:].any()
    others = [block for block in range(BLOCKS) if block not in TABLE.ids]
    assert not sink.array[:, others].any()


def test_elements_are_as_wide_as_both_layouts_allow() -> None:
    def unit(order: str, theirs: str, item: str) -> int:
        ours, other = Cache(4, order, item).map(), Cache(4, theirs, item).map()
        planes = (ours.groups[0].planes[0], other.groups[0].planes[0])
        joined = all(plane.channels == ((DIM, plane.item),) for plane in planes)
        return module._unit(planes, [0, 64], joined=joined)

    assert unit("LBSHNC", "LBSNHC", "int16") == 8
    assert unit("LBSHNC", "LBSNHC", "uint8") == 4
    assert unit("LBSHNC", "LBSHCN", "int16") == 2, "channels apart: an element at a time"


def test_an_address_that_was_neither_described_nor_staged_is_refused() -> None:
    one, other = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    memory = DeviceMemory([one.untyped_storage()])
    assert memory.view(one.data_ptr() + 60, 4).numel() == 1
    for address in (other.data_ptr(), one.data_ptr() + 64, 0):
        with pytest.raises(PlatformError, match=f"address {address:#x} is in no memory that was described or staged"):
            memory.view(address, 1)
    with pytest.raises(PlatformError):
        DeviceMemory([]).view(1, 1)


def test_what_was_not_offered_is_refused() -> None:
    cache = Cache(4, "LBSHNC", "int16")
    one = cache.map()
    (group,) = one.groups
    tensors = [Tensor(i, a.ctypes.data, a.shape, a.strides) for i, a in enumerate(cache.array[:, :, 0])]
    tiles = opaque(tensors, "BHNC", name="kv", dtype="x", interior="tiles", item=2, heads=Heads((0, 1), 2))
    other = msgspec.structs.replace(one, groups=(msgspec.structs.replace(group, planes=tiles),))
    repacking = Repacking(other, other, [("tiles", "tiles")], base=cache.memory.data_ptr(), slots=1)
    (call,) = repacking.plan([TABLE], [TABLE], 0, 4).calls
    with pytest.raises(PlatformError, match=r"plane 'kv' is opaque \(tiles\): not re-packed here"):
        repack(call, DeviceMemory([cache.memory.untyped_storage()]))
