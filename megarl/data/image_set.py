"""Images on their way from the data, or an environment, to the model: patches with places and digests, as ImageSet.

In a batch they are the fields of `megarl.data.fields.IMAGES`.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.architectures.vision_language import ImageSettings
from megarl.data.batch import Batch
from megarl.data.fields import DIGESTS, GRIDS, PATCHES
from megarl.data.images import open_image, patchify, resized, unpatchify
from megarl.data.jagged import Jagged

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of a sequence, or one image by itself, which is at place 0.

    Attributes:
        patches: uint8 [P, 3 * patch * patch], of all of them.
        places: of each the place of its first feature among the tokens, and rows and columns of features.
        sizes: number of patches of each.
        digests: hash of the pixels of each.
    """

    patches: Tensor
    places: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]
    digests: tuple[int, ...]

    @classmethod
    def joined(cls, images: Sequence[ImageSet], shifts: Sequence[int]) -> ImageSet | None:
        """Return all of these images, each part as many tokens further on as `shifts` has; None: there are none."""
        if not images:
            return None
        return cls(
            torch.cat([part.patches for part in images]),
            tuple(place for part, shift in zip(images, shifts, strict=True) for place in part.shifted(shift).places),
            tuple(size for part in images for size in part.sizes),
            tuple(digest for part in images for digest in part.digests),
        )

    @property
    def features(self) -> int:
        """The number of features of all images, which is the number of their tokens."""
        return sum(rows * columns for _, rows, columns in self.places)

    def shifted(self, tokens: int) -> ImageSet:
        """Return the images with their places moved by `tokens`."""
        places = tuple((start + tokens, rows, columns) for start, rows, columns in self.places)
        return replace(self, places=places)

    def between(self, first: int, end: int) -> ImageSet | None:
        """Return the images that begin at the tokens first..end - 1, with places counted from `first`; None: there are
        none."""
        kept = [number for number, (start, *_) in enumerate(self.places) if first <= start < end]
        if not kept:
            return None
        if len(kept) == len(self.places):
            return self.shifted(-first)
        parts = self.parts()
        return ImageSet(
            torch.cat([parts[number] for number in kept]),
            tuple(self.places[number] for number in kept),
            tuple(self.sizes[number] for number in kept),
            tuple(self.digests[number] for number in kept),
        ).shifted(-first)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the patches of each image."""
        return self.patches.split(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return the images as JSON values, with the patches in base64."""
        encoded = base64.b64encode(self.patches.numpy().tobytes()).decode("ascii")
        return {"patches": encoded, "places": self.places, "sizes": self.sizes, "digests": self.digests}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ImageSet:
        """Return the images from the values that `to_json` returned."""
        places = tuple((start, rows, columns) for start, rows, columns in told["places"])
        patches = torch.frombuffer(bytearray(base64.b64decode(told["patches"])), dtype=torch.uint8)
        return cls(patches.view(sum(told["sizes"]), -1), places, tuple(told["sizes"]), tuple(told["digests"]))


def image_sets(samples: Batch) -> list[ImageSet | None]:
    """Return the images of each sample of a batch with image fields; None: the sample has no images."""
    parts = zip(*(samples[name].to("cpu").unbind() for name in (PATCHES, GRIDS, DIGESTS)), strict=True)
    return [
        _image_set(patches, grids.tolist(), digests.tolist()) if len(grids) else None
        for patches, grids, digests in parts
    ]


def image_features(samples: Batch) -> dict[int, int]:
    """Return the number of features of each distinct image of the samples, by the hash of its pixels."""
    if GRIDS not in samples:
        return {}
    counts = samples[GRIDS].values[:, 1:].prod(1).tolist()
    return dict(zip(samples[DIGESTS].values.tolist(), counts, strict=True))


def _image_set(patches: Tensor, grids: list[list[int]], digests: list[int]) -> ImageSet:
    merge = math.isqrt(len(patches) // sum(rows * columns for _, rows, columns in grids))
    places = tuple((start, rows, columns) for start, rows, columns in grids)
    return ImageSet(patches, places, tuple(merge**2 * rows * columns for _, rows, columns in grids), tuple(digests))


def pixels_of(images: ImageSet) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Return the hash and the pixels [height, width, 3] of each image, resized as the model sees it."""
    found, start = [], 0
    for (_, rows, columns), size, digest in zip(images.places, images.sizes, images.digests, strict=True):
        merge = math.isqrt(size // (rows * columns))
        values = images.patches[start : start + size].numpy()
        found.append((digest, unpatchify(values, rows * merge, columns * merge, merge)))
        start += size
    return found


def pil_images(images: ImageSet) -> list[Image]:
    """Return the images, resized as the model sees them."""
    from PIL import Image

    return [Image.fromarray(pixels) for _, pixels in pixels_of(images)]


def image_fields(
    images: Sequence[Sequence[ImageSet]], starts: Sequence[Sequence[int]], settings: ImageSettings
) -> dict[str, Jagged]:
    """Return the image fields of samples; `starts`: place of each image's first feature in its sample."""
    sets = [ImageSet.joined(own, places) for own, places in zip(images, starts, strict=True)]
    return fields_of_sets(sets, 3 * settings.patch**2)


def fields_of_sets(sets: Sequence[ImageSet | None], patch_values: int) -> dict[str, Jagged]:
    """Return the image fields of samples, each with its `ImageSet`; `patch_values`: numbers per patch."""
    given = [one for one in sets if one is not None]
    numbers = [0 if one is None else len(one.places) for one in sets]
    whole = torch.cat([torch.zeros(0, patch_values, dtype=torch.uint8), *(one.patches for one in given)])
    grids = [place for one in given for place in one.places]
    digests = [digest for one in given for digest in one.digests]
    return {
        PATCHES: Jagged.from_lengths(whole, [0 if one is None else len(one.patches) for one in sets]),
        GRIDS: Jagged.from_lengths(torch.tensor(grids, dtype=torch.int64).view(-1, 3), numbers),
        DIGESTS: Jagged.from_lengths(torch.tensor(digests, dtype=torch.int64), numbers),
    }


def patches_of(value: Any, settings: ImageSettings, folder: Path | None, where: str) -> ImageSet:
    """Return an image of a row in patches.

    Args:
        value: the image, see `megarl.data.images`.
        settings: sizes of patches, and limits of the number of pixels.
        folder: `data.image_dir`.
        where: row and column, for errors.

    Raises:
        DataError: it cannot be read, or has a size that no encoder takes.
    """
    pixels = resized(open_image(value, folder, where), settings)
    values = patchify(pixels, settings.patch, settings.merge)
    digest = hashlib.blake2b(values.tobytes(), digest_size=8, key=str(pixels.shape).encode()).digest()
    rows, columns = (side // (settings.patch * settings.merge) for side in pixels.shape[:2])
    number = int.from_bytes(digest, "little", signed=True)
    return ImageSet(torch.from_numpy(values), ((0, rows, columns),), (len(values),), (number,))
