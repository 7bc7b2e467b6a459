"""Models with gated delta nets: files of published models, and their sizes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.artifacts.facts import facts_from_config
from megarl.artifacts.layout import context_problem
from megarl.checks.weights import check_weights
from megarl.config.model import ParallelConfig
from tests.dist import single_process
from tests.models.tiny import build_tiny, save_tiny


def test_the_language_model_of_a_model_with_images_is_read_alone(tmp_path, capsys):
    """Published models nest it, and have a vision encoder and layers that predict further tokens."""
    single_process()
    save_tiny(tmp_path / "text", "qwen3_5_text")
    nested = tmp_path / "nested"
    nested.mkdir()
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"mtp.norm.weight": torch.ones(2), "model.visual.merger.norm.weight": torch.ones(2)}
    save_file(renamed | others, nested / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (nested / "config.json").write_text(json.dumps(whole))
    (alone,), (read,) = build_tiny(tmp_path / "text"), build_tiny(nested)
    printed = capsys.readouterr().out
    assert "1 tensor of parts that are not used, neither read nor exported" in printed
    assert "and 1 tensor of its draft head" in printed
    for (name, expected), found in zip(alone.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(found, expected), name
    facts = facts_from_config(whole, "config.json")
    assert check_weights(nested, facts)
    assert facts.parameters == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(("tp", "cp", "allowed"), [(1, 16, None), (4, 8, "1, 2, 4"), (1, 3, "1, 2, 4, 8, 16")])
def test_context_parallel_ranks_share_key_heads_evenly(tp, cp, allowed):
    """Qwen3-Next has 16 key heads."""
    facts = facts_from_config({"model_type": "qwen3_next"}, "the defaults")
    problem = context_problem("actor.parallel", ParallelConfig(tp=tp, cp=cp), facts)
    assert (problem and problem.allowed) == allowed
