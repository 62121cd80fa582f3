"""Caches of real engines' layouts in host memory, filled and compared by position, whatever lies where.

Each is described as its own platform describes it; only that the memory is the host's is told otherwise, since no device is here.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from kvxfer.layout.describe import Content, Heads, Tensor, strided
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_neuron import layouts as neuron

LAYERS, HEADS, DIM, TOKENS = 2, 2, 64, 512
ITEM, NULL = 2, 1
"""Bytes of an element (bfloat16), and block 0, vLLM's null block."""


class LaidOut:
    """Memory, and a view of it as [layer, k/v, block, head, token, channel]."""

    block: ClassVar[int]
    cache: CacheMap
    views: list[np.ndarray]
    """A layer each, [k/v, block, head, token, channel]."""
    order: list[int]
    """The table with which the whole cache was filled last."""

    @property
    def blocks(self) -> int:
        return TOKENS // self.block + NULL

    def put(self, blocks: list[int], tokens: int, seed: int) -> None:
        """Write what positions [0, tokens) hold into the blocks of a table."""
        if tokens == TOKENS:
            self.order = blocks
        for layer, view in enumerate(self.views):
            for position in range(tokens):
                at = blocks[position // self.block], slice(None), position % self.block
                view[(slice(None), *at)] = content(seed)[layer, :, :, position]

    def wrong(self, blocks: list[int], tokens: int, seed: int, start: int, others: int) -> int:
        """Count elements that are not what they should be.

        Positions [start, tokens) hold what ``seed`` says; every other block what ``put`` wrote with the seed ``others`` before.
        """
        found = 0
        for layer, view in enumerate(self.views):
            for position in range(start, tokens):
                at = blocks[position // self.block], slice(None), position % self.block
                found += int((view[(slice(None), *at)] != content(seed)[layer, :, :, position]).sum())
        return found + self._changed(set(blocks[start // self.block :]), others)

    def _changed(self, mine: set[int], seed: int) -> int:
        order = self.order
        found = 0
        for number, block in enumerate(order):
            if block not in mine:
                positions = slice(number * self.block, (number + 1) * self.block)
                for layer, view in enumerate(self.views):
                    found += int((view[:, block] != content(seed)[layer, :, :, positions]).sum())
        return found + sum(int((view[:, 0] != 0).sum()) for view in self.views)


def content(seed: int) -> np.ndarray:
    """What every position of a request holds: [layer, k/v, head, position, channel], none of it zero."""
    if seed not in _contents:
        shape = (LAYERS, 2, HEADS, TOKENS, DIM)
        _contents[seed] = np.random.default_rng(seed).integers(1, 1 << 15, size=shape, dtype=np.int16)
    return _contents[seed]


_contents: dict[int, np.ndarray] = {}


class Neuron(LaidOut):
    """vllm-neuron: (2, blocks, heads, tokens, channels) a layer, an allocation each, blocks of 32."""

    block = 32

    def __init__(self) -> None:
        import torch

        shape = (2, self.blocks, HEADS, self.block, DIM)
        tensors = {f"layers.{i}.self_attn": torch.zeros(shape, dtype=torch.bfloat16) for i in range(LAYERS)}
        group = LayerGroup(tuple((name, i) for i, name in enumerate(tensors)), self.block, (0, 1), HEADS, DIM)
        described = neuron.describe(tensors, Geometry((group,), self.blocks, "auto", ("CUSTOM",)), packed=None)
        self.cache = msgspec.structs.replace(described, memory="DRAM")
        self.views = [tensor.view(torch.int16).numpy() for tensor in tensors.values()]


class Cuda(LaidOut):
    """What a subclass's memory order makes of K and V on a GPU."""

    axes: ClassVar[str]

    def _describe(self, memory: np.ndarray, layers: list[np.ndarray]) -> None:
        contents = [Content("k", DIM), Content("v", DIM)]
        tensors = [Tensor(i, one.ctypes.data, one.shape, one.strides) for i, one in enumerate(layers)]
        planes = strided(tensors, self.axes, contents, dtype="bfloat16", item=ITEM, heads=Heads((0, 1), HEADS))
        span = (memory.ctypes.data, memory.nbytes)
        self.cache = CacheMap((Group(self.block, self.blocks, planes),), (span,), "DRAM")


class CudaHalves(Cuda):
    """vLLM up to 0.25, HND: (blocks, 2, heads, tokens, channels), K and V beside each other in a block."""

    block, axes = 16, "BPHNC"

    def __init__(self) -> None:
        memory = np.zeros((LAYERS, self.blocks, 2, HEADS, self.block, DIM), dtype=np.int16)
        self._describe(memory, list(memory))
        self.views = [one.transpose(1, 0, 2, 3, 4) for one in memory]


class CudaHalvesOf32(CudaHalves):
    """The same with Neuron's block size."""

    block = 32


class CudaJoined(Cuda):
    """vLLM from 0.29 on, BLHNC: all layers of a block together, K and V joined in a token."""

    block, axes = 16, "BHNC"

    def __init__(self) -> None:
        memory = np.zeros((self.blocks, LAYERS, HEADS, self.block, 2 * DIM), dtype=np.int16)
        layers = [memory[:, layer] for layer in range(LAYERS)]
        self._describe(memory, layers)
        self.views = [np.moveaxis(one.reshape(*one.shape[:-1], 2, DIM), -2, 0) for one in layers]


KINDS = {"neuron": Neuron, "cuda halves": CudaHalves, "cuda halves of 32": CudaHalvesOf32, "cuda joined": CudaJoined}
