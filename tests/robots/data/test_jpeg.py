"""What JPEG does to a picture: TensorFlow's bytes, and the mathematics in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.robots.data.jpeg import through_jpeg
from tests.robots.data.golden_pictures import FILE, JPEG, frame


@pytest.mark.parametrize("name", JPEG)
def test_the_bytes_are_those_of_tensorflow(name):
    height, width, quality = JPEG[name]
    found = through_jpeg(torch.from_numpy(frame(name, height, width))[None], quality)[0].numpy()
    np.testing.assert_array_equal(found, np.load(FILE)[f"jpeg_{name}"])


def test_a_block_loses_what_rounding_its_frequencies_loses():
    """A grey 8 x 8 block in float64: cosine transform, rounding to steps of the table, and back."""
    scipy = pytest.importorskip("scipy.fft")
    table = [16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56]
    table += [14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92]
    table += [49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99]
    grey = frame("grey", 32, 32)[..., :1].repeat(3, axis=-1)
    expected = np.empty((32, 32))
    for y, x in np.ndindex(4, 4):
        block = np.s_[8 * y : 8 * y + 8, 8 * x : 8 * x + 8]
        frequencies = scipy.dctn(grey[block][..., 0] - 128.0, norm="ortho")
        steps = np.array(table).reshape(8, 8)
        expected[block] = scipy.idctn(np.round(frequencies / steps) * steps, norm="ortho") + 128

    found = through_jpeg(torch.from_numpy(grey)[None], quality=50)[0].numpy()

    difference = np.abs(found[..., 0] - expected.clip(0, 255))
    assert difference.max() < 20  # the fast transform is coarse, and a frequency half way goes to either step
    assert difference.mean() < 1


def test_pictures_do_not_depend_on_their_batch():
    pictures = torch.from_numpy(np.stack([frame(name, 40, 40) for name in "abc"]))
    together = through_jpeg(pictures)
    assert all(torch.equal(together[i], through_jpeg(pictures[i : i + 1])[0]) for i in range(3))


@pytest.mark.parametrize(
    ("picture", "quality"),
    [
        (torch.zeros(1, 8, 8, 3), 95),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), 95),
        (torch.zeros(1, 5, 8, 3, dtype=torch.uint8), 95),
        (torch.zeros(1, 8, 8, 3, dtype=torch.uint8), 0),
    ],
)
def test_what_is_no_picture_is_refused(picture, quality):
    with pytest.raises(ValueError, match="picture"):
        through_jpeg(picture, quality)
