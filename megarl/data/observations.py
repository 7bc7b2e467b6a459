"""Images in observations of environments and results of tools.

    [{"type": "image", "image": IMAGE}, {"type": "text", "text": "Now?"}]     parts, without delimiters
    [{"role": "tool", "content": [{"type": "image", "image": IMAGE}]}]        chat messages, whose content may be parts
An IMAGE has any form that a row allows (`megarl.data.images`); parts in OpenAI's form are read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.row_images import is_image, own_image
from megarl.system.errors import DataError

if TYPE_CHECKING:
    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.image_set import ImageSet

_PARTS = '{"type": "text", "text": "..."} or {"type": "image", "image": ...}'


def are_parts(value: Sequence[Any]) -> bool:
    """Return whether a list consists of parts of text and images, which have no role."""
    return bool(value) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) and "role" not in part for part in value
    )


def separate_images(observation: Any, images: ImagePrompts | None) -> tuple[Any, list[ImageSet]]:
    """Separate an observation into its text, with the text of an image in place of each image, and the images.

    Image tokens in texts, which may be the policy's own words, are removed, because each would count as an image.

    Args:
        observation: text, parts, or chat messages; other values are returned unchanged.
        images: reader of images; None: the recipe has none.
    """
    patches: list[ImageSet] = []

    def plain(text: str) -> str:
        if images is None:
            return text
        # Remove image tokens in two passes, which take linear time for any text. The first may join the text around a
        # token to another image token; the second replaces that token by white space, which cannot form a token.
        token = images.token_text
        return text.replace(token, "").replace(token, "\n" if " " in token else " ")

    def shown(parts: list[Any]) -> str:
        texts = [""]  # the texts between the images
        for part in parts:
            if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
                texts[-1] += part["text"]
            else:
                patches.append(_read(part, images, len(patches) + 1))
                texts.append("")
        return ("" if images is None else images.text).join(map(plain, texts))

    if isinstance(observation, str):
        return plain(observation), patches
    if not isinstance(observation, list) or not observation or not isinstance(observation[0], dict):
        return observation, patches
    if are_parts(observation):
        return shown(observation), patches
    return [
        {
            name: shown(value) if name == "content" and isinstance(value, list) else _cleaned(value, plain)
            for name, value in message.items()
        }
        for message in observation
    ], patches


def _read(part: Any, images: ImagePrompts | None, number: int) -> ImageSet:
    """Read the image in a part; it is the `number`-th image of an observation."""
    if not isinstance(part, dict) or not is_image(part):
        raise DataError("a part of the observation is neither text nor an image", found=f"{part!r:.80}", allowed=_PARTS)
    if images is None:
        raise DataError(
            "an environment or a tool returned an image, but nothing in the recipe reads images",
            where="data.image_key",
            found=None,
            fix="choose a vision-language model, and set data.image_key; rows need not have that column",
        )
    return images.read(own_image(part), f"image {number} of the observation")


def _cleaned(value: Any, plain: Callable[[str], str]) -> Any:
    """Apply `plain` to all texts in a JSON value, keys included."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_cleaned(item, plain) for item in value]
    return {plain(name): _cleaned(item, plain) for name, item in value.items()} if isinstance(value, dict) else value
