"""The seeded hybrid: a recipe like the other, with windows in every other layer."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvxfer.bench.hybrid import HybridRecipe
from kvxfer.bench.model import SPECIAL_TOKENS, build

pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

TINY = HybridRecipe(
    name="tiny", vocab=320, hidden=32, intermediate=48, q_heads=4, kv_heads=2, head_dim=16,
    sharpness=(2.0, 5.0, 8.0), attention_gain=(1.0, 2.0, 3.0), window=48,
)  # fmt: skip


def test_its_layers_take_turns_and_its_gains_are_the_norms(tmp_path):
    directory = build(TINY, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["model_type"]) == (48, "gemma3_text")
    assert "use_sliding_window" not in config
    weights = safetensors.load_file(directory / "model.safetensors")
    for layer, gain in enumerate(TINY.attention_gain):
        assert (weights[f"model.layers.{layer}.post_attention_layernorm.weight"] == gain - 1).all()
    embedding = weights["model.embed_tokens.weight"]
    assert not embedding[: len(SPECIAL_TOKENS)].any()
    seen = float(np.sqrt((embedding[len(SPECIAL_TOKENS) :] ** 2).mean()) * TINY.hidden**0.5)
    assert seen == pytest.approx(TINY.embedding_scale, rel=0.05)


def test_another_window_is_another_model():
    assert replace(TINY, window=64).digest != TINY.digest
