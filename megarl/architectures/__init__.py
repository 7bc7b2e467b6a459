"""The supported architectures, one file each: the config keys that an architecture reads, its tensors, its refusals.

A key that transformers' model class does not read has no effect here either. This is plain data without torch or
transformers, so that a dry run and the workers decide by the same functions. To add an architecture, write its file and
list it below. Source: the configuration and modelling files of these models in transformers 5.23.
"""

from __future__ import annotations

from megarl.architectures import (
    deepseek_v3,
    gemma3,
    glm4_moe,
    glm4_moe_lite,
    granite,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from megarl.architectures.base import Architecture
from megarl.architectures.vision_language import DECODERS, TEXT_PARTS
from megarl.system.errors import ConfigError

_MODULES = (
    deepseek_v3,
    gemma3,
    glm4_moe,
    glm4_moe_lite,
    granite,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
ARCHITECTURES: dict[str, Architecture] = {module.ARCHITECTURE.model_type: module.ARCHITECTURE for module in _MODULES}


def architecture(model_type: object, source: str) -> Architecture:
    """Return the architecture of this model type; raise ConfigError if it is not supported. `source` names the
    config."""
    if model_type not in ARCHITECTURES:
        # callers pass the decoder of a vision-language model
        supported = sorted([*ARCHITECTURES, *DECODERS, *TEXT_PARTS])
        raise ConfigError(
            "the model's architecture is not supported" if model_type else "the model's config has no model_type",
            where=source,
            found=model_type,
            allowed=supported,
            fix="choose a model of one of these architectures",  # similar names are other models
        )
    return ARCHITECTURES[str(model_type)]
