"""The supported architectures, one file each: the keys of a Hugging Face config that it reads, its tensors, its
refusals.

A key that the model class of transformers does not read has no effect here either. Plain data without torch and
transformers, so that a dry run and the workers decide by the same functions. To add one, write its file and name it
below. Source: the configuration and modelling files of these models in transformers 5.23.
"""

from __future__ import annotations

from megarl.architectures import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from megarl.architectures.base import Architecture
from megarl.architectures.vision_language import DECODERS
from megarl.system.errors import ConfigError

ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.model_type: module.ARCHITECTURE for module in (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe)
}


def architecture(model_type: object, source: str) -> Architecture:
    """Return the architecture of that name; `source` names the config in errors. Raise ConfigError for others."""
    if model_type not in ARCHITECTURES:
        supported = sorted([*ARCHITECTURES, *DECODERS])  # of a vision-language model, the caller asks for its decoder
        raise ConfigError(
            "the model's architecture is not supported" if model_type else "the model's config has no model_type",
            where=source,
            found=model_type,
            allowed=supported,
            fix="choose a model of one of these architectures",  # a close name is another architecture, no typing error
        )
    return ARCHITECTURES[str(model_type)]
