"""The benches' model with eyes: LLaVA around it, with a CLIP of two small layers, so that vLLM's CPU build runs multimodal prompts.

An image of 32 × 32 is 16 tokens. The language model is the benches' own (``kvxfer.bench.model``), whose answers depend on
everything before them; the weights of the rest are random and strong enough for another image to change every answer.
"""

from __future__ import annotations

import base64
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.bench import model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IMAGE = "<image>"
PIXELS, PATCH, WIDTH, INNER, LAYERS = 32, 8, 64, 128, 2


def build(directory: Path) -> Path:
    """Write the model into an empty directory, and return it."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer

    recipe = model.Recipe()
    language = model.build(recipe)
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (directory / name).write_bytes((language / name).read_bytes())
    tokenizer = Tokenizer.from_file(str(language / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True)])
    assert tokenizer.token_to_id(IMAGE) == recipe.vocab
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(dict(_weights(recipe)), directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory, "config.json", _config(recipe))
    image = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": PIXELS}, "resample": 3,
        "do_center_crop": True, "crop_size": {"height": PIXELS, "width": PIXELS}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "do_convert_rgb": True,
    }  # fmt: skip
    _write(directory, "preprocessor_config.json", {**image, "processor_class": "LlavaProcessor"})
    processor = {
        "processor_class": "LlavaProcessor", "patch_size": PATCH, "vision_feature_select_strategy": "default",
        "image_token": IMAGE, "num_additional_image_tokens": 1,
    }  # fmt: skip
    _write(directory, "processor_config.json", processor)
    return directory


def picture(seed: int) -> str:
    """An image of random squares, as a data URL."""
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(squares.repeat(PIXELS // 4, 0).repeat(PIXELS // 4, 1)).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def _config(recipe: model.Recipe) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": recipe.vocab,
        "image_seq_length": (PIXELS // PATCH) ** 2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "text_config": recipe.config(),
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "image_size": PIXELS, "patch_size": PATCH, "projection_dim": WIDTH, "vocab_size": 1,
        },
    }  # fmt: skip


def _weights(recipe: model.Recipe) -> Iterator[tuple[str, Any]]:
    for name, weight in recipe.weights():
        yield name.replace("model.", "model.language_model.", 1), weight
    matrix = model.uniform(recipe.seed + 100)

    def linear(name: str, rows: int, columns: int, scale: float = 1.0) -> Iterator[tuple[str, Any]]:
        yield f"{name}.weight", matrix(rows, columns, scale)
        yield f"{name}.bias", np.zeros(rows, np.float32)

    def norm(name: str) -> Iterator[tuple[str, Any]]:
        yield f"{name}.weight", np.ones(WIDTH, np.float32)
        yield f"{name}.bias", np.zeros(WIDTH, np.float32)

    eyes = "model.vision_tower.vision_model"
    yield f"{eyes}.embeddings.class_embedding", matrix(1, WIDTH, 8.0)[0]
    yield f"{eyes}.embeddings.patch_embedding.weight", matrix(WIDTH, 3 * PATCH**2).reshape(WIDTH, 3, PATCH, PATCH)
    yield f"{eyes}.embeddings.position_embedding.weight", matrix((PIXELS // PATCH) ** 2 + 1, WIDTH, 8.0)
    yield from norm(f"{eyes}.pre_layrnorm")
    for layer in range(LAYERS):
        here = f"{eyes}.encoder.layers.{layer}"
        for part in ("q", "k", "v", "out"):
            yield from linear(f"{here}.self_attn.{part}_proj", WIDTH, WIDTH)
        yield from norm(f"{here}.layer_norm1")
        yield from norm(f"{here}.layer_norm2")
        yield from linear(f"{here}.mlp.fc1", INNER, WIDTH)
        yield from linear(f"{here}.mlp.fc2", WIDTH, INNER)
    yield from norm(f"{eyes}.post_layernorm")
    # The size of a token's embedding.
    yield from linear("model.multi_modal_projector.linear_1", recipe.hidden, WIDTH)
    yield from linear("model.multi_modal_projector.linear_2", recipe.hidden, recipe.hidden, 2 * recipe.embedding_scale)


def _write(directory: Path, name: str, value: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(value, indent=2) + "\n")
