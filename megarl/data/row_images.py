"""Find the images of a row, without reading them: column `data.image_key`, `<image>` in prompts, parts of messages.

    {"prompt": "<image> How many?", "images": ["a.png"]}
    {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
                                             {"type": "text", "text": "How many?"}]}]}

An image part of a message becomes `<image>` in its text. The part contains the image, or stands for the next image of
the column. Needs no torch: commands check rows before a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.data.rows import Row
from megarl.system.errors import DataError, count

#: The placeholder of an image in a prompt's text.
MARK = "<image>"
#: The placeholder of a video in a prompt's text (`megarl.data.videos`).
VIDEO_MARK = "<video>"
#: Type of an image part in a message -> the keys where the image may be.
_KINDS = {"image": ("image", "url", "path"), "image_url": ("image_url",)}
_ADDRESS = "url"


def is_image(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a message is an image."""
    return part.get("type") in _KINDS


def row_images(row: Row, key: str, prompt_key: str, limit: int | None) -> list[Any]:
    """Return the images of a row, in the order of their placeholders; they are file names, bytes or PIL images.

    Args:
        key: `data.image_key`; the row may lack the column.
        prompt_key: `data.prompt_key`; messages in this column may contain images.
        limit: `data.limit_images`.
    """
    # data.image_key may be the prompt column, if all images are inside messages.
    value = row.column(key, "data.image_key") if row.has(key) and key != prompt_key else None
    column = list(value) if isinstance(value, list) else [] if value is None or value == "" else [value]
    inside = list(_marks(row.column(prompt_key, "data.prompt_key"))) if row.has(prompt_key) else []
    if any(image is not None for image in inside):
        rest = iter(column)
        images = [next(rest, None) if image is None else image for image in inside]
        images = [image for image in images if image is not None] + list(rest)
    else:
        images = column
    if limit is not None and len(images) > limit:
        raise DataError(
            "the row has more images than a prompt may have",
            where=row.where,
            found=len(images),
            allowed=f"data.limit_images: {limit}",
            fix=f"raise the limit, or {row.column_fix}",
        )
    return images


def _marks(value: Any) -> Iterator[Any]:
    """Yield the image in each image placeholder of a prompt; None for a placeholder of an image in the image column."""
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
    """Return the image inside an image part of a message; None if the part stands for an image of the image column."""
    value = next((part[name] for name in _KINDS[part["type"]] if part.get(name) is not None), None)
    return value.get(_ADDRESS) if isinstance(value, Mapping) and _ADDRESS in value else value


def without_images(value: Any) -> Any:
    """Return a prompt's value with its image parts emptied, so that it is plain data that can be sent."""
    if isinstance(value, dict):
        if is_image(value):
            return {"type": "image"}
        return {name: without_images(inner) for name, inner in value.items()}
    return [without_images(inner) for inner in value] if isinstance(value, list) else value


def check_marks(text: str, images: int, key: str, row: Row) -> None:
    """Raise an error unless the whole prompt's text has one `<image>` per image of the row."""
    marks = text.count(MARK)
    if images != marks:
        raise DataError(
            f"the prompt has {count(marks, MARK)} for {count(images, 'image')}",
            where=row.where,
            found=text[:120],
            allowed=f"{MARK} once for each image of column {key!r}",
            fix=f"write {MARK} where the image belongs, as with data.format_prompt, or {row.column_fix}",
        )
