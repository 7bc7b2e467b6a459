"""Draft heads (multi-token prediction): what exports and conversions have of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.artifacts.facts import facts_from_config, model_facts
from megarl.checks.weights import check_weights
from megarl.commands.convert import convert
from megarl.config.model import ModelConfig
from megarl.models.weights import export_weights
from tests.dist import single_process, world
from tests.models.tiny import build_tiny, save_tiny

AFTER = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
APART = ("qwen3_5_text", "qwen3_next")


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def add_head(folder: Path, model_type: str) -> dict[str, Tensor]:
    """Add a draft head to the files of a tiny model as published ones have it, in bf16; return its tensors."""
    tensors, after = load_file(folder / "model.safetensors"), model_type in AFTER
    prefix = "model.layers.4." if after else "mtp.layers.0."
    head = {
        name.replace("model.layers.3.", prefix): t for name, t in tensors.items() if name.startswith("model.layers.3.")
    }
    names = (
        ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        if after
        else (*("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),)
    )
    outer = "model.layers.4." if after else "mtp."
    shapes = [(64, 128), (64,), (64,), (64,)]
    head |= {f"{outer}{name}.weight": torch.randn(shape) for name, shape in zip(names, shapes, strict=True)}
    head = {name: tensor.bfloat16().contiguous() for name, tensor in head.items()}
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw |= {"num_nextn_predict_layers": 1} if after else {"mtp_num_hidden_layers": 1}
    file.write_text(json.dumps(raw))
    return head


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_exports_and_conversions_keep_the_head_of_the_files(model_type, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    model = save_tiny(tmp_path / "base", model_type)
    head = add_head(tmp_path / "base", model_type)
    facts = model_facts(ModelConfig(path=str(tmp_path / "base")))
    assert facts.parameters == model.num_parameters()
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
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_without_the_files_an_export_has_no_head_and_a_warning(tmp_path):
    save_tiny(tmp_path / "base", "glm4_moe")
    add_head(tmp_path / "base", "glm4_moe")
    chunks = build_tiny(tmp_path / "base")
    (tmp_path / "base/model.safetensors").unlink()
    with pytest.warns(UserWarning, match="the export has no draft head"):
        export_weights(
            chunks, tmp_path / "out", chunks[0].hf_config, world=world(), source=tmp_path / "base", keep_draft=True
        )
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not [name for name in load_file(tmp_path / "out/model.safetensors") if name.startswith("model.layers.4.")]
