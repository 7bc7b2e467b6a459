"""How the parts of a layer are connected, and what happens before the first and after the last layer; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.models.layers.rules import WeightRule, norm

Norms = Literal["before", "after", "both"]


@dataclass(frozen=True)
class Wiring:
    """The differences of a model from Llama outside its mixers and experts. The defaults are those of Llama.

    With the norms m and n, one of which a model may lack, and with f a mixer or an MLP, a layer computes twice

        x <- x + residual * n(f(m(x)))
    """

    norms: Norms = "before"
    """Which norms a layer has: those before its mixer and its MLP, those after them, or both."""
    residual: float = 1.0
    """Factor of what the mixer and the MLP add to the residual stream."""
    embedding: float = 1.0
    """Factor of the embeddings."""
    embedding_rounded: bool = False
    """Whether the factor of the embeddings is rounded to their dtype before the product."""
    logits: float = 1.0
    """Divisor of the logits."""
    logit_cap: float | None = None
    """Logits l become logit_cap * tanh(l / logit_cap); None: they stay."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The activation of the gate in a dense MLP."""
    mlp_bias: bool = False
    """Whether the projections of a dense MLP have biases."""
    zero_centered: bool = False
    """Whether the norms of layers, heads and the end store their scale minus 1."""


LLAMA = Wiring()

AFTER_MIXER, AFTER_MLP = "self_attn_bda.norm", "mlp_bda.norm"
"""Beginnings of the names of the norms after the mixer and after the MLP."""


def norm_rules(norms: Norms = "before") -> tuple[WeightRule, ...]:
    """Return the rules for the norms of a layer, with the names of Llama, OLMo and Gemma."""
    mixed, done = "post_attention_layernorm", "post_feedforward_layernorm"
    if norms == "before":
        return norm("input_layernorm", "input_layernorm", "hidden"), norm("pre_mlp_layernorm", mixed, "hidden")
    after = norm(AFTER_MIXER, mixed, "hidden"), norm(AFTER_MLP, done, "hidden")
    if norms == "after":
        return after
    before = norm("pre_mlp_layernorm", "pre_feedforward_layernorm", "hidden")
    return norm("input_layernorm", "input_layernorm", "hidden"), before, *after
