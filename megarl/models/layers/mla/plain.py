"""Sizes, weights, FLOPs and memory of multi-head latent attention (arXiv:2405.04434, section 2.1).

    hidden --q_a--> norm --q_b--> per head [nope | rope]           (or one projection, without a query rank)
    hidden --kv_a--> [latent | rope key]     rope key: one for all heads, not normed
                      norm --kv_b--> per head [nope key | value]

Only the normed latent and the rotated rope key of a token have to be cached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import COLUMNS, COPY, HF, MCORE, ROWS, Split, WeightRule, WeightSource, norm


@dataclass(frozen=True, kw_only=True)
class MLA(Mixer):
    """Multi-head latent attention (MLA) of one layer: its sizes and scale, not its weights."""

    kind: ClassVar[str] = "mla"

    heads: int
    q_rank: int | None  # None: queries are projected directly
    kv_rank: int
    nope: int  # width of the part of a query and key that RoPE leaves unchanged
    rope: int  # width of the part that RoPE rotates
    value: int
    scale: float  # factor of the attention scores
    # Epsilon of both latent norms. Here it is the model's `rms_norm_eps`, as in Megatron, SGLang and vLLM, because
    # training has to agree with what generates the samples; transformers uses 1e-6 whatever the config says. The two
    # differ for models with another number in their config (Moonlight, GLM-4.7-Flash: 1e-5).
    eps: float
    interleaved: bool  # RoPE rotates pairs of neighbours, (0, 1), (2, 3), ..., not (i, i + half of the width)

    @property
    def key(self) -> int:
        """Width of a head's query and key."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Number of values cached per token: the latent and the rope key."""
        return self.kv_rank + self.rope

    def dimensions(self) -> dict[str, int]:
        """Return the sizes that the weight rules of latent attention use, by name."""
        return {
            "q_rank": self.q_rank or 0,
            "kv_rank": self.kv_rank,
            "kv_compressed": self.cached,
            "mla_query": self.heads * self.key if self.q_rank else 0,
            "mla_direct_query": 0 if self.q_rank else self.heads * self.key,
            "mla_key_value": self.heads * (self.nope + self.value),
            "mla_output": self.heads * self.value,
        }

    def widths(self) -> dict[str, int]:
        """Return the numbers that tensor parallelism must divide, by name: here that of attention heads."""
        return {"attention heads": self.heads}

    def kept_elements(self, tp: int) -> float:
        """Return the elements per token that a rank keeps for the backward pass: latents before and after their norms;
        queries and keys after RoPE; values and context, which kernels need in the width of the keys; the context in its
        own width."""
        latents = 2 * (self.q_rank or 0) + 2 * self.kv_rank + self.rope
        context = self.nope + 2 * self.value if self.value >= self.key else 2 * self.key + self.value
        return latents + self.heads / tp * (2 * max(self.key, self.value) + context)

    def attended_elements(self, tp: int) -> tuple[float, float]:
        """Return the elements per token of the queries, and of the keys and values together, on a rank; kernels need
        both in the larger width of keys and values."""
        width = max(self.key, self.value)
        return self.heads / tp * width, 2 * self.heads / tp * width

    @property
    def pair_flops(self) -> float:
        """FLOPs of one (query, key) pair: 2 per element of the keys for the score, and 2 per element of the values."""
        return 2.0 * self.heads * (self.key + self.value)

    @property
    def decoded_pair_flops(self) -> float:
        """2 FLOPs per element of the latent and the rope key for each head's score, and 2 per element of the latent."""
        return 2.0 * self.heads * (self.cached + self.kv_rank)

    def cache_elements(self, tp: int) -> float:
        """Return `cached` for every rank, because all heads read the same latent."""
        return float(self.cached)

    def projected_elements(self, hidden: int, cp: int) -> tuple[int, ...]:
        """Return the widths of the latent of queries (the hidden size if there is none) and of that of keys and values,
        which every context-parallel rank expands for the tokens of all `cp` ranks."""
        return self.q_rank or hidden, self.kv_rank * cp

    def copied_elements(self) -> tuple[int, ...]:
        """Return the width of the rope key, which all heads share."""
        return (self.rope,)

    def gathered_elements(self, tp: int, cp: int) -> float:
        """Return the cached elements per token, because context-parallel ranks gather latents before they
        expand them."""
        return float(self.cached)


def yarn_scale(factor: float, all_dim: float | None) -> float:
    """Return what the scores are multiplied by if RoPE is scaled by yarn: g(all_dim)^2, 1 without `mscale_all_dim`.

    g(m) = 0.1 m ln(factor) + 1, or 1 for factors up to 1 (arXiv:2309.00071, and DeepSeek's code).
    """
    if not all_dim or factor <= 1:
        return 1.0
    return (0.1 * all_dim * math.log(factor) + 1.0) ** 2


def mla_of(values: Mapping[str, Any], rope: Mapping[str, Any]) -> MLA:
    """Return the latent attention of a config with DeepSeek's keys.

    Args:
        rope: its RoPE settings, from `megarl.architectures.values.rope_scaling`.
    """
    scaled = 1.0 if rope["rope_type"] == "default" else yarn_scale(rope["factor"], rope.get("mscale_all_dim"))
    return MLA(
        heads=values["num_attention_heads"],
        q_rank=values["q_lora_rank"],
        kv_rank=values["kv_lora_rank"],
        nope=values["qk_nope_head_dim"],
        rope=values["qk_rope_head_dim"],
        value=values["v_head_dim"],
        scale=(values["qk_nope_head_dim"] + values["qk_rope_head_dim"]) ** -0.5 * scaled,
        eps=values["rms_norm_eps"],
        interleaved=values["rope_interleave"],
    )


def mla_rules() -> tuple[WeightRule, ...]:
    """Return the rules for a layer's attention and for the two norms of the layer; parameters are named as in
    Megatron's MLASelfAttention.

    A model projects queries either directly or through a low-rank product; the tensors of the other way have size 0.
    """

    def rule(param: str, split: Split, source: str, *shape: str) -> WeightRule:
        sources = (WeightSource(f"{HF}self_attn.{source}.weight", shape),)
        return WeightRule(f"{MCORE}self_attention.{param}.weight", MLA.kind, split, sources)

    return (
        norm("input_layernorm", "input_layernorm", "hidden"),
        rule("linear_q_proj", ROWS, "q_proj", "mla_direct_query", "hidden"),
        rule("linear_q_down_proj", COPY, "q_a_proj", "q_rank", "hidden"),
        rule("q_layernorm", COPY, "q_a_layernorm", "q_rank"),
        rule("linear_q_up_proj", ROWS, "q_b_proj", "mla_query", "q_rank"),
        rule("linear_kv_down_proj", COPY, "kv_a_proj_with_mqa", "kv_compressed", "hidden"),
        rule("kv_layernorm", COPY, "kv_a_layernorm", "kv_rank"),
        rule("linear_kv_up_proj", ROWS, "kv_b_proj", "mla_key_value", "kv_rank"),
        rule("linear_proj", COLUMNS, "o_proj", "hidden", "mla_output"),
        norm("pre_mlp_layernorm", "post_attention_layernorm", "hidden"),
    )
