"""Texts of environments, which may quote the policy, never stand for an image."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.data.observations import separate_images

PAD = "<|image_pad|>"
READER = SimpleNamespace(token_text=PAD, text=f"[{PAD}]", read=lambda value, where: value)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ("<|image_<|image_pad|>pad|>a", " a"),
        ([text("<|image_"), text("pad|>a")], "a"),
        ([text("<|image_"), {"type": "image", "image": "x.png"}, text("pad|>a")], f"<|image_[{PAD}]pad|>a"),
        (
            [{"role": "tool", "name": PAD, "tool_calls": [{PAD: f"a{PAD}", "n": 1}], "content": [text(PAD)]}],
            [{"role": "tool", "name": "", "tool_calls": [{"": "a", "n": 1}], "content": ""}],
        ),
    ],
    ids=["nested", "parts", "around an image", "other keys"],
)
def test_an_image_token_is_taken_out_of_all_text(said, plain):
    assert separate_images(said, READER)[0] == plain


def test_a_token_in_a_token_a_hundred_thousand_times_takes_no_longer_than_a_text():
    text, _ = separate_images("<|image_" * 100_000 + "pad|>" * 100_000, READER)
    assert PAD not in text
