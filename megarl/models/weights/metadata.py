"""The files of a Hugging Face folder other than the weights: config.json, generation_config.json, tokenizer files.

Programs with transformers 4 and 5 read the same model from them. transformers 5 keeps RoPE in `rope_parameters`;
version 4 and programs built on it only read `rope_theta` and `rope_scaling`. The number of experts also has two names.
Both forms are written. Files of the source model are copied; only a plain tokenizer's class gets its older name.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.architectures import ARCHITECTURES
from megarl.architectures.values import read_keys
from megarl.artifacts.action_statistics import FILE, write_statistics
from megarl.artifacts.facts import hub_snapshot, is_hub_name
from megarl.artifacts.model_files import TOKENIZER_FILES
from megarl.artifacts.vla_folder import PREPROCESSOR, VIDEO_PREPROCESSOR
from megarl.models.hf import encoder_of, image_settings, value_bias

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_TOKENIZER_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"


def write_metadata(
    folder: Path,
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    *,
    value_head: bool = False,
    classifies: bool = False,
    source: str | Path | None = None,
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files; for a robot policy also its action
    statistics.

    Args:
        tokenizer: the files it was read from are copied if they still exist.
        classifies: the value head scores whole sequences, not tokens.
        source: folder or hub name of the original model, whose generation_config.json is copied.
    """
    name, policy = str(dtype).removeprefix("torch."), getattr(hf_config, "policy", None)
    padding: int | None = None
    if getattr(hf_config, "vision_language", None) is not None:
        _write_vision_language(folder, hf_config, name)
        if not value_head:
            _write_generation_config(folder, hf_config, source)
    elif policy is None:
        _write_config(folder, hf_config, name, value_head=value_head)
        if classifies:
            padding = _name_classifier(folder, hf_config, tokenizer)
        if not value_head:
            _write_generation_config(folder, hf_config, source)
    else:  # a robot policy, for which transformers has no class: keep its config
        (folder / "config.json").write_text(json.dumps(policy | {"torch_dtype": name}, indent=2))
        if statistics := getattr(hf_config, "action_statistics", None):
            write_statistics(folder / FILE, statistics)
        if hf_config.preprocessor is not None:
            (folder / PREPROCESSOR).write_text(json.dumps(hf_config.preprocessor, indent=2) + "\n")
    if tokenizer is not None and not copy_tokenizer(_folder_of(tokenizer.name_or_path), folder):
        tokenizer.save_pretrained(folder)
        _name_older_class(folder / _TOKENIZER_CONFIG)
    if tokenizer is not None and padding is not None and padding != tokenizer.pad_token_id:
        _name_padding(folder, tokenizer.convert_ids_to_tokens(padding))


def write_draft_layers(folder: Path, hf_config: PretrainedConfig, layers: int) -> None:
    """Write to config.json how many layers the draft head in the folder has (0: the folder has no head).

    Engines then look for this head. A key that the model's config does not have is left out, as SGLang needs none.
    """
    draft, file = ARCHITECTURES[hf_config.model_type].draft, folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    section = written.get("text_config", written)
    if draft is None or draft.keys[0] not in section:
        return
    section[draft.keys[0]] = layers
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path | None, folder: Path) -> bool:
    """Copy the tokenizer files in `source` to `folder`; return whether there are any."""
    if source is None or not any((source / name).is_file() for name in ("tokenizer.json", _TOKENIZER_CONFIG)):
        return False
    for pattern in TOKENIZER_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                target = folder / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    _name_older_class(folder / _TOKENIZER_CONFIG)
    return True


def older_rope_keys(rope_parameters: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` of transformers 4 for the `rope_parameters` of transformers 5.

    >>> older_rope_keys({"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, 64)
    {'rope_theta': 500.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    >>> longrope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 500.0}
    >>> older_rope_keys({**longrope, "original_max_position_embeddings": 32}, 64)["rope_scaling"]
    {'short_factor': [1.0], 'long_factor': [2.0], 'type': 'longrope'}

    Args:
        max_positions: max_position_embeddings of the model; yarn without a factor uses its ratio to the original
            length, which transformers 4 needs as a number.
    """
    scaling = {key: value for key, value in rope_parameters.items() if key not in ("rope_theta", "type")}
    # transformers 4 reads this key beside the section `rope_scaling`, and so does version 5 if the section exists.
    partial = scaling.pop("partial_rotary_factor", None)
    older: dict[str, Any] = {} if partial is None else {"partial_rotary_factor": partial}
    if scaling.get("rope_type", "default") == "default":
        sections = {key: value for key, value in scaling.items() if key.startswith("mrope_")}
        scaled = {"rope_type": "default", **sections} if sections else None
        return {"rope_theta": rope_parameters["rope_theta"], "rope_scaling": scaled, **older}
    if scaling["rope_type"] == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = max_positions / scaling["original_max_position_embeddings"]
    # In a longrope section transformers 4 allows no keys but the factors and the kind, under its older name `type`.
    if scaling["rope_type"] == "longrope":
        older["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        scaling["type"] = scaling.pop("rope_type")
    return {"rope_theta": rope_parameters["rope_theta"], "rope_scaling": scaling, **older}


def _write_config(folder: Path, hf_config: PretrainedConfig, dtype: str, *, value_head: bool) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    config = copy.deepcopy(hf_config)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    if value_head:  # transformers does not have this class for every model
        classifier = name.replace("ForCausalLM", "ForTokenClassification")
        name = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, classifier)
    config.architectures = [name]
    config.dtype = dtype
    if (draft := ARCHITECTURES[config.model_type].draft) is not None and draft.follows:
        setattr(config, draft.keys[0], 0)  # `write_draft_layers` changes it if the head is exported
    if value_head:
        config.num_labels = 1
        config.token_classification_bias = value_bias(config)  # otherwise transformers adds a bias
    config.save_pretrained(folder)
    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    values = read_keys(written)
    if (further := ARCHITECTURES[config.model_type].written) is not None:
        written |= further(values)
    written |= _older_keys(written, config.model_type, values.get("num_experts"))
    written["torch_dtype"] = dtype
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _older_keys(written: dict[str, Any], architecture: str, experts: int | None) -> dict[str, Any]:
    """Return the keys of a language model's config.json that only transformers 4 reads."""
    parameters, local = written["rope_parameters"], {}
    if "sliding_attention" in parameters:  # the older keys, except `local`, are those of layers without a window
        local = {"rope_local_base_freq": parameters["sliding_attention"]["rope_theta"]}
        parameters = parameters["full_attention"]
    key = ARCHITECTURES[architecture].rope.local_theta
    older = older_rope_keys(parameters, written["max_position_embeddings"])
    older |= local if key is not None and key[0] in ARCHITECTURES[architecture].keys else {}
    return older | dict.fromkeys(ARCHITECTURES[architecture].experts_keys or (), experts)


def _name_classifier(
    folder: Path, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> int | None:
    """Turn config.json into that of a sequence classifier, and return the id of its padding token; None if no token is
    suitable.

    transformers scores a text at its last token that is not padding, so the padding token must not be the end token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    ends = list(hf_config.eos_token_id) if isinstance(hf_config.eos_token_id, list) else [hf_config.eos_token_id]
    known: list[int | None] = [hf_config.pad_token_id]
    if tokenizer is not None:
        ends.append(tokenizer.eos_token_id)
        # Candidates for padding, with which no text ends: the tokenizer's own padding token, the BOS token, and special
        # tokens that the chat template does not use.
        template, text_of = str(tokenizer.chat_template or ""), tokenizer.convert_ids_to_tokens
        known += [tokenizer.pad_token_id, tokenizer.bos_token_id]
        known += [token for token in tokenizer.all_special_ids if str(text_of(token)) not in template]
    padding = next((token for token in known if token is not None and token not in ends), None)
    if padding is None and tokenizer is not None:
        warnings.warn(
            f"{folder}: the tokenizer has no special token for padding other than the end token, so transformers can "
            "score only one text at a time with this reward model. To score batches, add a pad_token to "
            "tokenizer_config.json before training",
            stacklevel=2,
        )
    name = str(written["architectures"][0]).replace("ForTokenClassification", "ForSequenceClassification")
    written["architectures"] = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(hf_config.model_type, name)]
    written["pad_token_id"] = padding
    written.pop("token_classification_bias", None)
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return padding


def _name_padding(folder: Path, token: str) -> None:
    """Write `token` as the padding token into the files of a tokenizer."""
    for name in (_TOKENIZER_CONFIG, "special_tokens_map.json"):
        file = folder / name
        if file.is_file():
            settings = json.loads(file.read_text(encoding="utf-8")) | {"pad_token": token}
            file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_vision_language(folder: Path, hf_config: PretrainedConfig, dtype: str) -> None:
    """Write a vision-language model's config.json, and preprocessor_config.json for its processor."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = AutoConfig.for_model(**hf_config.vision_language)
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type]]
    config.dtype = dtype
    config.save_pretrained(folder)
    _complete_decoder(folder / "config.json", hf_config, dtype)
    processor = hf_config.preprocessor
    if processor is None:
        settings = image_settings(hf_config)
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
            "image_mean": settings.mean,
            "image_std": settings.deviation,
            "patch_size": settings.patch,
            "merge_size": settings.merge,
            "temporal_patch_size": config.vision_config.temporal_patch_size,
        }
    (folder / PREPROCESSOR).write_text(json.dumps(processor, indent=2) + "\n")
    # without this file transformers takes a video processor's settings from preprocessor_config.json
    if hf_config.video_preprocessor not in (None, hf_config.preprocessor):
        (folder / VIDEO_PREPROCESSOR).write_text(json.dumps(hf_config.video_preprocessor, indent=2) + "\n")


def _complete_decoder(file: Path, hf_config: PretrainedConfig, dtype: str) -> None:
    """Add to a vision-language model's config.json what transformers 4 and SGLang read.

    These are the position sections in RoPE's keys, `Architecture.written`, the keys that only transformers 4 reads, a
    key of the encoder's part, and the embedding tie and the dtype at the top level.
    """
    encoder = encoder_of(hf_config)
    assert encoder is not None, "a vision-language model"
    written = json.loads(file.read_text(encoding="utf-8"))
    text = written["text_config"]
    text["rope_parameters"]["mrope_section"] = list(encoder.sections)
    if encoder.interleaved:
        text["rope_parameters"]["mrope_interleaved"] = True
    values = read_keys({**text, "model_type": hf_config.model_type})
    if (further := ARCHITECTURES[hf_config.model_type].written) is not None:
        text |= further(values)
    # The number of experts is in the file even if no layer has experts, because transformers refuses null.
    text |= _older_keys(text, hf_config.model_type, values.get("num_experts"))
    vision = written["vision_config"]  # add keys that published files have and transformers does not write
    if encoder.form.learned:
        vision.setdefault("deepstack_visual_indexes", list(encoder.deepstack))
    else:
        vision.setdefault("in_chans", vision["in_channels"])
    text["tie_word_embeddings"] = written["tie_word_embeddings"] = hf_config.tie_word_embeddings
    written["torch_dtype"] = dtype
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_generation_config(folder: Path, hf_config: PretrainedConfig, source: str | Path | None) -> None:
    """Copy the source's generation_config.json, which engines read, if it exists.

    Without a source, write what transformers derives from the config."""
    from transformers import GenerationConfig

    original = _folder_of(source)
    if original is not None and (original / _GENERATION).is_file():
        shutil.copyfile(original / _GENERATION, folder / _GENERATION)
    elif original is None:
        GenerationConfig.from_model_config(hf_config).save_pretrained(folder)


def _folder_of(name: str | Path | None) -> Path | None:
    """Return the local folder of a path or hub name; None if it is not on this machine."""
    if not name:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    return hub_snapshot(str(name)) if is_hub_name(str(name)) else None


def _name_older_class(file: Path) -> None:
    """Set the class and special tokens of a plain tokenizer in the form that transformers 4 and 5 both read."""
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") != "TokenizersBackend":
        return
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
