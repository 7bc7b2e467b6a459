"""gpt-oss: attention with a sink per head, a window in every other layer, and biases; every layer is a mixture whose
experts have biases and a clamped activation. Checkpoints have the experts of a layer in one tensor, often in mxfp4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, ROUTER, Architecture, Refuse
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.experts.plain import ClampedGate, Mixture, MixtureTraits, RouterRules, stacked_expert_rules


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer for configs without `layer_types`: sliding and full attention in turn."""
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(values["num_hidden_layers"])]


def mixture(values: Mapping[str, Any]) -> Mixture:
    """Return the settings of the experts and router of every layer, from the keys of config.json."""
    sizes = values["num_experts"], values["num_experts_per_tok"]
    router = RouterRules(*sizes, "softmax_of_chosen", bias=True, wide=False)
    gate = ClampedGate(values["swiglu_limit"], values["swiglu_alpha"])
    return Mixture(router, values["intermediate_size"], bias=True, clamped=gate, stacked=True)


def refuse_other_gates(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse a limit or alpha of the experts' gate that is not a float above 0."""
    for key in ("swiglu_limit", "swiglu_alpha"):
        if not isinstance(values[key], float) or values[key] <= 0:  # transformers refuses integers
            refuse(key, values[key], "number > 0, with a decimal point")


ARCHITECTURE = Architecture(
    model_type="gpt_oss",
    keys={
        **COMMON,
        **ROUTER,
        "num_hidden_layers": 36,
        "num_experts": 128,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "layer_types": None,
        "attention_bias": True,
    },
    null=(*COMMON_NULL, "layer_types"),
    tensors=OUTER + attention_rules() + stacked_expert_rules("mlp"),
    attention=AttentionTraits(windows="chosen", qkv_bias="attention_bias", out_bias="attention_bias", sinks=True),
    experts=MixtureTraits(mixture, names=("num_local_experts", "num_experts")),
    layer_types=layer_types,
    # SGLang reads the factor of the gate under another name
    written=lambda values: {"hidden_act_alpha": values["swiglu_alpha"]},
    refusals=(refuse_other_gates,),
    served=ServedClass(tied=False, windows=True, attention_dp=True, needs_gpu=True),
)
