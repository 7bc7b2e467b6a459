"""Qwen3, dense: queries and keys are normalised per head. Not supported: biases in attention."""

from __future__ import annotations

from megarl.architectures.base import COMMON_NULL, LAYER_WINDOWS, QWEN, Architecture
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import DENSE

ARCHITECTURE = Architecture(
    model_type="qwen3",
    keys={**QWEN, **LAYER_WINDOWS, "head_dim": 128, "attention_bias": False},
    null=(*COMMON_NULL, "num_key_value_heads", "sliding_window", "layer_types"),
    tensors=OUTER + attention_rules() + DENSE,
    attention=AttentionTraits(windows="chosen", qk_norm=True),
    served=ServedClass(attention_dp=True),
)
