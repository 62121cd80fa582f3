"""The seeded model with latent attention: the cache's size is DeepSeek's, and its layers are dense."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvxfer.bench.latent import LatentRecipe
from kvxfer.bench.model import SPECIAL_TOKENS, build

pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

TINY = LatentRecipe(
    name="tiny", vocab=320, hidden=32, intermediate=48, q_heads=4, kv_heads=4, head_dim=16,
    sharpness=(2.0, 5.0), attention_gain=(1.0, 2.0), latent=24, rotary=8,
)  # fmt: skip


def test_shapes_are_those_that_its_config_says(tmp_path):
    directory = build(TINY, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["model_type"]) == (24, 8, "deepseek_v2")
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 2, "no layer has experts"
    assert "head_dim" not in config, "vLLM would take it for the size of a cached head"
    weights = safetensors.load_file(directory / "model.safetensors")
    first = "model.layers.0.self_attn"
    assert weights[f"{first}.q_proj.weight"].shape == (4 * (16 + 8), 32)
    assert weights[f"{first}.kv_a_proj_with_mqa.weight"].shape == (24 + 8, 32)
    assert weights[f"{first}.kv_b_proj.weight"].shape == (4 * 2 * 16, 24)
    assert weights[f"{first}.o_proj.weight"].shape == (32, 4 * 16)
    assert not weights["lm_head.weight"][: len(SPECIAL_TOKENS)].any()
    sharper = [float(np.std(weights[f"model.layers.{layer}.self_attn.q_proj.weight"])) for layer in (0, 1)]
    assert sharper[1] / sharper[0] == pytest.approx(2.5, rel=0.05)


def test_a_token_has_one_vector_a_layer_whatever_the_heads():
    assert TINY.kv_bytes_per_token(4) == 2 * (24 + 8) * 4
    assert replace(TINY, q_heads=8, kv_heads=8).kv_bytes_per_token(4) == TINY.kv_bytes_per_token(4)
    assert LatentRecipe().latent + LatentRecipe().rotary == 576, "all that vLLM's CPU kernel takes"
