"""Turns camera frames into the pictures and pixels that a model was trained with, on any device.

    frames uint8 [..., H, W, 3]     as the simulator rendered them
      | PicturePipeline             turned, sent through JPEG, resized, cropped
    pictures uint8 [..., S, S, 3]   episodes store these: acting and training use the same bytes
      | Normalisation               one for each vision tower, their channels one after another
    pixels [..., 3 * towers, S, S]

OpenVLA-OFT's evaluation, and both systems that train it with RL, run the first part in TensorFlow; this module uses
torch. Compared with TensorFlow 2 on a CPU, `through_jpeg` returns the same bytes, and a whole pipeline differs by at
most one level of 255 in less than 1 of 10,000 values: if a float32 sum is near half a level, the order of its terms
decides how it is rounded. The same may happen between devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.robots.data.jpeg import through_jpeg
from megarl.robots.data.resampling import KERNELS, crop_centre, resize
from megarl.system.errors import ConfigError, DataError, choose

#: Frames that are processed at a time, by device type; on CPUs as many as fit into their caches.
_AT_A_TIME = {"cpu": 4}


@dataclass(frozen=True)
class PicturePipeline:
    """Turns a camera's frame into a picture, by the steps that its fields configure, in their order."""

    size: int  # height and width of the picture
    rotate: bool = False  # turn by 180 degrees; LIBERO renders upside down, and its demonstrations were turned
    # quality with which the frame is compressed to JPEG at its rendered size, and decompressed; None: it is not
    # compressed. The demonstrations of published checkpoints were stored as JPEG, and their evaluation compresses
    # frames too.
    jpeg: int | None = None
    # filter with which the frame is resized to `size` x `size`, without keeping its proportions; None: not resized here
    resize: str | None = None
    # share of the area that is kept, around the centre, and enlarged to `size`; None: all. A checkpoint that was
    # trained with random crops is evaluated with the central one.
    crop: float | None = None

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(
                "a picture must have at least 2 x 2 pixels", where="size", found=self.size, allowed="2 or more"
            )
        if self.resize is not None:
            choose(KERNELS, self.resize, "unknown filter for resizing", where="resize")
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ConfigError(
                "the share of the area that a crop keeps is invalid",
                where="crop",
                found=self.crop,
                allowed="above 0, up to 1",
            )
        if self.jpeg is not None and not 1 <= self.jpeg <= 100:
            raise ConfigError("the JPEG quality is invalid", where="jpeg", found=self.jpeg, allowed="1 to 100")

    def __call__(self, frames: Tensor) -> Tensor:
        """Turn frames uint8 [..., H, W, 3] into pictures uint8 [..., size, size, 3]."""
        _check(frames)
        height, width = frames.shape[-3:-1]
        if self.resize is None and self.crop is None and (height, width) != (self.size, self.size):
            raise DataError(
                "the frames differ in size from the policy's pictures, and the pipeline does not resize",
                where="frames",
                found=f"{height} x {width}",
                allowed=f"{self.size} x {self.size}",
                fix="set `resize` or `crop` of the pipeline, or render at this size",
            )
        return _by_parts(frames, self._one_part, (self.size, self.size, 3))

    def _one_part(self, frames: Tensor) -> Tensor:
        if self.rotate:
            frames = frames.flip(1, 2)
        if self.jpeg is not None:
            frames = through_jpeg(frames, self.jpeg)
        if self.resize is not None and tuple(frames.shape[1:3]) != (self.size, self.size):
            frames = _levels(resize(frames.float(), self.size, self.size, self.resize))
        if self.crop is not None:
            # As TensorFlow does: divide levels by 255, and later multiply by 255.5 and drop the fraction.
            shares = crop_centre(frames.float() * float(np.float32(1 / 255)), self.crop, self.size)
            frames = (shares.clamp(0, 1) * 255.5).to(torch.uint8)
        return frames


#: Values of `robot.pictures`. `libero` and `aloha` reproduce OpenVLA-OFT's evaluation, `robotwin` SimpleVLA-RL, which
#: crops frames before they are resized. `plain` only resizes.
PIPELINES = {
    "libero": PicturePipeline(224, rotate=True, jpeg=95, resize="lanczos3", crop=0.9),
    "aloha": PicturePipeline(224, jpeg=95, resize="lanczos3", crop=0.9),
    "robotwin": PicturePipeline(224, crop=0.9),
    "plain": PicturePipeline(224, resize="bilinear"),
}


@dataclass(frozen=True)
class Normalisation:
    """Turns pictures into the pixels of one or more vision towers: (level / 255 - mean) / deviation, per channel."""

    means: tuple[tuple[float, ...], ...]  # means of red, green and blue, for each tower
    deviations: tuple[tuple[float, ...], ...]  # standard deviations of red, green and blue, for each tower

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any], where: str) -> Normalisation:
        """Return the normalisation with `means` and `stds` of a checkpoint's preprocessor_config.json.

        They may differ from the usual numbers: OpenVLA's are rounded to bfloat16 (0.484375 for 0.485).
        """
        try:
            parts = [tuple(tuple(float(x) for x in tower) for tower in config[key]) for key in ("means", "stds")]
        except (ValueError, KeyError, TypeError) as problem:
            raise ConfigError(
                f"the image normalisation cannot be read ({type(problem).__name__}: {problem})",
                where=where,
                allowed="`means` and `stds`: for each vision tower three numbers",
            ) from None
        if {len(tower) for part in parts for tower in part} != {3} or len(parts[0]) != len(parts[1]):
            raise ConfigError(
                "`means` and `stds` do not have three numbers for each vision tower",
                where=where,
                found=parts,
                allowed="`means` and `stds`: for each vision tower three numbers",
                fix="use the preprocessor_config.json that belongs to the checkpoint",
            )
        means, deviations = ([number for tower in part for number in tower] for part in parts)
        if not all(map(math.isfinite, means + deviations)) or min(deviations) <= 0:
            raise ConfigError(
                "`means` or `stds` has a number that pixels cannot be normalised with",
                where=where,
                found=parts,
                allowed="finite numbers, `stds` above 0",
            )
        return cls(*parts)

    def __call__(self, pictures: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalise pictures uint8 [..., H, W, 3] in float32; return [..., 3 * towers, H, W] in `dtype`."""
        _check(pictures)
        values = (pictures.movedim(-1, -3).float() / 255).unsqueeze(-4)
        means, deviations = (
            torch.tensor(part, device=pictures.device)[..., None, None] for part in (self.means, self.deviations)
        )
        return ((values - means) / deviations).flatten(-4, -3).to(dtype)


IMAGENET = Normalisation(((0.485, 0.456, 0.406),), ((0.229, 0.224, 0.225),))
SIGLIP = Normalisation(((0.5, 0.5, 0.5),), ((0.5, 0.5, 0.5),))
#: OpenVLA has two towers: DINOv2's channels are first, then SigLIP's.
DINO_SIGLIP = Normalisation(IMAGENET.means + SIGLIP.means, IMAGENET.deviations + SIGLIP.deviations)
#: The normalisation of a policy without a preprocessor_config.json, by its number of towers.
_OF_TOWERS = {1: SIGLIP, 2: DINO_SIGLIP}


def policy_normalisation(
    preprocessor: Mapping[str, Any] | None, towers: int, side: int, where: str = "preprocessor_config.json"
) -> Normalisation:
    """Return the image normalisation of a robot policy.

    Args:
        preprocessor: content of its preprocessor_config.json; None: it has none, so OpenVLA's numbers are used.
        towers: number of vision towers.
        side: side of the towers' pictures, in pixels.
    """
    if preprocessor is None:
        return _OF_TOWERS[towers]
    normalisation = Normalisation.of_checkpoint(preprocessor, where)
    sizes = preprocessor.get("input_sizes")
    wanted = [[3, side, side]] * towers
    if len(normalisation.means) != towers or (sizes is not None and [list(size) for size in sizes] != wanted):
        raise ConfigError(
            "the image normalisation does not fit the model's vision towers",
            where=where,
            found={"means": normalisation.means, "input_sizes": sizes},
            allowed=f"means of {towers} towers, and input_sizes {wanted} or none",
            fix="use config.json and preprocessor_config.json of the same checkpoint",
        )
    return normalisation


@dataclass(frozen=True)
class VideoPipeline:
    """Turns the frames of an episode into the clip for a video encoder. The defaults are V-JEPA 2's at 384 pixels."""

    frames: int = 64  # length of the clip
    size: int = 384  # height and width; frames are resized until their shorter side is 256/224 of it, and cropped
    # filter with which frames are resized. V-JEPA 2's own code, its class in transformers and SRPO use bilinear.
    filter: str = "bilinear"
    normalisation: Normalisation = IMAGENET

    def choose(self, count: int) -> list[int]:
        """Return which of an episode's `count` frames form its clip.

        They are evenly spaced and include both ends; a short episode is repeated.

        >>> VideoPipeline(frames=4).choose(8), VideoPipeline(frames=4).choose(3)
        ([0, 2, 4, 7], [0, 1, 2, 0])
        """
        if count < 1:
            raise DataError(
                "cannot make a clip of an episode without frames",
                where="frames",
                found=count,
                allowed="1 or more",
                fix="leave the episode out, or record its frames",
            )
        if count < self.frames:
            return [number % count for number in range(self.frames)]
        return [int(place) for place in np.linspace(0, count - 1, self.frames, dtype=np.int64)]

    def __call__(self, frames: Tensor) -> Tensor:
        """Turn an episode's frames, uint8 [T, H, W, 3], into a clip, float32 [frames, 3, size, size]."""
        _check(frames)
        height, width = frames.shape[1:3]
        short = self.size * 256 // 224
        larger = (short * height // min(height, width), short * width // min(height, width))
        top, left = (round((side - self.size) / 2) for side in larger)

        def enlarged(part: Tensor) -> Tensor:
            return _levels(resize(part.float(), *larger, self.filter))[
                :, top : top + self.size, left : left + self.size
            ]

        chosen = frames[self.choose(len(frames))]
        return self.normalisation(_by_parts(chosen, enlarged, (self.size, self.size, 3)))


def _levels(values: Tensor) -> Tensor:
    """Convert float32 pixel values to uint8, limited to 0 to 255; halves are rounded to even."""
    return values.round().clamp_(0, 255).to(torch.uint8)


def _by_parts(frames: Tensor, work: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> Tensor:
    """Apply `work` to frames [..., H, W, 3], a few at a time, and return the results, uint8 [..., *shape]."""
    flat = frames.reshape(-1, *frames.shape[-3:])
    result = torch.empty(len(flat), *shape, dtype=torch.uint8, device=frames.device)
    step = _AT_A_TIME.get(frames.device.type, 256)
    for start in range(0, len(flat), step):
        result[start : start + step] = work(flat[start : start + step])
    return result.view(*frames.shape[:-3], *shape)


def _check(frames: Tensor) -> None:
    if frames.dtype != torch.uint8 or frames.dim() < 3 or frames.shape[-1] != 3:
        raise DataError(
            "the shape or dtype of the frames is invalid",
            where="frames",
            found=f"{frames.dtype} {list(frames.shape)}",
            allowed="uint8 [..., height, width, 3]",
        )
