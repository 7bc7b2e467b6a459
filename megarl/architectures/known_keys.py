"""The known keys of `model.hf_config`, by architecture.

A Hugging Face configuration accepts any key, so a misspelt size silently gets the default, that of a large model. The
lists here and in the architectures' files have the keys that transformers' classes read; a test compares them.
"""

from __future__ import annotations

from typing import Any

from megarl.architectures import ARCHITECTURES
from megarl.architectures.base import ROPE_KEYS, Architecture
from megarl.architectures.generic import GENERIC
from megarl.system.errors import close_matches

OLDER = frozenset({"model_type", "output_attentions", "rope_scaling", "rope_theta", "torch_dtype"})
"""Keys that every class accepts in addition to its fields: names that older versions wrote."""

# Keys that no class reads, but that config.json files of supported models have: Qwen's distillations of R1 (use_mrope),
# DeepSeek's own code (scoring_func and others), quantised models, models with their own code, older versions and other
# trainers.
_PUBLISHED = frozenset(
    {
        *("use_mrope", "quantization_config", "compression_config", "auto_map", "tokenizer_class"),
        *("model_max_length", "unsloth_fixed", "unsloth_version"),
        *("scoring_func", "topk_method", "moe_layer_freq", "ep_size", "seq_aux", "aux_loss_alpha"),
        *("experts_per_token", "initial_context_length"),  # keys of gpt-oss's own code
        *("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # keys of draft heads
        "qk_head_dim",  # written by classes with latent attention, which compute it
    }
)


# Fields of every configuration class that do not change the model's computation here.
_FIELDS = (
    *("architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label"),
    *("initializer_range", "is_encoder_decoder", "label2id", "output_hidden_states", "pad_token_id", "problem_type"),
    *("return_dict", "transformers_version", "use_cache"),
)
ROPE_NUMBERS = frozenset(
    {
        *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor"),
        *("low_freq_factor", "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
        *("partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "truncate"),
    }
)
"""Keys of `rope_parameters`, for all kinds of scaling."""


def known_keys(model_type: str) -> frozenset[str]:
    """Return every key that the architecture's configuration class in transformers reads."""
    spec = ARCHITECTURES[model_type]
    return OLDER.union(_keys(spec) - frozenset(ROPE_KEYS), _FIELDS, spec.fields)


def _keys(spec: Architecture) -> frozenset[str]:
    """Return the keys of config.json that an architecture reads; the number of experts appears under every name that
    config.json may have for it.
    """
    names = spec.experts_keys
    return frozenset(spec.keys) if names is None else frozenset(spec.keys).difference({"num_experts"}).union(names)


def unknown_keys(hf_config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (dotted key, fix) for every key that is probably a mistake.

    No class of this model type or of its relatives reads such a key, and no published config has it.
    """
    model_type = hf_config["model_type"]
    legal = _legal(model_type)
    foreign = _foreign(model_type)
    mistakes = [(name, _fix(name, model_type, legal)) for name in _not_in(hf_config, legal) if name not in foreign]
    rope_keys = ROPE_NUMBERS | {"type"}  # the older name of rope_type
    sections: dict[str, Any] = {name: hf_config.get(name) for name in ("rope_parameters", "rope_scaling")}
    if ARCHITECTURES[model_type].rope.local_theta is not None and isinstance(sections["rope_parameters"], dict):
        sections |= {f"rope_parameters.{name}": values for name, values in sections.pop("rope_parameters").items()}
    for section, values in sections.items():
        if isinstance(values, dict):
            mistakes += [
                (f"{section}.{name}", _fix(name, model_type, rope_keys)) for name in _not_in(values, rope_keys)
            ]
    return mistakes


def ignored_keys(hf_config: dict[str, Any]) -> list[str]:
    """Return the keys that only other models or programs read; published config.json files have such keys."""
    legal, foreign = _legal(hf_config["model_type"]), _foreign(hf_config["model_type"])
    return [name for name in _not_in(hf_config, legal) if name in foreign]


def _legal(model_type: str) -> frozenset[str]:
    return known_keys(model_type) | _keys(ARCHITECTURES[model_type]) | (frozenset(GENERIC) - _PUBLISHED)


def _foreign(model_type: str) -> frozenset[str]:
    """Return keys that a config.json of `model_type` may inherit from other classes, or that no class reads.

    Keys of experts are excluded if the class has no experts, since they describe another model.
    """
    sparse = {name for name in ARCHITECTURES if "num_experts" in ARCHITECTURES[name].keys}
    relatives = [name for name in ARCHITECTURES if model_type in sparse or name not in sparse]
    return _PUBLISHED.union(*(_legal(name) for name in relatives))


def _not_in(values: dict[str, Any], known: frozenset[str]) -> list[str]:
    """Return the unknown keys, except keys that begin with `_`, which transformers' classes write."""
    return [name for name in values if name not in known and not name.startswith("_")]


def _fix(name: str, model_type: str, known: frozenset[str]) -> str:
    close = close_matches(name, sorted(known))
    return f"did you mean {close[0]}?" if close else f"remove it: transformers' {model_type} has no such key"
