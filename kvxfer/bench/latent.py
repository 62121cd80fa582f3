"""A small, seeded model in DeepSeek-V2's architecture: multi-head latent attention, whose cache keeps one vector a token.

Like ``model``'s it is random and *amplifies*, so that its answers depend on every block of its cache. The cache's vector has
DeepSeek's own 512 + 64 values, the only size that vLLM's CPU kernel takes (0.29 and 0.32, v1/attention/backends/mla/cpu_mla.py).
All of its layers are dense: which expert a token goes to has nothing to do with the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.bench.model import SPECIAL_TOKENS, Recipe, uniform

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


@dataclass(frozen=True)
class LatentRecipe(Recipe):
    """``latent`` and ``rotary``: values of a token that the cache keeps, without a position and with one.

    A query head has ``head_dim`` values without a position beside those with one. The rest is as in ``Recipe``.
    """

    name: str = "sensitive-deepseek2"
    kv_heads: int = 8
    latent: int = 512
    rotary: int = 64

    def kv_bytes_per_token(self, element_bytes: int = 4) -> int:
        """Bytes of KV per token over all layers, at ``element_bytes`` a value."""
        return self.layers * (self.latent + self.rotary) * element_bytes

    def config(self) -> dict[str, object]:
        """Return the model's config.json."""
        changes: dict[str, object] = {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rotary,
            "v_head_dim": self.head_dim,
            "first_k_dense_replace": self.layers,
            "moe_layer_freq": 1,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": self.intermediate,
        }
        left_out = ("head_dim", "use_sliding_window")
        return {key: value for key, value in super().config().items() if key not in left_out} | changes

    def weights(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Make the model's weights. A query is sharpened by its projection: nothing normalises it."""
        matrix = uniform(self.seed)
        hidden, heads = self.hidden, self.q_heads
        yield "model.embed_tokens.weight", matrix(self.vocab, hidden, self.embedding_scale * float(np.sqrt(hidden)))
        head = matrix(self.vocab, hidden)
        head[: len(SPECIAL_TOKENS)] = 0.0
        yield "lm_head.weight", head
        yield "model.norm.weight", np.ones(hidden, np.float32)
        for layer, (sharpness, gain) in enumerate(zip(self.sharpness, self.attention_gain, strict=True)):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", np.ones(hidden, np.float32)
            yield f"{prefix}.post_attention_layernorm.weight", np.ones(hidden, np.float32)
            yield (
                f"{prefix}.self_attn.q_proj.weight",
                matrix(heads * (self.head_dim + self.rotary), hidden, sharpness),
            )
            yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", matrix(self.latent + self.rotary, hidden)
            yield f"{prefix}.self_attn.kv_a_layernorm.weight", np.ones(self.latent, np.float32)
            yield f"{prefix}.self_attn.kv_b_proj.weight", matrix(heads * 2 * self.head_dim, self.latent)
            yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, heads * self.head_dim, gain)
            yield f"{prefix}.mlp.gate_proj.weight", matrix(self.intermediate, hidden)
            yield f"{prefix}.mlp.up_proj.weight", matrix(self.intermediate, hidden)
            yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, self.intermediate, self.mlp_gain)
