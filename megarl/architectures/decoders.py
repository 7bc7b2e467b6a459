"""The language models inside Qwen's vision-language models: configuration, names of tensors, use without an encoder.

Each is a language model of this package (`DECODERS`), except that positions have three numbers per token. Source: the
configuration files of these models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Model type -> architecture of its decoder.
DECODERS = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
#: Model types whose vision encoder is not read unless the recipe has images or asks for it.
_ON_DEMAND = ("qwen3_5", "qwen3_5_moe")


class Prefixes(NamedTuple):
    """Prefixes of the names of the decoder's tensors (without the head) and the encoder's tensors in checkpoints."""

    decoder: str
    encoder: str


_FLAT, _NESTED = Prefixes("model.", "visual."), Prefixes("model.language_model.", "model.visual.")
_QWEN2 = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
#: Default sizes of decoders in which their configuration classes differ from the classes of `DECODERS`.
_DECODER_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": {"max_position_embeddings": 128000, "rope_theta": 5e5},
    "qwen3_vl_moe": {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "rope_theta": 5e5,
    },
}
_OF_POSITIONS = ("mrope_section", "mrope_interleaved")
_OF_IMAGES = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def reads_vision(model_type: object, vision: bool | None) -> bool:
    """Return whether a model's vision encoder is loaded; `vision` is the recipe key `model.vision`."""
    if model_type not in DECODERS:
        return False
    return model_type not in _ON_DEMAND if vision is None else vision


def prefixes(model_type: object) -> Prefixes:
    """Return the prefixes of tensor names in checkpoints that transformers writes."""
    return _FLAT if model_type in ("qwen2_vl", "qwen2_5_vl") else _NESTED


def canonical_name(model_type: object, stored: str, *, vision: bool) -> str:
    """Translate a tensor's name from any form in published files.

    With `vision` the prefixes are those of `prefixes`, otherwise those of the language model's own class. Names of
    models without images stay as they are.
    """
    if model_type not in DECODERS:
        return stored
    written = prefixes(model_type) if vision else _FLAT
    for form in (_NESTED, _FLAT):
        for prefix, replaced in ((form.encoder, written.encoder), (form.decoder, written.decoder)):
            if stored.startswith(prefix):
                return replaced + stored.removeprefix(prefix)
    return stored


def module_name(stored: str) -> str:
    """Return the name that a tensor of a vision-language model has in the modules of transformers 5, where files may
    have older names.

    >>> module_name("model.layers.0.mlp.up_proj.weight")
    'model.language_model.layers.0.mlp.up_proj.weight'
    """
    return canonical_name("qwen3_vl", stored, vision=True)


def is_left_out(model_type: object, stored: str, *, vision: bool) -> bool:
    """Return whether a tensor of a checkpoint is not read: it belongs to a vision encoder that is not used."""
    return not vision and model_type in DECODERS and stored.startswith((_NESTED.encoder, _FLAT.encoder))


def decoder_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's section of a config.json; older files have the decoder's keys at the top level."""
    kind = str(raw["model_type"])
    section = raw.get("text_config") or {key: value for key, value in raw.items() if key != "vision_config"}
    text = {**_DECODER_DEFAULTS.get(kind, {}), **section}
    if kind == "qwen3_vl_moe":
        text["norm_topk_prob"] = True  # the router of this model always normalises
        if "num_local_experts" in section:  # another name of num_experts
            text["num_experts"] = section["num_local_experts"]
    return text


def decoder_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's config as that of a language model, from a vision-language model's config.json."""
    kind, text = str(raw["model_type"]), decoder_section(raw)
    tied = raw.get("tie_word_embeddings", False)
    # Files of Qwen2-VL and Qwen2.5-VL before transformers 5 have this key in the decoder's section.
    inside = kind in ("qwen2_vl", "qwen2_5_vl") and text.get("tie_word_embeddings", False)
    text["tie_word_embeddings"] = tied or inside
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            scaling = {name: value for name, value in text[key].items() if name not in _OF_POSITIONS}
            scaling |= {name: "default" for name in ("type", "rope_type") if scaling.get(name) == "mrope"}
            text[key] = scaling
    for key in _OF_IMAGES:
        text.pop(key, None)
    return {**text, "model_type": DECODERS[kind]}
