"""Granite 3: Llama's layers, with factors of the embeddings, the attention scores, the residual branches and the
logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring


def wiring(values: Mapping[str, Any]) -> Wiring:
    """Return Granite's factors of residuals, embeddings and logits, and whether its MLPs have biases."""
    return Wiring(
        residual=values["residual_multiplier"],
        embedding=values["embedding_multiplier"],
        logits=values["logits_scaling"],
        mlp_bias=values["mlp_bias"],
    )


def scale(values: Mapping[str, Any]) -> float:
    """Return the factor of the attention scores."""
    return float(values["attention_multiplier"])


def biases_in_sglang(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> str | None:
    """Return why SGLang would compute other layers; None if it computes the same."""
    biases = [key for key in ("attention_bias", "mlp_bias") if values[key]]
    return f"SGLang's class leaves out the biases of {' and '.join(biases)}" if biases else None


ARCHITECTURE = Architecture(
    model_type="granite",
    keys={
        **COMMON,
        "num_key_value_heads": None,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    null=(*COMMON_NULL, "num_key_value_heads"),
    tensors=OUTER + attention_rules() + DENSE,
    attention=AttentionTraits(qkv_bias="attention_bias", out_bias="attention_bias", scale=scale),
    wiring=wiring,
    served=ServedClass(wrong=biases_in_sglang),
)
