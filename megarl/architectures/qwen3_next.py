"""Qwen3-Next: three of four layers have a gated delta net, the others softmax attention with an output gate.

Norms store their scale minus 1, except the norm inside the delta net. All or some layers are mixtures with a gated
shared expert. Not supported: biases in attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, FULL, LINEAR, ROUTER, Architecture, Refuse, RopeTraits
from megarl.architectures.draft import APART
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.experts.plain import Mixture, MixtureTraits, RouterRules, expert_rules, shared_gate
from megarl.models.layers.gated_delta.plain import gated_delta_of, gated_delta_rules
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring

#: The settings of softmax attention, and the mixers of the other layers by their name in `layer_types`.
ATTENTION = AttentionTraits(qk_norm=True, gate=True)
MIXERS = {LINEAR: gated_delta_of}
#: Keys that this family adds, with the default sizes of its configuration classes.
KEYS: dict[str, Any] = {
    "layer_types": None,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def hybrid_types(values: Mapping[str, Any]) -> list[str]:
    """Return the default type of each layer: softmax attention in every `full_attention_interval`-th one."""
    interval, count = values["full_attention_interval"], values["num_hidden_layers"]
    return [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]


def hybrid_wiring(values: Mapping[str, Any]) -> Wiring:
    """Return the only difference from Llama outside mixers and experts: the weights of norms are stored minus 1."""
    return Wiring(zero_centered=True)


def serving_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key that SGLang reads in place of `layer_types`, which is what transformers writes."""
    kinds = values["layer_types"] or hybrid_types(values)
    first = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    return {"full_attention_interval": first}


def refuse_odd_heads(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse value heads that key heads do not divide, and models without the output gate."""
    keys, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if heads % keys and LINEAR in (values["layer_types"] or hybrid_types(values)):
        refuse("linear_num_value_heads", heads, f"a multiple of the {keys} key heads")
    if raw.get("attn_output_gate", True) is not True:
        refuse("attn_output_gate", raw["attn_output_gate"], "true", "transformers ignores this key")


def mixture(values: Mapping[str, Any]) -> Mixture:
    """Return the settings of a sparse layer's routed and shared experts, from the keys of config.json."""
    normalized = values.get("norm_topk_prob", True)  # Qwen3.5 always normalises
    chosen = values["num_experts_per_tok"]
    router = RouterRules(values["num_experts"], chosen, "softmax", normalized=normalized, wide=False)
    shared = values["shared_expert_intermediate_size"]
    return Mixture(router, values["moe_intermediate_size"], shared_width=shared, shared_gate=True)


MIXTURE = (
    *expert_rules("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_expert"),
    shared_gate("mlp.shared_expert_gate"),
)
EXPERTS = {**ROUTER, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "hidden_size": 2048}

#: The constructor of an architecture with what all models of this family share.
hybrid = partial(
    Architecture,
    attention=ATTENTION,
    rope=RopeTraits(partial=True),
    mixers=MIXERS,
    layer_types=hybrid_types,
    wiring=hybrid_wiring,
    draft=APART,
    written=serving_keys,
    served=ServedClass(attention_dp=True, needs_gpu=True),
    refusals=(refuse_odd_heads,),
)

ARCHITECTURE = hybrid(
    model_type="qwen3_next",
    keys={
        **COMMON,
        **KEYS,
        **EXPERTS,
        "num_hidden_layers": 48,
        "intermediate_size": 5632,
        "vocab_size": 151936,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    null=(*COMMON_NULL, "layer_types", "mlp_only_layers"),
    tensors=OUTER + attention_rules(gate=True) + gated_delta_rules(by_key_head=True) + DENSE + MIXTURE,
    experts=MixtureTraits(mixture, optional=True),
    # SGLang's configuration class fails for other kinds of RoPE
    served=ServedClass(tied=False, rope_types=("default", "linear"), attention_dp=True, needs_gpu=True),
    fields=("num_experts",),
)
