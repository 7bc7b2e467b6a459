"""Samples with images as sequences of the model: text whose image tokens stand for features, and their positions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.architectures.vision_language import VisionEncoder
from megarl.data.batch import Batch, Jagged
from megarl.models.vlm.model import Images
from megarl.models.vlm.positions import positions_of
from megarl.training.sequence_layout import PackedRows, TextLayout

#: Fields of samples with images.
PATCHES, GRIDS, DIGESTS = "image_patches", "image_grids", "image_digests"


@dataclass(frozen=True)
class ImageLayout(TextLayout):
    """The layout of text with images: that of text, with positions of three numbers and each image once.

    Attributes:
        encoder: the model's vision encoder.
    """

    encoder: VisionEncoder

    def pack(self, rows: Batch) -> PackedRows:
        """See `SequenceLayout`; rows without images may be among them, or be all.

        Raises:
            ValueError: a row whose image tokens do not fit its images.
        """
        packed = super().pack(rows)
        if GRIDS not in rows:
            return packed
        grids = [sample.tolist() for sample in rows[GRIDS].to("cpu").unbind()]
        merge = self.encoder.merge
        positions = [
            positions_of(tokens.numpy(), self.encoder.image_token, [(r // merge, c // merge) for r, c in own])
            for tokens, own in zip(packed.tokens.split(packed.lengths), grids, strict=True)
        ]
        seen = self._images(packed.tokens, rows, grids) if any(grids) else None
        return dataclasses.replace(packed, positions=torch.from_numpy(np.concatenate(positions, 1)), seen=seen)

    def _images(self, tokens: Tensor, rows: Batch, grids: list[list[list[int]]]) -> Images:
        """Return the images of these rows, those of equal pixels once."""
        merge, known, parts = self.encoder.merge, dict[int, int](), list[Tensor]()
        shapes, features, at = list[list[int]](), list[Tensor](), 0
        samples = zip(rows[PATCHES].to("cpu").unbind(), rows[DIGESTS].to("cpu").unbind(), grids, strict=True)
        for patches, digests, own in samples:
            sizes = [r * c for r, c in own]
            for image, digest, shape, size in zip(patches.split(sizes), digests.tolist(), own, sizes, strict=True):
                count = size // merge**2
                if digest not in known:
                    known[digest] = at
                    parts.append(image)
                    shapes.append(shape)
                    at += count
                features.append(torch.arange(known[digest], known[digest] + count))
        places = (tokens == self.encoder.image_token).nonzero()[:, 0]
        return Images(torch.cat(parts), torch.tensor(shapes), places, torch.cat(features))


def no_images(count: int, patch_values: int) -> dict[str, Jagged]:
    """Return the image fields of `count` samples without images; `patch_values`: numbers of a patch."""
    none = torch.zeros(count, dtype=torch.int64)
    return {
        PATCHES: Jagged.from_lengths(torch.zeros(0, patch_values, dtype=torch.uint8), none),
        GRIDS: Jagged.from_lengths(torch.zeros(0, 2, dtype=torch.int64), none),
        DIGESTS: Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), none),
    }
