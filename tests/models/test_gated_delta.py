"""Models with gated delta nets against transformers: gradients of every parameter."""

import json
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from megarl.artifacts.facts import facts_from_config
from megarl.artifacts.layout import context_problem
from megarl.checks.weights import check_weights
from megarl.config.model import ParallelConfig
from megarl.models.packing import pack_stream
from megarl.models.weight_table import as_index
from megarl.models.weights.fill import local_shards
from tests.dist import single_process
from tests.models.tiny import build_tiny, save_tiny

MODELS = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
LENGTHS = [70, 3, 1, 25]


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1], tokens[1:], reduction="sum") if len(tokens) > 1 else logits.sum()


def single_experts(name: str, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint that transformers holds as one parameter."""
    block, _, projection = name.rpartition("experts.")
    if projection not in ("gate_up_proj", "down_proj"):
        yield name, stacked
        return
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    for expert, matrices in enumerate(stacked):
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
            yield f"{block}experts.{expert}.{part}.weight", matrix


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_parameters_equal_transformers(name, tmp_path):
    single_process()
    reference = save_tiny(tmp_path, name)
    (model,) = build_tiny(tmp_path)
    tokens = torch.randint(0, 131, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))
    stream = pack_stream(LENGTHS)
    hidden = model(stream.input_ids(tokens), stream.position_ids, None, packed_seq_params=stream.params)
    logits = F.linear(hidden[:, 0], model.lm_head_weight)
    parts = list(zip(logits.split(LENGTHS), tokens.split(LENGTHS), strict=True))
    sum(loss(out, part) for out, part in parts).backward()
    sum(loss(reference(input_ids=part[None]).logits[0], part) for _, part in parts).backward()
    theirs = dict(each for name, tensor in reference.named_parameters() for each in single_experts(name, tensor.grad))
    for shard, parameter in local_shards([model]):
        for piece in shard.pieces:
            torch.testing.assert_close(
                parameter.grad[as_index(piece.target_region)],
                theirs[piece.source][as_index(piece.source_region)],
                atol=5e-4,
                rtol=1e-3,
                msg=lambda text, piece=piece: f"{piece.source}: {text}",
            )


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
    assert "2 tensors of parts that are not supported are not read" in capsys.readouterr().out
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
