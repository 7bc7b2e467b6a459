"""Qwen2 and Qwen2.5: biases on query, key and value; sliding windows in the layers that the config names."""

from __future__ import annotations

from megarl.architectures.base import COMMON_NULL, LAYER_WINDOWS, QWEN, Architecture
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import DENSE

ARCHITECTURE = Architecture(
    model_type="qwen2",
    keys={**QWEN, **LAYER_WINDOWS},
    null=(*COMMON_NULL, "num_key_value_heads", "sliding_window", "layer_types"),
    tensors=OUTER + attention_rules() + DENSE,
    attention=AttentionTraits(windows="chosen", qkv_bias=True),
    served=ServedClass(head_dim=False),
)
