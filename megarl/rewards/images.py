"""Images on their way to reward functions: PNG in base64 between processes, images of PIL in the function."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.rewards.signatures import IMAGES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megarl.rewards.scoring import Sample


def encoded(images: Sequence[Sequence[tuple[int, npt.NDArray[np.uint8]]]]) -> list[list[str]]:
    """Return the images of each sample as text.

    Args:
        images: of each sample: digest, and pixels uint8 [height, width, 3]. Images of equal digests are encoded once.
    """
    known: dict[int, str] = {}
    for own in images:
        for digest, pixels in own:
            if digest not in known:
                known[digest] = base64.b64encode(png(pixels)).decode("ascii")
    return [[known[digest] for digest, _ in own] for own in images]


def packed(samples: Sequence[Any]) -> dict[str, Any]:
    """Return a message with samples in which each image is once, however many samples have it (`unpacked`)."""
    table: dict[str, int] = {}
    numbered = [
        {**one, IMAGES: [table.setdefault(text, len(table)) for text in one[IMAGES]]} if IMAGES in one else one
        for one in samples
    ]
    return {"samples": numbered, IMAGES: list(table)}


def unpacked(message: dict[str, Any]) -> list[Any]:
    """Return the samples of a message that `packed` has made."""
    table = message[IMAGES]
    return [
        {**one, IMAGES: [table[number] for number in one[IMAGES]]} if IMAGES in one else one
        for one in message["samples"]
    ]


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return pixels [height, width, 3] as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def with_images(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with images of PIL in the place of their texts; equal texts are one image."""
    known: dict[str, Any] = {}
    return [
        {**one, IMAGES: [_decoded(text, known) for text in one[IMAGES]]} if IMAGES in one else one for one in samples
    ]


def _decoded(text: str, known: dict[str, Any]) -> Any:
    from PIL import Image

    if text not in known:
        known[text] = Image.open(io.BytesIO(base64.b64decode(text)))
        known[text].load()
    return known[text]
