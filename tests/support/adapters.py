"""LoRA adapters for the benches' model, made of a seed, in PEFT's form: strong enough to change every answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvxfer.bench import model

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8


def adapter(directory: Path, seed: int, recipe: model.Recipe | None = None) -> Path:
    """Write an adapter of all layers' query, key and value projections, and return its directory."""
    from safetensors.numpy import save_file

    recipe = recipe or model.Recipe()
    matrix = model.uniform(seed)
    q_size, kv_size = recipe.q_heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    weights = {}
    for layer in range(recipe.layers):
        for part, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            weights[f"{name}.lora_A.weight"] = matrix(RANK, recipe.hidden)
            weights[f"{name}.lora_B.weight"] = matrix(size, RANK)
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
