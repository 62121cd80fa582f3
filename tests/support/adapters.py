"""Small LoRA adapters for the benches' model, made of random numbers: strong enough for every KV but the first layer's to differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from kvxfer.bench.model import Recipe

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8


def build(directory: Path, seed: int) -> Path:
    """Write an adapter of the attention's projections, in the form of PEFT."""
    recipe, draw = Recipe(), np.random.default_rng(seed)
    outputs = {"q_proj": recipe.q_heads * recipe.head_dim}
    outputs |= dict.fromkeys(("k_proj", "v_proj"), recipe.kv_heads * recipe.head_dim)
    weights = {}
    for layer in range(recipe.layers):
        for name, size in outputs.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = draw.normal(0, 0.1, (RANK, recipe.hidden)).astype(np.float32)
            weights[f"{where}.lora_B.weight"] = draw.normal(0, 0.1, (size, RANK)).astype(np.float32)
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    config |= {"target_modules": list(outputs), "base_model_name_or_path": "", "lora_dropout": 0.0}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
