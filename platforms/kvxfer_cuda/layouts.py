"""Cache maps of what vLLM's CUDA attention backends allocate, read off shapes and strides.

Strides tell the truth of all but two of them, so there is one description, and what differs between versions and backends is
only which axis is which. Read in 0.24.0, 0.26.0, 0.27.1, 0.28.0 (``get_kv_cache_shape`` in v1/attention/backends), 0.29.0 and
0.32.0 (v1/kv_cache_interface.py):

    B H N C      all attention from 0.26 on: FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION, with K and V joined in C, in any
                 memory order (NHD, HND; from 0.29 on LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC); MLA from 0.29 on, with one head
    B N C        MLA and indexers up to 0.28
    B 2 N H C    all other attention before that, HPC_ATTN up to 0.28: the second axis is K, V
    B N H C      of that time, backends for values of a size of their own (DIFFKV), K and V joined in C

Where a block has more tokens than the kernels take, B counts kernel blocks. Blocks of all layers in one piece ("cross-layer
blocks" up to 0.28, a layout with B outermost from 0.29 on) are views with large block strides. Of the cache types:

* fp8: one byte an element. With a scale for each token and head, the scale is behind K and behind V, inside C.
* MLA's packed fp8 (656 bytes) and fp4 (352 bytes): all of a token is inside C (v1/attention/backends/mla/flashmla_sparse.py).
* **nvfp4**: the halves of a block for K and V each hold all data, then all scales (utils/torch_utils.py
  ``nvfp4_split_data_scale``). From 0.26 on H has K's heads, then V's.
* **The sparse indexer's fp8 keys**: a (kernel) block holds all keys, then all scales (csrc ``indexer_k_quant_and_cache``).

What is not here is refused: TurboQuant and UltraQuant, DeepSeek-V4's caches (several tokens in one state, scales behind a page),
HiSparse, Mamba, chunked local attention, attention sinks, encoders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvxfer.errors import LayoutMismatchError, PlatformError, RemoteProtocolError
from kvxfer.layout.check import check
from kvxfer.layout.describe import Content, Heads, Tensor, sections, strided
from kvxfer.layout.maps import CacheMap, Group, Plane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvxfer.platform import Geometry, LayerGroup

KINDS: Final = frozenset(
    {
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MLAAttentionSpec",
        "SlidingWindowMLASpec",
        "RSWASpec",
    }
)
"""Cache specifications of vLLM's whose blocks hold one state for each position of the prompt."""

PACKED: Final = {656: "fp8_ds_mla", 352: "nvfp4_ds_mla"}
"""Bytes of a token in MLA's packed caches."""
INDEX_KEYS, INDEX_SCALES = 128, 4
"""An indexer's keys are quantized in parts of 128 bytes, each with one float32 scale."""
_SAME: Final = {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_BYTES: Final = frozenset({"uint8", "int8", "float8_e4m3fn", "float8_e5m2"})
_ONE: Final = Heads((0,), 1)


class _View(NamedTuple):
    """One layer's tensor with blocks of the manager's size: the letters of its axes (see ``kvxfer.layout.describe``)."""

    name: str
    axes: str
    tensor: Tensor
    item: int
    dtype: str

    @property
    def channels(self) -> int:
        return self.tensor.shape[-1]

    def extents(self, letter: str) -> tuple[int, ...]:
        return tuple(size for axis, size in zip(self.axes, self.tensor.shape, strict=True) if axis == letter)

    def stride(self, letter: str) -> int:
        """Bytes of one step of an axis, of its last digit; 0 for an axis that is not there."""
        at = self.axes.rfind(letter)
        return self.tensor.strides[at] if at >= 0 else 0

    def __str__(self) -> str:
        strides = tuple(stride // self.item for stride in self.tensor.strides)
        return f"layer {self.name}: shape {self.tensor.shape} and strides {strides} of {self.dtype}"


def describe(caches: Mapping[str, Any], geometry: Geometry) -> CacheMap:
    """Map tensors by layer name. Raises PlatformError that names layer, shape, strides and backends."""
    _check_names(caches, geometry)
    devices = sorted({str(cache.device) for cache in caches.values()})
    if len(devices) != 1:
        raise PlatformError(f"the cache's layers are on {' and '.join(devices)}: a worker has one device")
    try:
        cache = CacheMap(
            groups=tuple(_group(caches, group, geometry) for group in geometry.groups),
            spans=_spans(caches),
            memory="VRAM",
            device=next(iter(caches.values())).device.index or 0,
        )
        check(cache)
    except (LayoutMismatchError, RemoteProtocolError) as error:
        raise PlatformError(f"the cache of {_backends(geometry)} cannot be described: {error}") from error
    return cache


def _check_names(caches: Mapping[str, Any], geometry: Geometry) -> None:
    named = [name for group in geometry.groups for name, _ in group.layers]
    for name in named:
        if name not in caches:
            raise PlatformError(f"layer {name} is in vLLM's KV cache groups, and vLLM handed over no cache for it")
    for name in caches:
        if name not in named:
            shape = tuple(getattr(caches[name], "shape", ()))
            raise PlatformError(f"layer {name}: its cache of shape {shape} is in none of vLLM's KV cache groups")


def _spans(caches: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    storages = (cache.untyped_storage() for cache in caches.values())
    return tuple(sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages}))


def _group(caches: Mapping[str, Any], group: LayerGroup, geometry: Geometry) -> Group:
    if group.kind not in KINDS:
        raise PlatformError(
            f"layer {group.layers[0][0]}: vLLM keeps it as {group.kind}, which does not hold one state for each position; "
            "kvxfer moves full attention, sliding windows and MLA"
        )
    alike: dict[tuple[str, str, tuple[int, ...], tuple[int, ...], str], list[_View]] = {}
    seen = set()
    for name, number in group.layers:
        view = _view(name, number, caches[name], group, geometry)
        if view.tensor.base in seen:
            continue  # a layer that attends to another's cache: its bytes are the other's
        seen.add(view.tensor.base)
        what = "index" if _is_indexer(name) else "attention"
        alike.setdefault((what, view.axes, view.tensor.shape, view.tensor.strides, view.dtype), []).append(view)
    planes = tuple(plane for (what, *_), views in alike.items() for plane in _planes(what, views, group, geometry))
    return Group(group.block_size, geometry.num_blocks, planes, group.window)


def _is_indexer(name: str) -> bool:
    """Tell an indexer's side cache by its module: ``….self_attn.indexer.k_cache``."""
    return any(part.startswith("index") for part in name.split("."))


# --- which axis is which ----------------------------------------------------------------------------------------------


def _view(name: str, number: int, cache: Any, group: LayerGroup, geometry: Geometry) -> _View:
    if not hasattr(cache, "data_ptr"):
        raise PlatformError(
            f"layer {name}: its cache is a {type(cache).__name__} of tensors, as state-space models have"
        )
    shape, item = tuple(cache.shape), cache.element_size()
    strides = tuple(step * item for step in cache.stride())
    dtype = str(cache.dtype).removeprefix("torch.")
    heads = 1 if _is_indexer(name) or _is_mla(group) else len(group.heads)
    axes = _axes(shape, heads, group, geometry, dtype)
    raw = _View(name, axes, Tensor(number, cache.data_ptr(), shape, strides), item, dtype)
    if not axes:
        raise PlatformError(_unknown(raw, group, geometry, heads))
    (tokens,) = raw.extents("N")
    ratio = group.block_size // tokens
    if shape[0] != geometry.num_blocks * ratio:
        blocks = f"{geometry.num_blocks} blocks" + (f" of {ratio} kernel blocks each" if ratio > 1 else "")
        raise PlatformError(f"{raw} does not have {blocks} ({_backends(geometry)})")
    if ratio > 1:  # kernel blocks: the token axis has two digits
        axes = axes.replace("B", "BN")
        shape = (geometry.num_blocks, ratio, *shape[1:])
        strides = (strides[0] * ratio, *strides)
    return _View(name, axes, Tensor(number, cache.data_ptr(), shape, strides), item, dtype)


def _axes(shape: tuple[int, ...], heads: int, group: LayerGroup, geometry: Geometry, dtype: str) -> str:
    """Return the letters of a tensor's axes; empty where none of the known ones fits, or two do."""
    slots = {heads, 2 * heads} if _is_nvfp4(geometry, dtype) else {heads}
    fits = [
        axes
        for axes, head, token, possible in (
            ("BHNC", 1, 2, True),
            ("BNC", None, 1, heads == 1),
            ("BPNHC", 3, 2, shape[1:2] == (2,)),
            ("BNHC", 2, 1, _is_diffkv(geometry)),
        )
        if len(shape) == len(axes)
        and possible
        and (head is None or shape[head] in slots)
        and 0 < shape[token] <= group.block_size
        and group.block_size % shape[token] == 0
    ]
    return fits[0] if len(fits) == 1 else ""


def _is_mla(group: LayerGroup) -> bool:
    return "MLA" in group.kind


def _is_diffkv(geometry: Geometry) -> bool:
    return any("DIFFKV" in backend for backend in geometry.attention_backends)


def _is_nvfp4(geometry: Geometry, dtype: str) -> bool:
    return dtype == "uint8" and geometry.cache_dtype.startswith("nvfp4") and not geometry.cache_dtype.endswith("ds_mla")


# --- what is in it ----------------------------------------------------------------------------------------------------


def _planes(what: str, views: Sequence[_View], group: LayerGroup, geometry: Geometry) -> tuple[Plane, ...]:
    first, tensors = views[0], [view.tensor for view in views]
    if what == "index":
        return _index(first, tensors, group, geometry)
    dtype = _element(first, geometry)
    if _is_mla(group):
        packed = PACKED.get(first.channels) if first.dtype in _BYTES else None
        contents = [Content("latent", first.channels)]  # all of a token is inside C, whatever head size vLLM names
        return strided(tensors, first.axes, contents, dtype=packed or dtype, item=first.item, heads=_ONE)
    heads = Heads(group.heads, group.total_heads)
    if _is_nvfp4(geometry, first.dtype):
        return _nvfp4(first, tensors, group, geometry, heads)
    return strided(
        tensors, first.axes, _keys_and_values(first, group, geometry), dtype=dtype, item=first.item, heads=heads
    )


def _element(view: _View, geometry: Geometry) -> str:
    """Name what an element is, so that two engines whose bytes differ in meaning do not think them the same."""
    if view.dtype not in _BYTES:
        return view.dtype
    name = view.dtype if geometry.cache_dtype == "auto" else geometry.cache_dtype
    return _SAME.get(name, name)


def _keys_and_values(view: _View, group: LayerGroup, geometry: Geometry) -> list[Content]:
    """Cut C into K and V. They are of one size, but where a DIFFKV backend has a value size of its own."""
    joined, size = view.channels * (2 if "P" in view.axes else 1), group.head_size
    halves = [Content("k", joined // 2), Content("v", joined // 2)]
    if joined == 2 * size:
        return halves
    if "per_token_head" in geometry.cache_dtype and view.dtype in _BYTES and joined % 2 == 0:
        return halves
    if "P" not in view.axes and joined > size and _is_diffkv(geometry):
        return [Content("k", size), Content("v", joined - size)]
    raise PlatformError(_unknown(view, group, geometry, len(group.heads)))


def _index(view: _View, tensors: Sequence[Tensor], group: LayerGroup, geometry: Geometry) -> tuple[Plane, ...]:
    if view.dtype not in ("uint8", "int8"):  # MiniMax-M3: plain keys
        return strided(
            tensors, view.axes, [Content("index", view.channels)], dtype=view.dtype, item=view.item, heads=_ONE
        )
    parts, rest = divmod(view.channels, INDEX_KEYS + INDEX_SCALES)
    if rest or view.stride("N") != view.channels:
        raise PlatformError(_unknown(view, group, geometry, 1))
    contents = [Content("index", parts * INDEX_KEYS), Content("index_scale", parts * INDEX_SCALES)]
    *split, tokens = view.extents("N")
    planes = sections(tensors, tokens, contents, dtype="uint8", item=1)
    if split:  # kernel blocks
        digit = (split[0], view.tensor.strides[1])
        planes = tuple(msgspec.structs.replace(plane, tokens=(digit, *plane.tokens)) for plane in planes)
    return planes


def _nvfp4(
    view: _View, tensors: Sequence[Tensor], group: LayerGroup, geometry: Geometry, heads: Heads
) -> tuple[Plane, ...]:
    """Describe halves of a block that hold [all data][all scales], each in the order of heads and tokens that strides tell."""
    count, tokens, channels = len(heads.held), view.extents("N")[-1], view.channels
    data, scale = channels * 8 // 9, channels - channels * 8 // 9
    head, token = view.stride("H"), view.stride("N")
    if "P" in view.axes:
        value, slots = view.stride("P"), count
        dense = (head, token) in {(tokens * channels, channels), (channels, count * channels)}
    else:
        value, slots = count * head, 2 * count
        dense = (head, token) == (tokens * channels, channels)
    if channels != group.head_size // 2 + group.head_size // 16 or view.extents("H") != (slots,) or not dense:
        raise PlatformError(_unknown(view, group, geometry, count))
    split = tuple((size, view.tensor.strides[1]) for size in view.extents("N")[:-1])
    planes = []
    for name, half in (("k", 0), ("v", value)):
        for part, at, width in ((name, 0, data), (f"{name}_scale", count * tokens * data, scale)):
            planes.append(
                Plane(
                    name=part,
                    dtype="nvfp4" if width == data else "float8_e4m3fn",
                    item=1,
                    layers=tuple(tensor.layer for tensor in tensors),
                    bases=tuple(tensor.base + half + at for tensor in tensors),
                    heads=heads.held,
                    total_heads=heads.total,
                    block_stride=view.tensor.strides[0],
                    head_stride=head * width // channels,
                    tokens=(*split, (tokens, token * width // channels)),
                    channels=((width, 1),),
                )
            )
    return tuple(planes)


# --- for people -------------------------------------------------------------------------------------------------------


def _backends(geometry: Geometry) -> str:
    return "+".join(geometry.attention_backends) or "an attention backend that vLLM does not name"


def _unknown(view: _View, group: LayerGroup, geometry: Geometry, heads: int) -> str:
    return (
        f"{view} is no cache of {_backends(geometry)} that this platform knows: blocks of {group.block_size} tokens, {heads} "
        f"heads of {group.head_size}, kept as {group.kind} with kv_cache_dtype {geometry.cache_dtype}; known are [block, "
        "head, token, channel], [block, token, channel] and [block, 2, token, head, channel]. Choose another "
        "--attention-backend or --kv-cache-dtype"
    )
