"""Prompts with images: `<image>` in a prompt becomes the model's tokens of an image, one for each of its features.

    "<image> How many circles?"  ->  <|vision_start|> <|image_pad|> x features <|vision_end|> How many circles?

Sizes are known when prompts are read, so that lengths are; pixels are read when a prompt is trained on.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from megarl.system.errors import ConfigError, DataError, count

if TYPE_CHECKING:
    from PIL.Image import Image
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
    token_text: str
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
        texts = [str(text) for text in tokenizer.convert_ids_to_tokens(tokens)]
        text = "".join(texts)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != tokens:
            raise ConfigError(
                "the tokenizer does not know the tokens of images that the model's config.json names",
                where="model.tokenizer",
                found=text,
                allowed=f"tokens {tokens}: the begin of an image, a feature, its end",
                fix="take the model's own tokenizer",
            )
        token, token_text = encoder.image_token, texts[tokens.index(encoder.image_token)]
        return cls(config.image_key, config.prompt_key, folder, config.limit_images, limits, token, token_text, text)

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

    def read(self, value: Any, where: str) -> Patches:
        """Read an image; DataError as `patches_of`, with `where`."""
        return patches_of(value, self.settings, self.folder, where)

    def patches(self, row: Row) -> list[Patches]:
        """Read the images of a row.

        Raises:
            DataError: one cannot be read.
        """
        return [self.read(value, self._where(row)) for value in self.values(row)]

    def placed(self, ids: Sequence[int], images: Sequence[Patches]) -> tuple[list[int], ImageSet | None]:
        """Return tokens with as many image tokens as the images have features, and the images in their places.

        Args:
            ids: tokens with one image token for each image.

        Raises:
            DataError: other image tokens than those of the images.
        """
        if ids.count(self.token) != len(images):
            raise DataError(
                "the text holds the model's own token of images",
                found=f"{ids.count(self.token)} tokens, {count(len(images), 'image')}",
                allowed="images as parts, and no such token in text",
            )
        left, found, starts = iter(images), list[int](), list[int]()
        for token in ids:
            if token == self.token:
                starts.append(len(found))
                found += [token] * (len(next(left).values) // self.settings.merge**2)
            else:
                found.append(token)
        return found, ImageSet.of(images, starts, self.settings.merge)

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

    @classmethod
    def of(cls, images: Sequence[Patches], starts: Sequence[int], merge: int) -> ImageSet | None:
        """Return the images whose first features are at `starts`; None: there are none.

        Args:
            merge: patches along a side of a feature.
        """
        if not images:
            return None
        shapes = [(one.rows // merge, one.columns // merge) for one in images]
        return cls(
            torch.cat([torch.from_numpy(one.values) for one in images]),
            tuple((start, rows, columns) for start, (rows, columns) in zip(starts, shapes, strict=True)),
            tuple(len(one.values) for one in images),
            tuple(one.digest for one in images),
        )

    def followed_by(self, other: ImageSet, shift: int) -> ImageSet:
        """Return these images and, `shift` tokens further on, those of `other`."""
        return ImageSet(
            torch.cat([self.patches, other.patches]),
            self.places + other.shifted(shift).places,
            self.sizes + other.sizes,
            self.digests + other.digests,
        )

    def shifted(self, tokens: int) -> ImageSet:
        """Return the images `tokens` tokens further on."""
        places = tuple((start + tokens, rows, columns) for start, rows, columns in self.places)
        return replace(self, places=places)

    def between(self, first: int, end: int) -> ImageSet | None:
        """Return the images that begin at the tokens from `first` up to, not including, `end`, by their distance to
        `first`."""
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
        """Return plain data of it, with the patches in base64."""
        encoded = base64.b64encode(self.patches.numpy().tobytes()).decode("ascii")
        return {"patches": encoded, "places": self.places, "sizes": self.sizes, "digests": self.digests}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ImageSet:
        """Read what `to_json` gave."""
        places = tuple((start, rows, columns) for start, rows, columns in told["places"])
        patches = torch.frombuffer(bytearray(base64.b64decode(told["patches"])), dtype=torch.uint8)
        return cls(patches.view(sum(told["sizes"]), -1), places, tuple(told["sizes"]), tuple(told["digests"]))


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


def pil_images(images: ImageSet) -> list[Image]:
    """Return the images, in the size that the model sees."""
    from PIL import Image

    return [Image.fromarray(pixels) for _, pixels in pixels_of(images)]


def image_fields(
    images: Sequence[Sequence[Patches]], starts: Sequence[Sequence[int]], settings: ImageSettings
) -> dict[str, Jagged]:
    """Return the fields of samples with these images each, whose features begin at the places `starts`."""
    sets = [ImageSet.of(own, places, settings.merge) for own, places in zip(images, starts, strict=True)]
    return fields_of_sets(sets, 3 * settings.patch**2)


def fields_of_sets(sets: Sequence[ImageSet | None], patch_values: int) -> dict[str, Jagged]:
    """Return the fields of samples with these images each; `patch_values`: numbers of a patch."""
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
