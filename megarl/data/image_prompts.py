"""Prompts with images: `<image>` in a prompt becomes the model's tokens of an image, one for each of its features.

    "<image> How many circles?"  ->  <|vision_start|> <|image_pad|> x features <|vision_end|> How many circles?

Sizes are known when prompts are read, so that lengths are; pixels are read when a prompt is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.architectures.vision_language import ImageSettings, VisionEncoder
from megarl.config.data import DataConfig
from megarl.data.batch import Batch
from megarl.data.fields import DIGESTS, GRIDS, PATCHES
from megarl.data.images import Patches, fitting_size, image_folder, image_size, patches_of, unpatchify
from megarl.data.jagged import Jagged
from megarl.data.row_images import MARK, check_marks, row_images
from megarl.data.rows import Row
from megarl.errors import ConfigError, DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ImagePrompts:
    """The way from rows with images to prompts.

    Attributes:
        key: `data.image_key`.
        prompt_key: `data.prompt_key`, whose messages may hold images themselves.
        folder: `data.image_dir`.
        limit: `data.limit_images`.
        settings: sizes of patches and pixels.
        token: id of the token that stands for a feature.
        text: text of an image in a prompt, with one such token.
    """

    key: str
    prompt_key: str
    folder: Path | None
    limit: int | None
    settings: ImageSettings
    token: int
    text: str

    @classmethod
    def of(
        cls, config: DataConfig, encoder: VisionEncoder, settings: ImageSettings, tokenizer: PreTrainedTokenizerBase
    ) -> ImagePrompts | None:
        """Return how prompts of a recipe get their images; None: it names no column of images.

        Args:
            encoder, settings: of the model; `data.min_pixels` and `data.max_pixels` go before its limits.

        Raises:
            ConfigError: limits of pixels that contradict each other, a folder that is not there, or a tokenizer without
                the model's tokens of images.
        """
        if config.image_key is None:
            return None
        folder = image_folder(config)
        limits = settings.limited(config.min_pixels, config.max_pixels)
        tokens = list(encoder.image_tokens)
        text = "".join(map(str, tokenizer.convert_ids_to_tokens(tokens)))
        if tokenizer(text, add_special_tokens=False)["input_ids"] != tokens:
            raise ConfigError(
                "the tokenizer does not know the tokens of images that the model's config.json names",
                where="model.tokenizer",
                found=text,
                allowed=f"tokens {tokens}: the begin of an image, a feature, its end",
                fix="take the model's own tokenizer",
            )
        return cls(config.image_key, config.prompt_key, folder, config.limit_images, limits, encoder.image_token, text)

    def values(self, row: Row) -> list[Any]:
        """Return the images of a row, not read yet; DataError as `row_images`."""
        return row_images(row, self.key, self.prompt_key, self.limit)

    def marked(self, text: str, row: Row) -> str:
        """Return the text of a prompt with the model's tokens in the place of `<image>`.

        Raises:
            DataError: `<image>` does not stand there as often as the row has images.
        """
        check_marks(text, len(self.values(row)), self.key, row)
        return text.replace(MARK, self.text)

    def expanded(self, ids: Sequence[int], row: Row) -> list[int]:
        """Return the tokens of a prompt with as many image tokens as its images have features.

        Raises:
            DataError: an image that cannot be opened; or image tokens in the text of the row.
        """
        values = self.values(row)
        if ids.count(self.token) != len(values):
            raise DataError(
                "the text of the prompt holds the model's own token of images",
                where=row.where,
                found=f"{ids.count(self.token)} tokens, {count(len(values), 'image')}",
                allowed=f"{MARK} for each image",
                fix=row.way_out,
            )
        features = iter(values)
        found: list[int] = []
        for token in ids:
            found += [token] * (self._features(next(features), row) if token == self.token else 1)
        return found

    def _features(self, value: Any, row: Row) -> int:
        size = image_size(value, self.folder, self._where(row))
        height, width = fitting_size(*size, self.settings)
        unit = self.settings.patch * self.settings.merge
        return height // unit * (width // unit)

    def patches(self, row: Row) -> list[Patches]:
        """Read the images of a row.

        Raises:
            DataError: one cannot be read.
        """
        return [patches_of(value, self.settings, self.folder, self._where(row)) for value in self.values(row)]

    def _where(self, row: Row) -> str:
        return f"{row.where}: column {self.key!r}"

    def fields(self, rows: Sequence[Row], prompts: Sequence[Tensor]) -> dict[str, Jagged]:
        """Return the fields of prompts, of these tokens, with these rows' images."""
        images, starts = [self.patches(row) for row in rows], list[list[int]]()
        for own, tokens, row in zip(images, prompts, rows, strict=True):
            places = (tokens == self.token).nonzero()[:, 0].tolist()
            counts = [len(image.values) // self.settings.merge**2 for image in own]
            if sum(counts) != len(places):
                raise DataError(
                    "an image has another size than when the prompts were read",
                    where=self._where(row),
                    found=f"{sum(counts)} features for {len(places)} tokens",
                    fix="leave image files as they are during a run",
                )
            starts.append([places[sum(counts[:number])] for number in range(len(own))])
        return image_fields(images, starts, self.settings)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of a sequence.

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


def image_sets(samples: Batch) -> list[ImageSet | None]:
    """Return the images of each sample, which has the fields of images; None: it has none."""
    parts = zip(*(samples[name].to("cpu").unbind() for name in (PATCHES, GRIDS, DIGESTS)), strict=True)
    return [
        _image_set(patches, grids.tolist(), digests.tolist()) if len(grids) else None
        for patches, grids, digests in parts
    ]


def image_features(samples: Batch) -> dict[int, int]:
    """Return the number of features of every image of samples, those of equal pixels once, by its digest."""
    if GRIDS not in samples:
        return {}
    counts = samples[GRIDS].values[:, 1:].prod(1).tolist()
    return dict(zip(samples[DIGESTS].values.tolist(), counts, strict=True))


def _image_set(patches: Tensor, grids: list[list[int]], digests: list[int]) -> ImageSet:
    merge = math.isqrt(len(patches) // sum(rows * columns for _, rows, columns in grids))
    places = tuple((start, rows, columns) for start, rows, columns in grids)
    return ImageSet(patches, places, tuple(merge**2 * rows * columns for _, rows, columns in grids), tuple(digests))


def pixels_of(images: ImageSet) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Return digest and pixels [height, width, 3] of each image, in the size that the model sees."""
    found, start = [], 0
    for (_, rows, columns), size, digest in zip(images.places, images.sizes, images.digests, strict=True):
        merge = math.isqrt(size // (rows * columns))
        values = images.patches[start : start + size].numpy()
        found.append((digest, unpatchify(values, rows * merge, columns * merge, merge)))
        start += size
    return found


def image_fields(
    images: Sequence[Sequence[Patches]], starts: Sequence[Sequence[int]], settings: ImageSettings
) -> dict[str, Jagged]:
    """Return the fields of samples with these images each, whose features begin at the places `starts`."""
    merge, patch = settings.merge, settings.patch
    values = [torch.from_numpy(image.values) for own in images for image in own]
    counts = [sum(len(image.values) for image in own) for own in images]
    places = [start for own in starts for start in own]
    shapes = [[image.rows // merge, image.columns // merge] for own in images for image in own]
    grids = [[start, *shape] for start, shape in zip(places, shapes, strict=True)]
    numbers = torch.tensor([len(own) for own in images], dtype=torch.int64)
    whole = torch.cat([torch.zeros(0, 3 * patch**2, dtype=torch.uint8), *values])
    return {
        PATCHES: Jagged.from_lengths(whole, counts),
        GRIDS: Jagged.from_lengths(torch.tensor(grids, dtype=torch.int64).view(-1, 3), numbers),
        DIGESTS: Jagged.from_lengths(
            torch.tensor([image.digest for own in images for image in own], dtype=torch.int64), numbers
        ),
    }
