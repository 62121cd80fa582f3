"""Which heads and layers a worker rank says that it holds, of what vLLM's configuration tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.connector import compat


class FullAttentionSpec(SimpleNamespace):
    """What a group keeps."""


def described(monkeypatch, rank: int, size: int, *, total: int, latent: bool, layers=("model.layers.0.attn",)):
    monkeypatch.setattr(compat, "parallel_ranks", lambda _config: (rank, 0))
    monkeypatch.setattr(compat, "_attention_backends", lambda _config, _names: ())
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=latent, get_total_num_kv_heads=lambda: total, get_total_num_hidden_layers=lambda: 4
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    spec = FullAttentionSpec(block_size=16, head_size=64)
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec)
    return compat.geometry(config, SimpleNamespace(kv_cache_groups=[group], num_blocks=8)).groups[0]


def held(monkeypatch, *args, **options) -> tuple[tuple[int, ...], int]:
    found = described(monkeypatch, *args, **options)
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


def test_a_draft_models_layers_follow_the_models_own(monkeypatch) -> None:
    """Both are numbered from 0 on by their names. Of a stage of prefill not all of the model's are there, and the numbers stay."""
    names = [
        "draft_model.model.layers.0.attn",
        "model.layers.3.attn",
        "draft_model.model.layers.1.attn",
        "model.layers.2.attn",
    ]
    found = described(monkeypatch, 0, 1, total=4, latent=False, layers=names)
    assert found.layers == tuple(zip((names[3], names[1], names[0], names[2]), (2, 3, 4, 5), strict=True))


def test_eagles_layers_have_numbers_behind_the_models_already(monkeypatch) -> None:
    names = ["model.layers.4.attn", "model.layers.3.attn"]
    found = described(monkeypatch, 0, 1, total=4, latent=False, layers=names)
    assert [number for _, number in found.layers] == [3, 4]
