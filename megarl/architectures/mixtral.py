"""Mixtral: Mistral's attention, and a mixture of experts in every layer; chosen probabilities sum to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON_NULL, MISTRAL, ROUTER, Architecture, Refuse
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.experts.plain import Mixture, MixtureTraits, RouterRules, expert_rules


def _head_dim_for_yarn(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse yarn without head_dim: transformers 5.23 fails, because Mixtral's configuration class, unlike others, does
    not derive head_dim."""
    scaling = values["rope_scaling"] or values["rope_parameters"] or {}
    if scaling.get("rope_type", scaling.get("type")) == "yarn" and values["head_dim"] is None:
        width = values["hidden_size"] // values["num_attention_heads"]
        refuse("head_dim", None, f"{width}: transformers needs it for yarn")


def mixture(values: Mapping[str, Any]) -> Mixture:
    """Return the settings of the experts and router of every layer, from the keys of config.json."""
    router = RouterRules(values["num_experts"], values["num_experts_per_tok"], "softmax_of_chosen")
    return Mixture(router, values["intermediate_size"])


ARCHITECTURE = Architecture(
    model_type="mixtral",
    keys={
        **MISTRAL,
        **ROUTER,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
    },
    null=(*COMMON_NULL, "head_dim", "sliding_window"),
    tensors=OUTER + attention_rules() + expert_rules("block_sparse_moe", "w1", "w3", "w2"),
    attention=AttentionTraits(windows="all"),
    experts=MixtureTraits(mixture, names=("num_local_experts", "num_experts")),
    refusals=(_head_dim_for_yarn,),
    served=ServedClass(tied=False, head_dim=False, rope_types=("default",)),
)
