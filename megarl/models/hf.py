"""Facts about a Hugging Face configuration: supported kinds, derived sizes, layouts that fit.

Nothing here imports Megatron. The meaning of a key stands once, in megarl/architectures, which a dry run asks too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.architectures import ARCHITECTURES, values
from megarl.architectures.generic import MEANINGS
from megarl.architectures.vision import LANGUAGE_MODEL
from megarl.architectures.vision_language import (
    DECODERS,
    ImageSettings,
    VisionEncoder,
    canonical_name,
    decoder_config,
)
from megarl.artifacts.facts import ModelFacts, facts_from_config
from megarl.artifacts.layout import layout_problems
from megarl.artifacts.model_files import no_model
from megarl.artifacts.vla_folder import PREPROCESSOR, VLA_TYPE, read_preprocessor
from megarl.config.base import raise_problems
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.system.compat import transformers
from megarl.system.errors import ConfigError
from megarl.system.processes import is_first_process

if TYPE_CHECKING:
    from transformers import AutoConfig, PretrainedConfig

    from megarl.architectures.vision import VisionShape

_ALLOWED = "a folder with config.json and *.safetensors, or a hub name such as Qwen/Qwen3-0.6B"


def load_hf_config(model: ModelConfig, key: str = "model.path", *, follow_files: bool = True) -> PretrainedConfig:
    """Return the Hugging Face configuration of `model.path`, or the one spelt out in `model.hf_config`.

    Args:
        key: where the recipe names `model.path`, for errors.
        follow_files: fetch and look at the files with the weights, too: they may hold a head of their own, see
            `_follow_files`.

    Raises:
        ConfigError: nothing to load, no such folder, or an architecture or variant that is not supported.
    """
    raw, where = _raw_config(model, key)
    if raw.get("model_type") == VLA_TYPE:
        return _vla_policy(raw, where, model, key, follow_files=follow_files)
    if raw.get("model_type") in DECODERS:
        return _vision_language(raw, where, model, key)
    if model.path is not None:
        config = read_hf_config(model.path, key, trust_remote_code=model.trust_remote_code)
        facts_of(config, key)
        if follow_files:
            _follow_files(config, model.path)
    elif model.hf_config is not None:
        facts_from_config(model.hf_config, "model.hf_config")
        try:
            config = _config_classes().for_model(**model.hf_config)
        except _refusals() as error:
            raise ConfigError(
                f"transformers refuses this configuration: {_first_line(error)}",
                where="model.hf_config",
                found=model.hf_config,
            ) from error
    else:
        raise ConfigError(
            "no model is named", where="model", fix="set model.path to a folder or hub name, or model.hf_config"
        )
    config.__dict__.pop("quantization_config", None)  # what is exported is not quantised
    return config


def _config_classes() -> type[AutoConfig]:
    """Return what makes configurations; it imports no modelling code."""
    transformers.install()
    from transformers import AutoConfig

    return AutoConfig


def _raw_config(model: ModelConfig, key: str) -> tuple[dict[str, Any], str]:
    """Return config.json of a model as it is, and its place for errors. Empty where it cannot be read: who reads it as
    that of a language model says what is wrong."""
    from transformers import PretrainedConfig

    if model.path is None:
        return model.hf_config or {}, "model.hf_config"
    check_folder(model.path, key)
    where = f"{key}: config.json"
    try:
        return PretrainedConfig.get_config_dict(model.path)[0], where
    except _refusals():
        return {}, where


def _vla_policy(
    raw: dict[str, Any], where: str, model: ModelConfig, key: str, *, follow_files: bool
) -> PretrainedConfig:
    """Return the configuration of a robot policy, for which transformers has no class.

    Small files next to config.json are a part of it. A model on the hub comes with weights only with `follow_files`.
    """
    from megarl.robots.models.vla.config import policy_config, read_policy_config

    if model.path is None:
        return policy_config(raw, where)
    from megarl.models.weights.files import resolve_folder

    return read_policy_config(resolve_folder(model.path, key, weights=follow_files))


def _vision_language(raw: dict[str, Any], where: str, model: ModelConfig, key: str) -> PretrainedConfig:
    """Return the configuration of a vision-language model's decoder, which has that of the whole model in
    `vision_language`."""
    from megarl.models.weights.files import resolve_folder

    hf = load_hf_config(ModelConfig(hf_config=decoder_config(raw)), f"{where}.text_config")
    VisionEncoder.from_config(raw, hf.hidden_size, where)
    hf.vision_language = dict(raw)  # goes into the config.json of what is exported, as it is
    hf.preprocessor = None if model.path is None else read_preprocessor(resolve_folder(model.path, key, weights=False))
    image_settings(hf)
    return hf


def _follow_files(config: PretrainedConfig, source: str) -> None:
    """Let `config` say what the tensors in the files say: an untied head, and the bias of a value head.

    transformers keeps a `lm_head.weight` that differs from the embeddings although `tie_word_embeddings` is true, and
    warns. A token classifier has a bias unless its config says `token_classification_bias: false`.
    """
    from megarl.models.weights.files import CheckpointReader, resolve_folder

    folder = resolve_folder(source)
    if not CheckpointReader.has_weights(folder):
        return  # only sizes are asked for; who reads the weights says that there are none
    reader = CheckpointReader(folder)
    if "score.weight" in reader:
        config.token_classification_bias = "score.bias" in reader
    if config.tie_word_embeddings and reader.untied_head():
        config.tie_word_embeddings = False
        if not is_first_process():
            return
        warnings.warn(
            f"{folder}: config.json says tie_word_embeddings, and lm_head.weight in the files differs from the "
            "embeddings: the model is taken with a head of its own, as transformers takes it. Set "
            "tie_word_embeddings to false there, or remove lm_head.weight from the files",
            stacklevel=2,
        )


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that transformers raises for files, the hub, and values its configuration classes
    refuse."""
    from huggingface_hub.errors import StrictDataclassError

    return (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, StrictDataclassError)


def _first_line(error: Exception) -> str:
    return " ".join((str(error).strip() or repr(error)).split("\n")[:2]).strip()


def read_hf_config(path: str, where: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the configuration in a folder, or of a hub name.

    Raises:
        ConfigError: at `where`: there is none, or it cannot be read.
    """
    check_folder(path, where)
    try:
        return _config_classes().from_pretrained(path, trust_remote_code=trust_remote_code)
    except _refusals() as error:
        from megarl.data.hub import advice

        raise ConfigError(
            f"the model's configuration cannot be loaded: {_first_line(error)}",
            where=where,
            found=path,
            allowed=_ALLOWED,
            fix=advice("models", path, "check its config.json"),
        ) from error


def facts_of(hf: PretrainedConfig, where: str = "the model's config") -> ModelFacts:
    """Return the sizes of a model; `where` names its config in errors.

    Raises:
        ConfigError: as `artifacts.facts.facts_from_config`, for what transformers made of the config: what the Megatron
            model would compute differently.
    """
    raw = {"model_type": hf.model_type, **_attributes(hf)}
    for key in ("layer_types", "quantization_config"):
        if getattr(hf, key, None) is not None:
            raw[key] = getattr(hf, key)
    raw |= {key: getattr(hf, key) for key in MEANINGS if hasattr(hf, key)}
    if getattr(hf, "is_heterogeneous", False):
        raw["per_layer_config"] = "sizes per layer"
    return replace(facts_from_config(raw, where), vision=vision_of(hf), encoder=encoder_of(hf))


def check_trainable(hf: PretrainedConfig, key: str) -> None:
    """Refuse to train a model whose config asks for what transformers does in training only, and this trainer not.

    A dry run checks the same where the config is on this machine. ConfigError names the keys, and `key` of the recipe.
    """
    raise_problems(values.training_problems(values.only_in_training(_keys(hf)).items(), key))


def _attributes(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the keys that the architecture of `hf` reads, as far as `hf` has them."""
    keys = ARCHITECTURES[hf.model_type].keys if hf.model_type in ARCHITECTURES else {}
    return {key: getattr(hf, key) for key in keys if hasattr(hf, key)}


def _keys(hf: PretrainedConfig) -> dict[str, Any]:
    return values.read_keys({"model_type": hf.model_type, **_attributes(hf)})


def check_folder(path: str, where: str) -> None:
    """Raise a ConfigError if `path`, set at `where`, is or looks like a folder, and no model is there."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise no_model(folder, where)
    if (folder.exists() or looks_local) and not (folder / "config.json").is_file():
        raise ConfigError(
            "no config.json here",
            where=where,
            found=path,
            allowed=_ALLOWED,
            fix="check the path",
        )


def rope_type(hf: PretrainedConfig) -> str:
    """Name of the RoPE scaling: `default` or one of transformers' scaled kinds."""
    return (hf.rope_parameters or {}).get("rope_type", "default")


def head_dim(hf: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    return values.head_width(_keys(hf))


def expert_ffn(hf: PretrainedConfig) -> int:
    """Return the width of one expert's MLP."""
    return values.expert_width(_keys(hf))


def num_experts(hf: PretrainedConfig) -> int | None:
    """Return the routed experts per MoE layer; None for a model without MoE layers."""
    return values.expert_count(_keys(hf)) or None


def moe_layers(hf: PretrainedConfig) -> list[bool]:
    """Tell for each layer whether its MLP is a mixture of experts."""
    return values.sparse_layers(_keys(hf))


def layer_windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None where attention is full."""
    return values.layer_windows(_keys(hf))


def dimensions(hf: PretrainedConfig) -> dict[str, int]:
    """Return the sizes that the tables of tensors name."""
    return values.dimensions(_keys(hf))


def normalizes_experts(hf: PretrainedConfig) -> bool:
    """Tell whether the probabilities of the chosen experts are divided by their sum."""
    return bool(_keys(hf).get("norm_topk_prob", True))  # Mixtral always does


def value_bias(hf: PretrainedConfig) -> bool:
    """Tell whether a value head on this model adds a bias: only that of a checkpoint that has one."""
    return bool(getattr(hf, "token_classification_bias", False))


def vision_of(hf: PretrainedConfig) -> VisionShape | None:
    """Return the vision part of a robot policy (`megarl.robots.models.vla.config`); None for a language model."""
    policy = getattr(hf, "policy", None)
    if policy is None:
        return None
    from megarl.architectures.vision import VisionShape

    return VisionShape.from_config(policy, hf.hidden_size, "config.json")


def encoder_of(hf: PretrainedConfig) -> VisionEncoder | None:
    """Return the vision encoder of a vision-language model; None for another model."""
    whole = getattr(hf, "vision_language", None)
    return None if whole is None else VisionEncoder.from_config(whole, hf.hidden_size, "config.json")


def image_settings(hf: PretrainedConfig) -> ImageSettings:
    """Return the way from pixels to the encoder's input of a vision-language model."""
    encoder = encoder_of(hf)
    assert encoder is not None, "a vision-language model"
    return ImageSettings.from_config(encoder, hf.preprocessor, PREPROCESSOR)


def visual_tensors(hf: PretrainedConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of the model's vision part by name of the parameter: name and shape in a checkpoint."""
    sight = vision_of(hf)
    if sight is not None:
        return {f"vision.{name}": found for name, found in sight.tensors.items()}
    encoder = encoder_of(hf)
    return {} if encoder is None else {f"visual.{name}": found for name, found in encoder.tensors.items()}


def stacks_experts(hf: PretrainedConfig) -> bool:
    """Tell whether this model's checkpoints hold the matrices of all experts of a layer as one tensor."""
    whole = getattr(hf, "vision_language", None)
    return whole is not None and whole["model_type"] == "qwen3_vl_moe"


def checkpoint_names(hf: PretrainedConfig) -> Callable[[str], str]:
    """Return the function from a language model's name of a tensor to its name in checkpoints of this model."""
    if getattr(hf, "policy", None) is not None:
        return LANGUAGE_MODEL.__add__
    whole = getattr(hf, "vision_language", None)
    return str if whole is None else partial(canonical_name, whole["model_type"])


def check_layout(hf: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Refuse a layout that does not divide the model, naming the sizes that do."""
    raise_problems(layout_problems("parallel", parallel, facts_of(hf)))
