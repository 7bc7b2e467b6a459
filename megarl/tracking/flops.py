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

from megarl.models.hf import expert_ffn, head_dim, layer_windows, moe_layers, num_experts


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
        hidden, heads, head = config.hidden_size, config.num_attention_heads, head_dim(config)
        attention = hidden * head * (2 * heads + 2 * config.num_key_value_heads)
        mlp = sum(_mlp_weights(config, sparse) for sparse in moe_layers(config))
        windows = set(layer_windows(config))
        return cls(
            per_token=2.0 * (config.num_hidden_layers * attention + mlp),
            per_pair=4.0 * config.num_hidden_layers * heads * head,
            per_head_token=2.0 * hidden * config.vocab_size,
            # Where some layers only have a window the pairs are counted as if none had.
            window=windows.pop() if len(windows) == 1 else None,
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


def _mlp_weights(config: Any, sparse: bool) -> float:
    """Weights one token meets in the MLP of a layer (gated: three matrices), router included."""
    hidden, experts = config.hidden_size, num_experts(config)
    if not sparse or experts is None:
        return 3 * hidden * config.intermediate_size
    return 3 * hidden * expert_ffn(config) * config.num_experts_per_tok + hidden * experts
