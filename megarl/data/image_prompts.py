"""Prompts with images: `<image>` in a prompt becomes the model's image tokens, one for each feature of the image.

    "<image> How many circles?"  ->  <|vision_start|> <|image_pad|> x features <|vision_end|> How many circles?
The sizes of images are read with the prompts, because lengths depend on them; pixels are read when a prompt is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megarl.architectures.vision_language import ImageSettings, VisionEncoder
from megarl.config.data import DataConfig
from megarl.data.image_set import ImageSet, image_fields, patches_of
from megarl.data.images import fitting_size, image_folder, image_size
from megarl.data.jagged import Jagged
from megarl.data.row_images import MARK, check_marks, row_images
from megarl.data.rows import Row
from megarl.system.errors import ConfigError, DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ImagePrompts:
    """Reads the images of prompts, and writes their image tokens into the text."""

    key: str  # column of images, `data.image_key`
    prompt_key: str  # column of prompts, `data.prompt_key`; its messages may contain images, too
    folder: Path | None  # folder of relative file names, `data.image_dir`
    limit: int | None  # maximum number of images per prompt, `data.limit_images`
    settings: ImageSettings  # patch size and limits on the number of pixels
    token: int  # id of the image token, which stands for one feature
    token_text: str
    text: str  # text of one image in a prompt, with one image token

    @classmethod
    def of(
        cls, config: DataConfig, encoder: VisionEncoder, settings: ImageSettings, tokenizer: PreTrainedTokenizerBase
    ) -> ImagePrompts | None:
        """Return the reader for a recipe; None: the recipe has no `data.image_key`.

        Args:
            encoder, settings: the model's encoder and image settings, whose limits `data.min_pixels` and
                `data.max_pixels` replace.
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
                "the tokenizer lacks the image tokens that the model's config.json names",
                where="model.tokenizer",
                found=text,
                allowed=f"tokens {tokens}: the beginning of an image, a feature, its end",
                fix="use the model's own tokenizer",
            )
        token, token_text = encoder.image_token, texts[tokens.index(encoder.image_token)]
        return cls(config.image_key, config.prompt_key, folder, config.limit_images, limits, token, token_text, text)

    def values(self, row: Row) -> list[Any]:
        """Return a row's images, which are not read yet; raises DataError like `row_images`."""
        return row_images(row, self.key, self.prompt_key, self.limit)

    def marked(self, text: str, row: Row) -> str:
        """Replace each `<image>` in a prompt by the text that the model expects for an image."""
        check_marks(text, len(self.values(row)), self.key, row)
        return text.replace(MARK, self.text)

    def expanded(self, ids: Sequence[int], row: Row) -> list[int]:
        """Repeat each image token of a prompt once per feature of its image."""
        values = self.values(row)
        if ids.count(self.token) != len(values):
            raise DataError(
                "the text of the prompt contains the model's image token",
                where=row.where,
                found=f"{ids.count(self.token)} tokens, {count(len(values), 'image')}",
                allowed=f"{MARK} for each image",
                fix=row.column_fix,
            )
        images, tokens, unit = iter(values), list[int](), self.settings.patch * self.settings.merge
        for token in ids:
            features = 1
            if token == self.token:
                size = image_size(next(images), self.folder, self._where(row))
                height, width = fitting_size(*size, self.settings)
                features = height // unit * (width // unit)
            tokens += [token] * features
        return tokens

    def read(self, value: Any, where: str) -> ImageSet:
        """Read an image as patches; one that has been read is returned unchanged.

        Raises:
            DataError: at `where`, if the image cannot be read or has an invalid size.
        """
        if isinstance(value, ImageSet):
            return value
        return patches_of(value, self.settings, self.folder, where)

    def patches(self, row: Row) -> list[ImageSet]:
        """Read the images of a row, and return them as patches."""
        return [self.read(value, self._where(row)) for value in self.values(row)]

    def placed(self, ids: Sequence[int], images: Sequence[ImageSet]) -> tuple[list[int], ImageSet | None]:
        """Return tokens with as many image tokens as the images have features, and the images in their places.

        Args:
            ids: tokens with one image token for each image.
        """
        if ids.count(self.token) != len(images):
            raise DataError(
                "the text contains the model's image token",
                found=f"{ids.count(self.token)} tokens, {count(len(images), 'image')}",
                allowed="images as parts, and no such token in text",
                fix="remove the token from the text",
            )
        left, tokens, starts = iter(images), list[int](), list[int]()
        for token in ids:
            if token == self.token:
                starts.append(len(tokens))
            tokens += [token] * (next(left).features if token == self.token else 1)
        return tokens, ImageSet.joined(images, starts)

    def _where(self, row: Row) -> str:
        return f"{row.where}: column {self.key!r}"

    def fields(self, rows: Sequence[Row], prompts: Sequence[Tensor]) -> dict[str, Jagged]:
        """Return the batch's image fields for prompts with these rows and tokens."""
        images, starts = [self.patches(row) for row in rows], list[list[int]]()
        for row_patches, tokens, row in zip(images, prompts, rows, strict=True):
            places = (tokens == self.token).nonzero()[:, 0].tolist()
            counts = [image.features for image in row_patches]
            if sum(counts) != len(places):
                raise DataError(
                    "the size of an image has changed since the prompts were read",
                    where=self._where(row),
                    found=f"{sum(counts)} features for {len(places)} tokens",
                    fix="do not change image files during a run",
                )
            starts.append([places[sum(counts[:number])] for number in range(len(row_patches))])
        return image_fields(images, starts, self.settings)
