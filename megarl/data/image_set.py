"""`ImageSet`: the images of a sequence as the model reads them: patches, places among the tokens, and digests.

A batch has them as the fields of `megarl.data.fields.IMAGES`. A temporal patch of a video is an image of two frames,
whose patches are the first frame's and then the second's.
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
import torch.nn.functional as F
from torch import Tensor

from megarl.architectures.vision_language import TEMPORAL, ImageSettings, VideoSettings
from megarl.data.batch import Batch
from megarl.data.fields import DIGESTS, GRIDS, PATCHES
from megarl.data.images import open_image, patchify, resized, unpatchify
from megarl.data.jagged import Jagged
from megarl.data.videos import VideoClip, fitting_frames

if TYPE_CHECKING:
    from PIL.Image import Image


#: The place of an image: position of its first feature among the tokens, its rows and columns of features, and `STILL`.
#: A temporal patch of a video has instead of `STILL` the distance of its time to the video's first, in positions.
Place = tuple[int, int, int, int]
STILL = -1
#: How many numbers of each `Place` a batch stores: the first three in runs without videos, all four with videos.
STILLS, CLIPS = 3, 4


def place_of(numbers: Sequence[int]) -> Place:
    """Return the place of an image or video in a sequence from 3 or 4 numbers; images may lack the lag, the last."""
    start, rows, columns, *lag = numbers
    return start, rows, columns, lag[0] if lag else STILL


def frames_of(place: Place) -> int:
    """Return the number of frames that the patches of an image show: one, or two of a video."""
    return 1 if place[3] == STILL else TEMPORAL


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of a sequence, or one image by itself, which is at place 0."""

    patches: Tensor  # uint8 [P, 3 * patch * patch], the patches of all images, one image after the other
    places: tuple[Place, ...]
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
        return sum(rows * columns for _, rows, columns, _ in self.places)

    def shifted(self, tokens: int) -> ImageSet:
        """Return the images with their places moved by `tokens`."""
        places = tuple((start + tokens, rows, columns, lag) for start, rows, columns, lag in self.places)
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
        """Return the pixel patches of each image [patches, values]."""
        return self.patches.split(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return the images as a JSON object whose patches are base64 text."""
        encoded = base64.b64encode(self.patches.numpy().tobytes()).decode("ascii")
        return {"patches": encoded, "places": self.places, "sizes": self.sizes, "digests": self.digests}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ImageSet:
        """Return the images from the values that `to_json` returned."""
        places = tuple(map(place_of, values["places"]))
        patches = torch.frombuffer(bytearray(base64.b64decode(values["patches"])), dtype=torch.uint8)
        return cls(patches.view(sum(values["sizes"]), -1), places, tuple(values["sizes"]), tuple(values["digests"]))


def image_sets(samples: Batch) -> list[ImageSet | None]:
    """Return each sample's images from the image fields of a batch; None for a sample without images."""
    sets = list[ImageSet | None]()
    for patches, grids, digests in zip(
        *(samples[name].to("cpu").unbind() for name in (PATCHES, GRIDS, DIGESTS)), strict=True
    ):
        places = tuple(map(place_of, grids.tolist()))
        features = [place[1] * place[2] * frames_of(place) for place in places]
        merge = math.isqrt(len(patches) // sum(features)) if places else 0
        sizes = tuple(merge**2 * count for count in features)
        sets.append(ImageSet(patches, places, sizes, tuple(digests.tolist())) if places else None)
    return sets


def image_features(samples: Batch) -> dict[int, int]:
    """Return the number of features of each distinct image of the samples, by the hash of its pixels."""
    if GRIDS not in samples:
        return {}
    counts = samples[GRIDS].values[:, 1:3].prod(1).tolist()
    return dict(zip(samples[DIGESTS].values.tolist(), counts, strict=True))


def pixels_of(images: ImageSet) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Return the hash and the pixels, uint8 [height, width, 3], of each image, or frame of a video, as the model sees
    it."""
    pixels = []
    for place, patches, digest in zip(images.places, images.parts(), images.digests, strict=True):
        _, rows, columns, _ = place
        frames = patches.chunk(frames_of(place))
        merge = math.isqrt(len(frames[0]) // (rows * columns))
        for number, frame in enumerate(frames):
            pixels.append((digest ^ number, unpatchify(frame.numpy(), rows * merge, columns * merge, merge)))
    return pixels


def pil_images(images: ImageSet) -> list[Image]:
    """Return the images as PIL images, in the size that the model sees."""
    from PIL import Image

    return [Image.fromarray(pixels) for _, pixels in pixels_of(images)]


def image_fields(
    images: Sequence[Sequence[ImageSet]],
    starts: Sequence[Sequence[int]],
    settings: ImageSettings,
    *,
    clips: bool = False,
) -> dict[str, Jagged]:
    """Return the image fields of a batch from each sample's images.

    Args:
        starts: for each image the position of its first feature among the tokens of its sample.
        clips: whether the run reads videos.
    """
    sets = [ImageSet.joined(parts, places) for parts, places in zip(images, starts, strict=True)]
    return fields_of_sets(sets, 3 * settings.patch**2, clips=clips)


def fields_of_sets(sets: Sequence[ImageSet | None], patch_values: int, *, clips: bool = False) -> dict[str, Jagged]:
    """Return the image fields of a batch from one `ImageSet` per sample.

    Args:
        patch_values: values per patch.
        clips: whether the run reads videos.
    """
    width = CLIPS if clips else STILLS
    given = [images for images in sets if images is not None]
    numbers = [0 if images is None else len(images.places) for images in sets]
    whole = torch.cat([torch.zeros(0, patch_values, dtype=torch.uint8), *(images.patches for images in given)])
    grids = [place[:width] for images in given for place in images.places]
    digests = [digest for images in given for digest in images.digests]
    return {
        PATCHES: Jagged.from_lengths(whole, [0 if images is None else len(images.patches) for images in sets]),
        GRIDS: Jagged.from_lengths(torch.tensor(grids, dtype=torch.int64).view(-1, width), numbers),
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
    return _set_of([resized(open_image(value, folder, where), settings)], settings, STILL)


def _set_of(frames: Sequence[npt.NDArray[np.uint8]], settings: ImageSettings | VideoSettings, lag: int) -> ImageSet:
    """Return one image, or the frames of a temporal patch, as an `ImageSet`; all frames have one size."""
    values = np.concatenate([patchify(pixels, settings.patch, settings.merge) for pixels in frames])
    shape = frames[0].shape if lag == STILL else (len(frames), *frames[0].shape)
    digest = hashlib.blake2b(values.tobytes(), digest_size=8, key=str(shape).encode()).digest()
    rows, columns = (side // (settings.patch * settings.merge) for side in frames[0].shape[:2])
    number = int.from_bytes(digest, "little", signed=True)
    return ImageSet(torch.from_numpy(values), ((0, rows, columns, lag),), (len(values),), (number,))


def clip_of(clip: VideoClip, settings: VideoSettings) -> list[ImageSet]:
    """Decode a video, resize its frames for the model, and return its temporal patches, each an `ImageSet` of one."""
    size = fitting_frames(len(clip.chosen), *clip.size, settings, clip.where)
    frames = [_resized(np.array(frame), size) for frame in clip.frames()]
    frames += [frames[-1]] * (-len(frames) % settings.temporal)
    return [
        _set_of(frames[number * settings.temporal :][: settings.temporal], settings, lag)
        for number, lag in enumerate(lags_of(clip, settings))
    ]


def _resized(frame: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Resize a video frame [height, width, 3] to `size` with the interpolation of transformers' video processors."""
    if frame.shape[:2] == size:
        return frame
    pixels = torch.from_numpy(frame)[None].permute(0, 3, 1, 2)
    scaled: npt.NDArray[np.uint8] = F.interpolate(pixels, size, mode="bicubic", antialias=True).numpy()
    return scaled[0].transpose(1, 2, 0)


def lags_of(clip: VideoClip, settings: VideoSettings) -> list[int]:
    """Return how far the position of time of each temporal patch is from that of the video's first one.

    Source: `get_vision_position_ids` of transformers' Qwen2.5-VL, 5.23, in float32.
    """
    numbers = np.arange(clip.blocks(settings.temporal))
    if settings.timestamps:
        return [0] * len(numbers)
    if settings.clock is not None:
        seconds = np.float32(settings.temporal / clip.sampled_fps)  # duration of a temporal patch
        numbers = (numbers.astype(np.float32) * (np.float32(settings.clock) * seconds)).astype(np.int64)
    return [int(number) for number in numbers]
