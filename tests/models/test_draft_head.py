"""Draft heads (multi-token prediction): what exports and conversions have of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megarl.artifacts.facts import facts_from_config, model_facts
from megarl.checks.weights import check_weights
from megarl.commands.convert import convert
from megarl.config.model import ModelConfig
from megarl.models.weights import export_weights
from megarl.models.weights.draft import KeptDraft
from tests.dist import single_process, world
from tests.models.draft_oracle import AFTER, DraftOracle
from tests.models.tiny import build_tiny


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_exports_and_conversions_keep_the_head_of_the_files(model_type, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    oracle = DraftOracle(model_type)
    model, head = oracle.policy, oracle.save(tmp_path / "base", dtype=torch.bfloat16)
    facts = model_facts(ModelConfig(path=str(tmp_path / "base")))
    assert facts.parameters == model.num_parameters()
    counted = [tensor for name, tensor in head.items() if not name.endswith("e_score_correction_bias")]
    assert facts.draft_parameters == sum(map(torch.numel, counted))
    assert f"and {len(head)} tensors of its draft head" in check_weights(tmp_path / "base", facts)
    chunks = build_tiny(tmp_path / "base")
    hf = chunks[0].hf_config
    export_weights(chunks, tmp_path / "out", hf, world=world(), source=tmp_path / "base", keep_draft=True)
    assert "the head was not trained" in capsys.readouterr().out
    convert(tmp_path / "out", tmp_path / "converted", dtype="bf16")
    key = "num_nextn_predict_layers" if model_type in AFTER else "mtp_num_hidden_layers"
    for folder in (tmp_path / "out", tmp_path / "converted"):
        written = load_file(folder / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in written.items() if name in head} == dict.fromkeys(
            head, torch.bfloat16
        )
        assert all(torch.equal(written[name], tensor) for name, tensor in head.items())
        assert len(written) == len(load_file(tmp_path / "base/model.safetensors"))
        config = json.loads((folder / "config.json").read_text())
        assert config[key] == 1
        assert facts_from_config(config, "config.json").draft_layers == 1
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **plain)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_without_the_files_an_export_has_no_head_and_a_warning(tmp_path):
    DraftOracle("glm4_moe").save(tmp_path / "base")
    chunks = build_tiny(tmp_path / "base")
    (tmp_path / "base/model.safetensors").unlink()
    with pytest.warns(UserWarning, match="the export has no draft head"):
        export_weights(
            chunks, tmp_path / "out", chunks[0].hf_config, world=world(), source=tmp_path / "base", keep_draft=True
        )
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not [name for name in load_file(tmp_path / "out/model.safetensors") if name.startswith("model.layers.4.")]


def test_experts_are_in_the_order_of_their_numbers():
    names = [f"model.layers.4.mlp.experts.{number}.up_proj.weight" for number in range(12)]
    assert KeptDraft.of(SimpleNamespace(draft=dict.fromkeys(reversed(names), 0))).names == tuple(names)
