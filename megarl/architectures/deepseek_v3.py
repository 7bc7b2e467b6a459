"""DeepSeek-V3, Moonlight: latent attention. Not supported: biases in attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture, Refuse
from megarl.architectures.tensors import OUTER
from megarl.models.layers.mla.plain import MLA, mla_of, mla_rules
from megarl.models.layers.mlp.plain import DENSE

#: Keys that DeepSeek's own code reads and transformers does not, with the only value that means the same model.
_OF_THE_AUTHORS: dict[str, object] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def latent_layers(values: Mapping[str, Any]) -> tuple[MLA, ...]:
    """Return the latent attention of every layer."""
    from megarl.architectures.values import rope_scaling  # which imports all architectures

    return (mla_of(values, rope_scaling(values)),) * int(values["num_hidden_layers"])


def refuse_latent(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse sizes of latent attention with which transformers fails, and values that mean another model."""
    heads, rope = values["num_attention_heads"], values["qk_rope_head_dim"]
    if values["num_key_value_heads"] not in (None, heads):
        refuse("num_key_value_heads", values["num_key_value_heads"], f"{heads}: latent attention has no other number")
    if raw.get("head_dim") not in (None, rope):
        refuse("head_dim", raw["head_dim"], f"{rope}, which is qk_rope_head_dim, or no such key")
    scaling = values["rope_scaling"] or values["rope_parameters"] or {}
    if scaling.get("mscale_all_dim") and scaling.get("factor") is None:
        refuse("rope_scaling", {"factor": None}, "factor: number > 0, if there is mscale_all_dim")
    for key, value in _OF_THE_AUTHORS.items():
        if raw.get(key, value) != value:
            refuse(key, raw[key], str(value), "this variant is not supported")


#: Keys of latent attention, with the defaults of DeepseekV3Config.
LATENT: dict[str, Any] = {
    **COMMON,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}

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
    },
    null=(*COMMON_NULL, "head_dim", "num_key_value_heads", "q_lora_rank"),
    windows="none",
    tensors=OUTER + mla_rules() + DENSE,
    mixers=latent_layers,
    head_key="qk_rope_head_dim",
    predicts_ahead=True,
    refusals=(refuse_latent,),
)
