"""What Neuron's caches look like inside, as cache maps.

vllm-neuron (0.21, 0.24; neuron_model_runner.py) hands the connector one tensor a layer, (2, blocks, heads, tokens, channels), K
in the first half and V in the second; blocks have 32 tokens unless set otherwise. vLLM 0.29 asserts that a cache begins with its
blocks, so the view (blocks, 2, heads, tokens, channels) of the same memory is read as well, and the joined form that 0.29 itself
allocates, (blocks, heads, tokens, K + V). MLA keeps one latent, (blocks, 1, tokens, channels).

With ``fp8_packed_kv`` K's half is laid out as [block, head, token / 2, channel, 2], two tokens side by side, while the tensor
that is handed over has the shape of the unpacked one (neuron_config.py, ``fp8_packed_kv``). Nothing in it tells, so whoever knows
must say.

Other caches come as ``Pair``, whose axes are known to who made it (``nxdi``): shapes alone do not tell (blocks, tokens, heads,
channels) from (blocks, heads, tokens, channels) when both numbers are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import LayoutMismatchError, PlatformError
from kvxfer.layout.describe import Content, Heads, Tensor, strided
from kvxfer.layout.maps import CacheMap, Group
from kvxfer_neuron.nrt import UNMAPPED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvxfer.layout.maps import Plane
    from kvxfer.platform import Geometry, LayerGroup

_LATENT_KINDS: Final = ("MLAAttentionSpec", "SlidingWindowMLASpec")
_KINDS: Final = ("FullAttentionSpec", "SlidingWindowSpec", *_LATENT_KINDS)
_FP8: Final = "float8"


@dataclass(frozen=True, slots=True)
class Pair:
    """One layer's K and V in tensors of their own, with their axes in the letters of ``kvxfer.layout.describe``.

    ``padding`` are head slots at the end that hold no head of the model's.
    """

    k: Any
    v: Any
    k_axes: str
    v_axes: str
    padding: int = 0

    @property
    def device(self) -> Any:
        """The tensors' device."""
        return self.k.device


@dataclass(frozen=True, slots=True)
class _Part:
    """Some planes of one layer: everything that layers must have in common to be described together, and the layer."""

    axes: str
    contents: tuple[Content, ...]
    dtype: str
    item: int
    tensor: Tensor

    @property
    def key(self) -> tuple[Any, ...]:
        return self.axes, self.contents, self.dtype, self.item, self.tensor.shape, self.tensor.strides


def describe(caches: Mapping[str, Any], geometry: Geometry, *, packed: bool | None) -> CacheMap:
    """Describe every group's layers. ``packed`` says whether fp8 caches have their K packed; None for unknown.

    Raises PlatformError that names layer, shape and strides of what is not known.
    """
    if not geometry.groups or not any(group.layers for group in geometry.groups):
        raise PlatformError("the cache has no layers to describe")
    groups = tuple(
        Group(group.block_size, geometry.num_blocks, _planes(caches, group, geometry.num_blocks, packed), group.window)
        for group in geometry.groups
    )
    return CacheMap(groups, _spans(caches), "VRAM", _device(caches))


def tensors_of(cache: Any) -> tuple[Any, ...]:
    """Return the tensors of one layer's cache."""
    return (cache.k, cache.v) if isinstance(cache, Pair) else (cache,)


def _planes(caches: Mapping[str, Any], group: LayerGroup, blocks: int, packed: bool | None) -> tuple[Plane, ...]:
    if group.kind not in _KINDS:
        raise PlatformError(
            f"layers {', '.join(name for name, _ in group.layers[:3])}: a cache of kind {group.kind} is not described on Neuron "
            f"(known are {', '.join(_KINDS)}): serve a model without such layers, or keep it on one engine"
        )
    alike: dict[tuple[Any, ...], list[_Part]] = {}
    for name, index in group.layers:
        if name not in caches:
            raise PlatformError(f"layer {name}: vLLM handed over no cache for it; there are {', '.join(caches)}")
        for part in _parts(name, index, caches[name], group, blocks, packed):
            alike.setdefault(part.key, []).append(part)
    planes: list[Plane] = []
    for parts in alike.values():
        first = parts[0]
        latent = first.contents[0].name == "latent"
        heads = Heads((0,), 1) if latent else Heads(group.heads, group.total_heads)
        try:
            planes += strided(
                [part.tensor for part in parts],
                first.axes,
                first.contents,
                dtype=first.dtype,
                item=first.item,
                heads=heads,
            )
        except LayoutMismatchError as error:
            raise PlatformError(str(error)) from error
    return tuple(planes)


def _parts(name: str, index: int, cache: Any, group: LayerGroup, blocks: int, packed: bool | None) -> Iterator[_Part]:
    for tensor in tensors_of(cache):
        if not tensor.data_ptr():
            raise PlatformError(f"layer {name}: its cache has no address (data_ptr() is 0): {UNMAPPED}")
    if isinstance(cache, Pair):
        for content, tensor, axes in (("k", cache.k, cache.k_axes), ("v", cache.v, cache.v_axes)):
            seen = _narrowed(_tensor(index, tensor), axes, blocks, cache.padding)
            yield _part(axes, (Content(content, group.head_size),), tensor, seen)
        return
    axes, contents = _recognised(name, cache, group, blocks)
    tensor = _tensor(index, cache)
    if _FP8 not in str(cache.dtype) or "P" not in axes or packed is False:
        yield _part(axes, contents, cache, tensor)
    elif packed:
        yield from _packed(name, cache, axes, tensor, group)
    else:
        raise PlatformError(
            f"layer {name}: an fp8 cache of shape {tensor.shape} does not tell whether its K is packed "
            "(additional_config's neuron_config.fp8_packed_kv): set KVXFER_NEURON_FP8_PACKED to 1 if that is on, else to 0"
        )


def _recognised(name: str, cache: Any, group: LayerGroup, blocks: int) -> tuple[str, tuple[Content, ...]]:
    """Recognise a tensor by its shape."""
    shape, size = tuple(cache.shape), group.head_size
    inside = (len(group.heads), group.block_size)
    kv = (Content("k", size), Content("v", size))
    known: dict[str, tuple[tuple[int, ...], tuple[Content, ...]]] = {
        "PBHNC": ((2, blocks, *inside, size), kv),
        "BPHNC": ((blocks, 2, *inside, size), kv),
        "BHNC": ((blocks, *inside, 2 * size), kv),
    }
    if group.kind in _LATENT_KINDS:
        known = {"BHNC": ((blocks, 1, group.block_size, size), (Content("latent", size),))}
    found = [(axes, contents) for axes, (wanted, contents) in known.items() if shape == wanted]
    if len(found) == 1:
        return found[0]
    strides = tuple(cache.stride())
    if found:
        raise PlatformError(
            f"layer {name}: shape {shape} with strides {strides} can be read as {' and as '.join(axes for axes, _ in found)}: "
            f"with {blocks} blocks, planes and blocks look alike; give the cache more memory"
        )
    wanted_text = " or ".join(str(wanted) for wanted, _ in known.values())
    raise PlatformError(
        f"layer {name}: a cache of shape {shape} and strides {strides} is not {wanted_text}, as {blocks} blocks of "
        f"{group.block_size} tokens with {inside[0]} heads of {size} would be, as vllm-neuron lays "
        "it out; NxD Inference's caches are read with kvxfer_neuron.nxdi"
    )


def _packed(name: str, cache: Any, axes: str, tensor: Tensor, group: LayerGroup) -> Iterator[_Part]:
    """Read K's half as [block, head, token / 2, channel, 2], and V's as it is."""
    strides = dict(zip(axes, tensor.strides, strict=True))
    item, size, tokens = cache.element_size(), group.head_size, group.block_size
    if tokens % 2 or (strides["C"], strides["N"]) != (item, item * size):
        raise PlatformError(
            f"layer {name}: a cache of shape {tensor.shape} and strides {tuple(cache.stride())} cannot hold packed K, whose "
            "heads are runs of an even number of tokens: use an even --block-size, or turn neuron_config.fp8_packed_kv off"
        )
    outer = (group_shape := (tensor.shape[axes.index("B")], len(group.heads))), (strides["B"], strides["H"])
    k_shape = (*group_shape, tokens // 2, size, 2)
    k_strides = (*outer[1], 2 * size * item, 2 * item, item)
    yield _part("BHNCN", (Content("k", size),), cache, Tensor(tensor.layer, tensor.base, k_shape, k_strides))
    v_base = tensor.base + strides["P"]
    v_strides = (*outer[1], size * item, item)
    yield _part(
        "BHNC", (Content("v", size),), cache, Tensor(tensor.layer, v_base, (*group_shape, tokens, size), v_strides)
    )


def _narrowed(tensor: Tensor, axes: str, blocks: int, padding: int) -> Tensor:
    """Leave out the blocks behind the model's (NxDI's scratch block), and head slots that are padding."""
    shape = list(tensor.shape)
    block, head = axes.index("B"), axes.index("H")
    if shape[block] < blocks:
        raise PlatformError(f"layer {tensor.layer}: shape {tensor.shape} as {axes} has not {blocks} blocks")
    shape[block] = blocks
    shape[head] -= padding
    return tensor._replace(shape=tuple(shape))


def _part(axes: str, contents: tuple[Content, ...], cache: Any, tensor: Tensor) -> _Part:
    return _Part(axes, contents, str(cache.dtype).removeprefix("torch."), cache.element_size(), tensor)


def _tensor(index: int, cache: Any) -> Tensor:
    item = cache.element_size()
    return Tensor(index, cache.data_ptr(), tuple(cache.shape), tuple(stride * item for stride in cache.stride()))


def _spans(caches: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Name each storage once, in the order of addresses."""
    storages = (tensor.untyped_storage() for cache in caches.values() for tensor in tensors_of(cache))
    return tuple(sorted({storage.data_ptr(): storage.nbytes() for storage in storages}.items()))


def _device(caches: Mapping[str, Any]) -> int:
    """Return the device ordinal of the tensors, which are all on one."""
    found = {cache.device.index or 0 for cache in caches.values()}
    if len(found) > 1:
        raise PlatformError(f"the cache's layers are on devices {sorted(found)}: a rank of kvxfer's has one")
    return found.pop()
