"""What Neuron's caches look like inside: every element where the tensor has it; head replication; NxDI; what has no common run."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvxfer.errors import LayoutMismatchError, PlatformError
from kvxfer.layout.check import check
from kvxfer.layout.describe import Content, Heads, Tensor, strided
from kvxfer.layout.maps import CacheMap, Group, offsets, spell
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table
from kvxfer.layout.ranks import Shard, heads_of, share
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_neuron import nxdi
from kvxfer_neuron.layouts import describe
from tests.unit.platforms.neuron_doubles import InHbm

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 2, 5, 32, 4, 8


def geometry(heads=(0, 1), total=HEADS, *, blocks=BLOCKS, block=BLOCK, size=DIM, **changes) -> Geometry:
    group = LayerGroup(tuple((f"layers.{i}", i) for i in range(LAYERS)), block, heads, total, size)
    return Geometry((_replace(group, **changes),), blocks, "auto")


def _replace(group: LayerGroup, **changes) -> LayerGroup:
    return LayerGroup(**{**{name: getattr(group, name) for name in LayerGroup.__slots__}, **changes})


def filled(shape, dtype=torch.int32):
    """Tensors a layer, no two elements of which hold the same."""
    count = int(np.prod(shape))
    return {
        f"layers.{i}": InHbm(torch.arange(i * count, (i + 1) * count, dtype=torch.int32).view(dtype).view(shape))
        for i in range(LAYERS)
    }


def element(caches: CacheMap, plane: str, layer: int, block: int, head: int, token: int, channel: int) -> int:
    """What lies where the map has an element, as an int32."""
    for one in (one for group in caches.groups for one in group.planes if one.name == plane and layer in one.layers):
        at = one.bases[one.layers.index(layer)] + block * one.block_stride + one.heads.index(head) * one.head_stride
        at += int(offsets(one.tokens)[token] + offsets(one.channels)[channel])
        return int(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * 1).from_address(at))[0])
    raise AssertionError(f"no plane {plane} of layer {layer}")


def every_element(blocks=BLOCKS, block=BLOCK, size=DIM, heads=(0, 1)):
    sample = itertools.product(range(LAYERS), (0, blocks - 1), heads, (0, 1, block - 1), (0, 1, size - 1))
    return list(sample)


# --- vllm-neuron ------------------------------------------------------------------------------------------------------

VIEWS = {
    "vllm-neuron": ((2, BLOCKS, 2, BLOCK, DIM), lambda t: t, lambda kv, b, h, n, c: (kv, b, h, n, c)),
    "blocks first": ((2, BLOCKS, 2, BLOCK, DIM), lambda t: t.transpose(0, 1), lambda kv, b, h, n, c: (b, kv, h, n, c)),
    "joined": ((BLOCKS, 2, BLOCK, 2 * DIM), lambda t: t, lambda kv, b, h, n, c: (b, h, n, kv * DIM + c)),
    "joined, token-major": (
        (BLOCKS, BLOCK, 2, 2 * DIM),
        lambda t: t.transpose(1, 2),
        lambda kv, b, h, n, c: (b, h, n, kv * DIM + c),
    ),
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_element_is_where_the_tensor_has_it(view) -> None:
    shape, seen, at = VIEWS[view]
    caches = {name: InHbm(seen(one.host)) for name, one in filled(shape).items()}
    found = describe(caches, geometry((2, 3)), packed=None)
    check(found)
    for layer, block, head, token, channel in every_element(heads=(2, 3)):
        tensor = caches[f"layers.{layer}"].host
        for kv, plane in enumerate(("k", "v")):
            want = int(tensor[at(kv, block, head - 2, token, channel)])
            assert element(found, plane, layer, block, head, token, channel) == want


def test_a_layer_is_registered_once_and_the_planes_are_named_as_everywhere() -> None:
    caches = filled((2, BLOCKS, 2, BLOCK, DIM))
    found = describe(caches, geometry(), packed=None)
    assert len(found.spans) == LAYERS
    assert found.memory == "VRAM"
    assert spell(found) == "k+v of layers 0-1, heads 0-1 as [layer][k+v][block][head][token 32][channel 8] int32"


def test_a_latent() -> None:
    caches = filled((BLOCKS, 1, BLOCK, DIM))
    found = describe(caches, geometry((0,), 1, kind="MLAAttentionSpec"), packed=None)
    (plane,) = found.groups[0].planes
    assert (plane.name, plane.heads, plane.total_heads) == ("latent", (0,), 1)
    assert element(found, "latent", 1, 4, 0, 31, 7) == int(caches["layers.1"].host[4, 0, 31, 7])


def test_window_groups_keep_their_window_and_layers_of_their_own() -> None:
    caches = filled((2, BLOCKS, 2, BLOCK, DIM))
    (whole,) = geometry().groups
    first = _replace(whole, layers=(("layers.0", 0),), kind="SlidingWindowSpec", window=64)
    second = _replace(whole, layers=(("layers.1", 1),))
    found = describe(caches, Geometry((first, second), BLOCKS, "auto"), packed=None)
    assert [(group.window, group.planes[0].layers) for group in found.groups] == [(64, (0,)), (None, (1,))]


def test_layers_of_two_shapes_are_described_apart() -> None:
    caches = filled((2, BLOCKS, 2, BLOCK, DIM))
    caches["layers.1"] = InHbm(caches["layers.1"].host.transpose(0, 1).contiguous())
    planes = describe(caches, geometry(), packed=None).groups[0].planes
    assert [(plane.name, plane.layers) for plane in planes] == [("k", (0,)), ("v", (0,)), ("k", (1,)), ("v", (1,))]


# --- packed fp8 -------------------------------------------------------------------------------------------------------


def fp8():
    shape = (2, BLOCKS, 2, BLOCK, DIM)
    raw = torch.arange(2 * BLOCKS * 2 * BLOCK * DIM, dtype=torch.int64).to(torch.uint8)
    return {f"layers.{i}": InHbm(raw.clone().view(torch.float8_e4m3fn).view(shape)) for i in range(LAYERS)}


def test_packed_keys_lie_two_tokens_side_by_side() -> None:
    """neuron_config.fp8_packed_kv: K is [block, head, token / 2, channel, 2], V as ever."""
    caches = fp8()
    found = describe(caches, geometry(), packed=True)
    check(found)
    k, v = found.groups[0].planes
    assert (k.tokens, k.channels) == (((BLOCK // 2, 2 * DIM), (2, 1)), ((DIM, 2),))
    assert (v.tokens, v.channels) == (((BLOCK, DIM),), ((DIM, 1),))
    half = BLOCKS * 2 * BLOCK * DIM
    assert [b - a for a, b in zip(k.bases, v.bases, strict=True)] == [half, half]
    raw = caches["layers.0"].host.view(torch.uint8)
    packed = raw[0].reshape(BLOCKS, 2, BLOCK // 2, DIM, 2)
    at = k.bases[0] + 3 * k.block_stride + k.head_stride + int(offsets(k.tokens)[7] + offsets(k.channels)[5])
    assert np.ctypeslib.ctypes.c_uint8.from_address(at).value == int(packed[3, 1, 3, 5, 1])


def test_an_fp8_cache_that_does_not_tell_whether_it_is_packed_is_refused() -> None:
    with pytest.raises(
        PlatformError, match=r"layers\.0: an fp8 cache of shape .*fp8_packed_kv.*set KVXFER_NEURON_FP8_PACKED to 1"
    ):
        describe(fp8(), geometry(), packed=None)


def test_packed_and_plain_fp8_have_no_run_in_common_and_are_refused_at_the_handshake() -> None:
    packed, plain = (describe(fp8(), geometry(), packed=packed) for packed in (True, False))
    with pytest.raises(LayoutMismatchError, match=r"on average"):
        prepare(packed, plain)
    prepare(packed, describe(fp8(), geometry(), packed=True))


def test_what_cannot_be_packed() -> None:
    caches = {name: InHbm(one.host.transpose(2, 3).contiguous().transpose(2, 3)) for name, one in fp8().items()}
    with pytest.raises(PlatformError, match=r"cannot hold packed K.*even --block-size"):
        describe(caches, geometry(), packed=True)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        (
            (2, BLOCKS, 3, BLOCK, DIM),
            {},
            r"layers\.0: a cache of shape \(2, 5, 3, 32, 8\) and strides .* is not \(2, 5, 2, 32, 8\)",
        ),
        ((BLOCKS, BLOCK, 2, 2 * DIM), {}, "NxD Inference's caches are read with kvxfer_neuron.nxdi"),
        ((2, BLOCKS, 2, BLOCK, DIM), {"kind": "MambaSpec"}, "a cache of kind MambaSpec is not described on Neuron"),
        ((2, BLOCKS, 2, BLOCK, DIM), {"kind": "ChunkedLocalAttentionSpec"}, "not described"),
        ((2, BLOCKS, 2, BLOCK, DIM), {"kind": "MLAAttentionSpec"}, r"is not \(5, 1, 32, 8\)"),
        ((2, BLOCKS, 2, BLOCK, DIM), {"layers": (("other", 0),)}, "layer other: vLLM handed over no cache for it"),
        ((2, BLOCKS, 2, BLOCK, DIM), {"layers": ()}, "no layers to describe"),
    ],
)
def test_what_is_not_known_is_refused(shape, changes, said) -> None:
    with pytest.raises(PlatformError, match=said):
        describe(filled(shape), geometry(**changes), packed=None)


def test_two_blocks_are_ambiguous_with_two_planes() -> None:
    caches = filled((2, 2, 2, BLOCK, DIM))
    with pytest.raises(PlatformError, match=r"can be read as PBHNC and as BPHNC: with 2 blocks"):
        describe(caches, geometry(blocks=2), packed=None)


def test_layers_on_two_devices_are_refused() -> None:
    caches = filled((2, BLOCKS, 2, BLOCK, DIM))
    caches["layers.1"].device = SimpleNamespace(type="neuron", index=3)
    with pytest.raises(PlatformError, match=r"devices \[0, 3\]"):
        describe(caches, geometry(), packed=None)


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 2), (8, 8), (8, 32), (4, 64), (1, 4)])
def test_replicated_heads_are_on_consecutive_ranks_as_vllm_and_nxd_have_them(kv_heads, ranks) -> None:
    """vllm-neuron: max(1, kv_heads // TP) heads a rank. neuronx-distributed: REPLICATE_TO_TP_DEGREE."""
    held = [nxdi.heads_of_rank(rank, ranks, 64, kv_heads) for rank in range(ranks)]
    assert held == [heads_of(kv_heads, Shard(rank, ranks)) for rank in range(ranks)]
    assert {len(heads) for heads in held} == {max(1, kv_heads // ranks)}


@pytest.mark.parametrize(
    ("attention", "kv", "ranks", "held"),
    [
        (6, 3, 2, [(0, 0, 1), (1, 2, 2)]),  # CONVERT_TO_MHA: each KV head for its two query heads
        (5, 5, 2, [(0, 1, 2), (3, 4, None)]),  # … padded at the tail
        (10, 5, 4, [(0, 0, 1), (1, 2, 2), (3, 3, 4), (4, None, None)]),
        (6, 6, 4, [(0, 1), (2, 3), (4, 5), (None, None)]),
    ],
)
def test_heads_that_do_not_divide_are_converted_to_one_a_query_head(attention, kv, ranks, held) -> None:
    assert [nxdi.heads_of_rank(rank, ranks, attention, kv) for rank in range(ranks)] == held


@pytest.mark.parametrize("wrong", [(2, 2, 8, 4), (-1, 2, 8, 4), (0, 2, 8, 3), (0, 2, 0, 4), (0, 2, 8, 0)])
def test_heads_that_cannot_be_spread(wrong) -> None:
    with pytest.raises(PlatformError, match="cannot be spread over"):
        nxdi.heads_of_rank(*wrong)


@pytest.mark.parametrize(("ranks", "sinks"), [(8, 2), (2, 8), (8, 8), (16, 1), (4, 4)])
def test_replicated_heads_of_neuron_and_shards_of_cuda_exchange_every_byte_once(ranks, sinks) -> None:
    """TP 8 of 4 heads (replicas on Neuron) to TP 2 of vLLM's CUDA layouts, blocks of 32 to blocks of 16, and back."""
    ours = [neuron_rank(Shard(rank, ranks)) for rank in range(ranks)]
    theirs = [cuda_rank(Shard(rank, sinks)) for rank in range(sinks)]
    content = np.random.default_rng(0).integers(1, 1 << 30, size=(LAYERS, 2, HEADS, 3 * BLOCK, DIM), dtype=np.int32)
    for sources, targets in ((ours, theirs), (theirs, ours)):
        for one in sources:
            one.write(content)
        for target in targets:
            target.write(np.zeros_like(content))
            for source in sources:
                part = share(source.cache, source.shard, target.cache, target.shard)
                if part:
                    prepared = prepare(source.cache, target.cache, part, useful=0)
                    move(prepared.plan([source.table], [target.table], 0, 3 * BLOCK))
            assert (target.read() == content[:, :, list(target.heads)]).all()


class Rank:
    """A cache, and how its tensor is indexed by [layer, k/v, block, head, token, channel]."""

    def __init__(self, shard, cache, array, block, table) -> None:
        self.shard, self.cache, self.array, self.block = shard, cache, array, block
        self.heads, self.table = heads_of(HEADS, shard), Table(np.array(table, dtype=np.int32))

    def _blocks(self):
        for number, block in enumerate(self.table.ids.tolist()):
            yield block, slice(number * self.block, (number + 1) * self.block)

    def write(self, content) -> None:
        for block, positions in self._blocks():
            self.array[:, :, block] = content[:, :, list(self.heads), positions]

    def read(self):
        return np.concatenate([self.array[:, :, block] for block, _ in self._blocks()], axis=3)


def neuron_rank(shard) -> Rank:
    heads = heads_of(HEADS, shard)
    caches = filled((2, BLOCKS, len(heads), BLOCK, DIM))
    array = _Stacked([one.host.numpy() for one in caches.values()], lambda t: t)
    rank = Rank(shard, describe(caches, geometry(heads), packed=None), array, BLOCK, [4, 1, 2])
    rank.kept = caches
    return rank


def cuda_rank(shard) -> Rank:
    """vLLM 0.29's BLHNC: all layers' blocks beside each other, K and V joined in a token."""
    heads, block = heads_of(HEADS, shard), BLOCK // 2
    memory = np.zeros((11, LAYERS, len(heads), block, 2 * DIM), dtype=np.int32)
    layers = [memory[:, layer] for layer in range(LAYERS)]
    tensors = [Tensor(i, one.ctypes.data, one.shape, one.strides) for i, one in enumerate(layers)]
    contents = [Content("k", DIM), Content("v", DIM)]
    planes = strided(tensors, "BHNC", contents, dtype="int32", item=4, heads=Heads(heads, HEADS))
    cache = CacheMap((Group(block, 11, planes),), ((memory.ctypes.data, memory.nbytes),), "VRAM")
    split = _Stacked(layers, lambda t: t.reshape(*t.shape[:-1], 2, DIM).transpose(3, 0, 1, 2, 4))
    return Rank(shard, cache, split, block, [9, 3, 4, 5, 10, 1])


class _Stacked:
    """Arrays of layers, indexed as one [layer, k/v, block, …] without being copied."""

    def __init__(self, layers, view) -> None:
        self.layers = [view(one) for one in layers]
        assert all(np.shares_memory(one, two) for one, two in zip(layers, self.layers, strict=True))

    def __setitem__(self, key, value) -> None:
        for layer, part in zip(self.layers, value, strict=True):
            layer[key[1:]] = part

    def __getitem__(self, key):
        return np.stack([layer[key[1:]] for layer in self.layers])


def move(plan) -> None:
    for (origin, length, _), (at, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True):
        np.ctypeslib.ctypes.memmove(at, origin, length)


# --- NxDI -------------------------------------------------------------------------------------------------------------

NXDI = {"attention_heads": 8, "kv_heads": HEADS, "head_size": DIM, "shard": (0, 2)}
"""Rank 0 of 2: heads 0 and 1."""
MANAGERS = {
    "contiguous": ("contiguous", (3, 2, 256, DIM), {}, lambda b, h, n, c: (b, h, n, c), (3, 256)),
    "tiled": ("contiguous", (3, 2, 128, 2, DIM), {}, lambda b, h, n, c: (b, h, n // 2, n % 2, c), (3, 256)),
    "blocks": ("blocks", (6, BLOCK, 2, DIM), {}, lambda b, h, n, c: (b, n, h, c), (5, BLOCK)),
    "tiled blocks": ("blocks", (6, 4, 8, 2, DIM), {}, lambda b, h, n, c: (b, n // 8, n % 8, h, c), (5, BLOCK)),
    "chunked": ("chunked", (5, 2, BLOCK, DIM), {}, lambda b, h, n, c: (b, h, n, c), (5, BLOCK)),
}


def flat(shape, k_shape=None):
    out = []
    for number in range(2 * LAYERS):
        mine = k_shape if k_shape and number % 2 == 0 else shape
        count = int(np.prod(mine))
        out.append(InHbm(torch.arange(number * count, (number + 1) * count, dtype=torch.int32).view(mine)))
    return out


@pytest.mark.parametrize("name", MANAGERS)
def test_nxdis_caches(name) -> None:
    manager, shape, options, at, (blocks, block) = MANAGERS[name]
    tensors = flat(shape)
    caches, told = nxdi.caches(tensors, manager=manager, **NXDI, **options)
    assert (told.num_blocks, told.groups[0].block_size) == (blocks, block)
    found = describe(caches, told, packed=None)
    check(found)
    for layer, b, h, n, c in every_element(blocks, block):
        for number, plane in enumerate(("k", "v")):
            assert element(found, plane, layer, b, h, n, c) == int(tensors[2 * layer + number].host[at(b, h, n, c)])


def test_transposed_keys() -> None:
    tensors = flat((3, 2, 256, DIM), (3, 2, DIM, 256))
    caches, told = nxdi.caches(tensors, manager="contiguous", k_transposed=True, **NXDI)
    found = describe(caches, told, packed=None)
    assert element(found, "k", 1, 2, 1, 255, 3) == int(tensors[2].host[2, 1, 3, 255])
    assert element(found, "v", 1, 2, 1, 255, 3) == int(tensors[3].host[2, 1, 255, 3])


def test_head_slots_of_padding_and_of_replicas() -> None:
    """Rank 1 of 2 of five heads has heads 3 and 4 and a slot of padding; rank 0 of six query heads on three, head 0 twice."""
    caches, told = nxdi.caches(
        flat((5, 3, BLOCK, DIM)), manager="chunked", shard=(1, 2), attention_heads=5, kv_heads=5, head_size=DIM
    )
    assert {plane.heads for plane in describe(caches, told, packed=None).groups[0].planes} == {(3, 4)}
    caches, told = nxdi.caches(
        flat((5, 3, BLOCK, DIM)), manager="chunked", shard=(0, 2), attention_heads=6, kv_heads=3, head_size=DIM
    )
    found = describe(caches, told, packed=None)
    check(found)
    assert {plane.heads for plane in found.groups[0].planes} == {(0, 0, 1)}


def of(manager, shape, k_shape=None, **options) -> CacheMap:
    caches, told = nxdi.caches(flat(shape, k_shape), manager=manager, **NXDI, **options)
    return describe(caches, told, packed=None)


@pytest.mark.parametrize("name", ["contiguous", "tiled", "chunked"])
def test_nxdis_head_major_caches_and_vllm_neurons_have_common_runs(name) -> None:
    """A head's part of the smaller block is one run in both: 32 tokens × 8 channels × 4 bytes."""
    manager, shape, *_ = MANAGERS[name]
    ours = of(manager, shape)
    theirs = describe(filled((2, BLOCKS, 2, BLOCK, DIM)), geometry(), packed=None)
    tables = [Table(np.array([2, 1], dtype=np.int32))], [Table(np.array([1, 3], dtype=np.int32))]
    plan = prepare(ours, theirs).plan(*tables, 0, 2 * BLOCK)
    assert sum(plan.source[:, 1].tolist()) == 2 * LAYERS * 2 * 2 * BLOCK * DIM * 4
    assert min(plan.source[:, 1].tolist()) >= BLOCK * DIM * 4


@pytest.mark.parametrize(
    "ours",
    [
        lambda: of("blocks", (6, BLOCK, 2, DIM)),
        lambda: of("contiguous", (3, 2, BLOCK, DIM), (3, 2, DIM, BLOCK), k_transposed=True),
    ],
    ids=["token-major", "transposed"],
)
def test_layouts_without_a_common_run_are_refused_with_both_layouts(ours) -> None:
    theirs = describe(filled((2, BLOCKS, 2, BLOCK, DIM)), geometry(), packed=None)
    with pytest.raises(LayoutMismatchError) as raised:
        prepare(ours(), theirs, names=("prefill", "decode"))
    for said in ("bytes on average", "prefill lays", "decode lays"):
        assert said in str(raised.value)


@pytest.mark.parametrize(
    ("manager", "shape", "options", "said"),
    [
        ("contiguous", (3, 2, 256, DIM), {"padding_side": "left"}, "moves every token .*set padding_side to right"),
        ("contiguous", (3, 2, 256, DIM), {"flash_decoding": True}, "flash decoding spreads positions"),
        ("chunked", (5, 2, BLOCK, 2, DIM), {}, r"manager 'chunked' has no cache of shape \(5, 2, 32, 2, 8\)"),
        ("chunked", (5, 3, BLOCK, DIM), {}, "does not hold 2 head slots of 8"),
        ("chunked", (5, 2, BLOCK, DIM + 1), {}, "does not hold 2 head slots of 8"),
        ("blocks", (6, BLOCK, 2, DIM), {"k_transposed": True}, "transposes K in its contiguous, untiled cache alone"),
        ("contiguous", (1, 2, 1 << 17, DIM), {}, "longer than 65536: lower max_length"),
    ],
)
def test_what_has_no_lasting_place_or_is_none_of_nxdis(manager, shape, options, said) -> None:
    with pytest.raises(PlatformError, match=said):
        nxdi.caches(flat(shape), manager=manager, **NXDI, **options)


def test_a_list_that_is_no_pairs_and_a_rank_of_nothing_but_padding() -> None:
    for wrong in ([], flat((5, 2, BLOCK, DIM))[:-1]):
        with pytest.raises(PlatformError, match="a flat list of K and V in turn"):
            nxdi.caches(wrong, manager="chunked", **NXDI)
    with pytest.raises(PlatformError, match="rank 3 of 4 holds nothing but padding"):
        nxdi.caches(
            flat((5, 2, BLOCK, DIM)),
            manager="chunked",
            **{**NXDI, "shard": (3, 4), "attention_heads": 6, "kv_heads": 6},
        )


def test_neuronx_distributed_tells_the_rank(monkeypatch) -> None:
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_rank=lambda: 1,
        get_tensor_model_parallel_size=lambda: 2,
    )
    layers = ModuleType("neuronx_distributed.parallel_layers")
    layers.parallel_state = state
    monkeypatch.setitem(sys.modules, "neuronx_distributed", ModuleType("neuronx_distributed"))
    monkeypatch.setitem(sys.modules, "neuronx_distributed.parallel_layers", layers)
    _, told = nxdi.caches(flat((5, 2, BLOCK, DIM)), manager="chunked", **{**NXDI, "shard": None})
    assert told.groups[0].heads == (2, 3)
    state.model_parallel_is_initialized = lambda: False
    with pytest.raises(PlatformError, match=r"parallel state is not initialised.*give the shard"):
        nxdi.this_rank()


def test_the_placeholder_of_neuronx_distributed_is_told_from_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "neuronx_distributed").mkdir()
    (tmp_path / "neuronx_distributed/__init__.py").write_text("raise RuntimeError('WRONG PACKAGE')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        PlatformError, match=r"does not import \(WRONG PACKAGE\): install it from https://pip.repos.neuron"
    ):
        nxdi.this_rank()


def test_maps_travel() -> None:
    found = describe(fp8(), geometry(), packed=True)
    assert msgspec.convert(msgspec.to_builtins(found), CacheMap) == found
