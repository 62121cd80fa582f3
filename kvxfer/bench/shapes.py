"""Shapes of real models without their weights: a config.json and the bench's small tokenizer, for ``--load-format dummy``.

How long prefill, decode and a handoff take depends on a model's shape and not on what its weights say. So no weights are
needed to measure time; what tokens come out means nothing. The vocabulary is the bench model's: a tokenizer must be there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from kvxfer.bench import model
from kvxfer.bench.model import Recipe
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_LAYERS: Final = 36
QWEN3_8B: Final = Recipe(
    name="qwen3-8b-shape",
    hidden=4096,
    intermediate=12288,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    max_positions=40960,
    sharpness=(1.0,) * _LAYERS,
    attention_gain=(1.0,) * _LAYERS,
)
"""Qwen3-8B's config.json on Hugging Face, but for the vocabulary."""

DUMMY: Final = ("--load-format", "dummy")


def choose(name: str, cache: Path | None = None) -> tuple[Path, tuple[str, ...], int]:
    """Return a model's directory, arguments that vLLM needs with it, and its vocabulary.

    ``small`` is the bench's own model, ``qwen3-8b`` that model's shape; anything else is a directory with a config.json.
    """
    from pathlib import Path

    if name == "small":
        recipe = Recipe()
        return model.build(recipe, cache), (), recipe.vocab
    if name == "qwen3-8b":
        return model.build(QWEN3_8B, cache, weights=False), DUMMY, QWEN3_8B.vocab
    directory = Path(name)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        vocab = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model {name!r} is none of small and qwen3-8b, and no directory with a config.json that has a vocab_size: {error}"
        ) from None
    return directory, (), vocab
