"""DeepSeek-V3 and R1, Moonlight: latent attention; a mixture of experts with shared experts in all but the first
layers. Experts are chosen by sigmoid scores plus a correction bias, within groups of experts. Not supported: biases in
attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, FULL, Architecture, Refuse, RopeTraits
from megarl.architectures.draft import AFTER_LAYERS
from megarl.architectures.served import ServedClass
from megarl.architectures.sigmoid_routing import ROUTING, check_routing, shared_mixture
from megarl.architectures.tensors import OUTER
from megarl.models.layers.experts.plain import MixtureTraits, expert_rules
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mla.plain import MLA, mla_of, mla_rules
from megarl.models.layers.mlp.plain import DENSE

#: Keys of latent attention and of its mixtures, with the defaults of DeepseekV3Config.
LATENT: dict[str, Any] = {
    **COMMON,
    **ROUTING,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
LATENT_TENSORS = (
    *OUTER,
    *mla_rules(),
    *DENSE,
    *expert_rules(
        *("mlp", "gate_proj", "up_proj", "down_proj"),
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
    ),
)


def latent_attention(values: Mapping[str, Any]) -> MLA:
    """Return the latent attention of every layer."""
    from megarl.architectures.values import rope_scaling  # imported here, because `values` imports all architectures

    return mla_of(values, rope_scaling(values))


def check_latent(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse sizes of latent attention with which transformers fails or computes another model."""
    heads, rope = values["num_attention_heads"], values["qk_rope_head_dim"]
    if values["num_key_value_heads"] not in (None, heads):
        refuse("num_key_value_heads", values["num_key_value_heads"], f"{heads}, one for each attention head")
    if raw.get("head_dim", rope) != rope:
        allowed = f"{rope}, which is qk_rope_head_dim, or no such key"
        refuse("head_dim", raw["head_dim"], allowed, "a second width for RoPE is not supported")
    scaling = values["rope_scaling"] or values["rope_parameters"] or {}
    if scaling.get("mscale_all_dim") and scaling.get("factor") is None:
        refuse("rope_parameters", {"factor": None}, "factor: number > 0, with mscale_all_dim")


def serving_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that engines read and transformers does not write; SGLang fails to start without them."""
    return {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def other_yarn(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> str | None:
    """Return why SGLang would compute other rotary positions; None if it computes the same."""
    from megarl.architectures.values import rope_scaling  # imported here, because `values` imports all architectures

    scaling = rope_scaling(values)
    if scaling["rope_type"] != "yarn":
        return None
    if bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")):
        return "SGLang expects both mscale and mscale_all_dim of rotary positions, or neither"
    return None if scaling.get("truncate", True) else "SGLang expects truncate: true of rotary positions"


def rotates_halves(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> bool:
    """Return whether rotary positions rotate the halves of a head instead of its pairs."""
    return not values["rope_interleave"]


def halves_or_unscaled(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> bool:
    """Return whether rotary positions rotate the halves of a head, or are not scaled."""
    from megarl.architectures.values import rope_scaling

    return rotates_halves(values, mixers) or bool(rope_scaling(values)["rope_type"] == "default")


SERVED = ServedClass(wrong=other_yarn, rope_types=("default", "yarn"), attention_dp=True)
ARCHITECTURE = Architecture(
    model_type="deepseek_v3",
    keys={
        **LATENT,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    null=(*COMMON_NULL, "head_dim", "num_key_value_heads", "q_lora_rank"),
    tensors=LATENT_TENSORS,
    rope=RopeTraits(width_key="qk_rope_head_dim"),
    experts=MixtureTraits(shared_mixture, names=("n_routed_experts", "num_local_experts")),
    fields=("output_router_logits", "pretraining_tp", "num_mtp_layers", "num_nextn_predict_layers"),
    mixers={FULL: latent_attention},
    draft=AFTER_LAYERS,
    written=serving_keys,
    refusals=(check_latent, check_routing),
    served=replace(SERVED, needs_gpu=halves_or_unscaled),
)
