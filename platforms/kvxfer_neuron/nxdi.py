"""NxD Inference's caches (vllm-neuron up to 0.5, SDK 2.25 to 2.30), as what ``NeuronPlatform.describe`` takes.

NxDI keeps a flat list, [K of layer 0, V of layer 0, K of layer 1, …], whose tensors are laid out by one of three managers:

``contiguous``  KVCacheManager: (sequences, heads, tokens, channels). A sequence's slot is one block of the longest length there
                is. With ``kv_cache_tiling`` the tokens are in two dimensions, 128 first; with ``k_cache_transposed`` K's channels
                come before tokens
``blocks``      BlockKVCacheManager with prefix caching: (blocks + 1 scratch block, tokens, heads, channels), the tokens in two
                dimensions where it tiles them
``chunked``     BlockKVCacheManager with chunked prefill: (blocks, heads, tokens, channels)

All are described by their strides, so that equal engines exchange long runs. Whether two unlike ones have runs in common is
decided where all engines' layouts are compared, at the handshake: transposed K against K that is not has none, nor has
``blocks``, which is token-major, against head-major caches, and both are refused there with the two layouts.

Refused here is what has no lasting place for a position: padding on the left, which moves every token at each step, and flash
decoding, which spreads positions over ranks.

Sources: neuronx-distributed-inference, modules/kvcache/kv_cache_manager.py and block_kv_cache_manager.py,
modules/attention/gqa.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from kvxfer.errors import PlatformError
from kvxfer.layout.check import MAX_BLOCK_SIZE
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_neuron.layouts import Pair

if TYPE_CHECKING:
    from collections.abc import Sequence

AWS_INDEX: Final = "https://pip.repos.neuron.amazonaws.com"

Manager = Literal["contiguous", "blocks", "chunked"]

_AXES: Final[dict[tuple[str, int], str]] = {
    ("contiguous", 4): "BHNC",
    ("contiguous", 5): "BHNNC",
    ("blocks", 4): "BNHC",
    ("blocks", 5): "BNNHC",
    ("chunked", 4): "BHNC",
}
_SCRATCH: Final = {"contiguous": 0, "blocks": 1, "chunked": 0}
"""Blocks at the end to which NxDI scatters what belongs nowhere."""


def heads_of_rank(rank: int, size: int, attention_heads: int, kv_heads: int) -> tuple[int | None, ...]:
    """Return the model's KV head in each head slot of a tensor-parallel rank, None where a slot is padding.

    With as many KV heads as divide over the ranks there is nothing to replicate. REPLICATE_TO_TP_DEGREE, where the ranks
    are a multiple of the heads: each head on consecutive ranks. Otherwise CONVERT_TO_MHA: each KV head for each of its query
    heads, padding at the tail (gqa.py: determine_sharding_strategy, get_shardable_head_counts, preshard_hook).
    """
    if not 0 <= rank < size or attention_heads < 1 or kv_heads < 1 or attention_heads % kv_heads:
        raise PlatformError(
            f"{kv_heads} KV heads for {attention_heads} query heads cannot be spread over {size} ranks, of which this is {rank}"
        )
    padded = -(-attention_heads // size) * size
    if kv_heads % size == 0:
        repeats, slots = 1, kv_heads
    elif size % kv_heads == 0:
        repeats, slots = size // kv_heads, size
    else:
        repeats, slots = attention_heads // kv_heads, padded
    each = slots // size
    slot_heads = (slot // repeats for slot in range(rank * each, (rank + 1) * each))
    return tuple(head if head < kv_heads else None for head in slot_heads)


def this_rank() -> tuple[int, int]:
    """Ask neuronx-distributed for this process's tensor-parallel rank, and how many there are. Raises PlatformError."""
    try:
        from neuronx_distributed.parallel_layers import parallel_state
    except Exception as error:  # the public index's placeholder raises what it likes
        raise PlatformError(
            f"neuronx-distributed does not import ({error}): install it from {AWS_INDEX} (kvxfer doctor tells the public index's "
            "placeholder from it), or give the shard"
        ) from error
    if not parallel_state.model_parallel_is_initialized():
        raise PlatformError(
            "neuronx-distributed's parallel state is not initialised in this process: initialise it first, or give the shard"
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()


def caches(
    flat: Sequence[Any],
    *,
    manager: Manager,
    shard: tuple[int, int] | None = None,
    attention_heads: int,
    kv_heads: int,
    head_size: int,
    cache_dtype: str = "auto",
    k_transposed: bool = False,
    padding_side: str = "right",
    flash_decoding: bool = False,
) -> tuple[dict[str, Pair], Geometry]:
    """Name NxDI's tensors, and say what they hold. Raises PlatformError where positions have no lasting place.

    ``shard`` is (tensor-parallel rank, ranks); neuronx-distributed is asked for it where it is not given.
    """
    if padding_side != "right":
        raise PlatformError(
            f"NxDI with padding_side={padding_side!r} moves every token of its cache at each step: set padding_side to right"
        )
    if flash_decoding:
        raise PlatformError("NxDI's flash decoding spreads positions over ranks: set flash_decoding_enabled to false")
    if not flat or len(flat) % 2:
        raise PlatformError(f"NxDI's cache is a flat list of K and V in turn; one of {len(flat)} tensors is none of it")
    rank, ranks = this_rank() if shard is None else shard
    held = heads_of_rank(rank, ranks, attention_heads, kv_heads)
    real = tuple(head for head in held if head is not None)
    if not real:
        raise PlatformError(
            f"tensor-parallel rank {rank} of {ranks} holds nothing but padding ({kv_heads} KV heads): use fewer ranks"
        )
    shape = tuple(flat[1].shape)  # of V, which is never transposed
    axes = _AXES.get((manager, len(shape)))
    if axes is None:
        raise PlatformError(f"NxDI's manager {manager!r} has no cache of shape {shape}")
    extent = dict.fromkeys(axes, 1)
    for letter, count in zip(axes, shape, strict=True):
        extent[letter] *= count
    if (extent["H"], extent["C"]) != (len(held), head_size):
        raise PlatformError(
            f"NxDI's cache of shape {shape} as {axes} does not hold {len(held)} head slots of {head_size}: {kv_heads} KV heads "
            f"for {attention_heads} query heads on rank {rank} of {ranks}"
        )
    if extent["N"] > MAX_BLOCK_SIZE:
        raise PlatformError(
            f"a sequence's slot of {extent['N']} tokens is longer than {MAX_BLOCK_SIZE}: lower max_length, or use block KV"
        )
    if k_transposed and (manager, len(shape)) != ("contiguous", 4):
        raise PlatformError(
            f"NxDI transposes K in its contiguous, untiled cache alone, not in {manager!r} of shape {shape}"
        )
    k_axes = "BHCN" if k_transposed else axes
    padding = len(held) - len(real)
    pairs = {
        f"layers.{layer}": Pair(flat[2 * layer], flat[2 * layer + 1], k_axes, axes, padding)
        for layer in range(len(flat) // 2)
    }
    layers = tuple((name, index) for index, name in enumerate(pairs))
    group = LayerGroup(layers, extent["N"], real, kv_heads, head_size)
    return pairs, Geometry((group,), extent["B"] - _SCRATCH[manager], cache_dtype)
