"""Which heads a worker rank says that it holds, of what vLLM's configuration tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.connector import compat


class FullAttentionSpec(SimpleNamespace):
    """What a group keeps."""


def held(monkeypatch, rank: int, size: int, *, total: int, latent: bool) -> tuple[tuple[int, ...], int]:
    monkeypatch.setattr(compat, "parallel_ranks", lambda _config: (rank, 0))
    monkeypatch.setattr(compat, "_attention_backends", lambda _config, _names: ())
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=latent, get_total_num_kv_heads=lambda: total),
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    spec = FullAttentionSpec(block_size=16, head_size=64)
    group = SimpleNamespace(layer_names=["model.layers.0.attn"], kv_cache_spec=spec)
    found = compat.geometry(config, SimpleNamespace(kv_cache_groups=[group], num_blocks=8)).groups[0]
    return found.heads, found.total_heads


@pytest.mark.parametrize(
    ("size", "total", "heads"),
    [(1, 4, [(0, 1, 2, 3)]), (2, 4, [(0, 1), (2, 3)]), (4, 2, [(0,), (0,), (1,), (1,)])],
)
def test_heads_are_spread_over_ranks_or_repeated(monkeypatch, size, total, heads) -> None:
    found = [held(monkeypatch, rank, size, total=total, latent=False) for rank in range(size)]
    assert found == [(one, total) for one in heads]


def test_every_rank_has_the_one_latent(monkeypatch) -> None:
    """MLA keeps one latent for all heads, which every rank repeats, whatever number of heads the model names."""
    found = [held(monkeypatch, rank, 3, total=16, latent=True) for rank in range(3)]
    assert found == [((0,), 1)] * 3
