"""Images of requests: read in a thread, within limits, in the size that the model sees.

    file in a request -> its size -> limits of the call -> pixels, patches -> `ChatImage.pixels`

A client sends all images of a conversation with every call, so an image that the episode still has is not read again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from megarl.gateway.messages import ChatImage, ChatMessage
from megarl.gateway.refusals import Refusal, too_long
from megarl.rewards.images import png
from megarl.system.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from megarl.architectures.vision_language import ImageSettings
    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.image_set import ImageSet

#: Maximum number of images of a call where `data.limit_images` sets none.
MOST_IMAGES = 100
#: Maximum pixels of one image, and of all images of a call, before they are resized.
MOST_PIXELS, MOST_OF_CALL = 32_000_000, 128_000_000
_THREADS = 2


def data_url(image: Image) -> str:
    """Return an image as a data URL, as requests contain it."""
    import numpy as np

    return f"data:image/png;base64,{base64.b64encode(png(np.asarray(image))).decode('ascii')}"


class ImageReader:
    """Reads the images of all episodes of a replica.

    Args:
        images: how the model sees images; None: the policy reads text.
        tokens: maximum tokens of a sequence.
    """

    def __init__(self, images: ImagePrompts | None, tokens: int) -> None:
        self._images, self._tokens = images, tokens
        self._threads = ThreadPoolExecutor(_THREADS, "images")
        self._known: WeakValueDictionary[bytes, ImageSet] = WeakValueDictionary()

    @property
    def is_used(self) -> bool:
        """Whether the policy sees images."""
        return self._images is not None

    def close(self) -> None:
        """Cancel the reading of images that has not begun yet, and stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, messages: Sequence[ChatMessage]) -> None:
        """Raise Refusal if the policy sees no images, or not so many."""
        images = [image for message in messages for image in message.images]
        if not images:
            return
        if self._images is None:
            raise Refusal(
                400,
                f"{images[0].where}: found an image, but this policy reads text only (data.image_key of the recipe is "
                "null)",
            )
        most = self._images.limit or MOST_IMAGES
        if len(images) > most:
            limit = "this gateway" if self._images.limit is None else "data.limit_images of the recipe"
            raise Refusal(400, f"{images[most].where}: found {len(images)} images; {limit} allows {most} in a call")

    async def read(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return the messages with the pixels of their images.

        Raises:
            Refusal: an image cannot be read, is too large, or the images need more tokens than a sequence may have.
        """
        if self._images is None or not any(message.images for message in messages):
            return messages
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, self._images, messages)

    def _read(self, prompts: ImagePrompts, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        images = [image for message in messages for image in message.images]
        try:
            self._check_sizes(images, prompts.settings)
            return [
                replace(message, images=tuple(self._with_pixels(image, prompts) for image in message.images))
                for message in messages
            ]
        except DataError as error:
            details = [("found", error.found), ("allowed", error.allowed)]
            given = [f"; {name}: {value}" for name, value in details if value is not None]
            raise Refusal(400, f"{error.where}: {error.what}{''.join(given)}") from error

    def _check_sizes(self, images: Sequence[ChatImage], settings: ImageSettings) -> None:
        """Refuse images that are too large, before any of their pixels is decoded."""
        from megarl.data.images import fitting_size, image_size  # imports numpy, which commands about keys do not need

        total, tokens, unit = 0, 0, settings.patch * settings.merge
        for image in images:
            height, width = image_size(image.file, None, image.where)
            total += height * width
            if height * width > MOST_PIXELS:
                raise Refusal(400, f"{image.where}: found {width} x {height} pixels; allowed: {MOST_PIXELS} pixels")
            if total > MOST_OF_CALL:
                raise Refusal(
                    400, f"{image.where}: found {total} pixels in the images up to this one; allowed: {MOST_OF_CALL}"
                )
            rows, columns = (side // unit for side in fitting_size(height, width, settings))
            tokens += rows * columns
        if tokens > self._tokens:
            raise too_long(self._tokens)

    def _with_pixels(self, image: ChatImage, prompts: ImagePrompts) -> ChatImage:
        digest = hashlib.blake2b(image.file, digest_size=16).digest()
        pixels = self._known.get(digest)
        if pixels is None:
            pixels = self._known[digest] = prompts.read(image.file, image.where)
        return replace(image, file=b"", pixels=pixels)
