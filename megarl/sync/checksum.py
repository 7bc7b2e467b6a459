"""Checksums of tensors, computed a part at a time."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor


class Checksum(Protocol):
    """Takes the bytes of a tensor in order."""

    def update(self, part: Tensor) -> None:
        """Add the next bytes: those of `part`, row by row."""
        ...

    def hexdigest(self) -> str:
        """16 digits."""
        ...


class HostChecksum:
    """First 8 bytes of SHA-256."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, part: Tensor) -> None:
        """Add the next bytes."""
        self._sha.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """16 digits."""
        return self._sha.hexdigest()[:16]
