"""Llama 2 and 3. Not supported: biases in attention or feed-forward layers."""

from __future__ import annotations

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import attention_rules
from megarl.models.layers.mlp.plain import DENSE

ARCHITECTURE = Architecture(
    model_type="llama",
    keys={
        **COMMON,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    null=(*COMMON_NULL, "num_key_value_heads", "head_dim", "attention_dropout"),
    tensors=OUTER + attention_rules() + DENSE,
    fields=("pretraining_tp",),
    even_hidden=True,
)
