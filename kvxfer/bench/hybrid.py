"""A small, seeded hybrid in Gemma 3's architecture: every other layer attends to a sliding window, the rest to everything.

Like ``model``'s it is random and *amplifies*, so that its answers depend on every block of its cache: the embedding is small
against what the first layers' broad attention adds, and later layers' attention grows sharper. Gemma normalises what attention
and MLP add, so their gains are the weights of these norms. vLLM gives it two KV cache groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.bench.model import SPECIAL_TOKENS, Recipe, uniform

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


@dataclass(frozen=True)
class HybridRecipe(Recipe):
    """``window``: positions that the layers of even number attend to. The rest is as in ``Recipe``."""

    name: str = "sensitive-gemma3"
    sharpness: tuple[float, ...] = (2.0, 2.0, 5.0, 8.0)
    attention_gain: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    mlp_gain: float = 0.5
    window: int = 96

    def config(self) -> dict[str, object]:
        """Return the model's config.json."""
        kinds = ("sliding_attention", "full_attention")
        changes: dict[str, object] = {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "layer_types": [kinds[layer % 2] for layer in range(self.layers)],
            "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
        }
        return {key: value for key, value in super().config().items() if key != "use_sliding_window"} | changes

    def weights(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Make the model's weights. Its norms multiply by one more than theirs."""
        matrix = uniform(self.seed)
        hidden, q_size, kv_size = self.hidden, self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        embedding = matrix(self.vocab, hidden, self.embedding_scale)  # and times the root of hidden, in the model
        embedding[: len(SPECIAL_TOKENS)] = 0.0
        yield "model.embed_tokens.weight", embedding
        one = np.zeros(hidden, np.float32)
        yield "model.norm.weight", one
        for layer, (sharpness, gain) in enumerate(zip(self.sharpness, self.attention_gain, strict=True)):
            prefix = f"model.layers.{layer}"
            side = np.full(self.head_dim, math.sqrt(sharpness) - 1.0, np.float32)
            yield f"{prefix}.input_layernorm.weight", one.copy()
            yield f"{prefix}.post_attention_layernorm.weight", np.full(hidden, gain - 1.0, np.float32)
            yield f"{prefix}.pre_feedforward_layernorm.weight", one.copy()
            yield f"{prefix}.post_feedforward_layernorm.weight", np.full(hidden, self.mlp_gain - 1.0, np.float32)
            yield f"{prefix}.self_attn.q_norm.weight", side
            yield f"{prefix}.self_attn.k_norm.weight", side.copy()
            yield f"{prefix}.self_attn.q_proj.weight", matrix(q_size, hidden)
            yield f"{prefix}.self_attn.k_proj.weight", matrix(kv_size, hidden)
            yield f"{prefix}.self_attn.v_proj.weight", matrix(kv_size, hidden)
            yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, q_size)
            yield f"{prefix}.mlp.gate_proj.weight", matrix(self.intermediate, hidden)
            yield f"{prefix}.mlp.up_proj.weight", matrix(self.intermediate, hidden)
            yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, self.intermediate)
