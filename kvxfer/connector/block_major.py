"""Block-major caches: all layers of a block in one run of memory, so that a handoff takes one descriptor a block.

vLLM decides how a cache lies. A connector may ask; where it cannot have its wish, the cache lies layer by layer and a handoff
takes as many descriptors for each block as there are layers. That is slower and never wrong: what is moved is decided by
where the blocks are found to lie, not by what was asked for. So nothing here may keep an engine from starting.

How to ask, in vLLM's versions:

* since 0.29 by the *required layout* ``BLHNC``, which vLLM drops with a warning where an attention backend does not take it. It
  must be asked for only where a block of the scheduler's is one block of the attention kernel's: otherwise vLLM, which would
  have to split it, ends the start (v1/kv_cache_interface.py). 0.29.0 and 0.32.0: read; run where it is refused.
* up to 0.28 by ``prefer_cross_layer_blocks``, which the V1 runner alone looks at; then one tensor of all layers is handed over
  as it lies. 0.26.0: read, not run.

vLLM's CPU attention takes ``LBHNC`` alone (0.29 and 0.32, v1/attention/backends/cpu_attn.py). Its MLA on a CPU says that it takes
any, and ends the engine at the first prompt where a layer's cache is not one run of memory (``_ONE_RUN``; 0.29.0: run).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvxfer.config import settings_from
from kvxfer.connector import compat
from kvxfer.layout.plan import Prepared
from kvxfer.layout.positions import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.layout.maps import CacheMap

logger = logging.getLogger("kvxfer.layout")

LAYOUT: Final = "BLHNC"
"""Blocks, then layers, heads, tokens, content: the layout in which a block of all layers, and each layer's part, is one run."""

_ONE_RUN: Final = ("CPU_MLA", "AMX_MLA")
"""Backends that view a layer's whole cache as one run, without saying so (0.29 and 0.32, v1/attention/backends/mla)."""


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
    if getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None):
        return "layers of different element types share the cache"
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


def descriptors_a_block(cache: CacheMap) -> int:
    """Count the runs of memory that one block of all layers consists of: so many descriptors it takes to move one alone."""
    # Groups lie in the same memory (vLLM 0.29 v1/worker/utils.py): each takes a block of its own, and none beside another's.
    ids = [max(0, group.num_blocks - 1 - 2 * number) for number, group in enumerate(cache.groups)]
    tables = [Table(np.array([block], dtype=np.int32)) for block in ids]
    return Prepared(cache, cache).plan(tables, tables, 0, min(group.block_size for group in cache.groups)).count


def report(vllm_config: Any, cache: CacheMap) -> None:
    """Say in one line, when a block of all layers is not one run, what that costs and why it is so."""
    count = descriptors_a_block(cache)
    if count <= len(cache.groups):
        return
    logger.info(
        "the KV cache is not block-major: a block is %d runs of memory, so that a handoff takes up to %d times as many "
        "descriptors as it would with blocks of one run; because %s",
        count, count, obstacle(vllm_config) or _chosen(vllm_config),
    )  # fmt: skip


def _chosen(vllm_config: Any) -> str:
    """Say why there is no block-major cache although nothing is in the way of asking for one."""
    if not _layouts_have_names() and getattr(vllm_config, "use_v2_model_runner", False):
        return "this vLLM's V2 runner has none: VLLM_USE_V2_MODEL_RUNNER=0 takes the other, which has"
    return "vLLM chose so: see VLLM_KV_CACHE_LAYOUT, and its own log"


def _layouts_have_names() -> bool:
    return LAYOUT in compat.layouts()


def _backends(vllm_config: Any) -> list[Any]:
    """Return the attention backends of the layers; where this process has no layers, the one that vLLM would choose."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return list(get_current_attn_backends(vllm_config))


def _refused_layout(backends: Iterable[Any]) -> str:
    for backend in backends:
        if backend.get_name() in _ONE_RUN:
            return f"{backend.get_name()} takes a layer's cache as one run alone"
        layouts = backend.supported_kv_cache_layouts() if _layouts_have_names() else None
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
