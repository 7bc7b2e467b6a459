"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention; some or all layers are mixtures with a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON_NULL, LAYER_WINDOWS, QWEN, ROUTER, Architecture
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.experts.plain import Mixture, MixtureTraits, RouterRules, expert_rules, shared_gate
from megarl.models.layers.mlp.plain import DENSE


def mixture(values: Mapping[str, Any]) -> Mixture:
    """Return the settings of a sparse layer's routed and shared experts, from the keys of config.json."""
    normalized = values["norm_topk_prob"]
    router = RouterRules(
        values["num_experts"], values["num_experts_per_tok"], "softmax", normalized=normalized, wide=False
    )
    shared = values["shared_expert_intermediate_size"]
    return Mixture(router, values["moe_intermediate_size"], shared_width=shared, shared_gate=True)


ARCHITECTURE = Architecture(
    model_type="qwen2_moe",
    keys={
        **QWEN,
        **ROUTER,
        **LAYER_WINDOWS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    null=(*COMMON_NULL, "sliding_window", "layer_types", "mlp_only_layers"),
    tensors=OUTER
    + attention_rules()
    + DENSE
    + expert_rules("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_expert")
    + (shared_gate("mlp.shared_expert_gate"),),
    attention=AttentionTraits(windows="every_other", qkv_bias="qkv_bias"),
    experts=MixtureTraits(mixture, optional=True),
    served=ServedClass(tied=False, head_dim=False, attention_dp=True, needs_gpu=True),
)
