"""Block-major caches: all layers of a block in one run of memory, so that a handoff takes one descriptor a block.

vLLM decides how a cache lies. A connector may ask; where it cannot have its wish, the cache lies layer by layer and a handoff
takes as many descriptors for each block as there are layers. That is slower and never wrong: what is moved is decided by
where the blocks are found to lie, not by what was asked for. So nothing here may keep an engine from starting.

How to ask, in vLLM's versions (0.26.0, 0.29.0 and 0.32.0 read, the last two run):

* since 0.29 by the *required layout* ``BLHNC``. It must be asked for only where a block of the scheduler's is one block of the
  attention kernel's: otherwise vLLM, which would have to split it, ends the start (v1/kv_cache_interface.py).
* up to 0.28 by ``prefer_cross_layer_blocks``, which the V1 runner alone looks at; then one tensor of all layers is handed over.

vLLM's CPU attention takes ``LBHNC`` alone (0.29 and 0.32, v1/attention/backends/cpu_attn.py).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvxfer.config import settings_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

logger = logging.getLogger("kvxfer.layout")

LAYOUT: Final = "BLHNC"
"""Blocks, then layers, heads, tokens, content: the layout in which a block of all layers, and each layer's part, is one run."""


def required_layout(vllm_config: Any) -> str | None:
    """Return the layout to ask vLLM for, where layouts have names (0.29 and later) and this one can be had."""
    if not _layouts_have_names() or obstacle(vllm_config):
        return None
    return LAYOUT


def prefers_cross_layers(vllm_config: Any) -> bool:
    """Tell whether to ask for one tensor of all layers, where that is how it is asked for (up to 0.28)."""
    return not _layouts_have_names() and not obstacle(vllm_config)


def obstacle(vllm_config: Any) -> str:
    """Say why the cache cannot be block-major; empty where nothing is known to be in the way."""
    settings, _ = settings_from(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if not settings.block_major:
        return "the setting block_major is false"
    if getattr(vllm_config.model_config, "is_hybrid", False):
        return "the model has layers of several kinds"
    try:
        backends = _backends(vllm_config)
        return _refused_layout(backends) or _split_blocks(vllm_config.cache_config, backends)
    except Exception as error:  # noqa: BLE001 - of vLLM's, about a wish: the engine starts without it
        return f"vLLM does not tell what its attention takes ({type(error).__name__}: {error})"


def layers_of(kv_cache: Any, attn_backend: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Take a tensor of all layers (up to 0.28) apart into what vLLM's layers themselves see: views [block, head, token, content].

    vLLM hands it over in physical order; the backend's stride order says which axis is which (0.26
    v1/worker/kv_connector_model_runner_mixin.py ``allocate_uniform_kv_caches``).
    """
    order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    logical = kv_cache.permute(*(order.index(axis) for axis in range(len(order))))
    names = [tensor.shared_by for tensor in kv_cache_config.kv_cache_tensors]
    return {name: logical[i] for i, shared in enumerate(names) for name in shared}


def is_block_major(caches: Mapping[str, Any]) -> bool:
    """Tell whether all layers of a block are one run of memory, by where vLLM has put them."""
    tensors = list({cache.data_ptr(): cache for cache in caches.values()}.values())  # layers may share a cache
    block_bytes = sum(cache[0].numel() * cache.element_size() for cache in tensors)
    first = min(cache.data_ptr() for cache in tensors)
    return all(
        cache.stride(0) * cache.element_size() == block_bytes and cache.data_ptr() - first < block_bytes
        for cache in tensors
    )


def report(vllm_config: Any, caches: Mapping[str, Any]) -> None:
    """Say, once, when the cache lies layer by layer, what that costs and why it is so."""
    layers = len({cache.data_ptr() for cache in caches.values()})
    if layers < 2 or is_block_major(caches):  # noqa: PLR2004
        return
    logger.info(
        "the KV cache lies layer by layer: a handoff takes up to %d descriptors for each block, where a block-major cache "
        "takes one (%d times as many); because %s",
        layers, layers, obstacle(vllm_config) or "vLLM chose so: see VLLM_KV_CACHE_LAYOUT, and its own log",
    )  # fmt: skip


def _layouts_have_names() -> bool:
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return False
    return LAYOUT in KVCacheLayout.__members__


def _backends(vllm_config: Any) -> list[Any]:
    """Return the attention backends of the layers; where this process has no layers, the one that vLLM would choose."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return list(get_current_attn_backends(vllm_config))


def _refused_layout(backends: Iterable[Any]) -> str:
    if not _layouts_have_names():
        return ""
    for backend in backends:
        layouts = backend.supported_kv_cache_layouts()
        if layouts is not None and all(layout.name != LAYOUT for layout in layouts):
            return f"{backend.get_name()} takes {', '.join(layout.name for layout in layouts)} alone"
    return ""


def _split_blocks(cache_config: Any, backends: Iterable[Any]) -> str:
    if not getattr(cache_config, "user_specified_block_size", True):
        return ""  # then vLLM chooses a block size that the kernel takes whole
    size = cache_config.block_size
    for backend in backends:
        whole = backend.get_supported_kernel_block_sizes()
        # Sizes, or multiples of a base.
        if not any(size == one if isinstance(one, int) else size % one.base == 0 for one in whole):
            return f"{backend.get_name()} splits blocks of {size} tokens: choose a --block-size that it takes whole"
    return ""
