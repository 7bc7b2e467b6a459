"""The routing of DeepSeek-V3 and its relatives: sigmoid scores, a correction bias, groups of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import Refuse
from megarl.models.layers.experts.plain import Mixture, RouterRules

ROUTING: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
"""Keys of config.json, with the defaults of most classes."""

# Keys that published files have and transformers ignores, each with the value that describes what transformers
# computes.
_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def sigmoid_router(values: Mapping[str, Any]) -> RouterRules:
    """Return the routing rules of these config keys."""
    return RouterRules(
        values["num_experts"],
        values["num_experts_per_tok"],
        "sigmoid",
        normalized=values["norm_topk_prob"],
        epsilon=1e-20,
        scale=float(values["routed_scaling_factor"]),
        groups=values["n_group"],
        chosen_groups=values["topk_group"],
        correction=True,
    )


def shared_mixture(values: Mapping[str, Any]) -> Mixture:
    """Return a mixture whose shared experts are one MLP of their summed width."""
    width = values["moe_intermediate_size"]
    return Mixture(sigmoid_router(values), width, shared_width=values["n_shared_experts"] * width)


def check_routing(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse groups that do not divide the experts or hold too few, and values that mean another model."""
    from megarl.architectures.values import sparse_layers  # imported here, because `values` imports all architectures

    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            refuse(key, raw[key], value, "this variant is not supported")
    if not any(sparse_layers(values)):
        return
    experts, groups, chosen = values["num_experts"], values["n_group"], values["topk_group"]
    if experts % groups or experts // groups < 2:
        refuse("n_group", groups, f"a divisor of the {experts} experts that leaves two or more in a group")
    if chosen > groups:
        refuse("topk_group", chosen, f"at most the {groups} groups")
    if values["num_experts_per_tok"] > experts // groups * chosen:
        refuse("num_experts_per_tok", values["num_experts_per_tok"], f"at most the experts of {chosen} groups")
    scale = values["routed_scaling_factor"]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or scale <= 0:
        refuse("routed_scaling_factor", scale, "number > 0")
