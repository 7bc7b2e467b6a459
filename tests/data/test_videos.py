"""Videos of rows: every form is the same video, sizes and pixels are those of transformers' processors."""

import importlib.util
import json
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.architectures.vision_language import ImageSettings, VideoSettings, VisionEncoder
from megarl.artifacts.vla_folder import read_video_preprocessor
from megarl.data.image_set import clip_of, lags_of
from megarl.data.rows import Row
from megarl.data.videos import check_video_marks, fitting_frames, open_video, row_videos
from megarl.models.vlm.model import gather_images
from megarl.system.errors import ConfigError, DataError
from tests.models.vlm_tiny import config_of

KINDS = ["qwen2_5_vl", "qwen3_vl"]


def settings_of(kind: str, least: int = 784, most: int = 10**6) -> tuple[VisionEncoder, VideoSettings]:
    encoder = VisionEncoder.from_config(config_of(kind), 64, "here")
    return encoder, VideoSettings.of(encoder, None, least, most)


def frames(count: int, height: int = 56, width: int = 84) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_video_is_the_same_video(kind, tmp_path):
    pixels = frames(5)
    pixels[:] = pixels[:, :1, :1]  # one colour, which a GIF stores as it is
    np.save(tmp_path / "a.npy", pixels)
    images = [Image.fromarray(each) for each in pixels]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=500, loop=0)
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    names, url = [f"{number}.png" for number in range(5)], f"file://{tmp_path}/a.npy"
    forms = [images, names, {"frames": names, "fps": 2}, url, {"path": "a.npy", "fps": 2.0}, "a.gif"]
    _, settings = settings_of(kind)
    clips = [open_video(form, tmp_path, 2.0, None, "a row") for form in forms]
    found = [[block.digests for block in clip_of(clip, settings)] for clip in clips]
    assert all(each == found[0] for each in found)
    assert len(found[0]) == 3
    assert {clip.fps for clip in clips} == {2.0}


def test_the_times_of_a_gif_are_read_again_only_if_the_file_has_changed(tmp_path, monkeypatch):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    reads, file = [], tmp_path / "v.gif"
    monkeypatch.setattr(
        Image, "open", lambda *given, read=Image.open, **more: reads.append(given) or read(*given, **more)
    )
    for count in (2, 3):
        frames[0].save(file, save_all=True, append_images=frames[1:count], duration=100)
        for number in (1, 1, 2):  # a row is used several times, and several rows have the file
            assert open_video("v.gif", tmp_path, 2.0, None, f"row {number}").total == count
    assert len(reads) == 2


def test_a_longer_video_has_frames_at_equal_distances_and_their_times():
    clip = open_video([Image.fromarray(each) for each in frames(9)], None, 4.0, 4, "a row")
    assert clip.chosen == (0, 3, 5, 8)
    assert clip.seconds(2) == [0.375, 1.625]
    assert clip.sampled_fps == pytest.approx(4 / 9 * 4.0)
    _, settings = settings_of("qwen2_5_vl")
    assert lags_of(clip, settings) == [0, 4]  # 4 positions a second, 2 frames of 16 / 9 a second: 4.5


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_transformers(kind):
    if kind == "qwen3_vl":
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_whole
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_frame

    rng, (_, settings) = random.Random(0), settings_of(kind, 20_000, 300_000)
    limits = {"factor": 28, "min_pixels": 20_000, "max_pixels": 300_000}
    for _ in range(300):
        count, height, width = rng.randint(2, 30), rng.randint(15, 900), rng.randint(15, 900)
        want = of_whole(count, height, width, **limits) if kind == "qwen3_vl" else of_frame(height, width, **limits)
        assert fitting_frames(count, height, width, settings, "a row") == want


@pytest.mark.parametrize("kind", KINDS)
def test_limits_are_those_that_transformers_reads(kind, tmp_path):
    """From each of three files, which are added from the last one to the first."""
    encoder, _ = settings_of(kind)
    older = {"min_pixels": 3136, "max_pixels": 12_845_056, "size": {"shortest_edge": 4000, "longest_edge": 90_000}}
    files = {
        "preprocessor_config.json": older,
        "video_preprocessor_config.json": {"size": {"shortest_edge": 5000, "longest_edge": 80_000}},
        "processor_config.json": {"video_processor": {"size": {"shortest_edge": 6000, "longest_edge": 70_000}}},
    }
    found, theirs = [], []
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
        settings = VideoSettings.of(encoder, read_video_preprocessor(tmp_path), None, None)
        found.append((settings.min_pixels, settings.max_pixels))
        if importlib.util.find_spec("torchvision"):
            size = processor_of(kind).from_pretrained(tmp_path).size
            theirs.append((size["shortest_edge"], size["longest_edge"]))
    # transformers' class of Qwen3-VL does not read the older keys
    first = (4000, 90_000) if kind == "qwen3_vl" else (3136, 12_845_056)
    assert found == [first, (5000, 80_000), (6000, 70_000)]
    assert theirs in ([], found)


def processor_of(kind: str):
    """transformers' class, which needs torchvision."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    return Qwen3VLVideoProcessor if kind == "qwen3_vl" else Qwen2VLVideoProcessor


@pytest.mark.campaign("families")
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers_processor(kind, tmp_path):
    """Of torchvision, which resizes them."""
    pytest.importorskip("torchvision")
    processor = processor_of(kind)(
        size={"shortest_edge": 8192, "longest_edge": 100_000}, patch_size=14, do_sample_frames=False
    )
    rng, (encoder, settings) = random.Random(0), settings_of(kind, 8192, 100_000)
    colours = ImageSettings.from_config(encoder)
    mean, deviation = (torch.tensor(one).view(1, 3, 1, 1) for one in (colours.mean, colours.deviation))
    for _ in range(20):
        video = frames(rng.randint(2, 9), rng.randint(20, 300), rng.randint(20, 300))
        want = processor(videos=[torch.from_numpy(video).permute(0, 3, 1, 2)], return_tensors="pt")
        np.save(tmp_path / "a.npy", video)
        blocks = clip_of(open_video("a.npy", tmp_path, 2.0, None, "a row"), settings)
        images = gather_images([block.features for block in blocks], blocks, encoder)
        rows, columns = (2 * side for side in blocks[0].places[0][1:3])
        assert want["video_grid_thw"].tolist() == [[len(blocks), rows, columns]]
        pixels = images.patches.view(len(images.patches), 3, -1, 14**2).float() / 255
        ours = ((pixels - mean) / deviation).flatten(1)
        torch.testing.assert_close(ours, want["pixel_values_videos"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"frames": [Image.new("RGB", (40, 40))], "fps": 0}, "no valid number of frames per second"),
        ("movie.mp4", "the value is not a video"),
        ("missing.npy", "the video cannot be read: No such file"),
        ("a" * 300 + ".npy", "File name too long"),
        ("~nobody-of-this-name/a.gif", "not the path of a video"),
        ("https://a.b/c.gif", "videos are not fetched from the network"),
        ("thin.npy", "the video has a size that no vision encoder accepts"),
        ("empty.npy", "the video"),
        ("broken.gif", "the video cannot be read"),
        ("wide.gif", "the video has too many pixels"),
        ([Image.new("L", (4000, 4000))] * 63, "set data.max_frames to at most 62"),
        ([Image.new("RGB", (40, 40)), Image.new("RGB", (41, 40))], "different sizes"),
        ("flat.npy", "the array is not a video"),
    ],
)
def test_a_bad_video_is_named(value, message, tmp_path):
    for name, shape in (("flat", (3, 4)), ("thin", (2, 1, 8, 3)), ("empty", (2, 0, 8, 3))):
        np.save(tmp_path / f"{name}.npy", np.zeros(shape, np.uint8))
    (tmp_path / "broken.gif").write_bytes(b"GIF89a")
    head, frame = struct.pack("<2H3B", 12_000, 12_000, 0, 0, 0), struct.pack("<4H2B", 0, 0, 1, 1, 0, 2)
    (tmp_path / "wide.gif").write_bytes(b"GIF89a" + head + b"," + frame + b"\0;")
    _, settings = settings_of("qwen2_5_vl")
    with pytest.raises(DataError, match=message) as error:
        clip_of(open_video(value, tmp_path, 2.0, None, "rows.jsonl:3: column 'videos'"), settings)
    assert "rows.jsonl:3" in str(error.value)


def test_sizes_that_a_model_cannot_use_are_located():
    encoder, settings = settings_of("qwen2_5_vl")
    with pytest.raises(DataError, match="a row: the frames of a video are too long"):
        fitting_frames(2, 10, 4000, settings, "a row")
    with pytest.raises(ConfigError, match="temporal_patch_size"):
        VideoSettings.of(replace(encoder, temporal=1), None, 784, 10**6)


def test_a_list_of_frames_is_no_list_of_videos_and_each_mark_needs_a_video():
    row = Row({"videos": ["0.png", "1.png"], "prompt": "<video>"}, "rows.jsonl", 3, "line")
    with pytest.raises(DataError, match="not a video") as error:
        row_videos(row, "videos")
    assert "[[frame, frame, ...]]" in str(error.value)
    with pytest.raises(DataError, match="the prompt has 1 <video> for 2 videos"):
        check_video_marks("a <video>", 2, "videos", row)
