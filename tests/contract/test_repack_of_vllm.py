"""Blocks that vLLM's own CPU kernel has written, handed over to blocks of another size and re-packed, byte for byte."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm import _custom_ops as ops

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.check import check
from kvxfer.layout.describe import Heads, Tensor
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table
from kvxfer.layout.ranks import Shard, heads_of, share
from kvxfer.layout.repack import Repacking
from kvxfer_host import repack

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"), reason="not vLLM's CPU build"),
]

LAYERS, HEADS, TOKENS, SLOTS = 2, 4, 300, 4


class Engine:
    """A rank's cache of vLLM's CPU attention, instruction set "vec", with TOKENS positions of a request in it or nothing."""

    def __init__(self, block: int, dim: int, dtype: torch.dtype, shard: Shard, content=None) -> None:
        self.block, self.dim, self.dtype, self.shard = block, dim, dtype, shard
        self.heads = heads_of(HEADS, shard)
        blocks = -(-TOKENS // block) + 3
        shape = (LAYERS, blocks, len(self.heads), block, 2 * dim)
        self.caches = torch.zeros(shape, dtype=dtype)
        order = np.random.default_rng(block).permutation(np.arange(1, blocks, dtype=np.int32))
        self.table = Table(order[: -(-TOKENS // block)])
        if content is not None:
            self.write(content, 0, TOKENS)

    def write(self, content: torch.Tensor, start: int, end: int) -> None:
        """Have vLLM's kernel write positions [start, end) of (layer, k/v, position, head, channel)."""
        positions = torch.arange(start, end)
        slots = torch.from_numpy(self.table.ids.astype(np.int64))[positions // self.block] * self.block
        slots += positions % self.block
        for layer in range(LAYERS):
            cache = self.caches[layer]
            key_cache, value_cache = cache.view(*cache.shape[:2], 2 * self.block, self.dim).chunk(2, dim=2)
            k, v = (content[layer, i, start:end][:, list(self.heads)].contiguous() for i in (0, 1))
            kept = (1.0, 1.0, "fp8_e4m3") if self.dtype == torch.uint8 else ()
            try:
                ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, slots, "vec", *kept)
            except RuntimeError as error:
                if (
                    kept
                    and "Unsupported CPU attention" in str(error)
                    and "avx512f" not in Path("/proc/cpuinfo").read_text()
                ):
                    pytest.skip("vLLM's build for a CPU without AVX-512 has no kernel for fp8")
                raise

    def map(self) -> CacheMap:
        item = self.caches.element_size()
        tensors = [
            Tensor(layer, one.data_ptr(), tuple(one.shape), tuple(step * item for step in one.stride()))
            for layer, one in enumerate(self.caches)
        ]
        heads = Heads(self.heads, HEADS)
        planes = repack.vec(tensors, self.block, self.dim, dtype=str(self.dtype), item=item, heads=heads)
        storage = self.caches.untyped_storage()
        group = Group(self.block, self.caches.shape[1], planes)
        cache = CacheMap((group,), ((storage.data_ptr(), storage.nbytes()),), "DRAM")
        check(cache)
        return cache


def carry_out(plan) -> None:
    for (ours, length, _), (theirs, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True):
        ctypes.memmove(theirs, ours, length)


@pytest.mark.parametrize(("block", "theirs"), [(32, 128), (128, 32), (32, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("tp", "their_tp"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_re_packed_blocks_are_those_that_vllms_kernel_would_have_written(block, theirs, dtype, tp, their_tp) -> None:
    torch.manual_seed(0)
    content = torch.randn(LAYERS, 2, TOKENS, HEADS, 64)
    content = content if dtype == torch.uint8 else content.to(dtype)  # to a cache of bytes the kernel writes fp8
    start, end = 45, 290
    shard = Shard(their_tp - 1, their_tp)
    sink, reference = (Engine(theirs, 64, dtype, shard) for _ in range(2))
    sink.write(content, 0, start)  # what its own prefix cache has: it shares a block with what comes
    reference.write(content, 0, end)
    for rank in range(tp):
        source = Engine(block, 64, dtype, Shard(rank, tp), content)
        part = share(source.map(), source.shard, sink.map(), shard)
        if not part:
            continue
        with pytest.raises(LayoutMismatchError, match="on average"):
            prepare(source.map(), sink.map(), part)
        staging = torch.zeros(Repacking(source.map(), sink.map(), repack.OFFERS, base=0, slots=SLOTS, share=part).size)
        base = staging.data_ptr()
        repacking = Repacking(source.map(), sink.map(), repack.OFFERS, base=base, slots=SLOTS, share=part)
        for span in repacking.rounds(start, end):
            staged = repacking.plan([source.table], [sink.table], *span, keep=start)
            carry_out(staged.transfer)
            for call in staged.calls:
                repack.repack(call)
    assert torch.equal(sink.caches, reference.caches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_between_equal_blocks_transposed_interiors_move_as_they_are(dtype) -> None:
    content = torch.randn(LAYERS, 2, TOKENS, HEADS, 64).to(dtype)
    source, sink = Engine(32, 64, dtype, Shard(0, 1), content), Engine(32, 64, dtype, Shard(0, 1))
    plan = prepare(source.map(), sink.map(), useful=1 << 12).plan([source.table], [sink.table], 0, TOKENS)
    carry_out(plan)
    assert torch.equal(sink.caches, source.caches), "both tables are the same here"
    assert plan.count <= LAYERS * len(source.table.ids)
