"""Sizes of a model that the checks need, read from plain JSON: no torch, no transformers, no network."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.model import ModelConfig
from megarl.errors import ConfigError, close_matches

_DENSE = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
}
# Defaults of the Hugging Face configuration classes, for keys that a config.json or model.hf_config leaves out.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_DENSE, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": {
        **_DENSE,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    },
    "mixtral": {
        **_DENSE,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": {
        **_DENSE,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
    },
    "qwen3": {
        **_DENSE,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "qwen3_moe": {
        **_DENSE,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE scaling that are supported."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder. `ffn` is the width of a dense layer, or of one expert when `experts` is not 0.

    `dense_ffn` is the width of the dense layers that a mixture of experts may also have (0: none).
    """

    source: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    tied: bool
    dense_ffn: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def is_moe(self) -> bool:
        """True for a mixture of experts."""
        return self.experts > 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer without its experts: attention, norms, router, and the dense feed-forward."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = self.hidden * (2 * q + 2 * kv) + 2 * self.hidden
        if self.model_type == "qwen2":
            count += q + 2 * kv  # attention biases
        if self.model_type.startswith("qwen3"):
            count += 2 * self.head_dim  # query and key norms
        return count + (self.hidden * self.experts if self.is_moe else 3 * self.hidden * self.ffn)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer, 0 for a dense model."""
        return 3 * self.hidden * self.ffn * self.experts

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.hidden + self.layers * (self.layer_parameters + self.expert_parameters)


def facts_from_config(raw: dict[str, Any], source: str) -> ModelFacts:
    """Facts of a Hugging Face config; `source` names it in errors. ConfigError for an unsupported architecture."""
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        near = close_matches(str(model_type), ARCHITECTURES)
        raise ConfigError(
            "the model's architecture is not supported" if model_type else "the model's config has no model_type",
            where=source,
            found=model_type,
            allowed=sorted(ARCHITECTURES),
            fix=f"did you mean {near[0]}?" if near else None,
        )
    _refuse_variants(raw, source)
    values = {**ARCHITECTURES[model_type], **raw}

    def size(name: str) -> int:
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is not a size", where=source, found=value, allowed="whole number > 0")
        return value

    heads = size("num_attention_heads")
    experts = next((size(name) for name in ("num_experts", "num_local_experts") if name in values), 0)
    return ModelFacts(
        source=source,
        model_type=model_type,
        layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        heads=heads,
        kv_heads=heads if values["num_key_value_heads"] is None else size("num_key_value_heads"),
        head_dim=size("hidden_size") // heads if values["head_dim"] is None else size("head_dim"),
        ffn=size("moe_intermediate_size") if "moe_intermediate_size" in values else size("intermediate_size"),
        vocab=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        tied=bool(values["tie_word_embeddings"]),
        dense_ffn=size("intermediate_size") if experts else 0,
        experts=experts,
        experts_per_token=size("num_experts_per_tok") if experts else 0,
    )


def _refuse_variants(raw: dict[str, Any], source: str) -> None:
    """Refuse what a supported architecture can also be and the Megatron model would compute differently."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    variants = {
        "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (bool(raw.get("attention_bias", False)), (False,)),
        "mlp_bias": (bool(raw.get("mlp_bias", False)), (False,)),
        "rope_parameters": (rope.get("rope_type", rope.get("type", "default")), ROPE_TYPES),
    }
    for key, (value, supported) in variants.items():
        if value not in supported:
            raise ConfigError("this variant is not supported", where=f"{source}: {key}", found=value, allowed=supported)


def model_facts(model: ModelConfig) -> ModelFacts | None:
    """Facts of `model.path` (a folder, the hub cache, or a well-known hub name) or of `model.hf_config`.

    None when `path` is a hub name that nothing local describes. ConfigError when the model is missing or unsupported.
    """
    if model.path is None:
        if model.hf_config is None:
            raise ConfigError(
                "no model is named",
                where="model",
                allowed="model.path, or model.hf_config for a fresh random model",
                fix="set model.path to a Hugging Face folder or hub name",
            )
        return facts_from_config(model.hf_config, "model.hf_config")
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return facts_from_config(_read_json(folder / "config.json"), str(folder / "config.json"))
    if not is_hub_name(model.path):
        raise ConfigError(
            "there is no such model folder",
            where="model.path",
            found=model.path,
            allowed="a folder with config.json and safetensors files, or a hub name such as Qwen/Qwen3-8B",
            fix=_near_folder(folder),
        )
    cached = hub_cache_folder(model.path)
    if cached is not None:
        return facts_from_config(_read_json(cached / "config.json"), str(cached / "config.json"))
    known = json.loads((Path(__file__).parent / "known_models.json").read_text(encoding="utf-8"))
    return facts_from_config(known[model.path], f"{model.path} (known model)") if model.path in known else None


def is_hub_name(name: str) -> bool:
    """True for text of the form `organisation/name`, which is not a path that says so itself (`./x/y`, `/x`)."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def hub_cache_folder(name: str) -> Path | None:
    """Snapshot folder of a hub model in the local Hugging Face cache, None when it is not there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / ("models--" + name.replace("/", "--"))
    reference = cache / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = cache / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if (snapshot / "config.json").is_file() else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            "the model folder has no config.json",
            where="model.path",
            found=str(file.parent),
            fix="name the folder that save_pretrained or a hub download wrote",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError("the model's config cannot be read", where=str(file), found=str(error)) from error
    if not isinstance(raw, dict):
        raise ConfigError("the model's config is not a mapping", where=str(file), found=raw)
    return raw


def _near_folder(folder: Path) -> str:
    siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    close = close_matches(folder.name, siblings)
    return f"did you mean {folder.parent / close[0]}?" if close else "check the path; it is relative to this folder"
