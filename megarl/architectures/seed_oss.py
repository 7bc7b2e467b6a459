"""Seed-OSS: Llama's layers with biases on queries, keys and values; its config sets dropouts, which are refused in
training."""

from __future__ import annotations

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring

ARCHITECTURE = Architecture(
    model_type="seed_oss",
    keys={
        **COMMON,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "vocab_size": 155136,
        "max_position_embeddings": 524288,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    null=(*COMMON_NULL, "num_key_value_heads", "head_dim"),
    tensors=OUTER + attention_rules() + DENSE,
    attention=AttentionTraits(qkv_bias="attention_bias", out_bias="attention_out_bias"),
    fields=("pretraining_tp",),
    wiring=lambda values: Wiring(mlp_bias=values["mlp_bias"]),
)
