"""Qwen3-MoE: Qwen3's attention; some or all layers are mixtures of experts. Not supported: biases in attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON_NULL, QWEN, ROUTER, Architecture
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.experts.plain import Mixture, MixtureTraits, RouterRules, Score, expert_rules
from megarl.models.layers.mlp.plain import DENSE


def mixture(values: Mapping[str, Any]) -> Mixture:
    """Return the settings of a sparse layer's experts, from the keys of config.json.

    Choosing experts before the softmax gives the same weights as renormalising their probabilities.
    """
    score: Score = "softmax_of_chosen" if values["norm_topk_prob"] else "softmax"
    router = RouterRules(values["num_experts"], values["num_experts_per_tok"], score)
    return Mixture(router, values["moe_intermediate_size"])


ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    keys={
        **QWEN,
        **ROUTER,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    null=(*COMMON_NULL, "sliding_window", "mlp_only_layers"),
    tensors=OUTER + attention_rules() + DENSE + expert_rules("mlp", "gate_proj", "up_proj", "down_proj"),
    attention=AttentionTraits(windows="all_if_used", qk_norm=True),
    experts=MixtureTraits(mixture, names=("num_experts", "num_local_experts"), optional=True),
    served=ServedClass(tied=False, attention_dp=True),
)
