"""The supported architectures, one file each: the config keys that an architecture reads, its tensors, its refusals.

A key that transformers' model class does not read has no effect here either. This is plain data without torch or
transformers, so that a dry run and the workers decide by the same functions. To add an architecture, write its file and
list it below; its first paragraph is its row in docs/models.md. Source: the configuration and modelling files of these
models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures import (
    deepseek_v3,
    exaone4,
    gemma2,
    gemma3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
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
from megarl.architectures.decoders import DECODERS
from megarl.system.errors import ConfigError

_MODULES = (
    deepseek_v3,
    exaone4,
    gemma2,
    gemma3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
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
#: Model types that transformers does not have -> the architecture of the same computation and tensors.
ALIASES = {"kimi_k2": "deepseek_v3"}


def standard_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the model type of its architecture, without an alias's `auto_map` to its own code."""
    if (kind := raw.get("model_type")) not in ALIASES:
        return dict(raw)
    return {key: value for key, value in raw.items() if key != "auto_map"} | {"model_type": ALIASES[kind]}


def supported_model_types() -> list[str]:
    """Return the values of `model_type` that are supported, in order."""
    return sorted([*ARCHITECTURES, *ALIASES, *DECODERS])


def descriptions() -> dict[str, str]:
    """Return what each architecture is, by its model type: the first paragraph of its file."""
    texts = {module.ARCHITECTURE.model_type: module.__doc__ or "" for module in _MODULES}
    return {kind: " ".join(text.partition("\n\n")[0].split()) for kind, text in texts.items()}


def architecture(model_type: object, source: str) -> Architecture:
    """Return the architecture of this model type; raise ConfigError if it is not supported. `source` names the
    config."""
    if model_type not in ARCHITECTURES:
        # for a vision-language model, callers pass the type of its decoder
        raise ConfigError(
            "the model's architecture is not supported" if model_type else "the model's config has no model_type",
            where=source,
            found=model_type,
            allowed=supported_model_types(),
            # no hint of a similar name, because that is a different model
            fix="choose a model of one of these architectures",
        )
    return ARCHITECTURES[str(model_type)]
