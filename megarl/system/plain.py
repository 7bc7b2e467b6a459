"""Messages of processes that run foreign code: JSON and bytes with stated sizes; nothing in them is ever executed.

    length of the header | length of the body | header (a JSON object) | body

Code that a model wrote can write anything into the connection of its process. So a reader states limits, and a larger,
deeper or invalid message raises `Malformed`; the reader never waits for the rest of a message. It validates the fields
of a message, for usual types by the functions below.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

_LENGTHS = struct.Struct("<II")
_SHOWN = 40  # characters of an invalid value that errors show


class Malformed(ValueError):
    """A process sent an invalid message."""


def pack(header: Mapping[str, Any], body: bytes = b"", *, finite: bool = True) -> bytes:
    """Encode a message as bytes. NaN and infinity, which only Python's JSON allows, are rejected with `finite`."""
    text = json.dumps(header, allow_nan=not finite, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return _LENGTHS.pack(len(text), len(body)) + text + body


class PlainInbox:
    """A decoder that receives bytes in any pieces and returns complete messages.

    Args:
        header: maximum bytes of a header.
        body: maximum bytes of a body.
        depth: maximum nesting of lists and objects in a header; None: no limit, because the writer is trusted.

    >>> inbox = PlainInbox(1000, 0, 5)
    >>> data = pack({"call": "reset"})
    >>> inbox.feed(data[:5]); inbox.take()
    >>> inbox.feed(data[5:]); inbox.take()
    ({'call': 'reset'}, b'')
    """

    def __init__(self, header: int, body: int, depth: int | None) -> None:
        self._limits, self._depth = (header, body), depth
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._held += data

    def take(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next message, or None while it is incomplete. Raise Malformed if it is invalid."""
        start = _LENGTHS.size
        if len(self._held) < start:
            return None
        sizes = _LENGTHS.unpack_from(self._held)
        for part, size, limit in zip(("header", "body"), sizes, self._limits, strict=True):
            if size > limit:
                raise Malformed(f"the {part} of the message has {size} bytes; allowed: at most {limit}")
        middle, end = start + sizes[0], start + sum(sizes)
        if len(self._held) < end:
            return None
        header, body = parsed(bytes(self._held[start:middle]), self._depth), bytes(self._held[middle:end])
        del self._held[:end]
        return header, body


def parsed(text: bytes, depth: int | None) -> dict[str, Any]:
    """Return the JSON object in `text`, or raise Malformed. `depth` is the maximum nesting of lists and objects; None:
    no limit.
    """
    try:
        header = json.loads(text.decode("utf-8", "surrogatepass"), parse_constant=_constant if depth else None)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the message is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise Malformed(f"the message is not a JSON object: {short(header)}")
    if depth is not None and nested_deeper(header, depth):
        raise Malformed(f"the message nests lists and objects more than {depth} levels deep")
    return header


def _constant(name: str) -> float:
    raise ValueError(f"JSON has no number {name}")


def nested_deeper(value: Any, depth: int) -> bool:
    """Return whether `value` has more than `depth` nested lists and objects."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list, tuple))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, (dict, list, tuple)) for item in level)


def number(value: Any, what: str) -> float:
    """Return `value` as a finite number, or raise Malformed; `what` names the field."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer too large for a float
            if math.isfinite(converted := float(value)):
                return converted
    raise Malformed(f"{what} must be a finite number, not {short(value)}")


def whole(value: Any, limits: range, what: str) -> int:
    """Return `value` as an integer within `limits`, or raise Malformed; `what` names the field."""
    if not isinstance(value, int) or isinstance(value, bool) or value not in limits:
        raise Malformed(f"{what} must be an integer from {limits.start} to {limits.stop - 1}, not {short(value)}")
    return value


def flag(value: Any, what: str) -> bool:
    """Return `value`, true or false, or raise Malformed; `what` names the field."""
    if not isinstance(value, bool):
        raise Malformed(f"{what} must be true or false, not {short(value)}")
    return value


def text(value: Any, limit: int, what: str) -> str:
    """Return `value` as text of at most `limit` characters, or raise Malformed; `what` names the field."""
    if not isinstance(value, str) or len(value) > limit:
        shown = f"{len(value)} characters" if isinstance(value, str) else short(value)
        raise Malformed(f"{what} must be text of at most {limit} characters, not {shown}")
    return value


def short(value: Any) -> str:
    """Return the beginning of a value as JSON, or the type of a list or mapping, for an error text."""
    shown = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."


def cut(value: str, limit: int) -> str:
    """Return the first `limit` characters of a text, including a note if it was cut.

    >>> cut("x" * 100, 30)
    'xxxxxxx... (of 100 characters)'
    """
    if len(value) <= limit:
        return value
    note = f"... (of {len(value)} characters)"
    return value[: max(0, limit - len(note))] + note
