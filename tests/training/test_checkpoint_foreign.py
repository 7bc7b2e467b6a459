"""Checkpoints of other models than the run's: refused on all ranks, before anything is loaded."""

from pathlib import Path

import pytest

from megarl.training import checkpoint
from megarl.training.shards import CheckpointError
from tests.dist import run_distributed, world
from tests.training import cases
from tests.training.test_checkpoint import _engine, _hashes


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_loaded(alone, tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"actor": _engine("dense", {})}, {})
    other = _engine("moe", {})
    before = _hashes(other)
    with pytest.raises(
        CheckpointError, match=r"to a different model(?s:.*)no actor\.decoder.*experts(?s:.*)resume=never"
    ):
        checkpoint.load(folder, {"actor": other})
    assert _hashes(other) == before


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_hidden_layers": 1}, r"actor\.decoder\.layers\.1\S+ is in the checkpoint only"),
        ({"tie_word_embeddings": True}, r"actor\.output_layer\.weight is in the checkpoint only"),
        ({"vocab_size": 120}, "actor has a vocabulary of 131 tokens, expected 120"),
    ],
)
def test_a_smaller_model_does_not_take_a_part_of_a_checkpoint(alone, tmp_path, monkeypatch, changes, found):
    folder = checkpoint.save(tmp_path, 1, {"actor": _engine("dense", {})}, {})
    monkeypatch.setitem(cases.MODELS, "dense", {**cases.MODELS["dense"], **changes})
    other = _engine("dense", {}, layers=changes.get("num_hidden_layers", 2))
    before = _hashes(other)
    with pytest.raises(CheckpointError, match=f"belongs to a different model(?s:.*){found}"):
        checkpoint.load(folder, {"actor": other})
    assert _hashes(other) == before


def _a_stage_is_foreign(root: str) -> str:
    """What this pipeline stage is told; only the second one lacks a parameter."""
    folder = checkpoint.save(Path(root), 1, {"actor": _engine("tied", {"pp": 2})}, {})
    other = _engine("dense", {"pp": 2})
    try:
        checkpoint.check_model(folder, checkpoint.verify(folder, world()), {"actor": other}, world())
    except CheckpointError as error:
        return str(error)
    return "nothing"


@pytest.mark.procs
def test_all_stages_refuse_what_is_foreign_to_one(tmp_path):
    first, second = run_distributed(_a_stage_is_foreign, 2, 120, str(tmp_path))
    assert first == second
    assert "no actor.output_layer.weight" in first
