"""Qwen3.5, mixtures: the layers of Qwen3.5, each with a mixture of experts and a gated shared expert."""

from __future__ import annotations

from megarl.architectures.base import COMMON, COMMON_NULL
from megarl.architectures.qwen3_next import EXPERTS, KEYS, MIXTURE, hybrid, mixture
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import attention_rules
from megarl.models.layers.experts.plain import MixtureTraits
from megarl.models.layers.gated_delta.plain import gated_delta_rules

ARCHITECTURE = hybrid(
    model_type="qwen3_5_moe_text",
    keys={
        **COMMON,
        **KEYS,
        **EXPERTS,
        "num_hidden_layers": 40,
        "vocab_size": 248320,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    null=(*COMMON_NULL, "layer_types"),
    tensors=OUTER + attention_rules(gate=True) + gated_delta_rules(by_key_head=False) + MIXTURE,
    experts=MixtureTraits(mixture),
    fields=("num_experts",),
    served=ServedClass(attention_dp=True, whole_embedding=True, needs_gpu=True),
)
