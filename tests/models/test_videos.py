"""Videos of rows, from frames to log-probs and greedy tokens, against transformers' own models.

The pixels that transformers gets are cut into patches here, as its processors do it; these need torchvision, and a
campaign compares them (tests/data/test_videos.py).
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from megarl.architectures.vision_language import VideoSettings
from megarl.config.data import DataConfig
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.data.batch import Jagged
from megarl.data.image_prompts import ImagePrompts
from megarl.data.image_set import image_sets
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import character_tokenizer
from megarl.models.hf import encoder_of, image_settings, load_hf_config
from megarl.training.microbatch import build
from megarl.training.vlm_sequences import ImageLayout
from tests.dist import layout_for, single_process
from tests.models import tiny
from tests.models.vlm_tiny import save_config, shallow_config

CPU = torch.device("cpu")
KINDS = ["qwen2_5_vl", "qwen3_vl"]
MORE = ["qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"]
IDS = {"vision_start_token_id": 4, "image_token_id": 5, "vision_end_token_id": 6, "video_token_id": 7}
ALPHABET = "[#]%<>. 0123456789abcdenosp?"
#: Height and width of all frames here, 3 x 2 features: no frame is resized.
SIZE = 84, 56
TOKENIZER = character_tokenizer(ALPHABET)
ROWS: list[dict[str, Any]] = []


def rows() -> list[dict[str, Any]]:
    return ROWS


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def frames(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *SIZE, 3), dtype=np.uint8)


def patched(pixels: np.ndarray, settings: Any) -> tuple[Tensor, list[int]]:
    """Normalised patches of frames [n, height, width, 3], or of an image, and how many patches each side has."""
    shown = np.concatenate([pixels, pixels[-1:]]) if len(pixels) % 2 else pixels
    values = (
        torch.from_numpy(shown).permute(0, 3, 1, 2).float() / 255 - torch.tensor(settings.mean)[:, None, None]
    ) / (torch.tensor(settings.deviation)[:, None, None])
    t, h, w = len(shown) // 2, SIZE[0] // 14, SIZE[1] // 14
    cut = values.view(t, 2, 3, h // 2, 2, 14, w // 2, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(t * h * w, -1), [t, h, w]


@pytest.fixture(params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.campaign("families")) for kind in MORE)])
def made(request, tmp_path):
    """A tiny model in our form and in transformers', and prompts with videos, an image, and neither."""
    single_process()
    raw = shallow_config(request.param) | IDS
    raw["text_config"]["vocab_size"] = 64
    # Seconds that take fewer positions than frames do: for others transformers 5.23 has positions of its own.
    raw["vision_config"]["tokens_per_second"] = 1
    reference = save_config(tmp_path, raw)
    hf = load_hf_config(ModelConfig(path=str(tmp_path), vision=True))
    first, second = frames(5, 1), frames(4, 2)
    np.save(tmp_path / "clip.npy", second)
    picture = frames(1, 3)
    images = [Image.fromarray(frame) for frame in first]
    ROWS[:] = [
        {"prompt": "a<video>b?", "videos": [{"frames": images, "fps": 2.5}]},
        {"prompt": "c<image>b<video>a?", "images": [Image.fromarray(picture[0])], "videos": [{"path": "clip.npy"}]},
        {"prompt": "abc?"},
    ]
    config = DataConfig(
        train_files=["tests.models.test_videos:rows"],
        answer_key=None,
        image_key="images",
        image_dir=str(tmp_path),
        video_key="videos",
        video_fps=1.0,
        max_prompt_tokens=256,
        min_pixels=784,
    )
    clips = VideoSettings.of(encoder_of(hf), None, 784, 10**6)
    prompts = ImagePrompts.of(config, encoder_of(hf), image_settings(hf), TOKENIZER, clips)
    data = PromptDataset(config, TOKENIZER, images=prompts)
    settings = image_settings(hf)
    shown = [
        {"pixel_values_videos": patched(first, settings), "seconds": 2 / 2.5},
        {
            "pixel_values_videos": patched(second, settings),
            "pixel_values": patched(picture, settings),
            "seconds": 2 / 1.0,
        },
        {},
    ]
    return tmp_path, reference, data, shown


def of_transformers(reference: Any, ids: list[int], shown: dict[str, Any]) -> Tensor:
    """Log-probs [n, V] after each token, by transformers' whole model."""
    tokens = torch.tensor([ids])
    given: dict[str, Any] = {}
    if shown:
        kinds = (tokens == IDS["image_token_id"]).int() + 2 * (tokens == IDS["video_token_id"]).int()
        given = {"mm_token_type_ids": kinds}
        for name, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
            if name in shown:
                given[name], sizes = shown[name][0], torch.tensor([shown[name][1]])
                given[grid] = sizes
        if reference.config.model_type == "qwen2_5_vl":
            given["second_per_grid_ts"] = torch.tensor([shown["seconds"]])
    with torch.no_grad():
        return torch.log_softmax(reference(input_ids=tokens, use_cache=False, **given).logits[0], -1)


def test_logprobs_and_greedy_tokens_are_those_of_transformers(made):
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.engine import Request

    folder, reference, data, shown = made
    chunks = tiny.build_tiny(folder, vision=True)
    encoder = encoder_of(chunks[0].hf_config)
    batch = data.batch([0, 1, 2])
    prompts = [ids.tolist() for ids in batch["prompt_ids"].unbind()]
    if encoder.model_type.startswith("qwen3"):  # the times of each pair of frames: 0 and 0.4, 0.8 and 1.2, 1.6 twice
        text = "".join(map(str, TOKENIZER.convert_ids_to_tokens(prompts[0])))
        assert text == "a" + "".join(f"<{time} seconds>[{'%' * 6}]" for time in (0.2, 1.0, 1.6)) + "b?"
    assert prompts[0].count(7) == 3 * 6
    # greedy
    engine = EmbeddedEngine(chunks, RolloutConfig(max_running=3), layout_for(ParallelConfig()))
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    requests = [Request(ids, [1], images=own) for ids, own in zip(prompts, image_sets(batch), strict=True)]
    answers = [one[0] for one in engine.generate(requests, sampling, [])]
    want = []
    for ids, answer, own in zip(prompts, answers, shown, strict=True):
        logp = of_transformers(reference, ids + answer.token_ids, own)[len(ids) - 1 : -1]
        assert logp.argmax(-1).tolist() == answer.token_ids
        want.append(logp.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0])
        torch.testing.assert_close(torch.tensor(answer.logprobs), want[-1], atol=1e-5, rtol=0)
    # log-probs of the same tokens in one packed stream
    batch.set("response_ids", Jagged.from_list([answer.token_ids for answer in answers], dtype=torch.int64))
    micro = build(batch, range(3), layout_for(ParallelConfig()), CPU, None, ImageLayout(encoder))
    hidden = chunks[0](micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
    logits = F.linear(hidden[micro.rows, 0], chunks[0].lm_head_weight)
    ours = torch.log_softmax(logits, -1).gather(1, micro.targets[:, None])[:, 0]
    torch.testing.assert_close(ours, torch.cat(want), atol=1e-5, rtol=0)
    ours.sum().backward()
    assert all(parameter.grad is not None for parameter in chunks[0].visual.parameters())
