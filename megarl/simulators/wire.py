"""Messages between a trainer and the process of a simulator: numbers and names only, so nothing in them is ever run.

    length of the header | length of the arrays | header (JSON) | arrays, one after the other

Pictures take another way: a block of memory that both map (`places`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocol import TaskSpec

#: Header and arrays.
Message = tuple[dict[str, Any], dict[str, NDArray[Any]]]
_LENGTHS = struct.Struct("<II")


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> bytes:
    """A message as bytes. `header`: plain JSON with finite numbers."""
    blocks = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    shapes = {name: [block.dtype.str, list(block.shape)] for name, block in blocks.items()}
    text = json.dumps({**header, "arrays": shapes}, allow_nan=False).encode()
    body = b"".join(block.tobytes() for block in blocks.values())
    return _LENGTHS.pack(len(text), len(body)) + text + body


class Inbox:
    """Takes bytes as they come, and gives messages as they are complete.

    >>> inbox = Inbox()
    >>> data = pack({"call": "reset"})
    >>> inbox.feed(data[:5]); inbox.take()
    >>> inbox.feed(data[5:]); inbox.take()
    ({'call': 'reset'}, {})
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes."""
        self._held += data

    def take(self) -> Message | None:
        """The next message; None: not all of it is there."""
        start = _LENGTHS.size
        if len(self._held) < start:
            return None
        text, body = _LENGTHS.unpack_from(self._held)
        if len(self._held) < start + text + body:
            return None
        header = json.loads(self._held[start : start + text])
        arrays, at = {}, start + text
        for name, (dtype, shape) in header.pop("arrays").items():
            block = np.empty(shape, dtype)
            if block.size:
                block[...] = np.frombuffer(self._held, dtype, math.prod(shape), at).reshape(shape)
            arrays[name], at = block, at + block.nbytes
        self._held = self._held[start + text + body :]
        return header, arrays


def places(spec: TaskSpec) -> tuple[dict[str, tuple[int, tuple[int, int, int]]], int]:
    """Where each camera's picture lies in the shared memory (offset, shape), and the bytes of all."""
    found, end = {}, 0
    for camera, (height, width) in spec.cameras.items():
        found[camera] = (end, (height, width, 3))
        end += height * width * 3
    return found, end


def plain_spec(spec: TaskSpec) -> dict[str, Any]:
    """What a task is, as plain JSON."""
    cameras = {camera: [int(height), int(width)] for camera, (height, width) in spec.cameras.items()}
    return {**dataclasses.asdict(spec), "cameras": cameras}


def spec_of(plain: Mapping[str, Any]) -> TaskSpec:
    """The task that `plain_spec` wrote."""
    cameras = {camera: (height, width) for camera, (height, width) in plain["cameras"].items()}
    return TaskSpec(**{**plain, "cameras": cameras})
