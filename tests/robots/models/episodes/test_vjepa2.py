"""Embeddings by V-JEPA 2, against transformers on random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import VJEPA2Config

from megarl.data.batch import Jagged
from megarl.robots.config import EmbeddingSettings
from megarl.robots.data.pictures import VideoPipeline
from megarl.robots.models.episodes import EpisodeEmbedder, build_embedder
from megarl.robots.simulators.protocol import Recording
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError
from tests.robots.models.episodes.made import moving_squares

SMALL = VJEPA2Config(
    patch_size=8,
    crop_size=16,
    frames_per_clip=8,
    hidden_size=24,
    num_attention_heads=2,
    num_hidden_layers=2,
    pred_hidden_size=24,
    pred_num_attention_heads=2,
    pred_num_hidden_layers=1,
    pred_num_mask_tokens=1,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.VJEPA2Model(SMALL).save_pretrained(tmp_path / "vjepa2")
    return tmp_path / "vjepa2"


def built(folder: Path, **settings: object) -> EpisodeEmbedder:
    wanted = EmbeddingSettings.model_validate({"name": "vjepa2", "path": str(folder), "clip": "calls"} | settings)
    return build_embedder(wanted, cameras=["top"], device=torch.device("cpu"), group=WorkerGroup.alone(), seed=0)


def test_embeddings_are_the_mean_of_the_models_tokens(folder: Path) -> None:
    batch = moving_squares([3, 11, 5], errors=["", "", "it crashed"])
    found = built(folder, batch_size=2).embed(batch)
    model, clip = transformers.VJEPA2Model.from_pretrained(folder).eval(), VideoPipeline(frames=8, size=16)
    assert found.shape == (3, 24)
    assert not found[2].any()
    for row in (0, 1):
        frames = torch.cat([batch["frames/top"].unbind()[row], batch["end_frames/top"][row][None]])
        with torch.no_grad():
            tokens = model(pixel_values_videos=clip(frames)[None], skip_predictor=True).last_hidden_state
        torch.testing.assert_close(found[row], tokens[0].mean(0), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[0], found[1])


def test_the_clip_of_every_environment_step_is_what_is_embedded(folder: Path) -> None:
    batch, drawn = moving_squares([3, 4]), torch.Generator().manual_seed(1)
    clips = [torch.randint(0, 256, (count, 24, 20, 3), generator=drawn, dtype=torch.uint8) for count in (8, 5)]
    batch.set("clip/top", Jagged.from_list(clips))
    embedder = built(folder, clip="steps")
    assert embedder.recording == Recording(("top",), 8)
    found = embedder.embed(batch)
    model, clip = transformers.VJEPA2Model.from_pretrained(folder).eval(), VideoPipeline(frames=8, size=16)
    for row, frames in enumerate(clips):
        with torch.no_grad():
            tokens = model(pixel_values_videos=clip(frames)[None], skip_predictor=True).last_hidden_state
        torch.testing.assert_close(found[row], tokens[0].mean(0), atol=1e-5, rtol=1e-4)
    assert built(folder).recording is None


def test_a_rank_of_which_no_episode_was_played_has_zeros(folder: Path) -> None:
    found = built(folder).embed(moving_squares([3, 4], errors=["it crashed", "it hung"]))
    assert found.shape == (2, 24)
    assert not found.any()


def test_another_kind_of_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "siglip"}))
    with pytest.raises(ConfigError, match="not a V-JEPA 2 encoder"):
        built(folder)


def test_missing_weights_are_not_drawn_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.0.attention.query.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"encoder\.layer\.0"):
        built(folder)


def test_no_checkpoint_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"robot\.reward\.embedding\.path"):
        built(tmp_path)
