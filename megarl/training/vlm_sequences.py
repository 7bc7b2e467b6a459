"""Samples with images as sequences of the model: text whose image tokens stand for features, and their positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.architectures.vision_language import VisionEncoder
from megarl.data.batch import Batch
from megarl.data.fields import DIGESTS, GRIDS
from megarl.data.image_set import image_sets
from megarl.models.vlm.model import gather_images, positions_of
from megarl.training.sequence_layout import PackedRows, TextLayout


@dataclass(frozen=True)
class ImageLayout(TextLayout):
    """The layout of text with images: positions are (time, height, width), and a repeated image is stored once."""

    encoder: VisionEncoder  # the model's vision encoder
    reads_images: bool = True  # whether samples have the fields of images; otherwise all samples are text

    def patches(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Return {digest: number of patches} of each row's images; empty if all samples are text."""
        if not self.reads_images:
            return super().patches(batch)
        square = self.encoder.merge**2
        images = zip(batch[DIGESTS].to("cpu").unbind(), batch[GRIDS].to("cpu").unbind(), strict=True)
        return [
            {
                digest: square * rows * columns
                for digest, (_, rows, columns, *_) in zip(digests.tolist(), grids.tolist(), strict=True)
            }
            for digests, grids in images
        ]

    def pack(self, rows: Batch) -> PackedRows:
        """Pack rows with and without images end to end, with the positions of all tokens and the distinct images.

        Response tokens are text, except for images in an environment's observations.
        """
        packed = super().pack(rows)
        if not self.reads_images or not len(rows):
            return packed
        sets = image_sets(rows)
        positions = [
            positions_of(length, () if images is None else images.places)
            for length, images in zip(packed.lengths, sets, strict=True)
        ]
        seen = gather_images(packed.lengths, sets, self.encoder)
        return dataclasses.replace(packed, positions=torch.from_numpy(np.concatenate(positions, 1)), seen=seen)
