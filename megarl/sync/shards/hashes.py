"""Hashes of parameters that add up: the hash of a parameter is the sum of the hashes of its parts, however it is cut.

    H = sum over elements i of bits(i) * f(i)   mod 2**64

`bits(i)` is element i as an unsigned integer, i its place in the parameter's memory, and f(i) an odd number: the
finaliser of SplitMix64 (Steele, Lea and Flood 2014) with its lowest bit set. One changed element always changes H,
because bits differ by less than 2**64 and f(i) is odd. For several changed elements H is equal with a probability of
about 2**-63. A sender computes f from the places in the receiver's parameter, so hashes of sent parts add up to the
receiver's hash, and no tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 24  # elements that are hashed at once; each needs 8 bytes for each of a few temporary tensors


def box_hash(part: Tensor, offset: int, strides: Sequence[int]) -> Tensor:
    """Return the hash of a part of a parameter, int64 [] on the part's device (compare it modulo 2**64).

    Args:
        part: the elements in the parameter's dtype, of any strides in memory.
        offset, strides: place of the part's first element in the parameter, and the distance in the parameter between
            neighbours in each dimension of the part; in elements.
    """
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.numel():
        return total
    rows = max(1, _CHUNK // max(part[0].numel(), 1)) if part.dim() else 1
    part = part if part.dim() else part.view(1)
    word = _WORDS[part.element_size()]
    mask = (1 << 8 * part.element_size()) - 1
    for first in range(0, len(part), rows):
        chunk = part[first : first + rows].contiguous()
        bits = chunk.view(word).to(torch.int64)
        bits = bits & mask if part.element_size() < 8 else bits
        total += (
            bits * _odd(_places(chunk.shape, offset + first * (strides[0] if strides else 0), strides, part))
        ).sum()
    return total


def parameter_hash(parameter: Tensor) -> Tensor:
    """Return the hash of a whole contiguous parameter, int64 [] on its device."""
    return box_hash(parameter.detach().flatten(), 0, (1,))


def numbers_of(hashes: Sequence[Tensor]) -> list[int]:
    """Return hashes as numbers below 2**64. The host waits for the device once, not for each hash."""
    return [number % (1 << 64) for number in torch.stack(list(hashes)).tolist()] if hashes else []


def _places(shape: Sequence[int], offset: int, strides: Sequence[int], like: Tensor) -> Tensor:
    """Return the place of each element of a part in its parameter's memory, in elements: int64 [*shape]."""
    places = torch.full((1,) * len(shape), offset, dtype=torch.int64, device=like.device)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=False)):
        steps = torch.arange(size, dtype=torch.int64, device=like.device) * stride
        places = places + steps.view([size if at == dim else 1 for at in range(len(shape))])
    return places


def _odd(places: Tensor) -> Tensor:
    """Return the odd factor f of each place in a parameter: int64 with the bits of the unsigned number."""
    x = (places + 1) * _signed(_GOLDEN)
    for by, factor in ((30, _FIRST), (27, _SECOND)):
        x = x ^ _shifted(x, by)
        x = x * _signed(factor)
    x = x ^ _shifted(x, 31)
    return x | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return x shifted right by `by` bits, with zeros from the left."""
    return (x >> by) & ((1 << 64 - by) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
