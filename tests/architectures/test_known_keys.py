"""The keys that `model.hf_config` may hold are those that transformers' classes read."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from megarl.architectures import ARCHITECTURES
from megarl.architectures.base import ROPE_KEYS
from megarl.architectures.generic import GENERIC
from megarl.architectures.known_keys import OLDER, ROPE_NUMBERS, ignored_keys, known_keys, unknown_keys
from tests.models.tiny import save_tiny, two_layers


def read_by_transformers(model_type: str) -> set[str]:
    """Fields of the configuration class, their other names, and what the model itself reads."""
    from transformers import AutoConfig

    cls = type(AutoConfig.for_model(model_type))
    model = importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
    read = re.findall(r'getattr\((?:self\.)?config, "(\w+)"', Path(str(model.__file__)).read_text())
    read += re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', inspect.getsource(cls))
    fields = set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"}
    return fields | set(cls.attribute_map) | set(cls.attribute_map.values()) | set(read)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_table_is_what_transformers_reads(model_type: str) -> None:
    everywhere = OLDER.union(ROPE_KEYS)
    assert known_keys(model_type) - everywhere == read_by_transformers(model_type) - everywhere


def test_keys_of_rope_are_what_transformers_reads() -> None:
    from transformers.modeling_rope_utils import RopeParameters

    assert set(RopeParameters.__annotations__) == ROPE_NUMBERS


@pytest.mark.parametrize("old", sorted(OLDER - {"model_type"}))
def test_older_names_still_count(old: str) -> None:
    from transformers import AutoConfig

    values = {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}, "torch_dtype": "float16"}
    config = AutoConfig.for_model("qwen3", **{old: values.get(old, True)}).to_dict()
    default = AutoConfig.for_model("qwen3").to_dict()
    assert config != default


@pytest.mark.parametrize(
    ("hf_config", "wrong", "fix"),
    [
        ({"hiden_size": 64}, "hiden_size", "did you mean hidden_size?"),
        ({"n_layer": 2}, "n_layer", "remove it: transformers' qwen3 has no such key"),
        ({"num_experts": 4}, "num_experts", "remove it: transformers' qwen3 has no such key"),
        ({"rope_parameters": {"rope_type": "linear", "facter": 2}}, "rope_parameters.facter", "did you mean factor?"),
        ({"rope_scaling": {"type": "linear", "factor_": 2}}, "rope_scaling.factor_", "did you mean factor?"),
    ],
)
def test_an_unknown_key_is_named_with_its_fix(hf_config: dict, wrong: str, fix: str) -> None:
    ((key, found),) = unknown_keys({"model_type": "qwen3", "hidden_size": 64, **hf_config})
    assert (key, found) == (wrong, fix)


def test_what_a_config_json_holds_is_known(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for model_type in ARCHITECTURES:
        AutoConfig.for_model(model_type).save_pretrained(tmp_path)
        assert unknown_keys(json.loads((tmp_path / "config.json").read_text())) == []


@pytest.mark.parametrize(
    ("model_type", "published", "ignored"),
    [
        ("qwen3_moe", {"max_window_layers": 48, "head_dim": 128}, ["max_window_layers"]),  # Qwen3-30B-A3B
        ("qwen2", {"use_mrope": False, "use_sliding_window": False}, ["use_mrope"]),  # R1-Distill-Qwen
        ("llama", {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 8192}, []),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ("mixtral", {"norm_topk_prob": True, "decoder_sparse_step": 1}, ["norm_topk_prob", "decoder_sparse_step"]),
    ],
)
def test_keys_of_published_configs_are_no_slips(model_type: str, published: dict, ignored: list[str]) -> None:
    raw = {"model_type": model_type, **published}
    assert unknown_keys(raw) == []
    assert ignored_keys(raw) == ignored


# Looked up by transformers of a configuration that has none of them, and without effect on what the model computes: of
# generation, of training a classifier, of loading, of caches that a model without them never has, of other kinds.
_HARMLESS = {
    *("attn_implementation", "name_or_path", "gradient_checkpointing", "ignore_keys_at_rope_validation", "num_heads"),
    *(
        "attention_chunk_size",
        "intermediate_size",
        "kv_sharing_modes",
        "layer_types",
        "mlp_layer_types",
        "mtp_layer_types",
        "number_of_conv_states",
        "sliding_window",
    ),
    *("classifier_dropout", "hidden_dropout", "token_classification_bias"),
    "qk_head_dim",
    *("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"),
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_all_that_transformers_looks_up_while_it_runs_a_model_is_known(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of no class's list of fields would otherwise change a model without a word, as is_causal does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedConfig

    save_tiny(tmp_path, model_type, **two_layers(model_type))
    looked_up: set[str] = set()
    kind = type(AutoConfig.from_pretrained(tmp_path))
    found = kind.__getattribute__

    def recorded(self: Any, name: str) -> Any:
        looked_up.add(name)
        return found(self, name)

    monkeypatch.setattr(kind, "__getattribute__", recorded)
    tokens = torch.arange(8)[None]
    classes = [AutoModelForCausalLM]
    if kind in AutoModelForTokenClassification._model_mapping:
        classes.append(AutoModelForTokenClassification)
    for model_class in classes:
        for attention in ("eager", "sdpa") if AutoModelForCausalLM._model_mapping[kind]._supports_sdpa else ("eager",):
            model = model_class.from_pretrained(tmp_path, attn_implementation=attention).train()
            model(input_ids=tokens, labels=tokens.clamp(max=1))
            model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    of_the_class = {name for name in dir(PreTrainedConfig) if name not in GENERIC}
    generation = set(transformers.GenerationConfig._get_default_generation_params())
    known = known_keys(model_type) | set(ARCHITECTURES[model_type].keys) | set(GENERIC) | generation | _HARMLESS
    assert {name for name in looked_up - of_the_class - known if not name.startswith("_")} == set()
