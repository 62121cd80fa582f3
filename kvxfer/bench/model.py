"""A small, seeded model in Qwen3's architecture whose every answer depends on every block of its KV cache.

Why not any tiny random model: one of those repeats a single token whatever its cache holds, so that equal outputs prove
nothing. This one is random too, but its scales are chosen so that it *amplifies*. The embedding is small and has no mean, and
the first layer's attention is broad and outweighs the token itself: what any one block says is a visible part of the sum.
The attention of the later layers grows sharper and sharper, which turns a small difference in the query into attention to
other tokens.

Measured with vLLM 0.29.0 and 0.32.0 on CPU (float32, greedy, 16 tokens, prompts of 31, 127, 300, 1,000, 2,000, 4,000 and 6,000
tokens; ``kvxfer bench model`` repeats it):

- one token changed among the first 32 (position 5 first): 168 of 168 answers changed, in either version
- one token changed anywhere: 168 of 168, in either version
- 11 to 16 of an answer's 16 tokens are different ones
- the same answers alone twice, with chunks of 512, 2,048 and 8,192 tokens, with blocks of 32 and 128, with one and two
  threads, with a prefix cache, empty and hit. Log-probabilities differ by up to 1.2e-4 between chunks of 512 and 2,048, so an
  answer can differ only where two tokens are nearer than that: about one answer in 200 to random prompts. Of the demo's
  prompts (seed 0) none comes nearer than 0.0023
- 6,000 tokens are prefilled in 1.3 to 3 s on two cores, and have 49 MB of KV

Measured on its KV cache (a float32 model of the same arithmetic, prompts of 300 and 6,000 tokens in blocks of 32):

- one block replaced by another, or by zeros: 72 of 72 answers changed, the next token's logits by 0.36 to 1.2 of their norm
- the last token computed apart, as decode does: none changed, logits by 3e-6 (300 tokens) and 6e-5 (6,000)

What no model of this kind can show: attention sums over a *set* of keys that carry their positions, so two full
blocks of one request that change places change nothing (0 of 18, logits by no more than the above). A misplaced block shows
only if its content is lost, or lands in the partly filled last block, where the rest is masked (36 of 36).

Guarantees: the same recipe gives the same bytes on every machine and version of NumPy (weights are uniform, made of raw
generator output without transcendental functions), built once per cache directory, and never seen half-written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from kvxfer.bench import corpus
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

RECIPE_VERSION: Final = 1
"""Raised when this code makes other files from the same recipe."""

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2. Their rows of the output matrix are zero, so greedy decoding never emits them."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the model's files; the cache directory's name is made of a hash of it.

    ``sharpness`` is the standard deviation of the attention logits per layer, ``attention_gain`` the scale of
    the attention's output projection, ``mlp_gain`` that of the MLP's, ``embedding_scale`` the root mean square of a
    token's embedding.
    """

    name: str = "sensitive-qwen3"
    seed: int = 1
    vocab: int = 1024
    hidden: int = 256
    intermediate: int = 512
    q_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    max_positions: int = 16384
    sharpness: tuple[float, ...] = (2.0, 5.0, 8.0, 10.0)
    attention_gain: tuple[float, ...] = (10.0, 6.0, 6.0, 6.0)
    mlp_gain: float = 1.0
    embedding_scale: float = 0.1

    def __post_init__(self) -> None:
        if len(self.sharpness) != len(self.attention_gain):
            raise ConfigError(
                f"recipe {self.name}: sharpness has {len(self.sharpness)} layers and attention_gain has "
                f"{len(self.attention_gain)}; give one value of each per layer"
            )
        if self.q_heads % self.kv_heads:
            raise ConfigError(
                f"recipe {self.name}: {self.q_heads} query heads are not a multiple of {self.kv_heads} KV heads"
            )

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.sharpness)

    @property
    def digest(self) -> str:
        """Twelve hex digits over the recipe, the corpus and the version of this code."""
        text = json.dumps([RECIPE_VERSION, asdict(self), corpus.TEXT, CHAT_TEMPLATE], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def kv_bytes_per_token(self, element_bytes: int = 4) -> int:
        """Bytes of KV per token over all layers and heads, at ``element_bytes`` a value."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def config(self) -> dict[str, object]:
        """Return the model's config.json."""
        return _config(self)

    def weights(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Make the model's weights, by name."""
        return _weights(self)


def default_cache() -> Path:
    """Where models are kept: ``$XDG_CACHE_HOME/kvxfer/models``, else ``~/.cache/kvxfer/models``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvxfer" / "models"


def build(recipe: Recipe | None = None, cache: Path | None = None, *, weights: bool = True) -> Path:
    """Build the model unless it is there already, and return its directory; ``weights`` False leaves its weights out.

    Built in a temporary directory beside the target and renamed, so that any number of processes may do so at once.
    """
    recipe = recipe or Recipe()
    cache = cache or default_cache()
    target = cache / f"{recipe.name}-{recipe.digest}{'' if weights else '-bare'}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    try:
        _write(recipe, scratch, weights=weights)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            # Another process was quicker: its directory has the same bytes.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def prompt_tokens(length: int, seed: int, recipe: Recipe | None = None) -> list[int]:
    """``length`` token ids without special tokens, the same for the same arguments everywhere."""
    vocab = (recipe or Recipe()).vocab
    generator = np.random.PCG64([seed, length])
    span = vocab - len(SPECIAL_TOKENS)
    return [len(SPECIAL_TOKENS) + int(raw) % span for raw in np.atleast_1d(generator.random_raw(length))]


def _write(recipe: Recipe, directory: Path, *, weights: bool) -> None:
    _write_tokenizer(recipe, directory)
    if weights:
        from safetensors.numpy import save_file

        save_file(dict(recipe.weights()), directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", recipe.config())
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [0, 2], "do_sample": False})


def _config(recipe: Recipe) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.q_heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "vocab_size": recipe.vocab,
        "max_position_embeddings": recipe.max_positions,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def uniform(seed: int) -> Callable[..., npt.NDArray[np.float32]]:
    """Return what makes matrices of so many rows and columns, one after the other, the same everywhere; ``scale`` is 1."""
    generator = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        # Uniform with variance scale² / columns: maps inputs of unit variance to outputs of variance scale².
        values = generator.random((rows, columns), dtype=np.float32)
        return np.asarray((values - np.float32(0.5)) * np.float32(scale * math.sqrt(12.0 / columns)), dtype=np.float32)

    return matrix


def _weights(recipe: Recipe) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    matrix = uniform(recipe.seed)
    hidden, q_size, kv_size = recipe.hidden, recipe.q_heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    embedding = matrix(recipe.vocab, hidden, recipe.embedding_scale * math.sqrt(hidden))
    # Summed in float64 and by rows, so that the mean does not depend on how NumPy orders a float32 sum.
    embedding -= (embedding.astype(np.float64).sum(axis=0) / recipe.vocab).astype(np.float32)
    yield "model.embed_tokens.weight", embedding
    head = matrix(recipe.vocab, hidden)
    head[: len(SPECIAL_TOKENS)] = 0.0
    yield "lm_head.weight", head
    yield "model.norm.weight", np.ones(hidden, np.float32)
    for layer, (sharpness, gain) in enumerate(zip(recipe.sharpness, recipe.attention_gain, strict=True)):
        prefix = f"model.layers.{layer}"
        # Normalised random vectors of head_dim give logits of deviation 1; each side's weight adds its root.
        side = np.full(recipe.head_dim, math.sqrt(sharpness), np.float32)
        yield f"{prefix}.input_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{prefix}.post_attention_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{prefix}.self_attn.q_norm.weight", side
        yield f"{prefix}.self_attn.k_norm.weight", side.copy()
        yield f"{prefix}.self_attn.q_proj.weight", matrix(q_size, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, q_size, gain)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(recipe.intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(recipe.intermediate, hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, recipe.intermediate, recipe.mlp_gain)


def _write_tokenizer(recipe: Recipe, directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus.TEXT.splitlines(keepends=True), trainer=trainer)
    if tokenizer.get_vocab_size() != recipe.vocab:
        # Otherwise the model could emit an id that has no text.
        raise ConfigError(
            f"recipe {recipe.name} asks for {recipe.vocab} tokens and the corpus gives {tokenizer.get_vocab_size()}; "
            "lengthen the corpus or lower vocab (at least 259: all bytes and the special tokens)"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: Mapping[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
