"""Maps of the caches of vLLM's CUDA backends: each byte that a kernel reads at (layer, block, head, token) is where the map says.

The caches are made as vLLM makes them, in host memory. What is expected is written with torch's own indexing.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import PlatformError
from kvxfer.layout.maps import offsets
from kvxfer.layout.plan import prepare
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_cuda.layouts import describe
from tests.unit.platforms.cuda_doubles import OnGpu

torch = pytest.importorskip("torch")

BLOCKS, TOKENS, HEADS, DIM = 5, 32, 2, 8


def geometry_of(*layers: str, backends=("FLASH_ATTN",), dtype: str = "auto", **more) -> Geometry:
    numbered = tuple((name, int(name.split(".")[2])) for name in layers)
    what = {"heads": tuple(range(HEADS)), "total_heads": HEADS, "head_size": DIM, **more}
    return Geometry((LayerGroup(numbered, TOKENS, **what),), BLOCKS, dtype, backends)


def named(count: int, last: str = "self_attn.attn") -> list[str]:
    return [f"model.layers.{number}.{last}" for number in range(count)]


def noise(shape, dtype):
    """A tensor of no two equal bytes in a row."""
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    data = np.random.default_rng(size).integers(0, 256, size=size, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def read(plane, layer: int, block: int, head: int, token: int, memory) -> bytes:
    """Read one head's part of one token by the map alone."""
    at = (
        plane.bases[plane.layers.index(layer)]
        + block * plane.block_stride
        + plane.heads.index(head) * plane.head_stride
    )
    addresses = at + int(offsets(plane.tokens)[token]) + offsets(plane.channels)
    start = memory.data_ptr()
    flat = memory.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(flat).numpy()
    return b"".join(raw[address - start : address - start + plane.item].tobytes() for address in addresses.tolist())


def raw(tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_map(cache, storages, expected) -> None:
    """``expected(plane name, layer, block, head, token)`` is the tensor whose bytes the map must find."""
    (group,) = cache.groups
    for plane in group.planes:
        for layer in plane.layers:
            for block in range(BLOCKS):
                for head in plane.heads:
                    for token in (0, 1, TOKENS // 2 - 1, TOKENS // 2, TOKENS - 1):
                        found = read(plane, layer, block, head, token, storages[layer])
                        assert found == raw(expected(plane.name, layer, block, head, token)), (plane.name, layer, block)


def half(cell, name: str):
    size = cell.shape[-1] // 2
    return cell[..., :size] if name == "k" else cell[..., size:]


# --- vLLM 0.29's own views --------------------------------------------------------------------------------------------


def vllm_views(layout: str, spec, layers: int, kernel=None):
    """One buffer for all layers, viewed as vLLM 0.29's runner does it."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout")
    order = layouts.KVCacheLayout[layout]
    buffer = noise((layers * BLOCKS * spec.page_size_bytes,), torch.int8)
    strides = interface.compute_layout_strides(spec, BLOCKS, layers, order)
    whole = interface.KVCacheTensor(
        size=buffer.numel(), layers=named(layers), layer_stride=strides[0], block_stride=strides[1]
    )
    views = interface.create_kv_cache_views(buffer, spec, BLOCKS, order, whole, kernel)
    return buffer, dict(zip(named(layers), views, strict=True))


def full_attention(dtype=torch.bfloat16, **more):
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    return interface.FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=dtype, **more)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "auto"), (torch.uint8, "fp8"), (torch.float8_e4m3fn, "fp8_e4m3")]
)
def test_every_layout_of_vllm(layout, dtype, name) -> None:
    buffer, views = vllm_views(layout, full_attention(dtype), 3)
    cache = describe({key: OnGpu(view) for key, view in views.items()}, geometry_of(*views, dtype=name))
    assert cache.spans == ((buffer.data_ptr(), buffer.numel()),)
    assert {plane.dtype for plane in cache.groups[0].planes} == {"bfloat16" if name == "auto" else "fp8_e4m3"}
    tensors = list(views.values())
    assert_map(cache, [buffer] * 3, lambda n, layer, b, h, t: half(tensors[layer][b, h, t], n))


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_kernel_blocks_smaller_than_vllms(layout) -> None:
    """FlashInfer and MLA kernels take 16 tokens or 64 where the cache manager has more."""
    buffer, views = vllm_views(layout, full_attention(), 3, kernel=TOKENS // 2)
    assert next(iter(views.values())).shape == (2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM)
    cache = describe({key: OnGpu(view) for key, view in views.items()}, geometry_of(*views, backends=("FLASHINFER",)))
    tensors = list(views.values())

    def expected(name, layer, block, head, token):
        part, inside = divmod(token, TOKENS // 2)
        return half(tensors[layer][2 * block + part, head, inside], name)

    assert_map(cache, [buffer] * 3, expected)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_a_latent_of_vllms(layout) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    spec = interface.MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
    buffer, views = vllm_views(layout, spec, 3)
    more = {"heads": (0,), "total_heads": 1, "head_size": 72, "kind": "MLAAttentionSpec"}
    cache = describe(
        {key: OnGpu(view) for key, view in views.items()}, geometry_of(*views, backends=("FLASHMLA",), **more)
    )
    (plane,) = cache.groups[0].planes
    assert (plane.name, plane.total_heads) == ("latent", 1)
    tensors = list(views.values())
    assert_map(cache, [buffer] * 3, lambda n, layer, b, h, t: tensors[layer][b, 0, t])


def test_scales_for_each_token_and_head_travel_behind_k_and_v() -> None:
    wide = full_attention(torch.uint8, state_content_bytes=2 * (DIM + 4))
    buffer, views = vllm_views("LBHNC", wide, 2)
    geometry = geometry_of(*views, dtype="fp8_per_token_head", backends=("TRITON_ATTN",))
    cache = describe({key: OnGpu(view) for key, view in views.items()}, geometry)
    assert {plane.content for plane in cache.groups[0].planes} == {DIM + 4}
    tensors = list(views.values())
    assert_map(cache, [buffer] * 2, lambda n, layer, b, h, t: half(tensors[layer][b, h, t], n))


# --- earlier shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_planes_of_k_and_v(order) -> None:
    """FlashAttention, FlashInfer and Triton up to 0.25: [blocks, 2, tokens, heads, channels], HND as a view."""
    shape = (BLOCKS, 2, TOKENS, HEADS, DIM) if order == "NHD" else (BLOCKS, 2, HEADS, TOKENS, DIM)
    tensors = [noise(shape, torch.float16) for _ in range(2)]
    tensors = [one if order == "NHD" else one.transpose(2, 3) for one in tensors]
    caches = {name: OnGpu(one) for name, one in zip(named(2), tensors, strict=True)}
    cache = describe(caches, geometry_of(*caches, backends=("FLASHINFER",)))
    assert_map(cache, tensors, lambda n, layer, b, h, t: tensors[layer][b, 0 if n == "k" else 1, t, h])


def test_one_tensor_for_all_layers() -> None:
    """0.26's cross-layer blocks: [blocks, layers, 2, tokens, heads, channels], of which each layer is given its view."""
    whole = noise((BLOCKS, 3, 2, TOKENS, HEADS, DIM), torch.bfloat16)
    caches = {name: OnGpu(whole[:, number]) for number, name in enumerate(named(3))}
    cache = describe(caches, geometry_of(*caches))
    assert cache.spans == ((whole.data_ptr(), whole.numel() * 2),)
    assert_map(cache, [whole] * 3, lambda n, layer, b, h, t: whole[b, layer, 0 if n == "k" else 1, t, h])


def test_values_of_a_size_of_their_own() -> None:
    tensors = [noise((BLOCKS, TOKENS, HEADS, DIM + 4), torch.bfloat16) for _ in range(2)]
    caches = {name: OnGpu(one) for name, one in zip(named(2), tensors, strict=True)}
    cache = describe(caches, geometry_of(*caches, backends=("FLASH_ATTN_DIFFKV",)))
    assert_map(
        cache,
        tensors,
        lambda n, layer, b, h, t: tensors[layer][b, t, h][:DIM] if n == "k" else tensors[layer][b, t, h][DIM:],
    )


@pytest.mark.parametrize(("channels", "name"), [(656, "fp8_ds_mla"), (352, "nvfp4_ds_mla")])
def test_mlas_packed_tokens(channels, name) -> None:
    tensors = [noise((BLOCKS, TOKENS, channels), torch.uint8) for _ in range(2)]
    caches = {key: OnGpu(one) for key, one in zip(named(2), tensors, strict=True)}
    more = {"heads": (0,), "total_heads": 1, "head_size": 576, "kind": "MLAAttentionSpec"}
    cache = describe(caches, geometry_of(*caches, dtype=name, backends=("FLASHMLA_SPARSE",), **more))
    assert {plane.dtype for plane in cache.groups[0].planes} == {name}
    assert_map(cache, tensors, lambda n, layer, b, h, t: tensors[layer][b, t])


@pytest.mark.parametrize("head_size", [576, 132], ids=["the latent's", "the indexer's"])
def test_an_indexers_keys_lie_before_its_scales_in_a_block(head_size) -> None:
    """DeepSeek-V3.2. vLLM names one head size for both kinds of cache under one block table."""
    latent, index = noise((BLOCKS, TOKENS, 656), torch.uint8), noise((BLOCKS, TOKENS, 132), torch.uint8)
    names = ("model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache")
    more = {"heads": (0,), "total_heads": 1, "head_size": head_size, "kind": "MLAAttentionSpec"}
    caches = {names[0]: OnGpu(latent), names[1]: OnGpu(index)}
    cache = describe(caches, geometry_of(*names, dtype="fp8_ds_mla", backends=("FLASHMLA_SPARSE",), **more))
    planes = {plane.name: plane for plane in cache.groups[0].planes}
    assert set(planes) == {"latent", "index", "index_scale"}
    for block in range(BLOCKS):
        page = index[block].reshape(-1)
        for token in (0, 7, TOKENS - 1):
            keys = read(planes["index"], 0, block, 0, token, index)
            scale = read(planes["index_scale"], 0, block, 0, token, index)
            assert keys == raw(page[token * 128 : (token + 1) * 128])
            assert scale == raw(page[TOKENS * 128 + token * 4 : TOKENS * 128 + token * 4 + 4])
            assert read(planes["latent"], 0, block, 0, token, latent) == raw(latent[block, token])


def test_nvfp4s_scales_lie_behind_all_data_of_k_and_of_v() -> None:
    """A half of a block is [heads, tokens, data], then [heads, tokens, scales] (utils/torch_utils.py nvfp4_split_data_scale)."""
    dim, data, scale = 64, 32, 4
    tensors = [noise((BLOCKS, 2 * HEADS, TOKENS, data + scale), torch.uint8) for _ in range(2)]
    caches = {name: OnGpu(one) for name, one in zip(named(2), tensors, strict=True)}
    geometry = geometry_of(*caches, dtype="nvfp4", backends=("FLASHINFER",), head_size=dim)
    cache = describe(caches, geometry)

    def expected(name, layer, block, head, token):
        page = tensors[layer][block, :HEADS] if name[0] == "k" else tensors[layer][block, HEADS:]
        flat, width = page.reshape(-1), data if len(name) == 1 else scale
        start = 0 if len(name) == 1 else HEADS * TOKENS * data
        at = start + (head * TOKENS + token) * width
        return flat[at : at + width]

    assert {plane.name for plane in cache.groups[0].planes} == {"k", "k_scale", "v", "v_scale"}
    assert_map(cache, tensors, expected)


# --- several groups, shared layers ------------------------------------------------------------------------------------


def test_groups_of_a_hybrid_model_are_described_each_with_its_own_window() -> None:
    tensors = [noise((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.bfloat16) for _ in range(4)]
    caches = {name: OnGpu(one) for name, one in zip(named(4), tensors, strict=True)}
    names = list(caches)
    full = LayerGroup(((names[0], 0), (names[2], 2)), TOKENS, (0, 1), HEADS, DIM)
    sliding = LayerGroup(((names[1], 1), (names[3], 3)), TOKENS, (0, 1), HEADS, DIM, "SlidingWindowSpec", 128)
    cache = describe(caches, Geometry((full, sliding), BLOCKS, "auto", ("FLASH_ATTN",)))
    assert [group.window for group in cache.groups] == [None, 128]
    assert [group.planes[0].layers for group in cache.groups] == [(0, 2), (1, 3)]


def test_a_layer_that_reads_anothers_cache_is_described_once() -> None:
    one = noise((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.bfloat16)
    caches = {name: OnGpu(one) for name in named(2)}
    assert [plane.layers for plane in describe(caches, geometry_of(*caches)).groups[0].planes] == [(0,), (0,)]


def test_token_major_and_head_major_hold_the_same_planes() -> None:
    """So that a pair of them can be planned, and refused or re-packed for its runs, never for its names."""
    _, nhd = vllm_views("LBNHC", full_attention(), 2)
    _, hnd = vllm_views("LBHNC", full_attention(), 2)
    ours, theirs = (
        describe({key: OnGpu(view) for key, view in views.items()}, geometry_of(*views)) for views in (nhd, hnd)
    )
    assert prepare(ours, theirs, useful=0).pairings


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(shape, match, *, dtype=torch.bfloat16, name="model.layers.0.attn", strided=None, **geometry) -> None:
    tensor = noise(shape, dtype)
    tensor = tensor if strided is None else strided(tensor)
    with pytest.raises(PlatformError, match=match) as raised:
        describe({name: OnGpu(tensor)}, geometry_of(name, **geometry))
    assert name in str(raised.value)


@pytest.mark.parametrize(
    "shape",
    [
        (BLOCKS, HEADS, TOKENS, 2 * DIM + 2),  # another head size
        (BLOCKS, HEADS + 1, TOKENS, 2 * DIM),
        (BLOCKS, TOKENS, HEADS, 2 * DIM),  # token-major without being a view
        (2, BLOCKS, TOKENS, HEADS, DIM),  # ROCm's and others': K and V outermost
        (BLOCKS, HEADS, TOKENS - 1, 2 * DIM),
        (BLOCKS, 2 * DIM),
    ],
)
def test_shapes_that_no_backend_has(shape) -> None:
    refused(shape, r"is no cache of FLASH_ATTN that this platform knows: .* Choose another --attention-backend")


def test_another_number_of_blocks_is_named_with_the_kernels() -> None:
    refused((BLOCKS + 1, HEADS, TOKENS, 2 * DIM), f"does not have {BLOCKS} blocks")
    refused((BLOCKS, HEADS, TOKENS // 2, 2 * DIM), f"does not have {BLOCKS} blocks of 2 kernel blocks each")


@pytest.mark.parametrize(
    "kind", ["MambaSpec", "ChunkedLocalAttentionSpec", "CrossAttentionSpec", "SinkFullAttentionSpec"]
)
def test_caches_that_do_not_keep_one_state_a_position(kind) -> None:
    refused((BLOCKS, HEADS, TOKENS, 2 * DIM), f"keeps it as {kind}", kind=kind)


def test_nvfp4_that_is_not_dense() -> None:
    wrong = noise((BLOCKS, 2 * HEADS, TOKENS, 40), torch.uint8)[..., :36]
    geometry = geometry_of("model.layers.0.attn", dtype="nvfp4", head_size=64)
    with pytest.raises(PlatformError, match="is no cache"):
        describe({"model.layers.0.attn": OnGpu(wrong)}, geometry)


def test_layers_that_overlap_in_memory() -> None:
    whole = noise((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.bfloat16)
    view = whole.as_strided(whole.shape, (whole.stride(0) // 2, *whole.stride()[1:]))
    with pytest.raises(PlatformError, match=r"cannot be described: .*share bytes"):
        describe({"model.layers.0.attn": OnGpu(view)}, geometry_of("model.layers.0.attn"))


def test_tensors_and_groups_that_do_not_name_the_same_layers() -> None:
    one = OnGpu(noise((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.bfloat16))
    with pytest.raises(PlatformError, match=r"layer model.layers.1.* handed over no cache"):
        describe({"model.layers.0.attn": one}, geometry_of("model.layers.0.attn", "model.layers.1.attn"))
    with pytest.raises(PlatformError, match=r"layer odd: its cache of shape .* is in none of"):
        describe({"model.layers.0.attn": one, "odd": one}, geometry_of("model.layers.0.attn"))


def test_layers_on_two_devices() -> None:
    caches = {
        name: OnGpu(noise((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.bfloat16), index)
        for index, name in enumerate(named(2))
    }
    with pytest.raises(PlatformError, match="on cuda:0 and cuda:1"):
        describe(caches, geometry_of(*caches))


def test_a_state_space_models_list_of_tensors() -> None:
    geometry = geometry_of("model.layers.0.attn")
    listed = type("Listed", (list,), {"device": OnGpu(torch.zeros(1)).device})()
    with pytest.raises(PlatformError, match="is a Listed of tensors"):
        describe({"model.layers.0.attn": listed}, geometry)


def test_the_device_is_that_of_the_tensors() -> None:
    caches = {name: OnGpu(noise((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.bfloat16), 3) for name in named(2)}
    cache = describe(caches, geometry_of(*caches))
    assert (cache.memory, cache.device) == ("VRAM", 3)
