"""The FLOPs and activations of vision parts, by image sizes (docs/planning.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megarl.architectures.action_expert import ExpertShape
from megarl.architectures.tensors import part_of
from megarl.architectures.vision import VisionShape
from megarl.architectures.vision_language import VisionEncoder
from megarl.artifacts.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.training import EngineConfig
from megarl.planning.activations import Activations, Passes

_LOOKED_UP = ("pos_embed", "cls_token", "reg_token")


def image_flops(encoder: VisionEncoder, images: Iterable[float]) -> float:
    """Return the FLOPs of one forward pass of a vision-language model's encoder; `images` are numbers of patches."""
    merged = encoder.merge**2  # number of patches merged into one; mergers' products work on merged patches
    each = sum(
        2.0 * math.prod(shape) / (merged if part_of(f"visual.{name}") == "merger" else 1)
        for name, (_, shape) in encoder.tensors.items()
        if len(shape) > 1 and not name.startswith(_LOOKED_UP)
    )
    full = len(encoder.full) if encoder.window else encoder.blocks
    window = (encoder.window // encoder.patch) ** 2
    return sum(
        each * patches
        + 4.0 * encoder.width * patches * (full * patches + (encoder.blocks - full) * min(patches, window))
        for patches in images
    )


def picture_flops(vision: VisionShape) -> float:
    """Return the FLOPs of one forward pass of a robot policy's towers and projector over one image."""
    total = 0.0
    for tower in vision.towers:
        tokens = tower.patches + tower.class_token + tower.registers
        total += 4.0 * tower.width * tower.blocks * tokens**2
        for name, shape in tower.tensors.items():
            if len(shape) > 1 and not name.startswith(_LOOKED_UP):
                total += 2.0 * math.prod(shape) * (tower.patches if name.startswith("patch_embed") else tokens)
    maps = (shape for name, (_, shape) in vision.tensors.items() if name.startswith("projector.") and len(shape) > 1)
    return total + sum(2.0 * math.prod(shape) * vision.patches for shape in maps)


def expert_flops(expert: ExpertShape, numbers: int) -> float:
    """Return the FLOPs of one forward pass of an action expert over action chunks with `numbers` numbers in total.

    Attention and the tokens of the robot's state are left out, because they take little in comparison.
    """
    each = sum(2.0 * math.prod(shape) for _, shape in expert.tensors.values() if len(shape) > 1)
    return each * numbers / expert.action


def image_patches(config: RunConfig, encoder: VisionEncoder) -> float:
    """Return the maximum number of patches of a prompt or an episode, limited by its tokens or by its images."""
    if config.data.image_key is None:
        return 0.0
    # the environment may show images, too
    shown = config.response_tokens(config.rollout.sampling) if config.has_turns else 0
    most = float((config.data.max_prompt_tokens + shown) * encoder.merge**2)
    if config.data.limit_images is None or config.data.max_pixels is None or config.data.video_key is not None:
        return most
    return min(most, config.data.limit_images * config.data.max_pixels / encoder.patch**2)


def patch_bytes(encoder: VisionEncoder, element: int, *, recompute: bool) -> float:
    """Return the bytes that an encoder keeps of one patch until its gradient is computed.

    They are its pixels, and per block: queries, keys and values before and after rotation, the inputs of the four
    linear layers and the norms, and the wide layer before and after its activation (with the sigmoid in Qwen2-VL, with
    a gate in Qwen2.5-VL, whose norms also keep parts). With `recompute` they are every block's input and all of one
    block. A merger keeps the inputs of its two products and the first product's result.
    """
    block = _block_numbers(encoder)
    kept = encoder.blocks * encoder.width + block if recompute else encoder.blocks * block
    mergers = 3 * (1 + len(encoder.deepstack)) * encoder.width
    return element * (encoder.patch_values + kept + mergers)


def _block_numbers(encoder: VisionEncoder) -> int:
    narrow = 11 if encoder.form.norm_bias else 13
    return narrow * encoder.width + encoder.form.wide_results * encoder.ffn


def patch_tokens(facts: ModelFacts, parallel: ParallelConfig, engine: EngineConfig, *, learns: bool) -> float:
    """Return how many tokens take as much memory in a micro-batch as one patch; 0.0 for a model without images.

    Patches and tokens are on the first pipeline stage, which has the encoder (whole on each tensor-parallel rank) and a
    part of the decoder. A frozen encoder keeps no activations, and uses the memory of one block at a time.
    """
    encoder, element = facts.encoder, 2
    if encoder is None:
        return 0.0
    budget = engine.micro_batch_tokens
    decoder = Activations(facts, parallel, engine, Passes(budget, budget, longest=1), element=element, gpu=True)
    token = (decoder.micro_batch + decoder.passing) / budget
    if not learns:
        return element * _block_numbers(encoder) / token
    return patch_bytes(encoder, element, recompute=engine.recompute == "full") / token
