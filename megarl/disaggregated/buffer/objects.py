"""Blocks of bytes in the object stores of Ray's machines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from megarl.data.wire import Block, Span

#: A payload: the object that is its block, and its samples in it, from and to.
Piece: TypeAlias = tuple[Any, int, int]
_FREED_S = 7.0  # until all givers have heard what nobody needs, in their words every 5 s, and Ray has its memory back


def payloads_of(pieces: Sequence[Piece], limit_s: float) -> list[Span]:
    """What these pieces are, as soon as their objects are on this machine."""
    import ray

    from megarl.data.wire import Span

    objects = list(dict.fromkeys(ref for ref, _, _ in pieces))
    blocks = dict(zip(objects, ray.get(objects, timeout=limit_s), strict=True))
    return [Span(blocks[ref], start, stop) for ref, start, stop in pieces]


def put_object(block: Block) -> Any:
    """A reference to `block` in this machine's object store. What takers are done with leaves it seconds later."""
    import ray

    end = time.monotonic() + _FREED_S
    while True:
        try:
            return ray.put(block)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
