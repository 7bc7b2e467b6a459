"""Images for reward functions: base64 PNG between processes, PIL images in the function."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megarl.rewards.signatures import IMAGES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megarl.rewards.scoring import Sample


def encoded(images: Sequence[Sequence[tuple[int, npt.NDArray[np.uint8]]]]) -> list[list[str]]:
    """Return the images (digest, pixels uint8 [height, width, 3]) of each sample as base64 text; images with equal
    digests are encoded once."""
    known: dict[int, str] = {}
    for encoded_images in images:
        for digest, pixels in encoded_images:
            if digest not in known:
                known[digest] = base64.b64encode(png(pixels)).decode("ascii")
    return [[known[digest] for digest, _ in encoded_images] for encoded_images in images]


def packed(samples: Sequence[Any]) -> dict[str, Any]:
    """Return a message with the samples in which each distinct image is stored once; `unpacked` inverts it."""
    table: dict[str, int] = {}
    numbered = _with(samples, lambda text: table.setdefault(text, len(table)))
    return {"samples": numbered, IMAGES: list(table)}


def unpacked(message: dict[str, Any]) -> list[Any]:
    """Return the samples of a message that `packed` returned."""
    return _with(message["samples"], message[IMAGES].__getitem__)


def _with(samples: Sequence[Any], image: Callable[[Any], Any]) -> list[Any]:
    """Return the samples with each of their images replaced by the result of the function `image`."""
    return [{**sample, IMAGES: list(map(image, sample[IMAGES]))} if IMAGES in sample else sample for sample in samples]


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return pixels [height, width, 3] as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def with_images(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with PIL images in place of base64 text; equal texts become the same image."""
    known: dict[str, Any] = {}

    def decoded(text: str) -> Any:
        from PIL import Image

        if text not in known:
            known[text] = Image.open(io.BytesIO(base64.b64decode(text)))
            known[text].load()
        return known[text]

    return _with(samples, decoded)
