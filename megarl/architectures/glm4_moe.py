"""GLM-4.5 and 4.6: grouped queries with partial rotary positions; a mixture of experts with a shared expert in all but
the first layers. Experts are chosen by sigmoid scores plus a correction bias.
"""

from __future__ import annotations

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture, RopeTraits
from megarl.architectures.draft import AFTER_LAYERS
from megarl.architectures.served import ServedClass
from megarl.architectures.sigmoid_routing import ROUTING, check_routing, shared_mixture
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.experts.plain import MixtureTraits, expert_rules
from megarl.models.layers.mlp.plain import DENSE

CORRECTION = "gate.e_score_correction_bias"


ARCHITECTURE = Architecture(
    model_type="glm4_moe",
    keys={
        **COMMON,
        **ROUTING,
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "num_experts": 128,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
    null=COMMON_NULL,
    tensors=OUTER
    + attention_rules()
    + DENSE
    + expert_rules("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_experts", correction=CORRECTION),
    attention=AttentionTraits(qkv_bias="attention_bias", qk_norm="use_qk_norm"),
    rope=RopeTraits(partial=True),
    experts=MixtureTraits(shared_mixture, names=("n_routed_experts", "num_local_experts")),
    # transformers returns the router's logits, but computes no loss from them
    fields=("num_mtp_layers", "num_nextn_predict_layers", "output_router_logits"),
    draft=AFTER_LAYERS,
    refusals=(check_routing,),
    served=ServedClass(tied=False, attention_dp=True),
)
