"""Maps described from the tensors that vLLM's own code allocates, for each of its layouts.

Each element of a cache is written through vLLM's logical view [block, head, token, content]; what descriptors then copy is read
through the view of the other cache. No engine is started.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm.v1.kv_cache_layout", reason="no vLLM is installed that has layouts by name")

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvxfer.errors import PlatformError
from kvxfer.layout.check import check
from kvxfer.layout.describe import Content, Heads, Tensor, strided
from kvxfer.layout.maps import CacheMap, Group, offsets
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_host import HostPlatform

pytestmark = pytest.mark.contract

NAMES = [layout.name for layout in KVCacheLayout]
LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 4, 8, 16, 12
KV = [Content("k", DIM), Content("v", DIM)]


def allocate(name: str, groups: list[KVCacheGroupSpec], kernel_blocks: list[int] | None = None):
    """Allocate as a worker does: the engine's configuration, then one buffer and its views."""
    layout = KVCacheLayout[name]
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=None,
    )
    vllm = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    config = get_kv_cache_config_from_groups(vllm, groups, 1 << 24)
    assert config.num_blocks == BLOCKS
    return allocate_kv_cache(config, torch.device("cpu"), layout, kernel_blocks)


def attention(kind=FullAttentionSpec, **changes):
    fields = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    return kind(**(fields | changes))


def layer(number: int, what: str = "attn") -> str:
    return f"model.layers.{number}.self_attn.{what}"


def tensor(number: int, cache: torch.Tensor) -> Tensor:
    item = cache.element_size()
    return Tensor(number, cache.data_ptr(), tuple(cache.shape), tuple(step * item for step in cache.stride()))


def planes(caches, what: str = "attn", contents=KV, heads=Heads(tuple(range(HEADS)), HEADS), axes: str = "BHNC"):  # noqa: B008
    chosen = {number: caches[layer(number, what)] for number in range(LAYERS) if layer(number, what) in caches}
    item = next(iter(chosen.values())).element_size()
    tensors = [tensor(number, cache) for number, cache in chosen.items()]
    return strided(tensors, axes, contents, dtype="x", item=item, heads=heads)


def mapped(caches, *groups: Group) -> CacheMap:
    storage = next(iter(caches.values())).untyped_storage()
    cache = CacheMap(groups, ((storage.data_ptr(), storage.nbytes()),), "DRAM")
    check(cache)
    return cache


def stamp(caches) -> None:
    """Give each element of each cache a number of its own."""
    at = 1
    for cache in caches.values():
        numbers = torch.arange(at, at + cache.numel(), dtype=torch.int64)
        at += cache.numel()
        cache.copy_((numbers % 251 if cache.element_size() == 1 else numbers).reshape(cache.shape).to(cache.dtype))


def carry_out(plan) -> None:
    for (ours, length, _), (theirs, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True):
        ctypes.memmove(theirs, ours, length)


def ids(*values: int) -> Table:
    return Table(np.array(values, dtype=np.int32))


SOURCE, SINK = (3, 4, 5, 9, 1), (7, 8, 2, 10, 11)


def assert_moved(source, sink, pairs, name: str) -> None:
    """Blocks are equal pairwise, and all others of the sink are as they were: zero."""
    for ours, theirs in pairs:
        assert torch.equal(source[name][ours], sink[name][theirs]), (name, ours, theirs)
    untouched = [block for block in range(BLOCKS) if block not in {theirs for _, theirs in pairs}]
    assert not sink[name].view(torch.uint8)[untouched].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("theirs", NAMES)
def test_blocks_move_between_any_two_layouts(name, theirs) -> None:
    groups = [KVCacheGroupSpec([layer(number) for number in range(LAYERS)], attention())]
    source, sink = allocate(name, groups), allocate(theirs, groups)
    stamp(source)
    maps = [mapped(caches, Group(BLOCK, BLOCKS, planes(caches))) for caches in (source, sink)]
    plan = prepare(*maps, useful=0).plan([ids(*SOURCE)], [ids(*SINK)], 0, 5 * BLOCK)
    carry_out(plan)
    for number in range(LAYERS):
        assert_moved(source, sink, list(zip(SOURCE, SINK, strict=True)), layer(number))
    if name == theirs:
        chains = {"LBHNC": 4 * LAYERS, "LBNHC": 4 * LAYERS, "LHBNC": 4 * LAYERS * HEADS}
        assert plan.count == chains.get(name, 4), "two of the five blocks follow each other on both sides"


@pytest.mark.parametrize("name", NAMES)
def test_positions_inside_blocks_and_unequal_blocks(name) -> None:
    groups = [
        KVCacheGroupSpec([layer(number) for number in range(LAYERS)], attention(block_size=size)) for size in (16, 32)
    ]
    source, sink = allocate(name, groups[:1]), allocate(name, groups[1:])
    stamp(source)
    maps = [mapped(c, Group(size, BLOCKS, planes(c))) for c, size in ((source, 16), (sink, 32))]
    carry_out(prepare(*maps, useful=0).plan([ids(*SOURCE)], [ids(6, 2, 4)], 10, 70, exact=True))
    for number in range(LAYERS):
        tokens = torch.cat([source[layer(number)][block] for block in SOURCE], dim=1)
        there = torch.cat([sink[layer(number)][block] for block in (6, 2, 4)], dim=1)
        assert torch.equal(tokens[:, 10:70], there[:, 10:70])
        assert not there[:, :10].any()
        assert not there[:, 70:].any()


@pytest.mark.parametrize("name", ["BLHNC", "BLNHC", "BHLNC"])
def test_a_hybrids_groups_share_their_bytes_and_move_apart(name) -> None:
    specs = [attention(), attention(SlidingWindowSpec, sliding_window=20)]
    groups = [KVCacheGroupSpec([layer(0), layer(1)], specs[0]), KVCacheGroupSpec([layer(2)], specs[1])]
    caches = [allocate(name, groups) for _ in range(2)]
    stamp({layer(0): caches[0][layer(0)], layer(1): caches[0][layer(1)]})
    for block in (6, 0):  # blocks belong to one group at a time: these two are the window group's
        caches[0][layer(2)][block] = 5000 + torch.arange(caches[0][layer(2)][block].numel()).reshape(
            HEADS, BLOCK, 2 * DIM
        )
    maps = []
    for one in caches:
        full = planes({name: cache for name, cache in one.items() if name != layer(2)})
        maps.append(
            mapped(one, Group(BLOCK, BLOCKS, full), Group(BLOCK, BLOCKS, planes({layer(2): one[layer(2)]}), window=20))
        )
    plan = prepare(*maps, useful=0).plan([ids(3, 4, 5), ids(0, 0, 6)], [ids(7, 8, 2), ids(0, 0, 9)], 0, 40)
    carry_out(plan)
    assert [tuple(span) for span in plan.moved] == [(0, 48), (16, 48)]
    for number in (0, 1):
        for ours, theirs in ((3, 7), (4, 8), (5, 2)):
            assert torch.equal(caches[0][layer(number)][ours], caches[1][layer(number)][theirs])
    assert torch.equal(caches[0][layer(2)][6], caches[1][layer(2)][9])


@pytest.mark.parametrize("name", ["BLHNC", "LBHNC"])
def test_latents_and_an_indexer_of_another_size_beside_them(name) -> None:
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
    index = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    specs = {layer(number): latent for number in range(LAYERS)} | {layer(1, "indexer"): index}
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))
    caches = [allocate(name, [group]) for _ in range(2)]
    stamp(caches[0])
    one = Heads((0,), 1)
    maps = [
        mapped(
            c,
            Group(
                BLOCK,
                BLOCKS,
                planes(c, contents=[Content("latent", 72)], heads=one)
                + planes(c, "indexer", [Content("index", 132)], heads=one),
            ),
        )
        for c in caches
    ]
    plan = prepare(*maps).plan([ids(*SOURCE)], [ids(*SINK)], 0, 5 * BLOCK)
    carry_out(plan)
    assert plan.count == (4 if name == "BLHNC" else 4 * (LAYERS + 1))
    for which in specs:
        assert_moved(*caches, list(zip(SOURCE, SINK, strict=True)), which)


def test_blocks_that_vllm_splits_for_its_kernels() -> None:
    """Manager blocks of 32 tokens as two kernel blocks of 16: the token axis has two digits."""
    groups = [KVCacheGroupSpec([layer(number) for number in range(LAYERS)], attention(block_size=32))]
    source, sink = allocate("LBHNC", groups, [16]), allocate("LBHNC", groups)
    stamp(source)
    split = {name: cache.unflatten(0, (BLOCKS, 2)) for name, cache in source.items()}
    maps = [
        mapped(source, Group(32, BLOCKS, planes(split, axes="BNHNC"))),
        mapped(sink, Group(32, BLOCKS, planes(sink))),
    ]
    carry_out(prepare(*maps, useful=0).plan([ids(*SOURCE)], [ids(*SINK)], 0, 5 * 32))
    for number in range(LAYERS):
        whole = torch.cat([split[layer(number)][:, half] for half in (0, 1)], dim=2)
        for ours, theirs in zip(SOURCE, SINK, strict=True):
            assert torch.equal(whole[ours], sink[layer(number)][theirs])


# --- each element, where the map says that it is ---------------------------------------------------------------------------


def gather(cache: CacheMap, plane, layer: int) -> torch.Tensor:
    """Read a plane of one layer, [block, head, token, channel], byte by byte from the addresses that the map gives."""
    ((start, size),) = cache.spans
    memory = np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8)
    at = plane.bases[plane.layers.index(layer)] - start
    for span in (
        np.arange(BLOCKS) * plane.block_stride,
        np.arange(len(plane.heads)) * plane.head_stride,
        offsets(plane.tokens),
        offsets(plane.channels),
        np.arange(plane.item),
    ):
        at = np.add.outer(at, span)
    return torch.from_numpy(memory[at])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_element_is_where_the_map_says(name, dtype) -> None:
    groups = [KVCacheGroupSpec([layer(number) for number in range(LAYERS)], attention(dtype=dtype))]
    caches = allocate(name, groups)
    stamp(caches)
    cache = mapped(caches, Group(BLOCK, BLOCKS, planes(caches)))
    for number in range(LAYERS):
        for plane, content in zip(cache.groups[0].planes, caches[layer(number)].split(DIM, dim=-1), strict=True):
            assert torch.equal(gather(cache, plane, number), as_bytes(content)), (plane.name, number)


HOST_DIM, HOST_BLOCK = 64, 32
WHOLE = [layout.name for layout in KVCacheLayout if layout.is_block_contiguous]
"""Layouts in which a layer's part of a block is one run, heads outermost: what CPU kernels are handed."""


def host_caches(name: str, dtype):
    groups = [
        KVCacheGroupSpec(
            [layer(number) for number in range(LAYERS)],
            attention(block_size=HOST_BLOCK, head_size=HOST_DIM, dtype=dtype),
        )
    ]
    names = tuple((layer(number), number) for number in range(LAYERS))
    geometry = Geometry(
        (LayerGroup(names, HOST_BLOCK, tuple(range(HEADS)), HEADS, HOST_DIM),), BLOCKS, "auto", ("CPU_ATTN",)
    )
    return allocate(name, groups), geometry


@pytest.mark.skipif(not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"), reason="not vLLM's CPU build")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_the_host_platform_finds_every_element_that_vllms_kernel_has_written(name, dtype) -> None:
    from vllm import _custom_ops as ops

    caches, geometry = host_caches(name, dtype)
    cache = HostPlatform().describe(caches, geometry)
    check(cache)
    (group,) = cache.groups
    if [plane.name for plane in group.planes] != ["k", "v"]:
        pytest.skip(f"this machine's kernels pack tokens into tiles: {group.planes[0].interior}")
    content = torch.randn(LAYERS, 2, BLOCKS * HOST_BLOCK, HEADS, HOST_DIM).to(dtype)
    for number in range(LAYERS):
        view = caches[layer(number)]
        keys, values = view.view(*view.shape[:2], 2 * HOST_BLOCK, HOST_DIM).chunk(2, dim=2)
        slots = torch.arange(BLOCKS * HOST_BLOCK)
        ops.cpu_attn_reshape_and_cache(content[number, 0], content[number, 1], keys, values, slots, "vec")
    for number in range(LAYERS):
        for which, plane in enumerate(group.planes):
            written = content[number, which].reshape(BLOCKS, HOST_BLOCK, HEADS, HOST_DIM).transpose(1, 2)
            assert torch.equal(gather(cache, plane, number), as_bytes(written)), (plane.name, number)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE])
def test_the_host_platform_refuses_blocks_that_no_cpu_kernel_is_handed(name) -> None:
    caches, geometry = host_caches(name, torch.float32)
    with pytest.raises(PlatformError, match=r"layer model\.layers\.0.*VLLM_KV_CACHE_LAYOUT"):
        HostPlatform().describe(caches, geometry)
