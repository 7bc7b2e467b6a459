"""Tiny vision-language models of transformers, random, and samples with images for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.architectures.vision_language import ImageSettings, VisionEncoder
from megarl.config.model import ParallelConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.image_set import STILL, ImageSet, image_fields
from megarl.data.images import patchify
from megarl.data.trajectory import Trajectory, trajectory_values

#: Each kind of encoder and of decoder once; the others are cases of the campaign `exports`.
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")
EVERY_KIND = (
    *KINDS,
    *(pytest.param(kind, marks=pytest.mark.campaign("exports")) for kind in ("qwen3_vl", "qwen3_5_moe")),
)
#: Kinds whose classes transformers 4 has.
OLDER_KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
#: Keys of Qwen3.5's layers.
_HYBRID = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
BEGIN, IMAGE, END, VOCABULARY = 152, 150, 153, 200


def config_of(kind: str, **text: Any) -> dict[str, Any]:
    """config.json of a tiny model."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    if kind == "qwen2_vl":
        vision = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14}
    elif kind == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1], "patch_size": 14}
    elif kind.startswith("qwen3_5"):
        sizes |= _HYBRID
        sizes["rope_parameters"] |= {
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        }
        vision |= {"num_position_embeddings": 64, "patch_size": 14}
    else:
        sizes |= {"head_dim": 16}
        sizes["rope_parameters"] |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
        vision |= {
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": text.pop("deepstack", [0, 1]),
            "patch_size": 14,
        }
    if kind == "qwen3_5_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        sizes |= {"shared_expert_intermediate_size": 32}
    if kind == "qwen3_vl_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    ids = {"image_token_id": IMAGE, "video_token_id": 151, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    return {"model_type": kind, "text_config": {**sizes, **text}, "vision_config": vision, **ids}


def shallow_config(kind: str, layers: int = 2) -> dict[str, Any]:
    """config.json of a tiny model of few decoder layers and two encoder blocks, which has each kind of both."""
    raw = config_of(kind, num_hidden_layers=layers)
    raw["vision_config"]["depth"] = 2
    if "layer_types" in raw["text_config"]:
        raw["text_config"]["layer_types"] = raw["text_config"]["layer_types"][:layers]
    return raw


def save(folder: Path, kind: str, whole: dict[str, Any] | None = None, **text: Any) -> Any:
    """Write a random model with some other keys of config.json and of its decoder; returns transformers' own."""
    return save_config(folder, {**config_of(kind, **text), **(whole or {})})


def save_config(folder: Path, raw: dict[str, Any]) -> Any:
    """Write a random model with this config.json; returns transformers' own."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**raw)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases and norms that do nothing would hide mistakes
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "visual" in name:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Sample:
    """A prompt and a response, with images that begin at `starts`."""

    prompt: list[int]
    response: list[int]
    images: list[ImageSet]
    starts: list[int]


def draw(rng: random.Random, encoder: VisionEncoder, *shapes: tuple[int, ...]) -> Sample:
    """A random sample with images of these rows and columns of features; with a third number, temporal patches."""
    prompt, images, starts = [rng.randrange(100)], list[ImageSet](), list[int]()
    for rows, columns, *clip in shapes:
        prompt.append(BEGIN)
        starts.append(len(prompt))
        prompt += [IMAGE] * (rows * columns)
        prompt += [END, *(rng.randrange(100) for _ in range(rng.randint(1, 4)))]
        side = encoder.patch * encoder.merge
        drawn = np.random.default_rng(rng.randrange(1 << 30))
        frames = drawn.integers(0, 256, (2 if clip else 1, rows * side, columns * side, 3), dtype=np.uint8)
        values = np.concatenate([patchify(pixels, encoder.patch, encoder.merge) for pixels in frames])
        place = ((0, rows, columns, 0 if clip else STILL),)
        images.append(ImageSet(torch.from_numpy(values), place, (len(values),), (rng.randrange(1 << 60),)))
    prompt += [rng.randrange(100) for _ in range(3)]
    # An image token that the model says itself is text.
    return Sample(prompt, [rng.randrange(100), IMAGE, *(rng.randrange(100) for _ in range(4))], images, starts)


def batch_of(samples: list[Sample], settings: ImageSettings) -> Batch:
    """The samples as a batch."""
    clips = any(place[3] != STILL for one in samples for image in one.images for place in image.places)
    fields = image_fields([one.images for one in samples], [one.starts for one in samples], settings, clips=clips)
    return Batch(
        {
            "prompt_ids": Jagged.from_list([one.prompt for one in samples], dtype=torch.int64),
            "response_ids": Jagged.from_list([one.response for one in samples], dtype=torch.int64),
            **fields,
        }
    )


def encoder_input(sample: Sample, settings: ImageSettings) -> tuple[Tensor, Tensor]:
    """Normalised patches of the images for transformers' encoder, and how many rows and columns of them each has."""
    colours = torch.cat([one.patches for one in sample.images])
    colours = colours.view(len(colours), 3, 1, -1).float() / 255
    mean, deviation = (torch.tensor(one).view(1, 3, 1, 1) for one in (settings.mean, settings.deviation))
    pixels = ((colours - mean) / deviation).expand(-1, -1, 2, -1).reshape(len(colours), -1)
    shapes = [one.places[0][1:3] for one in sample.images]
    return pixels, torch.tensor([[1, rows * settings.merge, columns * settings.merge] for rows, columns in shapes])


def logits_of(reference: Any, sample: Sample, settings: ImageSettings) -> Tensor:
    """Logits [R, V] of transformers for the places of the response, with the positions of its own function."""
    model, given = reference.model, dict[str, Any]()
    ids = torch.tensor([sample.prompt + sample.response])
    kinds = torch.zeros_like(ids, dtype=torch.int32)
    for start, image in zip(sample.starts, sample.images, strict=True):
        kinds[0, start : start + image.features] = 1
    grid = None
    if sample.images:
        pixels, grid = encoder_input(sample, settings)
        found = model.visual(pixels, grid_thw=grid)
        given = {"deep": list(getattr(found, "deepstack_features", None) or []), "features": found.pooler_output}
    positions, _ = model.get_rope_index(ids, kinds, grid)
    hidden = model.language_model.embed_tokens(ids)
    more = {}
    if sample.images:
        places = kinds[0].bool()
        hidden = hidden.masked_scatter(places[None, :, None], given["features"])
        if given["deep"]:
            more = {"visual_pos_masks": places[None], "deepstack_visual_embeds": given["deep"]}
    out = model.language_model(inputs_embeds=hidden, position_ids=positions, use_cache=False, **more)
    return reference.lm_head(out.last_hidden_state)[0, len(sample.prompt) - 1 : -1]


def of_transformers(reference: Any, trajectory: Trajectory, settings: ImageSettings) -> Tensor:
    """Log-probs [R] of all tokens after the prompt of a trajectory with images."""
    own = trajectory.images
    images = [own.between(start, start + 1) for start, *_ in own.places]
    sample = Sample(trajectory.prompt_ids, trajectory.token_ids, images, [place[0] for place in own.places])
    logp = torch.log_softmax(logits_of(reference, sample, settings), -1)
    return logp.gather(1, torch.tensor(trajectory.token_ids)[:, None])[:, 0]


def in_training(model: Any, trajectories: list[Trajectory], settings: ImageSettings) -> tuple[Tensor, int]:
    """Log-probs of all tokens after the prompts in one training forward pass, and the patches that it reads."""
    from megarl.models.hf import encoder_of
    from megarl.training.microbatch import build
    from megarl.training.vlm_sequences import ImageLayout
    from tests.dist import layout_for

    count = len(trajectories)
    values = trajectory_values(trajectories, patch_values=3 * settings.patch**2)
    batch = Batch(image_fields([[]] * count, [[]] * count, settings), {"uid": ["p"] * count}).with_values(values)
    sequences = ImageLayout(encoder_of(model.hf_config))
    micro = build(batch, range(count), layout_for(ParallelConfig()), torch.device("cpu"), None, sequences)
    with torch.no_grad():
        hidden = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
        logits = hidden[micro.rows, 0] @ model.lm_head_weight.T
    logprobs = torch.log_softmax(logits, -1).gather(1, micro.targets[:, None])[:, 0]
    return logprobs, len(micro.packed.seen.patches)
