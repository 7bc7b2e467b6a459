"""The configuration of a robot policy: its language model and its vision part.

A published config.json of OpenVLA or OpenVLA-OFT has `text_config` and `timm_model_ids`; if the robot's state is an
input, also `use_proprio` and `proprio_dim`, as SimpleVLA-RL writes them. Small models of your own have `vision_towers`
instead of timm's names, and `state_dim`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.architectures.vision import VisionShape
from megarl.artifacts.vla_folder import VLA_TYPE, complete_config, read_preprocessor
from megarl.config.model import ModelConfig
from megarl.models.hf import load_hf_config
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def policy_config(
    config: Mapping[str, Any], where: str, preprocessor: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """Return the language model's configuration, which includes the vision part (`megarl.models.hf.vision_of`).

    Args:
        config: a policy's config.json, completed from the files next to it.
        preprocessor: the policy's preprocessor_config.json, if it has one.
    """
    text = config.get("text_config")
    if config.get("model_type") != VLA_TYPE or not isinstance(text, Mapping):
        raise ConfigError(
            "this is not the configuration of a robot policy",
            where=where,
            found=config.get("model_type"),
            allowed=f"model_type {VLA_TYPE!r} with text_config",
        )
    hf = load_hf_config(ModelConfig(hf_config={"model_type": "llama", **text}), f"{where}.text_config")
    VisionShape.from_config(config, hf.hidden_size, where)
    hf.policy = dict(config)  # exports write it to config.json unchanged
    # exports write it to preprocessor_config.json unchanged
    hf.preprocessor = None if preprocessor is None else dict(preprocessor)
    return hf


def read_policy_config(folder: Path) -> PretrainedConfig:
    """Return `policy_config` of the config.json in a folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError("this folder has no config.json", where="model.path", found=str(folder), fix="check the path")
    raw = json.loads(path.read_text(encoding="utf-8"))
    return policy_config(complete_config(raw, folder), str(path), read_preprocessor(folder))
