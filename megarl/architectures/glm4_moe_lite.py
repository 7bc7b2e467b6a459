"""GLM-4.7-Flash: DeepSeek-V3's layers; a list says which have a mixture of experts. Not supported: biases in attention,
and RoPE on a part of the rope dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.architectures.base import COMMON_NULL, FULL, Architecture, Refuse, RopeTraits
from megarl.architectures.deepseek_v3 import (
    LATENT,
    LATENT_TENSORS,
    SERVED,
    check_latent,
    latent_attention,
    other_yarn,
    rotates_halves,
    serving_keys,
)
from megarl.architectures.draft import AFTER_LAYERS
from megarl.architectures.sigmoid_routing import check_routing, shared_mixture
from megarl.models.layers.experts.plain import MixtureTraits
from megarl.models.layers.mixer import Mixer


def _check_lite(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse RoPE on a part of the rope dimensions, and a `first_k_dense_replace`, which only other programs read, that
    contradicts the list of layers.
    """
    dense = _dense_layers(values)
    if raw.get("first_k_dense_replace", dense) != dense:
        allowed = f"{dense}, the dense layers of mlp_layer_types, or no such key"
        refuse("first_k_dense_replace", raw["first_k_dense_replace"], allowed)
    factor = (values["rope_scaling"] or values["rope_parameters"] or {}).get("partial_rotary_factor")
    if any(value not in (None, 1) for value in (factor, values["partial_rotary_factor"])):
        refuse("partial_rotary_factor", factor or values["partial_rotary_factor"], "1", "this variant is not supported")


def _dense_layers(values: Mapping[str, Any]) -> int:
    """Return the number of dense layers before the first mixture; 1 if config.json has no `mlp_layer_types`."""
    types = list(values["mlp_layer_types"] or ["dense"])
    return types.index("sparse") if "sparse" in types else len(types)


def other_in_sglang(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> str | None:
    """Return why SGLang would compute other layers; None if it computes the same."""
    if values["q_lora_rank"] is None:
        return "SGLang's class computes other queries without a q_lora_rank"
    return other_yarn(values, mixers)


ARCHITECTURE = Architecture(
    model_type="glm4_moe_lite",
    keys={
        **LATENT,
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "intermediate_size": 10240,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": None,
    },
    null=(*COMMON_NULL, "head_dim", "q_lora_rank", "mlp_layer_types"),
    tensors=LATENT_TENSORS,
    rope=RopeTraits(width_key="qk_rope_head_dim"),
    experts=MixtureTraits(shared_mixture, names=("n_routed_experts", "num_local_experts")),
    fields=("output_router_logits", "pretraining_tp"),
    mixers={FULL: latent_attention},
    draft=AFTER_LAYERS,
    written=lambda values: serving_keys(values) | {"first_k_dense_replace": _dense_layers(values)},
    refusals=(check_latent, check_routing, _check_lite),
    served=replace(SERVED, wrong=other_in_sglang, tied=False, needs_gpu=rotates_halves),
)
