"""From frames to pixels: TensorFlow's pictures, normalisations, clips of a video."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from megarl.robots.config import RobotConfig
from megarl.robots.data.pictures import (
    DINO_SIGLIP,
    IMAGENET,
    PIPELINES,
    PicturePipeline,
    VideoPipeline,
    policy_normalisation,
)
from megarl.system.errors import ConfigError, DataError
from tests.robots.data.golden_pictures import CROPPED, FILE, SHRUNK, THIN, frame


def test_recipes_may_name_every_pipeline_and_no_other() -> None:
    assert set(get_args(RobotConfig.model_fields["pictures"].annotation)) == set(PIPELINES)


def differences(found: torch.Tensor, golden: str) -> tuple[int, float]:
    """(largest one in levels, share of numbers that differ)."""
    difference = np.abs(found[0].numpy()[::THIN, ::THIN].astype(int) - np.load(FILE)[golden].astype(int))
    return int(difference.max()), float((difference > 0).mean())


@pytest.mark.parametrize("name", SHRUNK)
@pytest.mark.parametrize("stage", ["resized", "seen"])
def test_libero_pictures_are_those_of_tensorflow(name, stage):
    """Within one level where a float32 sum ends near half a level; measured: see the module."""
    pipeline = replace(PIPELINES["aloha"], crop=0.9 if stage == "seen" else None)
    largest, share = differences(pipeline(torch.from_numpy(frame(name, *SHRUNK[name]))[None]), f"{stage}_{name}")
    assert largest <= 1
    assert share < 1e-4


@pytest.mark.parametrize("name", CROPPED)
def test_cropped_pictures_are_those_of_tensorflow(name):
    largest, share = differences(
        PIPELINES["robotwin"](torch.from_numpy(frame(name, *CROPPED[name]))[None]), f"cropped_{name}"
    )
    assert largest <= 1
    assert share < 1e-4


def test_libero_turns_its_frames_first():
    frames = torch.from_numpy(frame("libero", 256, 256))
    assert torch.equal(PIPELINES["libero"](frames), PIPELINES["aloha"](frames.flip(0, 1)))


def test_any_leading_dimensions():
    frames = torch.from_numpy(np.stack([frame(str(i), 40, 48) for i in range(6)])).view(2, 3, 40, 48, 3)
    pipeline = PicturePipeline(32, rotate=True, jpeg=95, resize="lanczos3", crop=0.9)
    pictures = pipeline(frames)
    assert pictures.shape == (2, 3, 32, 32, 3)
    assert torch.equal(pictures[1, 2], pipeline(frames[1, 2]))


def test_steps_are_left_out_by_name():
    frames = torch.from_numpy(frame("plain", 32, 32))
    assert torch.equal(PicturePipeline(32)(frames), frames)
    assert torch.equal(PicturePipeline(32, resize="lanczos3")(frames), frames)
    assert not torch.equal(PicturePipeline(32, jpeg=95)(frames), frames)


def test_frames_that_nothing_resizes_are_refused():
    with pytest.raises(DataError, match=r"(?s)the pipeline does not resize.*'8 x 9'.*32 x 32"):
        PicturePipeline(32)(torch.zeros(1, 8, 9, 3, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"torch.float32 \[1, 8, 8, 3\]"):
        PicturePipeline(8)(torch.zeros(1, 8, 8, 3))


@pytest.mark.parametrize("wrong", [{"size": 1}, {"resize": "lanczos"}, {"crop": 0.0}, {"jpeg": 101}])
def test_wrong_pipelines_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PicturePipeline(**{"size": 32} | wrong)


def test_channels_of_one_tower_follow_the_others():
    pictures = torch.from_numpy(frame("pixels", 16, 20))[None]
    pixels = DINO_SIGLIP(pictures)
    assert pixels.shape == (1, 6, 16, 20)
    shares = pictures[0].permute(2, 0, 1).double() / 255
    mean, deviation = (torch.tensor(x, dtype=torch.double) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    torch.testing.assert_close(
        pixels[0, :3].double(), (shares - mean[:, None, None]) / deviation[:, None, None], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(pixels[0, 3:].double(), shares * 2 - 1, atol=1e-6, rtol=0)
    assert torch.equal(DINO_SIGLIP(pictures, torch.bfloat16), pixels.bfloat16())


MEANS, STDS = [[0.484375, 0.455078125, 0.40625], [0.5] * 3], [[0.228515625, 0.2236328125, 0.224609375], [0.5] * 3]


def test_a_checkpoint_says_its_own_normalisation():
    sizes = {"input_sizes": [[3, 224, 224]] * 2}
    read = policy_normalisation({"means": MEANS, "stds": STDS} | sizes, 2, 224)
    assert [list(mean) for mean in read.means] == MEANS
    assert [list(std) for std in read.deviations] == STDS
    assert policy_normalisation(None, 2, 224) == DINO_SIGLIP


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"means": MEANS}, "stds"),
        ({"means": MEANS, "stds": STDS[:1]}, "three numbers for each vision tower"),
        ({"means": MEANS, "stds": [[1, 1, 0], [1, 1, 1]]}, "above 0"),
        ({"means": MEANS[:1], "stds": STDS[:1]}, "does not fit the model's vision towers"),
        ({"means": MEANS, "stds": STDS, "input_sizes": [[3, 384, 384]] * 2}, "does not fit the model's vision towers"),
    ],
)
def test_a_normalisation_of_other_pictures_is_refused(content, text):
    with pytest.raises(ConfigError, match=text) as caught:
        policy_normalisation(content, 2, 224)
    assert "preprocessor_config.json" in str(caught.value)


@pytest.mark.parametrize("count", [1, 5, 63, 64, 65, 513])
def test_frames_of_a_clip(count):
    expected = np.linspace(0, count - 1, 64, dtype=int) if count >= 64 else np.resize(np.arange(count), 64)
    assert VideoPipeline().choose(count) == expected.tolist()


def test_no_frames_are_no_clip():
    with pytest.raises(DataError, match="without frames"):
        VideoPipeline().choose(0)


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_a_clip_is_enlarged_and_cropped(kind):
    """Against torch's filter, whose sums end near half a level for some numbers too."""
    frames = torch.from_numpy(np.stack([frame(str(i), 48, 64) for i in range(3)]))
    clip = VideoPipeline(frames=4, size=56, filter=kind)(frames)
    larger = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2).float(), (64, 85), mode=kind, antialias=True
    ).round()
    expected = IMAGENET(larger.clamp(0, 255).to(torch.uint8)[:, :, 4:60, 14:70].permute(0, 2, 3, 1))
    assert clip.shape == (4, 3, 56, 56)
    difference = (clip[[0, 1, 2]] - expected).abs()
    assert difference.max() < 1.01 / 255 / 0.224
    assert (difference > 1e-6).float().mean() < 1e-3
    assert torch.equal(clip[3], clip[0])


def test_v_jepa_sees_384_of_438_pixels():
    clip = VideoPipeline(frames=1)(torch.from_numpy(frame("clip", 64, 64))[None])
    assert clip.shape == (1, 3, 384, 384)
