"""Resizing and cropping against the plain sums in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.robots.data.resampling import crop_centre, resize


def weight(kernel: str, x: float) -> float:
    x = abs(x)
    if kernel == "bilinear":
        return max(0.0, 1 - x)
    if kernel == "bicubic":
        return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0
    return 1.0 if x == 0 else float(np.sinc(x) * np.sinc(x / 3)) if x < 3 else 0.0


def line(values: np.ndarray, size: int, kernel: str) -> np.ndarray:
    """A filtered resize of one dimension, a sum over all inputs."""
    step = len(values) / size
    stretch = max(step, 1.0)
    weights = [
        [weight(kernel, (j + 0.5 - (i + 0.5) * step) / stretch) for j in range(len(values))] for i in range(size)
    ]
    table = np.array(weights)
    return (table / table.sum(1, keepdims=True)) @ values


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic", "lanczos3"])
@pytest.mark.parametrize(("height", "width", "to"), [(32, 32, (28, 28)), (13, 20, (29, 7)), (16, 9, (16, 18))])
def test_resize_is_the_sum_over_all_inputs(kernel, height, width, to):
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(float)
    rows = np.apply_along_axis(line, 0, picture, to[0], kernel)
    expected = np.apply_along_axis(line, 1, rows, to[1], kernel)

    found = resize(torch.from_numpy(picture).float()[None], *to, kernel)[0]

    # Positions are float32, and lanczos3 at the end of its range is cut at 3 exactly: thousandths of a level.
    np.testing.assert_allclose(found.numpy(), expected, atol=5e-3)


@pytest.mark.parametrize(("mode", "to"), [("bilinear", (20, 45)), ("bicubic", (20, 45)), ("bicubic", (50, 51))])
def test_filters_are_those_of_torch(mode, to):
    picture = torch.rand(2, 31, 30, 3, generator=torch.Generator().manual_seed(0)) * 255
    expected = torch.nn.functional.interpolate(picture.permute(0, 3, 1, 2), to, mode=mode, antialias=True)
    torch.testing.assert_close(resize(picture, *to, mode), expected.permute(0, 2, 3, 1), atol=2e-3, rtol=0)


@pytest.mark.parametrize(("height", "width", "area", "size"), [(24, 24, 0.9, 24), (30, 17, 0.5, 12), (9, 9, 1.0, 20)])
def test_a_crop_is_read_between_its_corners(height, width, area, size):
    picture = np.random.default_rng(1).random((height, width, 3))
    side = math.sqrt(area)
    expected = np.empty((size, size, 3))
    for y, x in np.ndindex(size, size):
        at = [(length - 1) * ((1 - side) / 2 + side * i / (size - 1)) for length, i in ((height, y), (width, x))]
        top, left = (min(int(place + 1e-9), n - 2) for place, n in zip(at, (height, width), strict=True))
        dy, dx = at[0] - top, at[1] - left
        near = picture[top : top + 2, left : left + 2]
        upper, lower = (near[row, 0] * (1 - dx) + near[row, 1] * dx for row in (0, 1))
        expected[y, x] = upper * (1 - dy) + lower * dy

    found = crop_centre(torch.from_numpy(picture).float()[None], area, size)[0]

    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_pictures_do_not_depend_on_their_batch():
    pictures = torch.rand(5, 40, 40, 3, generator=torch.Generator().manual_seed(0))
    together = resize(pictures, 33, 33, "lanczos3")
    assert all(torch.equal(together[i], resize(pictures[i : i + 1], 33, 33, "lanczos3")[0]) for i in range(5))
