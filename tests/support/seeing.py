"""The benches' model with eyes: a small Idefics3, so that vLLM's CPU build runs multimodal prompts without torchvision.

An image of 64 × 64 is four tiles and the whole, each of 4 tokens after those that name it. It has to be split, since transformers
5.24 counts no tile of one that is not, and vLLM goes by that count. The language model is the benches' own
(``kvxfer.bench.model``) as a Llama, whose answers depend on everything before them; the weights of the rest are random and
strong enough for another image to change every answer.
"""

from __future__ import annotations

import base64
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.bench import model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

IMAGE = "<image>"
TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
ADDED = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES)
PIXELS, TILE, PATCH, SCALE, WIDTH, INNER, LAYERS = 64, 32, 8, 2, 64, 128, 2


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
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ADDED])
    assert [tokenizer.token_to_id(token) for token in ADDED] == [recipe.vocab + i for i in range(len(ADDED))]
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(dict(_weights(recipe)), directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory, "config.json", _config(recipe))
    image = {
        "image_processor_type": "Idefics3ImageProcessor", "do_resize": True, "size": {"longest_edge": PIXELS}, "resample": 1,
        "max_image_size": {"longest_edge": TILE}, "do_image_splitting": True, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "do_pad": True, "do_convert_rgb": True,
    }  # fmt: skip
    _write(directory, "preprocessor_config.json", {**image, "processor_class": "Idefics3Processor"})
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (TILE // PATCH // SCALE) ** 2}
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
    text = {**recipe.config(), "model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": recipe.vocab,
        "scale_factor": SCALE,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "text_config": {**text, "vocab_size": recipe.vocab + len(ADDED)},
        "vision_config": {
            "model_type": "idefics3_vision", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "image_size": TILE, "patch_size": PATCH,
        },
    }  # fmt: skip


def _weights(recipe: model.Recipe) -> Iterator[tuple[str, Any]]:
    matrix = model.uniform(recipe.seed + 100)
    yield from _language(recipe, matrix)

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Any]]:
        yield f"{name}.weight", matrix(rows, columns)
        yield f"{name}.bias", np.zeros(rows, np.float32)

    def norm(name: str) -> Iterator[tuple[str, Any]]:
        yield f"{name}.weight", np.ones(WIDTH, np.float32)
        yield f"{name}.bias", np.zeros(WIDTH, np.float32)

    eyes = "model.vision_model"
    yield f"{eyes}.embeddings.patch_embedding.weight", matrix(WIDTH, 3 * PATCH**2).reshape(WIDTH, 3, PATCH, PATCH)
    yield f"{eyes}.embeddings.patch_embedding.bias", np.zeros(WIDTH, np.float32)
    yield f"{eyes}.embeddings.position_embedding.weight", matrix((TILE // PATCH) ** 2, WIDTH, 8.0)
    for layer in range(LAYERS):
        here = f"{eyes}.encoder.layers.{layer}"
        for part in ("q", "k", "v", "out"):
            yield from linear(f"{here}.self_attn.{part}_proj", WIDTH, WIDTH)
        yield from norm(f"{here}.layer_norm1")
        yield from norm(f"{here}.layer_norm2")
        yield from linear(f"{here}.mlp.fc1", INNER, WIDTH)
        yield from linear(f"{here}.mlp.fc2", WIDTH, INNER)
    yield from norm(f"{eyes}.post_layernorm")
    # Twice the size of a token's embedding.
    joined = WIDTH * SCALE**2
    yield "model.connector.modality_projection.proj.weight", matrix(recipe.hidden, joined, 2 * recipe.embedding_scale)


def _language(recipe: model.Recipe, matrix: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The benches' weights as a Llama's, with rows for the added tokens, which no answer has (their logits are 0)."""
    added = {
        "embed_tokens": matrix(len(ADDED), recipe.hidden, recipe.embedding_scale * recipe.hidden**0.5),
        "lm_head": np.zeros((len(ADDED), recipe.hidden), np.float32),
    }
    sides: dict[str, Any] = {}
    for name, weight in recipe.weights():
        part = name.split(".")[-2]
        here = name.replace("model.", "model.text_model.", 1)
        if part in ("q_norm", "k_norm"):  # Llama normalises neither, so the sharpness goes into what makes them.
            sides[part.replace("norm", "proj")] = weight[0]
        elif part in added:
            yield here, np.concatenate([weight, added[part]])
        else:
            yield here, weight * sides[part] if part in sides else weight


def _write(directory: Path, name: str, value: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(value, indent=2) + "\n")
