"""What the code has to know about a Hugging Face configuration: supported kinds, derived sizes, layouts that fit.

Nothing here imports Megatron. A dry run, which has no transformers either, makes the same checks in config/facts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.facts import ARCHITECTURES, ROPE_TYPES
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ALLOWED = "a folder with config.json and *.safetensors, or a hub name such as Qwen/Qwen3-0.6B"


def load_hf_config(model: ModelConfig, key: str = "model.path") -> PretrainedConfig:
    """Hugging Face configuration of `model.path`, or the one spelt out in `model.hf_config`.

    Args:
        key: where the recipe names `model.path`, for errors.

    Raises:
        ConfigError: nothing to load, no such folder, or an architecture or variant that is not supported.
    """
    from transformers import AutoConfig

    where = key if model.path is not None else "model.hf_config"
    if model.path is not None:
        config = read_hf_config(model.path, key, trust_remote_code=model.trust_remote_code)
    elif model.hf_config is not None:
        fields = dict(model.hf_config)
        _check_architecture(fields.pop("model_type", None), "model.hf_config.model_type")
        config = AutoConfig.for_model(model.hf_config["model_type"], **fields)
    else:
        raise ConfigError(
            "no model is named", where="model", fix="set model.path to a folder or hub name, or model.hf_config"
        )
    check_supported(config, where)
    return config


def read_hf_config(path: str, where: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration in a folder, or of a hub name.

    Raises:
        ConfigError: at `where`: there is none, or it cannot be read.
    """
    from transformers import AutoConfig

    _check_folder(path, where)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises for files, hub and types
        from megarl.config.hub import advice

        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"the model's configuration cannot be loaded: {reason}",
            where=where,
            found=path,
            allowed=_ALLOWED,
            fix=advice("models", path, "check its config.json"),
        ) from error


def check_supported(hf: PretrainedConfig, where: str) -> None:
    """Refuse what the Megatron model would compute differently, naming the key found at `where`."""
    _check_architecture(hf.model_type, where)
    if hf.hidden_act != "silu":
        raise ConfigError("unsupported activation", where=f"{where}: hidden_act", found=hf.hidden_act, allowed=["silu"])
    for key in ("attention_bias", "mlp_bias"):
        if getattr(hf, key, False):
            raise ConfigError("this bias is not supported", where=f"{where}: {key}", found=True, allowed=[False])
    if rope_type(hf) not in ROPE_TYPES:
        raise ConfigError(
            "unsupported RoPE scaling", where=f"{where}: rope_parameters", found=rope_type(hf), allowed=ROPE_TYPES
        )


def _check_folder(path: str, where: str) -> None:
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if (folder.exists() or looks_local) and not (folder / "config.json").is_file():
        raise ConfigError(
            "no config.json here",
            where=where,
            found=path,
            allowed=_ALLOWED,
            fix="check the path",
        )


def _check_architecture(model_type: object, where: str) -> None:
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            "unsupported model architecture",
            where=where,
            found=model_type,
            allowed=sorted(ARCHITECTURES),
        )


def rope_type(hf: PretrainedConfig) -> str:
    """Name of the RoPE scaling: `default` or one of transformers' scaled kinds."""
    return (hf.rope_parameters or {}).get("rope_type", "default")


def head_dim(hf: PretrainedConfig) -> int:
    """Width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def expert_ffn(hf: PretrainedConfig) -> int:
    """Width of one expert's MLP."""
    return getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size


def num_experts(hf: PretrainedConfig) -> int | None:
    """Routed experts per MoE layer; None for a dense model."""
    return getattr(hf, "num_local_experts", None) or getattr(hf, "num_experts", None)


def moe_layers(hf: PretrainedConfig) -> list[bool]:
    """For each layer, whether its MLP is a mixture of experts."""
    count = hf.num_hidden_layers
    if num_experts(hf) is None:
        return [False] * count
    dense, step = set(getattr(hf, "mlp_only_layers", None) or []), getattr(hf, "decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def layer_windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    """Sliding window of each layer, None where attention is full."""
    window = getattr(hf, "sliding_window", None)
    if hf.model_type in ("qwen2", "qwen3", "qwen3_moe") and not getattr(hf, "use_sliding_window", False):
        window = None
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_layout(hf: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Refuse a layout that does not divide the model, naming the sizes that do."""
    stages = parallel.pp * (parallel.vpp or 1)
    experts = num_experts(hf)
    if experts is None and parallel.ep > 1:
        raise ConfigError("this model has no experts", where="parallel.ep", found=parallel.ep, allowed=[1])
    wanted = [
        ("parallel.tp", parallel.tp, hf.num_key_value_heads, "key/value heads"),
        ("parallel.tp", parallel.tp, hf.num_attention_heads, "attention heads"),
        ("parallel.tp", parallel.tp, hf.intermediate_size, "MLP width"),
        ("parallel.pp x vpp", stages, hf.num_hidden_layers, "layers"),
        ("parallel.ep", parallel.ep, experts or 1, "experts"),
    ]
    if experts is not None:
        wanted.append(("parallel.etp", parallel.expert_tp, expert_ffn(hf), "expert MLP width"))
    for where, size, total, what in wanted:
        if total % size:
            divisors = [d for d in range(1, total + 1) if total % d == 0 and d <= 4 * size]
            raise ConfigError(
                f"{size} does not divide the model's {total} {what}", where=where, found=size, allowed=divisors
            )
    if parallel.vpp is not None and parallel.pp == 1:
        raise ConfigError(
            "virtual pipeline chunks need a pipeline",
            where="parallel.vpp",
            found=parallel.vpp,
            fix="set pp >= 2 or vpp to null",
        )
