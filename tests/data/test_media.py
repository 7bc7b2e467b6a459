"""Columns of pictures, video and sound are refused by name; what only sounds like them passes."""

from __future__ import annotations

import pytest

from megarl.data.rows import Row, refuse_media
from megarl.system.errors import DataError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", "a.bin"),
        ("images", ["a", "b"]),
        ("Image", {"bytes": None, "path": "x"}),
        ("image_1", "x"),
        ("image_url", "https://example.org/1"),
        ("input_images", ["x"]),
        ("video", "clip"),
        ("videos", [{"video": "x"}]),
        ("audio", {"array": [0.0], "path": None, "sampling_rate": 1}),
        ("audio_path", "x"),
        ("pixel_values", [[0.1]]),
        ("multi_modal_data", {"image": []}),
        ("mm_inputs", {"x": 1}),
        ("figure", {"bytes": None, "path": "x"}),
        ("figure", ["plots/1.png", "plots/2.JPG"]),
        ("context", "data:image/png;base64,iVBORw0KGgo="),
        ("clip", "a/b.mp4"),
    ],
)
def test_media_are_named(name, value):
    with pytest.raises(DataError, match=rf"f.jsonl:3: column '{name}' contains images, video or sound"):
        refuse_media(Row({"prompt": "a", name: value}, "f.jsonl", 3, "line"), ["prompt"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", None),
        ("images", []),
        ("image", ""),
        ("has_image", True),
        ("num_images", 2),
        ("image_count", "2"),
        ("docker_image", "python:3.11"),
        ("image_name", "python:3.11"),
        ("imagery", "of the sea"),
        ("video_id", "x1"),
        ("notes", "see a.png and b.png"),
        ("path", "solution.py"),
        ("prompt", "photo.png"),
    ],
)
def test_what_is_no_media_passes(name, value):
    refuse_media(Row({name: value}, "f.jsonl", 3, "line"), ["prompt"])
