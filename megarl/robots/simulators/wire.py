"""Messages between a trainer and a simulator's process: only numbers and names, so nothing in them is executed.

    a message of `plain` whose header has `arrays`, name -> [kind, shape], concatenated in its body

Pictures travel in memory that both processes map (`places`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.system import plain
from megarl.system.plain import Malformed

from .protocol import Recording, TaskSpec

#: A message: its header, and its arrays by name.
Message = tuple[dict[str, Any], dict[str, NDArray[Any]]]
_KINDS = ("<f4", "<f8", "<i4", "<i8", "|u1", "|b1")
_MOST_ARRAYS, _MOST_DIMENSIONS = 64, 8
#: Limits of bytes and nesting of a simulator's messages to the trainer; messages of the trainer are trusted.
_HEADER, _BODY, _DEPTH = 8 << 20, 1 << 30, 16
_ANY = (1 << 32) - 1


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> bytes:
    """Encode a message as bytes. `header`: plain JSON with finite numbers."""
    blocks = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    shapes = {name: [block.dtype.str, list(block.shape)] for name, block in blocks.items()}
    return plain.pack({**header, "arrays": shapes}, b"".join(block.tobytes() for block in blocks.values()))


class Inbox:
    """A decoder that takes bytes as they arrive, and returns messages once they are complete.

    Args:
        trusted: the messages come from the trainer.

    >>> inbox = Inbox()
    >>> data = pack({"call": "reset"})
    >>> inbox.feed(data[:5]); inbox.take()
    >>> inbox.feed(data[5:]); inbox.take()
    ({'call': 'reset'}, {})
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self._arrays = _ANY if trusted else _MOST_ARRAYS
        self._inbox = plain.PlainInbox(_ANY, _ANY, None) if trusted else plain.PlainInbox(_HEADER, _BODY, _DEPTH)

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._inbox.feed(data)

    def take(self) -> Message | None:
        """Return the next message; None: no message is complete yet.

        Raises:
            Malformed: the message is invalid.
        """
        message = self._inbox.take()
        return None if message is None else (message[0], _arrays(*message, most=self._arrays))


def _arrays(header: dict[str, Any], body: bytes, most: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of a message and remove their shapes from its header.

    Raises:
        Malformed: the shapes are invalid, or do not fit the body.
    """
    shapes = header.pop("arrays", None)
    if not isinstance(shapes, dict) or len(shapes) > most:
        raise Malformed(f"the field `arrays` of the message must map at most {most} names to type and shape")
    arrays, at = {}, 0
    for name, entry in shapes.items():
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in _KINDS or not isinstance(entry[1], list):
            raise Malformed(f"the array {plain.short(name)} has no valid type and shape: {plain.short(entry)}")
        if len(entry[1]) > _MOST_DIMENSIONS:
            raise Malformed(
                f"the array {plain.short(name)} has {len(entry[1])} dimensions; allowed: at most {_MOST_DIMENSIONS}"
            )
        field = f"a dimension of the array {plain.short(name)}"
        kind, shape = entry[0], [plain.whole(size, range(_ANY), field) for size in entry[1]]
        count = math.prod(shape)
        size = count * np.dtype(kind).itemsize
        if size > len(body) - at:
            raise Malformed(
                f"the array {plain.short(name)} needs {size} bytes, but {len(body) - at} are left in the message"
            )
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape).copy() if count else np.empty(shape, kind)
        at += size
    if at != len(body):
        raise Malformed(f"the message has {len(body) - at} bytes that belong to no array")
    return arrays


def places(spec: TaskSpec) -> tuple[dict[str, tuple[int, tuple[int, int, int]]], int]:
    """Return each camera's place in the shared memory (offset, shape), and the number of bytes."""
    layout, end = {}, 0
    for camera, (height, width) in spec.cameras.items():
        layout[camera] = (end, (height, width, 3))
        end += height * width * 3
    return layout, end


def clip_places(spec: TaskSpec, recording: Recording | None) -> tuple[dict[str, int], int]:
    """Return the offset of each camera's clip in the shared memory, after the pictures, and the number of bytes."""
    offsets, end = {}, places(spec)[1]
    if recording is not None:
        for camera in recording.cameras:
            offsets[camera] = end
            end += recording.frames * math.prod(spec.cameras[camera]) * 3
    return offsets, end


def plain_spec(spec: TaskSpec) -> dict[str, Any]:
    """Return a task as plain JSON."""
    cameras = {camera: [int(height), int(width)] for camera, (height, width) in spec.cameras.items()}
    return {**dataclasses.asdict(spec), "cameras": cameras}


def spec_of(plain: Mapping[str, Any]) -> TaskSpec:
    """Return the task that `plain_spec` wrote."""
    cameras = {camera: (height, width) for camera, (height, width) in plain["cameras"].items()}
    return TaskSpec(**{**plain, "cameras": cameras})
