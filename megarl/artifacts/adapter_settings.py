"""The settings of low-rank adapters in PEFT's adapter_config.json, and which of them megarl supports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.model import LoraConfig
from megarl.system.errors import ConfigError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
#: Settings with which PEFT may not compute exactly lora_alpha / r * B A, and the values with which it does.
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
#: Ends of names of parameters that may have adapters: weights of linear layers, and tensors of all experts (gpt-oss).
_PARAMETERS = (".weight", ".experts.gate_up_proj", ".experts.down_proj")
#: Initialisations that do not change the base model's weights. Others (pissa, olora, corda, loftq, lora_ga) do, and the
#: adapter then belongs to the changed model.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
#: Settings that do not change what is computed from the stored tensors, in addition to those that are read here. Any
#: other key with a value is refused, as PEFT keeps adding kinds of adapters.
_HARMLESS = {
    *("r", "lora_alpha", "lora_dropout", "init_lora_weights", "base_model_name_or_path", "revision"),
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "ensure_weight_tying"),
    *("target_modules", "exclude_modules", "layers_pattern"),  # the tensors' names show which modules have adapters
    # only read by the initialisation of the same name
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),  # only read if megatron_config or use_qalora is set
}


def read_settings(folder: Path, where: str) -> dict[str, Any]:
    """Return the settings of a PEFT adapter. `where`: the recipe key that sets the folder, for errors."""
    file = folder.expanduser() / CONFIG
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("the file must contain a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"this folder has no readable PEFT adapter ({CONFIG}: {error})",
            where=where,
            found=str(folder),
            allowed=f"a folder with {CONFIG} and {TENSORS}",
            fix="check the path, or copy the adapter again",
        ) from error
    beyond = next(_beyond_formula(settings), None)
    if beyond is not None:
        key, allowed = beyond
        raise ConfigError(
            "this adapter does not just add lora_alpha / r * B A to weights",
            where=f"{file}: {key}",
            found=settings[key],
            allowed=allowed,
            fix="train a plain LoRA adapter, or merge this one with PEFT and use the merged model",
        )
    for key, kinds in (("r", int), ("lora_alpha", (int, float))):
        if isinstance(value := settings.get(key), bool) or not isinstance(value, kinds) or not value > 0:
            raise ConfigError(
                "this adapter has no valid scale lora_alpha / r",
                where=f"{file}: {key}",
                found=value,
                allowed="an integer above 0" if key == "r" else "a number above 0",
                fix="correct the file, or copy the adapter again",
            )
    return settings


def check_scale(settings: Mapping[str, Any], lora: LoraConfig, where: str) -> None:
    """Check that an adapter's rank and alpha are those of the recipe.

    Args:
        where: the recipe key that sets the adapter, for errors.
    """
    for key, name, value in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if settings.get(name) != value:
            raise ConfigError(
                f"the adapter at {where} has a different {name} than the recipe",
                where=f"model.lora.{key}",
                found=value,
                allowed=str(settings.get(name)),
                fix=f"set model.lora.{key}={settings.get(name)}",
            )


def _beyond_formula(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, allowed values) for settings with which PEFT computes more than lora_alpha / r * B A."""
    for key, value in settings.items():
        if key in PLAIN:
            if (value or PLAIN[key]) != PLAIN[key]:
                yield key, str(PLAIN[key])
        elif key == "target_parameters":
            if not all(str(name).endswith(_PARAMETERS) for name in value or ()):
                yield key, f"names that end with {' or '.join(_PARAMETERS)}"
        elif key == "init_lora_weights":
            if value not in _STARTS:
                yield key, ", ".join(map(str, _STARTS))
        elif key not in _HARMLESS and value:
            yield key, "no value: megarl does not have this setting"
