"""OLMo 3: norms after attention and MLP only, queries and keys normalised over all heads, three layers with a window to
one without. Only layers without a window have scaled rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import Architecture, RopeTraits
from megarl.architectures.olmo2 import OLMO, OLMO_NULL
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring

THETA = 500000.0


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the default kind of each layer."""
    count = values["num_hidden_layers"]
    return ["sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(count)]


ARCHITECTURE = Architecture(
    model_type="olmo3",
    keys={
        **OLMO,
        "rope_theta": THETA,
        "sliding_window": 4096,
        "layer_types": None,
    },
    null=(*OLMO_NULL, "layer_types"),
    tensors=OUTER + attention_rules(norms="after") + DENSE,
    attention=AttentionTraits(windows="chosen", qkv_bias="attention_bias", out_bias="attention_bias", wide_norm=True),
    # transformers' class reads `rope_theta` for layers without a window only
    rope=RopeTraits(local_theta=("default_theta", THETA)),
    layer_types=layer_types,
    served=ServedClass(wrong="SGLang does not read the two sections of rope_parameters", windows=True, head_dim=False),
    wiring=lambda values: Wiring(norms="after"),
)
