"""Reading of request bodies: the value of a key, or a refusal that names key, value and what is allowed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megarl.gateway.messages import ChatImage
from megarl.gateway.refusals import Refusal

_PIECE = 24  # characters of a piece of a stream
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of message parts that are text
_IMAGES = ("image_url", "input_image", "image")
_SHOWN = 100  # characters of a wrong value in a message
_CHANGES = "It changes the distribution of tokens, so the policy could not be trained on the reply"
#: Keys of any API that change the distribution of tokens -> values that change nothing, in addition to null.
CONSTRAINTS: dict[str, list[Any]] = {
    "guided_json": [],
    "guided_regex": [],
    "guided_grammar": [],
    "guided_choice": [],
    "guided_whitespace_pattern": [],
    "regex": [],
    "ebnf": [],
    "json_schema": [],
    "structural_tag": [],
    "structured_outputs": [{}],
    "output_format": [{}],
    "bad_words": [[]],
    "stop_token_ids": [[]],
    "min_tokens": [0],
}


def wrong(key: str, value: Any, allowed: str) -> Refusal:
    """Return the refusal of a key's value."""
    return Refusal(400, f"{key}: found {value!r:.{_SHOWN}}; allowed: {allowed}")


def number(body: dict[str, Any], key: str, least: int, most: int | None = None) -> int | None:
    """Return a whole number; None: the key is missing or null."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise wrong(key, value, f"a whole number from {least}" + (f" to {most}" if most is not None else ""))
    return value


def flag(body: dict[str, Any], key: str) -> bool:
    """Return a truth value, False where the key is missing or null."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(key, value, "true or false")
    return bool(value)


def items(body: dict[str, Any], key: str, above: str = "") -> list[dict[str, Any]]:
    """Return a list of objects, empty where the key is missing or null; `above` is the text before the key in
    messages."""
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong(above + key, value, "a list of objects")
    return value


def mapping(body: dict[str, Any], key: str, above: str = "") -> dict[str, Any]:
    """Return an object, empty where the key is missing or null; `above` is the text before the key in messages."""
    value = body.get(key)
    if value is not None and not isinstance(value, dict):
        raise wrong(above + key, value, "an object")
    return value or {}


def string(value: Any, key: str) -> str:
    """Return a text; null counts as an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong(key, value, "a text")
    return value


def strings(body: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of texts, which may be given as one text; without empty ones."""
    value = body.get(key)
    values = [value] if isinstance(value, str) else value or []
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise wrong(key, value, "a text or a list of texts")
    return tuple(text for text in values if text)


def join_texts(content: Any, key: str) -> str:
    """Return the text of a message's content: a text, null, or a list of parts that are texts."""
    text, images = read_content(content, key)
    if images:
        raise only_users(images[0])
    return text


def only_users(image: ChatImage) -> Refusal:
    """Return the refusal of an image in a message that may have none."""
    return Refusal(400, f"{image.where}: found an image; only messages of users and results of tools may have images")


def read_content(content: Any, key: str) -> tuple[str, tuple[ChatImage, ...]]:
    """Return the text and the images of a message's content: a text, null, or a list of parts."""
    if not isinstance(content, list):
        return string(content, key), ()
    return read_parts((f"{key}[{place}]", part) for place, part in enumerate(content))


def read_parts(parts: Iterable[tuple[str, Any]]) -> tuple[str, tuple[ChatImage, ...]]:
    """Return the text and the images of parts of a message, each with its key."""
    text, images = "", list[ChatImage]()
    for key, part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS:
            text += string(part.get("refusal" if kind == "refusal" else "text"), f"{key}.text")
        elif kind in _IMAGES:
            images.append(ChatImage(len(text), _file(part, key), key))
        else:
            raise Refusal(400, f"{key}: found a part of type {kind!r}; allowed: {', '.join((*_TEXTS, *_IMAGES))}")
    return text, tuple(images)


def _file(part: dict[str, Any], key: str) -> bytes:
    """Return the file of an image, which the request itself contains: in a data URL, or as base64 text."""
    if part["type"] == "image":
        source = mapping(part, "source", f"{key}.")
        if source.get("type") != "base64":
            raise wrong(f"{key}.source.type", source.get("type"), "base64; images are not fetched from elsewhere")
        return _decoded(source.get("data"), f"{key}.source.data")
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", None)
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise wrong(f"{key}.image_url", url, "data:image/png;base64,...; images are not fetched from elsewhere")
    return _decoded(data, f"{key}.image_url")


def _decoded(text: Any, key: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (AttributeError, ValueError, binascii.Error) as error:
        raise wrong(key, text, "the image file as base64") from error


def refuse_changes(body: dict[str, Any], neutral: dict[str, Any], above: str = "", why: str = _CHANGES) -> None:
    """Refuse keys whose effect is not supported, unless they have the value that changes nothing.

    Args:
        neutral: key -> values that change nothing, in addition to null.
        above: text before the keys in messages, such as `text.`; empty for the request's own keys.
        why: the reason, a sentence without its full stop.
    """
    for key, values in neutral.items():
        value = body.get(key)
        if value is not None and value not in values:
            raise Refusal(400, f"{above}{key}: found {value!r:.{_SHOWN}}. {why}; remove it from the request")


def overridden(body: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Return the sampling settings of a request that the recipe's settings replace."""
    return [key for key in keys if body.get(key) is not None]


def pieces(text: str) -> Iterator[str]:
    """Yield a text in the pieces of a stream."""
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
