"""What an engine may not be asked for, since the KV that moved would be wrong, or no handoff could be: refused at start.

What lies in a cache is compared when two engines meet; this is what no geometry shows. Caches of several groups:
``compat.check_groups``; reuse: ``bidirectional.check``.
"""

from __future__ import annotations

from typing import Any

from kvxfer.errors import ConfigError


def check_engine(vllm_config: Any) -> None:
    """Raise ConfigError, with what to change, for an engine whose KV would mean something else on its peer, or fit none.

    Ranks that share out a prompt's positions hold no whole blocks of it, and an engine that works out the scales of its fp8
    cache from what it first computes is alone with them. No geometry shows either, so what moved would be wrong without a word.
    vLLM refuses the former for its own NIXL connectors alone (0.29 and 0.32, config/vllm.py), the latter, which it has until
    0.26 (config/cache.py), for none.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(
                f"engine {transfer.engine_id}: {size} ranks share out the positions of each prompt, and kvxfer moves KV between "
                f"ranks that hold all of them: set --{name.replace('_', '-')} 1; use tensor parallelism"
            )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            f"engine {transfer.engine_id}: it would calculate scales of its own for its fp8 cache, which its peer does not have: "
            "start without --calculate-kv-scales, on both engines; take a checkpoint that has scales"
        )
    if transfer.kv_role == "kv_consumer" and parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"engine {transfer.engine_id}: it would receive KV in {parallel.pipeline_parallel_size} pipeline stages, and kvxfer "
            "moves it to engines of one stage: set --pipeline-parallel-size 1 on the decode engine; use tensor parallelism there"
        )


def check_inputs(vllm_config: Any) -> None:
    """Raise ConfigError where vLLM numbers images and the like instead of hashing them, so that no two engines agree on one.

    It does so, in all versions from 0.24 to 0.32, where neither its prefix cache nor its cache of processed inputs could use
    a hash (renderers/base.py ``_process_mm_uuids``). The two legs' names for one image differ then, so that every handoff of one
    would be refused.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if getattr(multimodal, "mm_processor_cache_gb", None) == 0 and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "without --enable-prefix-caching and with --mm-processor-cache-gb 0 vLLM numbers multimodal inputs instead of "
            "hashing them, so that the other engine cannot tell whether it has the same ones: turn either of the two on"
        )
