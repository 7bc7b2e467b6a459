"""Floating-point operations of a Hugging Face decoder, dense or mixture of experts.

Counted are the matrix products (2 per multiply-add): projections, MLPs or the active experts and their router, causal
attention scores and values, and the output head. Norms, softmax, RoPE and the embedding lookup are below a percent.
Training costs three forward passes (arXiv:2001.08361); recomputation is not counted, so MFU is model FLOPs utilisation
(arXiv:2204.02311).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FlopCounter:
    """FLOPs of one model.

    Attributes:
        per_token: forward FLOPs of all layers for one token, attention over the context and output head aside.
        per_pair: forward FLOPs of all layers for one (query, key) pair.
        per_head_token: FLOPs of the output head for one token.
        window: keys a query sees at most; None: all before it.
    """

    per_token: float
    per_pair: float
    per_head_token: float
    window: int | None = None

    @classmethod
    def from_hf(cls, config: Any) -> FlopCounter:
        """Counter of a `PretrainedConfig` of a Llama-like model: llama, mistral, mixtral, qwen2, qwen3, *_moe."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        layers = config.num_hidden_layers
        mlp = sum(_mlp_weights(config, layer) for layer in range(layers))
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        return cls(
            per_token=2.0 * (layers * attention + mlp),
            per_pair=4.0 * layers * heads * head_dim,
            per_head_token=2.0 * hidden * config.vocab_size,
            window=window,
        )

    def forward(self, lengths: Sequence[int], head_tokens: int | None = None) -> float:
        """One forward pass over whole sequences.

        Args:
            lengths: tokens of each sequence.
            head_tokens: tokens that go through the output head; None: all.
        """
        tokens = sum(lengths)
        pairs = sum(self._pairs(0, length) for length in lengths)
        head = tokens if head_tokens is None else head_tokens
        return tokens * self.per_token + pairs * self.per_pair + head * self.per_head_token

    def train(self, lengths: Sequence[int], head_tokens: int | None = None) -> float:
        """Forward and backward over whole sequences: three forward passes."""
        return 3.0 * self.forward(lengths, head_tokens)

    def generate(self, prompt_lengths: Sequence[int], response_lengths: Sequence[Sequence[int]]) -> float:
        """Prefill of each prompt once, and decoding of its samples with a KV cache.

        Args:
            prompt_lengths: tokens of each prompt.
            response_lengths: for each prompt the tokens of its samples.
        """
        total = self.forward(prompt_lengths, head_tokens=len(prompt_lengths))
        for prompt, responses in zip(prompt_lengths, response_lengths, strict=True):
            for response in responses:
                decoded = max(0, response - 1)  # the prefill gives the first token
                total += decoded * (self.per_token + self.per_head_token)
                total += self._pairs(prompt, prompt + decoded) * self.per_pair
        return total

    def _pairs(self, start: int, end: int) -> float:
        """(query, key) pairs of the queries at positions start..end-1; a query sees itself and all keys before it."""
        if self.window is None or end <= self.window:
            return (end * (end + 1) - start * (start + 1)) / 2
        full = max(0, end - max(start, self.window))
        return full * self.window + (self._pairs(start, self.window) if start < self.window else 0)


def _mlp_weights(config: Any, layer: int) -> float:
    """Weights one token meets in the MLP of a layer (gated: three matrices), router included."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    sparse_step = getattr(config, "decoder_sparse_step", 1) or 1
    dense = layer in (getattr(config, "mlp_only_layers", None) or []) or (layer + 1) % sparse_step != 0
    if not experts or dense:
        return 3 * hidden * config.intermediate_size
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return 3 * hidden * (width * config.num_experts_per_tok + shared) + hidden * experts
