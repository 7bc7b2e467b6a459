"""Qwen3.5, dense: the layers of Qwen3-Next with a plain MLP; projections of the delta net are separate tensors."""

from __future__ import annotations

from megarl.architectures.base import COMMON, COMMON_NULL
from megarl.architectures.qwen3_next import KEYS, hybrid
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import attention_rules
from megarl.models.layers.gated_delta.plain import gated_delta_rules
from megarl.models.layers.mlp.plain import DENSE

ARCHITECTURE = hybrid(
    model_type="qwen3_5_text",
    keys={**COMMON, **KEYS, "num_key_value_heads": 4, "intermediate_size": 12288, "vocab_size": 248320},
    null=(*COMMON_NULL, "layer_types"),
    tensors=OUTER + attention_rules(gate=True) + gated_delta_rules(by_key_head=False) + DENSE,
    served=ServedClass(attention_dp=True, whole_embedding=True, needs_gpu=True),
)
