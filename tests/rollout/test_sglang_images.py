"""Images on their way to a server: what is asked, what is checked in the answer, and what a server makes of it."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.architectures.vision_language import ImageSettings, VisionEncoder
from megarl.config.rollout import SamplingConfig
from megarl.data.image_set import ImageSet, image_sets
from megarl.data.images import patchify
from megarl.data.routes import RouteForm
from megarl.rollout.engine import Request
from megarl.rollout.sglang.samples import OtherPromptError, ServedSample
from tests.models.vlm_tiny import BEGIN, END, IMAGE, batch_of, config_of, draw
from tests.rollout.fake_servers import samples_of
from tests.rollout.test_sglang_samples import answer

SAMPLING = SamplingConfig(max_new_tokens=6)
TAG = "5@run"
ENCODER = VisionEncoder.from_config(config_of("qwen2_5_vl"), 64, "config.json")
SETTINGS = ImageSettings.from_config(ENCODER)


def request(*shapes: tuple[int, int], seeds: int = 1, seed: int = 0) -> tuple[Request, ImageSet]:
    one = draw(random.Random(seed), ENCODER, *shapes)
    (images,) = image_sets(batch_of([one], SETTINGS))
    assert images is not None
    return Request(one.prompt, list(range(seeds)), images=images), images


def answered(
    sample: ServedSample, ids: list[int], reason: str, tokens: int | None = None, routes: list[int] | None = None
) -> dict[str, Any]:
    found = answer(ids, reason)
    if routes is not None:
        found["meta_info"]["routed_experts"] = base64.b64encode(np.array(routes, dtype=np.int32).tobytes()).decode()
    found["meta_info"]["prompt_tokens"] = len(sample.prompt_ids) + len(sample.token_ids) if tokens is None else tokens
    return found


def test_an_image_is_one_token_and_a_png_of_the_pixels_that_the_trainer_sees() -> None:
    asked, images = request((1, 2), (3, 1))
    payload = samples_of([asked])[0].payload(SAMPLING, [2])
    ids = payload["input_ids"]
    assert ids.count(IMAGE) == 2
    assert [token for token in ids if token != IMAGE] == [token for token in asked.prompt_ids if token != IMAGE]
    assert all(ids[at - 1] == BEGIN and ids[at + 1] == END for at, token in enumerate(ids) if token == IMAGE)
    patches = images.patches.split(list(images.sizes))
    for png, expected, (rows, columns) in zip(payload["image_data"], patches, ((1, 2), (3, 1)), strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))
        assert pixels.shape == (28 * rows, 28 * columns, 3)
        assert torch.equal(torch.from_numpy(patchify(pixels, 14, 2)), expected)


def test_the_samples_of_a_prompt_share_the_png_and_text_has_none() -> None:
    asked, _ = request((1, 1), seeds=2)
    one, two, text = samples_of([asked, Request([1, 2, 3], [0])])
    assert one.payload(SAMPLING, [2])["image_data"] is two.payload(SAMPLING, [2])["image_data"]
    assert text.payload(SAMPLING, [2]).keys() == {"input_ids", "sampling_params", "return_logprob"}


def test_an_interrupted_sample_goes_on_with_its_image() -> None:
    (sample,) = samples_of([request((2, 2))[0]])
    first = sample.payload(SAMPLING, [2])
    sample.add(answered(sample, [7, 8], "abort"), SAMPLING, [2], TAG)
    second = sample.payload(SAMPLING, [2])
    assert second["input_ids"] == first["input_ids"] + [7, 8]
    assert second["image_data"] == first["image_data"]
    sample.add(answered(sample, [9, 2], "stop"), SAMPLING, [2], TAG)
    assert sample.completion().token_ids == [7, 8, 9, 2]


def test_an_interrupted_sample_that_says_the_image_token_begins_again() -> None:
    (sample,) = samples_of([request((2, 2))[0]])
    sample.form = RouteForm((True,), chosen=1, experts=9)
    first, tokens = sample.payload(SAMPLING, [2]), len(sample.prompt_ids) + 1
    sample.add(answered(sample, [7, IMAGE], "abort", routes=[3] * tokens), SAMPLING, [2], TAG)
    assert sample.payload(SAMPLING, [2]) == first
    sample.add(answered(sample, [IMAGE, 2], "stop", routes=[4] * tokens), SAMPLING, [2], TAG)
    done = sample.completion()
    assert (done.token_ids, len(done.logprobs), done.versions) == ([IMAGE, 2], 2, [[5, 2]])
    assert done.routes[:, 0].tolist() == [4] * tokens


def test_a_request_that_was_aborted_in_its_queue_was_not_read() -> None:
    (sample,) = samples_of([request((2, 2))[0]])
    found = answered(sample, [], "abort")
    del found["meta_info"]["prompt_tokens"]
    sample.add(found, SAMPLING, [2], TAG)
    assert (sample.finish_reason, sample.interruptions) == (None, 1)


@pytest.mark.parametrize("off", [-1, 3, None])
def test_another_count_of_tokens_is_an_error(off: int | None) -> None:
    (sample,) = samples_of([request((2, 2))[0]])
    found = answered(sample, [7, 2], "stop", 0 if off is None else len(sample.prompt_ids) + off)
    if off is None:
        del found["meta_info"]["prompt_tokens"]
    with pytest.raises(OtherPromptError, match=rf"of a prompt with images instead of {len(sample.prompt_ids)}"):
        sample.add(found, SAMPLING, [2], TAG)
