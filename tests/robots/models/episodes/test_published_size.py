"""V-JEPA 2 of published sizes with random weights, on one clip of the published length."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import VJEPA2Config

from tests.robots.models.episodes.made import moving_squares
from tests.robots.models.episodes.test_vjepa2 import built

pytestmark = [pytest.mark.campaign("vla-7b"), pytest.mark.timeout(5000)]

#: From config.json of facebook/vjepa2-vitl-fpc64-256 and vjepa2-vitg-fpc64-384. A clip has 8,192 and 18,432 tokens.
SIZES: dict[str, dict[str, Any]] = {
    "vitl-fpc64-256": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "crop_size": 256},
    "vitg-fpc64-384": {
        "hidden_size": 1408,
        "num_hidden_layers": 40,
        "num_attention_heads": 22,
        "crop_size": 384,
        "mlp_ratio": 48 / 11,
    },
}
#: Parameters of the encoders.
PARAMETERS = {"vitl-fpc64-256": 303_885_312, "vitg-fpc64-384": 1_012_173_952}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for 5 GB, which are removed."""
    yield tmp_path / "vjepa2"
    shutil.rmtree(tmp_path / "vjepa2", ignore_errors=True)


@pytest.mark.parametrize("name", SIZES)
def test_a_clip_of_64_frames_is_embedded(name: str, folder: Path, capsys: Any) -> None:
    config = VJEPA2Config(patch_size=16, frames_per_clip=64, tubelet_size=2, **SIZES[name])
    torch.manual_seed(0)
    transformers.VJEPA2Model(config).save_pretrained(folder)
    began = time.monotonic()
    embedder = built(folder, batch_size=1)
    loaded = time.monotonic()
    found = embedder.embed(moving_squares([79], errors=[""]))  # 80 pictures, of which a clip takes 64
    embedded = time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    encoder = embedder._encoder
    count = sum(parameter.numel() for parameter in encoder.parameters())
    with capsys.disabled():
        print(
            f"\n{name}, {count / 1e9:.2f} billion parameters: load {loaded - began:.0f} s, a clip "
            f"{embedded - loaded:.0f} s, at most {peak:.1f} GB"
        )
    assert count == PARAMETERS[name]
    assert found.shape == (1, config.hidden_size)
    # The encoder ends with a layer norm, whose scale is 1: a token's numbers have the variance 1, and their mean less.
    assert torch.isfinite(found).all()
    assert 0 < found.std() <= 1
