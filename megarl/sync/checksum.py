"""Checksums of a receiver's parameters, computed in parts: SHA-256 on the CPU, SGLang's own hash on a GPU.

Both are 16 hexadecimal digits. Checked against SGLang 0.5.23.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

_TILE = 8192  # words per tile
_WORD, _LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))


class Checksum(Protocol):
    """A checksum over the bytes of a tensor, which are added in order."""

    def update(self, part: Tensor) -> None:
        """Add the bytes of `part`, which follow those added before; of a strided tensor in row-major order."""

    def hexdigest(self) -> str:
        """Return the checksum, 16 hexadecimal digits."""


def make_checksum(nbytes: int, *, on_gpu: bool) -> Checksum:
    """Return the checksum that a receiver on a GPU or CPU computes for a tensor of `nbytes` bytes."""
    return DeviceChecksum(nbytes) if on_gpu else HostChecksum()


class HostChecksum:
    """The first 8 bytes of SHA-256, for tensors on a CPU."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, part: Tensor) -> None:
        """Add the bytes of the tensor's next part."""
        self._sha.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """Return the checksum, 16 hexadecimal digits."""
        return self._sha.hexdigest()[:16]


class DeviceChecksum:
    """SGLang's hash: two 32-bit hashes per tile of 8192 words, summed over tiles and mixed.

    The hash is computed on the device of the tensors; only `hexdigest` waits for the device.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._words = nbytes, 0
        self._sums: Tensor | None = None  # int64 [2], the two hashes, each summed over the tiles so far
        self._rest: Tensor | None = None

    def update(self, part: Tensor) -> None:
        """Add the next bytes of the tensor to its hash, which is computed tile by tile (fixed numbers of bytes).

        Bytes after the last whole tile are kept until the next call or the end.
        """
        flat = part.detach().contiguous().flatten().view(torch.uint8)
        if self._rest is not None:
            flat = torch.cat([self._rest, flat])
        whole = flat.numel() // (4 * _TILE) * (4 * _TILE)
        for piece in flat[:whole].split(256 * 4 * _TILE):
            self._add(piece)
        self._rest = flat[whole:].clone()

    def hexdigest(self) -> str:
        """Return the checksum, 16 hexadecimal digits."""
        if self._nbytes == 0:
            return f"{0:016x}"
        if self._rest is not None and self._rest.numel():
            self._add(torch.cat([self._rest, self._rest.new_zeros(-self._rest.numel() % 4)]))
            self._rest = None
        low, high = (0, 0) if self._sums is None else self._sums.flip(0).tolist()
        x = (low + (high << 32)) & _LONG
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x ^= x >> shift
            x = (x * factor) & _LONG
        return f"{x:016x}"

    def _add(self, flat: Tensor) -> None:
        """Add whole tiles to the hash; only the tensor's last tile may be short (a multiple of 4 bytes)."""
        words = flat.view(torch.int32).to(torch.int64) & _WORD
        at = torch.arange(self._words, self._words + words.numel(), device=words.device) & _WORD
        self._words += words.numel()
        tiles = -(-words.numel() // _TILE)
        halves = []
        for seed, (factor, turn) in zip(_SEEDS, _POSITIONS, strict=True):
            place = ((_times(at, factor) + seed) & _WORD) ^ (((at << turn) | (at >> (32 - turn))) & _WORD)
            mixed = words.new_zeros(tiles * _TILE)
            mixed[: words.numel()] = _mix(words ^ place)
            halves.append(_mix((mixed.view(tiles, _TILE).sum(1) & _WORD) ^ (-(-self._nbytes // 4) * 4 & _WORD)))
        sums = torch.stack([half.sum() for half in halves])  # sums of tiles wrap modulo 2**64
        self._sums = sums if self._sums is None else self._sums + sums


def _times(x: Tensor, factor: int) -> Tensor:
    """Return the lower 32 bits of x * factor, for x and factor below 2**32; the whole product could overflow int64."""
    return (((x >> 16) * factor & 0xFFFF) * 65536 + (x & 0xFFFF) * factor) & _WORD


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = _times(x, 0x85EBCA6B)
    x = x ^ (x >> 13)
    x = _times(x, 0xC2B2AE35)
    return x ^ (x >> 16)
