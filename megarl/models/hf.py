"""Facts about a Hugging Face configuration: supported model types, derived sizes, layouts that fit.

Nothing here imports Megatron. megarl/architectures defines what a config key means; dry runs use it directly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.architectures import ALIASES, ARCHITECTURES, draft, standard_config, values
from megarl.architectures.decoders import DECODERS, canonical_name, decoder_config, reads_vision
from megarl.architectures.generic import MEANINGS
from megarl.architectures.vision import LANGUAGE_MODEL
from megarl.architectures.vision_language import ImageSettings, VisionEncoder
from megarl.artifacts.facts import ModelFacts, facts_from_config
from megarl.artifacts.layout import layout_problems
from megarl.artifacts.model_files import no_model
from megarl.artifacts.vla_folder import PREPROCESSOR, VLA_TYPE, read_preprocessor, read_video_preprocessor
from megarl.config.base import raise_problems
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.data.routes import RouteForm
from megarl.models.layers.experts.plain import Mixture
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import WeightRule, layer_parts
from megarl.models.layers.wiring import Wiring
from megarl.system.compat import transformers
from megarl.system.errors import ConfigError, relative_path_fix
from megarl.system.processes import is_first_process

if TYPE_CHECKING:
    from transformers import AutoConfig, PretrainedConfig

    from megarl.architectures.vision import VisionShape

_ALLOWED = "a folder with config.json and *.safetensors, or a hub name such as Qwen/Qwen3-0.6B"


def load_hf_config(model: ModelConfig, key: str = "model.path", *, follow_files: bool = True) -> PretrainedConfig:
    """Return the Hugging Face configuration of `model.path`, or the one given in `model.hf_config`.

    Args:
        key: where the recipe names `model.path`, for errors.
        follow_files: also fetch and read the weight files, which may have an untied head; see `_follow_files`.
    """
    raw, where = _raw_config(model, key)
    if raw.get("model_type") == VLA_TYPE:
        return _vla_policy(raw, where, model, key, follow_files=follow_files)
    if reads_vision(raw.get("model_type"), model.vision):
        return _vision_language(raw, where, model, key)
    if (kind := raw.get("model_type")) in DECODERS or kind in ALIASES:
        part, section = (decoder_config(raw), ".text_config") if kind in DECODERS else (standard_config(raw), "")
        text = load_hf_config(ModelConfig(hf_config=part), f"{where}{section}")
        if model.path is not None and follow_files:
            _follow_files(text, model.path)
        return text
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
                fix="correct the key that the message names",
            ) from error
    else:
        raise ConfigError(
            "the recipe names no model", where="model", fix="set model.path to a folder or hub name, or model.hf_config"
        )
    config.__dict__.pop("quantization_config", None)  # exported weights are not quantised
    return config


def _config_classes() -> type[AutoConfig]:
    """Return transformers' AutoConfig, which imports no modelling code."""
    transformers.install()
    from transformers import AutoConfig

    return AutoConfig


def _raw_config(model: ModelConfig, key: str) -> tuple[dict[str, Any], str]:
    """Return a model's config.json as a dict, and the name of its file for errors.

    An unreadable file gives an empty dict; loading it as a language model then raises the error."""
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

    Small files next to config.json are part of the configuration. With `follow_files`, a model on the hub is fetched
    with its weights.
    """
    from megarl.robots.models.vla.config import policy_config, read_policy_config

    if model.path is None:
        return policy_config(raw, where)
    from megarl.models.weights.files import resolve_folder

    return read_policy_config(resolve_folder(model.path, key, weights=follow_files))


def _vision_language(raw: dict[str, Any], where: str, model: ModelConfig, key: str) -> PretrainedConfig:
    """Return the configuration of a vision-language model's decoder, with the whole model's in `vision_language`."""
    from megarl.models.weights.files import resolve_folder

    hf = load_hf_config(ModelConfig(hf_config=decoder_config(raw)), f"{where}.text_config")
    VisionEncoder.from_config(raw, hf.hidden_size, where)
    hf.vision_language = dict(raw)  # exports write config.json from this attribute
    folder = None if model.path is None else resolve_folder(model.path, key, weights=False)
    hf.preprocessor = None if folder is None else read_preprocessor(folder)
    hf.video_preprocessor = None if folder is None else read_video_preprocessor(folder)
    image_settings(hf)
    return hf


def _follow_files(config: PretrainedConfig, source: str) -> None:
    """Set in `config` what only the tensor names and values show: an untied head, and the bias of a value head.

    transformers, with a warning, keeps a `lm_head.weight` that differs from the embeddings although
    `tie_word_embeddings` is true. A token classifier has a bias unless its config has
    `token_classification_bias: false`.
    """
    from megarl.models.weights.files import CheckpointReader, resolve_folder

    folder = resolve_folder(source)
    if not CheckpointReader.has_weights(folder):
        return  # keep the config's values; reading the missing weights later raises an error
    reader = CheckpointReader(folder, vision=False)
    if "score.weight" in reader:
        config.token_classification_bias = "score.bias" in reader
    if config.tie_word_embeddings and reader.untied_head():
        config.tie_word_embeddings = False
        if not is_first_process():
            return
        warnings.warn(
            f"{folder}: lm_head.weight differs from the embeddings although config.json sets tie_word_embeddings: the "
            "model is loaded with an untied head, as by transformers. Set tie_word_embeddings to false in config.json, "
            "or remove lm_head.weight from the files",
            stacklevel=2,
        )


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that transformers raises for unreadable files, hub failures, and invalid config values."""
    from huggingface_hub.errors import StrictDataclassError

    return (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, StrictDataclassError)


def _first_line(error: Exception) -> str:
    return " ".join((str(error).strip() or repr(error)).split("\n")[:2]).strip()


def read_hf_config(path: str, where: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the configuration of a folder or hub name."""
    check_folder(path, where)
    try:
        return _config_classes().from_pretrained(path, trust_remote_code=trust_remote_code)
    except _refusals() as error:
        from megarl.data.hub import advice, own_code_advice

        raise ConfigError(
            f"the model's configuration cannot be loaded: {_first_line(error)}",
            where=where,
            found=path,
            allowed=_ALLOWED,
            fix=own_code_advice(error) or advice("models", path, "check its config.json"),
        ) from error


def facts_of(hf: PretrainedConfig, where: str = "the model's config") -> ModelFacts:
    """Return the facts (sizes and switches) of a model; `where` names its config in errors."""
    raw = {"model_type": hf.model_type, **_attributes(hf)}
    for key in ("layer_types", "quantization_config"):
        if getattr(hf, key, None) is not None:
            raw[key] = getattr(hf, key)
    raw |= {key: getattr(hf, key) for key in MEANINGS if hasattr(hf, key)}
    if getattr(hf, "is_heterogeneous", False):
        raw["per_layer_config"] = "sizes per layer"
    return replace(facts_from_config(raw, where), vision=vision_of(hf), encoder=encoder_of(hf))


def check_trainable(hf: PretrainedConfig, key: str) -> None:
    """Raise an error if the config sets keys that transformers applies in training only and megarl does not support.

    A dry run makes the same check if the config is on this machine. `key` is the recipe's key of the model.
    """
    raise_problems(values.training_problems(values.only_in_training(_keys(hf)).items(), key))


def _attributes(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the attributes of `hf` that its architecture reads (`Architecture.keys`), without those that it lacks."""
    known = ARCHITECTURES.get(hf.model_type)
    keys = (*known.keys, *(known.experts_keys or ())) if known is not None else ()
    return {key: getattr(hf, key) for key in keys if hasattr(hf, key)}


def _keys(hf: PretrainedConfig) -> dict[str, Any]:
    return values.read_keys({"model_type": hf.model_type, **_attributes(hf)})


def check_folder(path: str, where: str) -> None:
    """Raise a ConfigError if `path`, set at `where`, is or looks like a local folder but holds no model."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise no_model(folder, where)
    if (folder.exists() or looks_local) and not (folder / "config.json").is_file():
        raise ConfigError(
            "a model must be a folder, and this is a file" if folder.exists() else "this folder does not exist",
            where=where,
            found=path,
            allowed=_ALLOWED,
            fix=relative_path_fix(),
        )


def wiring_of(hf: PretrainedConfig) -> Wiring:
    """Return the differences of a model from Llama outside its mixers and experts."""
    return values.wiring(_keys(hf))


def head_dim(hf: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    return values.head_width(_keys(hf))


def rotated_width(hf: PretrainedConfig) -> int:
    """Return how many numbers of an attention head RoPE rotates."""
    return values.rotated_width(_keys(hf))


def mixture_of(hf: PretrainedConfig) -> Mixture | None:
    """Return the settings of the model's layers with experts; None for a model without such layers."""
    return values.mixture(_keys(hf))


def num_experts(hf: PretrainedConfig) -> int | None:
    """Return the number of routed experts per MoE layer; None for a model without MoE layers."""
    experts = mixture_of(hf)
    return experts.router.experts if experts else None


def moe_layers(hf: PretrainedConfig) -> list[bool]:
    """Return, for each layer, whether its MLP is a mixture of experts."""
    return values.sparse_layers(_keys(hf))


def mixers_of(hf: PretrainedConfig) -> tuple[Mixer, ...]:
    """Return the mixer of each layer."""
    return values.mixers(_keys(hf))


def dimensions(hf: PretrainedConfig) -> dict[str, int]:
    """Return the model's sizes by the names that the tables of tensors use."""
    return values.dimensions(_keys(hf))


def route_form(hf: PretrainedConfig) -> RouteForm | None:
    """Return the form of the model's routes (`megarl.data.routes`); None for a model without experts."""
    mixture = mixture_of(hf)
    if mixture is None:
        return None
    return RouteForm(tuple(moe_layers(hf)), mixture.router.chosen, mixture.router.experts)


def draft_place(hf: PretrainedConfig) -> int:
    """Return the number of the last layer with the mixer of the draft head's layer, which has no recurrent state."""
    return draft.draft_place(mixers_of(hf))


def draft_rules(hf: PretrainedConfig, rules: Iterable[WeightRule]) -> tuple[WeightRule, ...]:
    """Return the rules of the draft head of this model, from those of its other weights. In a model with experts, its
    layer has experts."""
    form = ARCHITECTURES[hf.model_type].draft
    if form is None:
        raise ValueError(f"{hf.model_type} has no draft head")
    parts = layer_parts(mixers_of(hf)[draft_place(hf)].kind, sparse=any(moe_layers(hf)))
    return form.rules(rules, parts, hf.num_hidden_layers)


def value_bias(hf: PretrainedConfig) -> bool:
    """Return whether a value head on this model has a bias, as some checkpoints do."""
    return bool(getattr(hf, "token_classification_bias", False))


def vision_of(hf: PretrainedConfig) -> VisionShape | None:
    """Return the vision part of a robot policy (`megarl.robots.models.vla.config`); None for other models."""
    policy = getattr(hf, "policy", None)
    if policy is None:
        return None
    from megarl.architectures.vision import VisionShape

    return VisionShape.from_config(policy, hf.hidden_size, "config.json")


def encoder_of(hf: PretrainedConfig) -> VisionEncoder | None:
    """Return the vision encoder of a vision-language model; None for other models."""
    whole = getattr(hf, "vision_language", None)
    return None if whole is None else VisionEncoder.from_config(whole, hf.hidden_size, "config.json")


def image_settings(hf: PretrainedConfig) -> ImageSettings:
    """Return how a vision-language model turns pixels into its encoder's input."""
    encoder = encoder_of(hf)
    assert encoder is not None, "a vision-language model"
    return ImageSettings.from_config(encoder, hf.preprocessor, PREPROCESSOR)


def visual_tensors(hf: PretrainedConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of the vision part: parameter name -> (name in a checkpoint, shape)."""
    sight = vision_of(hf)
    if sight is not None:
        return {f"vision.{name}": tensor for name, tensor in sight.tensors.items()}
    encoder = encoder_of(hf)
    return {} if encoder is None else {f"visual.{name}": tensor for name, tensor in encoder.tensors.items()}


def stacks_experts(hf: PretrainedConfig) -> bool:
    """Return whether this model's checkpoints store the matrices of all experts of a layer as one tensor, although its
    weight table has the names of single experts."""
    whole = getattr(hf, "vision_language", None)
    return whole is not None and whole["model_type"] == "qwen3_vl_moe"


def checkpoint_names(hf: PretrainedConfig) -> Callable[[str], str]:
    """Return the function from a language model's name of a tensor to its name in checkpoints of this model."""
    if getattr(hf, "policy", None) is not None:
        return LANGUAGE_MODEL.__add__
    whole = getattr(hf, "vision_language", None)
    return str if whole is None else partial(canonical_name, whole["model_type"], vision=True)


def check_layout(hf: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Raise an error if the layout does not divide the model; the error names the sizes that divide it."""
    raise_problems(layout_problems("parallel", parallel, facts_of(hf)))
