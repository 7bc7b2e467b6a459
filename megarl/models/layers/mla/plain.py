"""Sizes, weights, FLOPs and memory of multi-head latent attention (arXiv:2405.04434, section 2.1).

    hidden --q_a--> norm --q_b--> per head [nope | rope]           (or one projection, without a query rank)
    hidden --kv_a--> [latent | rope key]     rope key: one for all heads, not normed
                      norm --kv_b--> per head [nope key | value]

Only the normed latent and the rotated rope key of a token have to be cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.architectures.tensors import WeightRule, WeightSource


@dataclass(frozen=True)
class MLA:
    """The latent attention of one layer."""

    kind: ClassVar[str] = "mla"

    heads: int
    kv_rank: int
    nope: int  # width of a key without position
    rope: int  # width of the part of a key that RoPE rotates
    value: int
    scale: float  # factor of the scores
    # Epsilon of both latent norms. It is the model's `rms_norm_eps`, as in Megatron, SGLang and vLLM. transformers has
    # 1e-6 whatever the config says; published models of which the config has another number (Moonlight, GLM-4.7-Flash:
    # 1e-5) are served with theirs, and training has to agree with what generates the samples.
    eps: float
    q_rank: int | None = None  # None: queries are projected directly
    interleaved: bool = True  # RoPE rotates neighbours (0, 1), (2, 3), ... instead of the two halves of the rope part

    @property
    def key(self) -> int:
        """Width of a head's query and key."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Width of what is cached for a token: the latent and the rope key."""
        return self.kv_rank + self.rope

    def dimensions(self) -> dict[str, int]:
        """Return the sizes that the weight rules use."""
        return {
            "q_rank": self.q_rank or 0,
            "kv_rank": self.kv_rank,
            "kv_compressed": self.cached,
            "mla_query": self.heads * self.key,
            "mla_key_value": self.heads * (self.nope + self.value),
            "mla_output": self.heads * self.value,
        }

    def score_flops(self, context: float) -> float:
        """Return the forward FLOPs of one token besides products with weights, if its query sees `context` keys."""
        return 2.0 * self.heads * (self.key + self.value) * context

    def cache_elements(self, tp: int) -> float:
        """Return the elements that a rank caches per token: all of them, since every head reads the same latent."""
        return float(self.cached)

    def state_bytes(self, tp: int, itemsize: int) -> float:
        """Return the bytes per sequence that do not grow with its length."""
        return 0.0

    def kept_elements(self, tp: int) -> float:
        """Return the elements per token that a rank keeps for the backward pass."""
        heads = self.heads / tp
        latents = 2 * (self.q_rank or 0) + 2 * self.kv_rank + self.rope  # before and after their norms
        # queries before and after RoPE, keys, the projection to keys and values, and the result
        return latents + heads * (2 * self.key + self.key + self.nope + self.value + self.value)


def yarn_scale(factor: float, all_dim: float | None) -> float:
    """Return what the scores are multiplied by if RoPE is scaled by yarn: g(all_dim)², 1 without `mscale_all_dim`.

    g(m) = 0.1 m ln(factor) + 1, or 1 for factors up to 1 (arXiv:2309.00071, and DeepSeek's code).
    """
    if not all_dim or factor <= 1:
        return 1.0
    return (0.1 * all_dim * math.log(factor) + 1.0) ** 2


def mla_of(values: Mapping[str, Any], rope: Mapping[str, Any]) -> MLA:
    """Return the latent attention of a config in DeepSeek's keys; `rope`: its RoPE settings, see `rope_scaling`."""
    width = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    scaled = 1.0 if rope["rope_type"] == "default" else yarn_scale(rope["factor"], rope.get("mscale_all_dim"))
    return MLA(
        heads=values["num_attention_heads"],
        q_rank=values["q_lora_rank"],
        kv_rank=values["kv_lora_rank"],
        nope=values["qk_nope_head_dim"],
        rope=values["qk_rope_head_dim"],
        value=values["v_head_dim"],
        scale=width**-0.5 * scaled,
        eps=values["rms_norm_eps"],
        interleaved=values["rope_interleave"],
    )


def weight_rules(*, query_rank: bool) -> Iterator[WeightRule]:
    """Yield the rules of one layer's weights; names of parameters are those of Megatron's MLASelfAttention."""
    hf, mcore = "model.layers.{i}.self_attn.", "decoder.layers.{i}.self_attention."

    def rule(param: str, split: Any, source: str, *shape: str) -> WeightRule:
        return WeightRule(f"{mcore}{param}.weight", "mla", split, (WeightSource(f"{hf}{source}.weight", shape),))

    if query_rank:
        yield rule("linear_q_down_proj", "copy", "q_a_proj", "q_rank", "hidden")
        yield rule("q_layernorm", "copy", "q_a_layernorm", "q_rank")
        yield rule("linear_q_up_proj", "gate_up", "q_b_proj", "mla_query", "q_rank")
    else:
        yield rule("linear_q_proj", "gate_up", "q_proj", "mla_query", "hidden")
    yield rule("linear_kv_down_proj", "copy", "kv_a_proj_with_mqa", "kv_compressed", "hidden")
    yield rule("kv_layernorm", "copy", "kv_a_layernorm", "kv_rank")
    yield rule("linear_kv_up_proj", "gate_up", "kv_b_proj", "mla_key_value", "kv_rank")
    yield rule("linear_proj", "row", "o_proj", "hidden", "mla_output")
