"""`ImageSet`: the images of a sequence as the model reads them: patches, places among the tokens, and digests.

A batch has them as the fields of `megarl.data.fields.IMAGES`.
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
    """The images of a sequence, or one image by itself, which is at place 0."""

    patches: Tensor  # uint8 [P, 3 * patch * patch], the patches of all images, one image after the other
    # for each image the position of its first feature among the tokens, and its rows and columns of features
    places: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]  # for each image the number of its patches
    digests: tuple[int, ...]  # for each image a hash of its pixels

    @classmethod
    def joined(cls, images: Sequence[ImageSet], shifts: Sequence[int]) -> ImageSet | None:
        """Join sets of images into one (None without sets). `shifts`: tokens by which each set's places move."""
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
        """Return the images that begin at tokens `first` to `end` - 1, with places counted from `first`; None: none
        begins there."""
        numbers = [number for number, (start, *_) in enumerate(self.places) if first <= start < end]
        if not numbers:
            return None
        if len(numbers) == len(self.places):
            return self.shifted(-first)
        parts = self.parts()
        return ImageSet(
            torch.cat([parts[number] for number in numbers]),
            tuple(self.places[number] for number in numbers),
            tuple(self.sizes[number] for number in numbers),
            tuple(self.digests[number] for number in numbers),
        ).shifted(-first)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the patches of each image."""
        return self.patches.split(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return the images as a JSON object whose patches are base64 text."""
        encoded = base64.b64encode(self.patches.numpy().tobytes()).decode("ascii")
        return {"patches": encoded, "places": self.places, "sizes": self.sizes, "digests": self.digests}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ImageSet:
        """Return the images from the values that `to_json` returned."""
        places = tuple((start, rows, columns) for start, rows, columns in values["places"])
        patches = torch.frombuffer(bytearray(base64.b64decode(values["patches"])), dtype=torch.uint8)
        return cls(patches.view(sum(values["sizes"]), -1), places, tuple(values["sizes"]), tuple(values["digests"]))


def image_sets(samples: Batch) -> list[ImageSet | None]:
    """Return each sample's images from the image fields of a batch; None for a sample without images."""
    sets = list[ImageSet | None]()
    for patches, grids, digests in zip(
        *(samples[name].to("cpu").unbind() for name in (PATCHES, GRIDS, DIGESTS)), strict=True
    ):
        places = tuple((start, rows, columns) for start, rows, columns in grids.tolist())
        features = [rows * columns for _, rows, columns in places]
        merge = math.isqrt(len(patches) // sum(features)) if places else 0
        sizes = tuple(merge**2 * count for count in features)
        sets.append(ImageSet(patches, places, sizes, tuple(digests.tolist())) if places else None)
    return sets


def image_features(samples: Batch) -> dict[int, int]:
    """Return the number of features of each distinct image of the samples, by the hash of its pixels."""
    if GRIDS not in samples:
        return {}
    counts = samples[GRIDS].values[:, 1:].prod(1).tolist()
    return dict(zip(samples[DIGESTS].values.tolist(), counts, strict=True))


def pixels_of(images: ImageSet) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Return the hash and the pixels, uint8 [height, width, 3], of each image in the size that the model sees."""
    pixels, start = [], 0
    for (_, rows, columns), size, digest in zip(images.places, images.sizes, images.digests, strict=True):
        merge = math.isqrt(size // (rows * columns))
        values = images.patches[start : start + size].numpy()
        pixels.append((digest, unpatchify(values, rows * merge, columns * merge, merge)))
        start += size
    return pixels


def pil_images(images: ImageSet) -> list[Image]:
    """Return the images as PIL images, in the size that the model sees."""
    from PIL import Image

    return [Image.fromarray(pixels) for _, pixels in pixels_of(images)]


def image_fields(
    images: Sequence[Sequence[ImageSet]], starts: Sequence[Sequence[int]], settings: ImageSettings
) -> dict[str, Jagged]:
    """Return the image fields of a batch from each sample's images.

    Args:
        starts: for each image the position of its first feature among the tokens of its sample.
    """
    sets = [ImageSet.joined(parts, places) for parts, places in zip(images, starts, strict=True)]
    return fields_of_sets(sets, 3 * settings.patch**2)


def fields_of_sets(sets: Sequence[ImageSet | None], patch_values: int) -> dict[str, Jagged]:
    """Return the image fields of a batch from one `ImageSet` per sample; `patch_values`: values per patch."""
    given = [images for images in sets if images is not None]
    numbers = [0 if images is None else len(images.places) for images in sets]
    whole = torch.cat([torch.zeros(0, patch_values, dtype=torch.uint8), *(images.patches for images in given)])
    grids = [place for images in given for place in images.places]
    digests = [digest for images in given for digest in images.digests]
    return {
        PATCHES: Jagged.from_lengths(whole, [0 if images is None else len(images.patches) for images in sets]),
        GRIDS: Jagged.from_lengths(torch.tensor(grids, dtype=torch.int64).view(-1, 3), numbers),
        DIGESTS: Jagged.from_lengths(torch.tensor(digests, dtype=torch.int64), numbers),
    }


def patches_of(value: Any, settings: ImageSettings, folder: Path | None, where: str) -> ImageSet:
    """Read an image of a data row, resize it for the model, and return it as an `ImageSet` of one image.

    Args:
        value: the image, in a form that `megarl.data.images` reads.
        settings: sizes of patches, and limits for the number of pixels.
        folder: `data.image_dir`.
        where: row and column, for errors.
    """
    pixels = resized(open_image(value, folder, where), settings)
    values = patchify(pixels, settings.patch, settings.merge)
    digest = hashlib.blake2b(values.tobytes(), digest_size=8, key=str(pixels.shape).encode()).digest()
    rows, columns = (side // (settings.patch * settings.merge) for side in pixels.shape[:2])
    number = int.from_bytes(digest, "little", signed=True)
    return ImageSet(torch.from_numpy(values), ((0, rows, columns),), (len(values),), (number,))
