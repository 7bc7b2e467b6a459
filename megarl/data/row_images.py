"""Images in the columns of a row, without their pixels: `data.image_key`, `<image>` in prompts, and parts of messages.

    {"prompt": "<image> How many?", "images": ["a.png"]}
    {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
                                             {"type": "text", "text": "How many?"}]}]}

A part of a message that is an image becomes `<image>` in its text. It has the image itself, or stands for the next one
of the column. Needs no torch: rows are also looked at before a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.data.rows import Row
from megarl.system.errors import DataError, count

#: Stands for an image in the text of a prompt.
MARK = "<image>"
#: Kinds of a part of a message that is an image -> the keys that may hold it.
_KINDS = {"image": ("image", "url", "path"), "image_url": ("image_url",)}
_ADDRESS = "url"


def is_image(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a message is an image."""
    return part.get("type") in _KINDS


def row_images(row: Row, key: str, prompt_key: str, limit: int | None) -> list[Any]:
    """Return the images of a row in the order of their marks, not read yet.

    Args:
        key: `data.image_key`; the row need not have the column.
        prompt_key: `data.prompt_key`, whose messages may hold images.
        limit: `data.limit_images`.

    Raises:
        DataError: more images than `limit`.
    """
    # Images only inside messages: the column of the prompt is none of images.
    found = row.column(key, "data.image_key") if row.has(key) and key != prompt_key else None
    column = list(found) if isinstance(found, list) else [] if found is None or found == "" else [found]
    inside = list(_marks(row.column(prompt_key, "data.prompt_key"))) if row.has(prompt_key) else []
    if any(value is not None for value in inside):
        rest = iter(column)
        images = [next(rest, None) if value is None else value for value in inside]
        images = [image for image in images if image is not None] + list(rest)
    else:
        images = column
    if limit is not None and len(images) > limit:
        raise DataError(
            f"column {key!r} holds more images than a prompt may have",
            where=row.where,
            found=len(images),
            allowed=f"data.limit_images: {limit}",
            fix=f"raise it, or {row.way_out}",
        )
    return images


def _marks(value: Any) -> Iterator[Any]:
    """Yield, for each mark in a prompt's text or messages, the image that stands there; None: one of the column."""
    if isinstance(value, str):
        yield from [None] * value.count(MARK)
    elif isinstance(value, list):
        for message in value:
            content = message.get("content", message.get("value")) if isinstance(message, dict) else message
            for part in content if isinstance(content, list) else [content]:
                if isinstance(part, dict) and is_image(part):
                    yield own_image(part)
                else:
                    yield from _marks(part.get("text") if isinstance(part, dict) else part)


def own_image(part: Mapping[str, Any]) -> Any:
    """Return the image that a part of a message has itself; None: it stands for one of the column."""
    value = next((part[name] for name in _KINDS[part["type"]] if part.get(name) is not None), None)
    return value.get(_ADDRESS) if isinstance(value, Mapping) and _ADDRESS in value else value


def without_images(value: Any) -> Any:
    """Return a prompt's value with the images taken out of its parts, which stay: it can then be sent as plain data."""
    if isinstance(value, dict):
        if is_image(value):
            return {"type": "image"}
        return {name: without_images(inner) for name, inner in value.items()}
    return [without_images(inner) for inner in value] if isinstance(value, list) else value


def check_marks(text: str, images: int, key: str, row: Row) -> None:
    """Refuse the text of a whole prompt in which `<image>` does not stand as often as the row has images.

    Raises:
        DataError: names the row.
    """
    marks = text.count(MARK)
    if images != marks:
        raise DataError(
            f"the prompt has {count(marks, MARK)} for {count(images, 'image')}",
            where=row.where,
            found=text[:120],
            allowed=f"{MARK} once for each image of column {key!r}",
            fix=f"write {MARK} where the image belongs, as with data.format_prompt, or {row.way_out}",
        )
