"""Checkpoints of models with latent attention: what is read, what is left out, and what an export holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.artifacts.facts import facts_from_config, model_facts
from megarl.checks.weights import check_weights
from megarl.config.model import ModelConfig
from megarl.models.weights import export_weights
from megarl.system.errors import ConfigError
from tests.dist import single_process, world
from tests.models.tiny import build_tiny, save_tiny, tiny_dict

MODELS = ["deepseek_v3", "glm4_moe_lite"]


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def predict_ahead(folder: Path) -> None:
    """Add a layer that predicts two tokens ahead, as published files have it, after the model's four layers."""
    tensors = load_file(folder / "model.safetensors")
    layer = {name.replace(".3.", ".4."): t.clone() for name, t in tensors.items() if name.startswith("model.layers.3.")}
    layer |= {"model.layers.4.eh_proj.weight": torch.ones(64, 128), "model.layers.4.enorm.weight": torch.ones(64)}
    save_file(tensors | layer, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", MODELS)
def test_an_export_is_what_transformers_reads_without_layers_that_predict_ahead(model_type, tmp_path):
    from transformers import AutoModelForCausalLM

    model = save_tiny(tmp_path / "base", model_type)
    predict_ahead(tmp_path / "base")
    check_weights(tmp_path / "base", model_facts(ModelConfig(path=str(tmp_path / "base"))))
    chunks = build_tiny(tmp_path / "base")
    export_weights(chunks, tmp_path / "out", chunks[0].hf_config, world=world())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    assert (written["moe_layer_freq"], written["scoring_func"], written["first_k_dense_replace"]) == (1, "sigmoid", 1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    facts_from_config(written, "config.json")  # is accepted again


def test_another_layer_of_a_model_that_does_not_predict_ahead_is_refused(tmp_path):
    save_tiny(tmp_path, "qwen3")
    predict_ahead(tmp_path)
    with pytest.raises(ConfigError, match="tensors that the model in"):
        build_tiny(tmp_path)


def test_kimi_k2_is_read_as_deepseek_v3_without_its_code(tmp_path):
    expected = save_tiny(tmp_path, "deepseek_v3")
    raw = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}  # a file that is not there
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2", "auto_map": code}))
    facts = model_facts(ModelConfig(path=str(tmp_path)))
    assert (facts.model_type, facts.parameters) == ("deepseek_v3", expected.num_parameters())
    chunks = build_tiny(tmp_path)
    export_weights(chunks, tmp_path / "out", chunks[0].hf_config, world=world())
    written, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tmp_path))
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("model_type", "changes", "key"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": None, "mscale_all_dim": 1.0}}, "rope_parameters"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_other_variants_are_refused_at_their_key(model_type, changes, key):
    with pytest.raises(ConfigError, match=rf"model\.hf_config\.{key}"):
        facts_from_config(tiny_dict(model_type, **changes), "model.hf_config")


def test_the_list_of_glm_decides_which_layers_have_experts():
    types = ["sparse", "dense", "dense", "sparse"]
    facts = facts_from_config(tiny_dict("glm4_moe_lite", mlp_layer_types=types), "model.hf_config")
    assert facts.sparse == (True, False, False, True)
    assert facts_from_config(tiny_dict("glm4_moe_lite"), "model.hf_config").sparse == (False, True, True, True)


def test_latent_norms_have_the_epsilon_of_the_config(tmp_path):
    """As what serves the model, and not 1e-6 as transformers; for a model with 1e-6 there is no difference."""
    save_tiny(tmp_path, "deepseek_v3", rms_norm_eps=1e-5)
    (model,) = build_tiny(tmp_path)
    attention = model.decoder.layers[0].self_attention
    assert attention.kv_layernorm.eps == attention.q_layernorm.eps == 1e-5
