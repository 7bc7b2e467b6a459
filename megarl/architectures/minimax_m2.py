"""MiniMax-M2: queries and keys are normalised over all heads, half of a head is rotated; every layer is a mixture of
experts, which are chosen by sigmoid scores plus a correction bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, ROUTER, Architecture, Refuse, RopeTraits
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.experts.plain import Mixture, MixtureTraits, RouterRules, expert_rules

# Keys that published files have and transformers ignores, each with the value that describes what transformers
# computes.
_FIXED = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}


def mixture(values: Mapping[str, Any]) -> Mixture:
    """Return the settings of the experts and router of every layer, from the keys of config.json."""
    sizes = values["num_experts"], values["num_experts_per_tok"]
    router = RouterRules(*sizes, "sigmoid", normalized=True, correction=True, wide=False)
    return Mixture(router, values["intermediate_size"])


def _check(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse values that describe a model other than the one that transformers computes."""
    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            refuse(key, raw[key], str(value).lower(), "this variant is not supported")
    turned = values["rotary_dim"]
    if turned is not None and (isinstance(turned, bool) or not isinstance(turned, int) or turned < 2):
        refuse("rotary_dim", turned, "integer > 1, or null")


def serving_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that SGLang reads and transformers does not write; without them it computes another model."""
    # imported here, because `values` imports all architectures
    from megarl.architectures.values import head_width, rope_scaling

    return {**_FIXED, "rotary_dim": int(head_width(values) * (rope_scaling(values)["partial_rotary_factor"] or 1))}


ARCHITECTURE = Architecture(
    model_type="minimax_m2",
    keys={
        **COMMON,
        **ROUTER,
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "rotary_dim": None,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "router_jitter_noise": 0.0,
    },
    null=(*COMMON_NULL, "rotary_dim"),
    tensors=OUTER
    + attention_rules()
    + expert_rules("block_sparse_moe", "w1", "w3", "w2", correction="e_score_correction_bias"),
    attention=AttentionTraits(wide_norm=True),
    rope=RopeTraits(partial=True),
    experts=MixtureTraits(mixture, names=("num_local_experts", "num_experts")),
    written=serving_keys,
    refusals=(_check,),
    served=ServedClass(tied=False, attention_dp=True, needs_gpu=True),
)
