"""Images in what environments say and tools return.

    [{"type": "image", "image": IMAGE}, {"type": "text", "text": "Now?"}]     parts, without delimiters
    [{"role": "tool", "content": [{"type": "image", "image": IMAGE}]}]        chat messages, whose content may be parts

An IMAGE is what it may be in a row (`megarl.data.images`); the parts of OpenAI's form are read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.row_images import is_image, own_image
from megarl.errors import DataError

if TYPE_CHECKING:
    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.images import Patches

_PARTS = '{"type": "text", "text": "..."} or {"type": "image", "image": ...}'


def are_parts(value: Sequence[Any]) -> bool:
    """Tell whether a list holds parts of text and images; such parts have no role."""
    return bool(value) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) and "role" not in part for part in value
    )


def taken_apart(said: Any, images: ImagePrompts | None) -> tuple[Any, list[Patches]]:
    """Return an observation with the text of an image in the place of each, and the images.

    An image token in a text, which may quote the policy, is taken out: it would stand for an image.

    Args:
        said: text, parts, or chat messages; anything else stays as it is.
        images: the way to read images; None: nothing reads them.

    Raises:
        DataError: a part that is neither text nor an image, or an image that cannot be read, or that nothing reads.
    """
    found: list[Patches] = []

    def plain(text: str) -> str:
        return text if images is None else text.replace(images.token_text, "")

    def shown(part: Any) -> str:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return plain(part["text"])
        if not isinstance(part, dict) or not is_image(part):
            raise DataError("a part that is neither text nor an image", found=f"{part!r:.80}", allowed=_PARTS)
        if images is None:
            raise DataError(
                "an image, and nothing in the recipe reads images",
                where="data.image_key",
                found=None,
                fix="take a vision-language model, and set data.image_key; rows need not have that column",
            )
        found.append(images.read(own_image(part), f"image {len(found) + 1} of the observation"))
        return images.text

    if isinstance(said, str):
        return plain(said), found
    if not isinstance(said, list) or not said or not isinstance(said[0], dict):
        return said, found
    if are_parts(said):
        return "".join(map(shown, said)), found
    return [_message(one, plain, shown) for one in said], found


def _message(message: dict[str, Any], plain: Callable[[str], str], shown: Callable[[Any], str]) -> dict[str, Any]:
    """Return a message whose content is text."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(map(shown, content))}
    return {**message, "content": plain(content)} if isinstance(content, str) else message
