"""The loss of JPEG compression, applied to pictures in tensors on any device, without writing a file.

Published robot policies saw pictures that were JPEG files: their training data was stored so, and their evaluation
passes every rendered frame through TensorFlow's `encode_jpeg` (quality 95, chroma at half the size) and `decode_image`.
Only the quantisation of frequencies loses information; entropy coding loses none and is left out. The arithmetic
equals libjpeg-turbo's, integer for integer, with TensorFlow's choice of transforms: the accurate one for writing
(Loeffler, Ligtenberg and Moschytz 1989), the fast one for reading (Arai, Agui and Nakajima 1988). Other readers, such
as Pillow, use the accurate one for both, and their pictures differ by a few levels of 255.
Reading computes in float32: its numbers are multiples of 1/256 below 2^15, so that each operation is exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Tables K.1 and K.2 of ITU-T T.81: quantisation steps of luma and chroma frequencies, by row and column.
_BRIGHTNESS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_COLOUR = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8 for _ in range(4)),
)
#: Smallest side of a picture for which libjpeg smooths chroma as `_double` does.
SMALLEST = 6


def through_jpeg(pictures: Tensor, quality: int = 95) -> Tensor:
    """Return the pictures as they look after writing and reading a JPEG file.

    Args:
        pictures: uint8 [N, H, W, 3], both sides at least 6.
        quality: 1 to 100, libjpeg's scale.

    Returns:
        uint8 [N, H, W, 3].
    """
    if pictures.dtype != torch.uint8 or pictures.dim() != 4 or pictures.shape[-1] != 3:
        raise ValueError(f"pictures must be uint8 [N, H, W, 3], got {pictures.dtype} {list(pictures.shape)}")
    height, width = pictures.shape[1:3]
    if min(height, width) < SMALLEST or not 1 <= quality <= 100:
        raise ValueError(
            f"cannot compress a {height} x {width} picture at quality {quality}: sides must be at least {SMALLEST}, "
            "quality 1 to 100"
        )
    brightness, blue, red = _to_planes(pictures)
    brightness = _smear(brightness, -height % 16, -width % 16)
    colour = torch.cat([_halve(blue), _halve(red)])
    steps = [_steps(table, quality, str(pictures.device)) for table in (_BRIGHTNESS, _COLOUR)]
    brightness, colour = (_quantized(plane, *step) for plane, step in zip((brightness, colour), steps, strict=True))
    colour = _double(colour[:, : (height + 1) // 2, : (width + 1) // 2])[:, :height, :width]
    blue, red = colour.chunk(2)
    return _to_pictures(brightness[:, :height, :width], blue, red)


@functools.cache
def _steps(table: tuple[tuple[int, ...], ...], quality: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the divisors that quantise the frequencies of 8 x 8 pixels, and the multipliers that restore them.

    Both are float32 [8 columns, 8 rows, 1], from the quantisation steps `table` [8 rows, 8 columns].
    """
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    step = ((torch.tensor(table) * percent + 50) // 100).clamp(1, 255).T
    scale = torch.tensor([1.0, *(math.sqrt(2) * math.cos(k * math.pi / 16) for k in range(1, 8))], dtype=torch.float64)
    multipliers = _shift(step * torch.round(scale[:, None] * scale * (1 << 14)).long(), 12)
    return tuple(part[:, :, None].float().to(device) for part in (step * 8, multipliers))  # type: ignore[return-value]


def _shift(x: Tensor, bits: int) -> Tensor:
    """Divide by 2^bits and round half up."""
    return (x + (1 << (bits - 1))) >> bits


def _fixed(x: float, bits: int) -> int:
    return int(x * (1 << bits) + 0.5)


def _smear(plane: Tensor, down: int, right: int) -> Tensor:
    """Repeat the last row of a plane [N, H, W] `down` times and its last column `right` times."""
    for dimension, more in ((1, down), (2, right)):
        if more:
            last = plane.narrow(dimension, plane.shape[dimension] - 1, 1)
            plane = torch.cat([plane, *[last] * more], dim=dimension)
    return plane


def _to_planes(pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert RGB to planes of luma, blue difference and red difference: int32 [N, H, W], 0 to 255."""
    r, g, b = pictures.int().unbind(-1)
    half, centre = 1 << 15, (128 << 16) + (1 << 15) - 1
    brightness = _fixed(0.299, 16) * r + _fixed(0.587, 16) * g + _fixed(0.114, 16) * b + half
    blue = _fixed(0.5, 16) * b - _fixed(0.16874, 16) * r - _fixed(0.33126, 16) * g + centre
    red = _fixed(0.5, 16) * r - _fixed(0.41869, 16) * g - _fixed(0.08131, 16) * b + centre
    return brightness >> 16, blue >> 16, red >> 16


def _to_pictures(brightness: Tensor, blue: Tensor, red: Tensor) -> Tensor:
    """Convert planes int32 [N, H, W] of luma, blue and red difference to RGB pictures, uint8 [N, H, W, 3]."""
    half, blue, red = 1 << 15, blue - 128, red - 128
    r = brightness + ((_fixed(1.402, 16) * red + half) >> 16)
    g = brightness + ((half - _fixed(0.34414, 16) * blue - _fixed(0.71414, 16) * red) >> 16)
    b = brightness + ((_fixed(1.772, 16) * blue + half) >> 16)
    return torch.stack([r, g, b], dim=-1).clamp_(0, 255).to(torch.uint8)


def _halve(plane: Tensor) -> Tensor:
    """Halve both sides of a plane by means of 2 x 2 values, rounded down and up alternately; pad to multiples of 8.

    As in libjpeg, the last column is repeated before the means are taken, the last row afterwards.
    """
    height, width = plane.shape[1:]
    plane = _smear(plane, height % 2, -width % 16)
    total = plane[:, ::2, ::2] + plane[:, ::2, 1::2] + plane[:, 1::2, ::2] + plane[:, 1::2, 1::2]
    bias = torch.tensor([1, 2], dtype=torch.int32, device=plane.device).repeat(total.shape[2] // 2)
    means = (total + bias) >> 2
    return _smear(means, -means.shape[1] % 8, 0)


def _double(plane: Tensor) -> Tensor:
    """Double both sides of a plane: per direction, a value is 3/4 of its nearest old value and 1/4 of the next one."""
    edges = torch.cat([plane[:, :1], plane, plane[:, -1:]], dim=1)
    near = 3 * plane
    rows = torch.stack([near + edges[:, :-2], near + edges[:, 2:]], dim=2).flatten(1, 2)
    edges = torch.cat([rows[..., :1], rows, rows[..., -1:]], dim=2)
    near = 3 * rows
    return torch.stack([(near + edges[..., :-2] + 8) >> 4, (near + edges[..., 2:] + 7) >> 4], dim=3).flatten(2, 3)


def _quantized(plane: Tensor, divisors: Tensor, multipliers: Tensor) -> Tensor:
    """Quantise the frequencies of the 8 x 8 blocks of a plane int32 [N, H, W], and transform them back."""
    count, height, width = plane.shape
    blocks = (plane - 128).view(count, height // 8, 8, width // 8, 8).permute(4, 2, 0, 1, 3).reshape(8, 8, -1)
    rows = torch.stack(_forward(blocks.unbind(0), first=True))
    frequencies = torch.stack(_forward(rows.unbind(1), first=False), dim=1).float()
    quantised = torch.floor((frequencies.abs() + divisors / 2) / divisors).copysign_(frequencies)
    read = torch.stack(_inverse_dct((quantised * multipliers).unbind(1)), dim=1)
    values = torch.stack(_inverse_dct(read.unbind(0))).mul_(1 / 32).floor_().clamp_(-128, 127).int() + 128
    return values.view(8, 8, count, height // 8, width // 8).permute(2, 3, 1, 4, 0).reshape(count, height, width)


def _forward(x: Sequence[Tensor], *, first: bool) -> list[Tensor]:
    """Return the accurate DCT of eight int32 samples; with `first` (the first of two passes) scaled by 4."""
    sums = [x[i] + x[7 - i] for i in range(4)]
    t7, t6, t5, t4 = (x[i] - x[7 - i] for i in range(4))
    even, odd = sums[0] + sums[3], sums[1] + sums[2]
    t13, t12 = sums[0] - sums[3], sums[1] - sums[2]
    bits = 11 if first else 15
    ends = [(even + odd) << 2, (even - odd) << 2] if first else [_shift(even + odd, 2), _shift(even - odd, 2)]
    z1 = (t12 + t13) * 4433
    second, sixth = _shift(z1 + t13 * 6270, bits), _shift(z1 - t12 * 15137, bits)
    z3, z4 = t4 + t6, t5 + t7
    z5 = (z3 + z4) * 9633
    z1, z2 = (t4 + t7) * -7373, (t5 + t6) * -20995
    z3, z4 = z5 - z3 * 16069, z5 - z4 * 3196
    return [
        ends[0],
        _shift(t7 * 12299 + z1 + z4, bits),
        second,
        _shift(t6 * 25172 + z2 + z3, bits),
        ends[1],
        _shift(t5 * 16819 + z2 + z4, bits),
        sixth,
        _shift(t4 * 2446 + z1 + z3, bits),
    ]


def _inverse_dct(x: Sequence[Tensor]) -> list[Tensor]:
    """Return the fast inverse DCT of eight frequencies: float32 tensors whose values are integers."""
    t10, t11, t13 = x[0] + x[4], x[0] - x[4], x[2] + x[6]
    t12 = _times(x[2] - x[6], 362) - t13
    t0, t3, t1, t2 = t10 + t13, t10 - t13, t11 + t12, t11 - t12
    z13, z10, z11, z12 = x[5] + x[3], x[5] - x[3], x[1] + x[7], x[1] - x[7]
    t7 = z11 + z13
    z5 = _times(z10 + z12, 473)
    t6 = _times(z10, -669) + z5 - t7
    t5 = _times(z11 - z13, 362) - t6
    t4 = _times(z12, 277) - z5 + t5
    return [t0 + t7, t1 + t6, t2 + t5, t3 - t4, t3 + t4, t2 - t5, t1 - t6, t0 - t7]


def _times(x: Tensor, factor: int) -> Tensor:
    """Return floor(x * factor / 256)."""
    return (x * (factor / 256)).floor_()
