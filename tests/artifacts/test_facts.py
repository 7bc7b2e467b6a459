import json
from dataclasses import replace

import pytest

from megarl.architectures import ARCHITECTURES
from megarl.artifacts import facts
from megarl.artifacts.facts import model_facts
from megarl.config.model import ModelConfig
from megarl.system.errors import ConfigError


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.mark.parametrize("model_type", facts.ARCHITECTURES)
def test_defaults_agree_with_transformers(model_type):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type)
    ours = model_facts(ModelConfig(hf_config={"model_type": model_type}))
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.layers, ours.hidden, ours.heads) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.num_attention_heads,
    )
    assert (ours.kv_heads, ours.head_dim, ours.vocab) == (theirs.num_key_value_heads, head_dim, theirs.vocab_size)
    assert (ours.max_positions, ours.tied) == (theirs.max_position_embeddings, theirs.tie_word_embeddings)
    assert ours.ffn == (getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size)
    assert ours.experts == getattr(theirs, "num_local_experts", getattr(theirs, "num_experts", 0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_parameters", {"rope_type": "longrope"}),
        ("rope_scaling", {"type": "dynamic"}),
    ],
)
def test_variants_that_would_be_computed_differently_are_refused(key, value):
    small = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts.facts_from_config(small, "here")
    with pytest.raises(ConfigError, match=r"this variant is not supported"):
        facts.facts_from_config({**small, key: value}, "here")


def test_a_key_for_attention_biases_must_be_the_switch_of_the_architecture(monkeypatch):
    biased = replace(ARCHITECTURES["qwen2"], keys={**ARCHITECTURES["qwen2"].keys, "attention_bias": True})
    monkeypatch.setitem(ARCHITECTURES, "qwen2", biased)
    small = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts.facts_from_config({**small, "num_key_value_heads": 4}, "here")
    with pytest.raises(ConfigError, match=r"attention_bias: this variant is not supported[\s\S]*allowed: true"):
        facts.facts_from_config({**small, "num_key_value_heads": 4, "attention_bias": False}, "here")


def test_hub_cache_comes_before_the_known_models(tmp_path):
    cache = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-8B"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc\n")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "snapshots" / "abc" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "num_hidden_layers": 7})
    )
    assert model_facts(ModelConfig(path="Qwen/Qwen3-8B")).layers == 7


def test_unknown_hub_name_has_no_facts():
    assert model_facts(ModelConfig(path="nobody/nothing")) is None


MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_have_two_names_and_the_one_that_transformers_sets_last_counts(name):
    assert facts.facts_from_config({**MOE, name: 6}, "here").experts == 6
    both = {"num_experts": 6, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert facts.facts_from_config({**MOE, **both}, "here").experts == 8
    assert facts.facts_from_config({**MOE, **both, "model_type": "mixtral"}, "here").experts == 6


def test_dense_layers_of_a_mixture_are_counted_as_such():
    model = facts.facts_from_config({**MOE, "num_experts": 6, "mlp_only_layers": [0, 1, 2]}, "here")
    assert model.dense_layers == 3
    assert model.layers * model.expert_parameters == 3 * 64 * 48 * 6
    dense = facts.facts_from_config({**MOE, "num_experts": 0}, "here")
    assert (dense.is_moe, dense.ffn, dense.dense_ffn) == (False, 96, 0)


def test_a_dense_model_has_no_experts_whatever_its_config_says():
    small = {**MOE, "model_type": "qwen3", "num_experts": 4, "num_local_experts": 4}
    assert not facts.facts_from_config(small, "here").is_moe


def test_rope_scaling_comes_before_rope_parameters_as_in_transformers():
    raw = {**MOE, "num_experts": 4, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match="here: rope_scaling"):
        facts.facts_from_config({**raw, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "here")


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        (facts.SMALL_MODEL, "run `make smollm2` in"),
        ("/nowhere/x/model", "check the path"),
        ("./nowhere/x/model", "check the path; relative paths start at"),
    ],
)
def test_advice_for_a_missing_folder_fits_its_path(path, fix, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="model folder does not exist") as caught:
        model_facts(ModelConfig(path=path))
    assert caught.value.fix.startswith(fix)
    assert ("relative" in caught.value.fix) == ("relative" in fix)
