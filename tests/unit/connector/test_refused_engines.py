"""Engines whose KV would be wrong on a peer, or that no peer can be connected with, are refused at start, with what to set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.connector.checks import check_engine
from kvxfer.errors import ConfigError


def config(role: str = "kv_producer", *, stages: int = 1, **sizes: int) -> SimpleNamespace:
    parallel = SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=stages, **sizes)
    transfer, cache = SimpleNamespace(kv_role=role, engine_id="e"), SimpleNamespace()
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer, cache_config=cache)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_ranks_that_share_out_positions_are_refused(role, what) -> None:
    """Such a rank's blocks look like any others, so that nothing later could notice."""
    with pytest.raises(ConfigError, match=f"engine e: 2 ranks .* set --{what}-context-parallel-size 1"):
        check_engine(config(role, **{f"{what}_context_parallel_size": 2}))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_scales_that_an_engine_finds_for_itself_are_refused(role) -> None:
    one = config(role)
    one.cache_config.calculate_kv_scales = False
    check_engine(one)
    one.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="without --calculate-kv-scales, on both engines"):
        check_engine(one)


def test_decode_in_stages_is_refused_and_prefill_in_stages_is_not() -> None:
    with pytest.raises(ConfigError, match=r"in 3 pipeline stages.*set --pipeline-parallel-size 1"):
        check_engine(config("kv_consumer", stages=3))
    for role in ("kv_producer", "kv_both"):
        check_engine(config(role, stages=3))


def test_all_else_passes_whether_this_vllm_knows_of_context_parallelism_or_not() -> None:
    check_engine(config())
    check_engine(config("kv_consumer", decode_context_parallel_size=1, prefill_context_parallel_size=1))
