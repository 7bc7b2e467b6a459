"""Resizes and crops pictures as TensorFlow does, with torch on any device.

Each output is a weighted sum of a few inputs, added in a fixed order. So a picture's result does not depend on the
other pictures of its batch, as it could with a matrix product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]


def _lanczos3(x: Floats) -> Floats:
    pi = np.float32(np.pi)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.float32(3) * np.sin(pi * x) * np.sin(pi * x / np.float32(3)) / (pi * pi * x * x)
    return np.where(x > 3, 0, np.where(x <= np.float32(1e-3), 1, value)).astype(np.float32)


def _triangle(x: Floats) -> Floats:
    return np.maximum(np.float32(1) - x, np.float32(0))


def _cubic(x: Floats) -> Floats:
    near = (np.float32(1.5) * x - np.float32(2.5)) * x * x + np.float32(1)
    far = ((np.float32(-0.5) * x + np.float32(2.5)) * x - np.float32(4)) * x + np.float32(2)
    return np.where(x >= 2, 0, np.where(x >= 1, far, near)).astype(np.float32)


#: By name of a filter: the function from distance to weight, and the distance from which weights are 0.
KERNELS: dict[str, tuple[Callable[[Floats], Floats], int]] = {
    "lanczos3": (_lanczos3, 3),
    "bilinear": (_triangle, 1),
    "bicubic": (_cubic, 2),
}


def resize(pictures: Tensor, height: int, width: int, kernel: str) -> Tensor:
    """Resize pictures with antialiasing, as `tf.image.resize(..., method=kernel, antialias=True)`.

    Pillow's and torch's filters of these names are the same.

    Args:
        pictures: float32 [N, H, W, C].
        kernel: one of KERNELS; `bicubic` is Keys' with a = -0.5.

    Returns:
        float32 [N, height, width, C]; values may be outside of the input's range.
    """
    pictures = _weighted(pictures, height, kernel).transpose(1, 2)
    return _weighted(pictures, width, kernel).transpose(1, 2)


def _weighted(pictures: Tensor, size: int, kernel: str) -> Tensor:
    """Resize dimension 1 of the pictures to `size`: each output is a weighted sum of inputs."""
    if pictures.shape[1] == size:
        return pictures
    pictures = pictures.contiguous()
    places, weights = _taps(kernel, pictures.shape[1], size, str(pictures.device))
    total = torch.zeros(pictures.shape[0], size, *pictures.shape[2:], device=pictures.device)
    for place, weight in zip(places, weights, strict=True):
        total += pictures.index_select(1, place) * weight[:, None, None]
    return total


@functools.cache
def _taps(kernel: str, source: int, target: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the inputs of each output along one dimension: indices int64 and weights float32, [inputs per output,
    target]. All arithmetic is float32, as in TensorFlow.
    """
    function, radius = KERNELS[kernel][0], np.float32(KERNELS[kernel][1])
    inverse = np.float32(1.0 / np.float32(np.float32(target) / np.float32(source)))
    stretch = max(inverse, np.float32(1))
    centre = (np.arange(target, dtype=np.float32) + np.float32(0.5)) * inverse
    start = np.ceil(centre - radius * stretch - np.float32(0.5)).clip(0, source - 1).astype(np.int64)
    end = np.floor(centre + radius * stretch - np.float32(0.5)).clip(0, source - 1).astype(np.int64)
    places = start + np.arange((end - start).max() + 1)[:, None]
    distance = np.abs((places.astype(np.float32) + np.float32(0.5) - centre) * (np.float32(1) / stretch))
    weights = np.where(places <= end, function(distance), np.float32(0))
    weights = weights * (np.float32(1) / weights.sum(0, dtype=np.float32))
    return (
        torch.from_numpy(places.clip(0, source - 1)).to(device),
        torch.from_numpy(weights.astype(np.float32)).to(device),
    )


def crop_centre(pictures: Tensor, area: float, size: int) -> Tensor:
    """Crop the centre of each picture, and resize it to `size` x `size`.

    Equals `tf.image.crop_and_resize` with a central box: bilinear, with aligned corners, without antialiasing.

    Args:
        pictures: float32 [N, H, W, C].
        area: share of the area to keep, above 0, up to 1.
        size: side of the result in pixels, at least 2.
    """
    side = np.sqrt(np.float32(area))
    low = (np.float32(1) - side) / np.float32(2)
    pictures = _between(pictures.transpose(1, 2), low, low + side, size)
    return _between(pictures.transpose(1, 2), low, low + side, size)


def _between(pictures: Tensor, low: np.float32, high: np.float32, size: int) -> Tensor:
    """Interpolate dimension 1 linearly at `size` evenly spaced places from `low` to `high`, both fractions of its
    length."""
    last = np.float32(pictures.shape[1] - 1)
    at = low * last + np.arange(size, dtype=np.float32) * ((high - low) * last / np.float32(size - 1))
    at = at.clip(0, last)
    before = np.floor(at)
    pictures, device = pictures.contiguous(), pictures.device
    first = pictures.index_select(1, torch.from_numpy(before.astype(np.int64)).to(device))
    second = pictures.index_select(1, torch.from_numpy(np.ceil(at).astype(np.int64)).to(device))
    share = torch.from_numpy(at - before).to(device)
    return first + (second - first) * share[:, None, None]
