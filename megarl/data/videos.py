"""Videos of rows: their frames and the times of these, without decoding more than is asked for.

A video of a row is a list of frames, each an image as `megarl.data.images` reads them; a mapping with `frames` or
`path`, and `fps`; or the path of a `.npy` file (uint8 [frames, height, width, 3]) or of a `.gif` file. Frame i is shown
at i / fps seconds. Needs no torch: commands check rows before a run.

    two frames -> a temporal patch -> rows x columns features          (Qwen2-VL, Bai et al. 2025; Qwen3-VL)
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megarl.architectures.vision_language import VideoSettings
from megarl.data.images import check_size, ignore_size_warnings, image_size, open_image, opened, path_of, readable
from megarl.data.row_images import VIDEO_MARK
from megarl.data.rows import Row
from megarl.system.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMS = "a list of frames, {frames, fps}, {path, fps}, or the path of a .npy or .gif file"
_MOST_FRAMES = 10_000
_MOST_RATIO = 200
_NOUN = "video"
#: Maximum number of pixels of all chosen frames together; without a limit, decoding a small file could take minutes.
_MOST_PIXELS = 1_000_000_000


@dataclass(frozen=True)
class VideoClip:
    """A video of a row, whose chosen frames are decoded when they are asked for.

    Attributes:
        source: images in the forms that `open_image` reads, or the file of an array or a GIF.
        chosen: numbers of the frames that the model sees.
        fps: frames of the source per second.
        total: number of frames of the source.
        size: height and width of a frame.
        where: row and column, for errors.
    """

    source: Sequence[Any] | Path
    chosen: tuple[int, ...]
    fps: float
    total: int
    size: tuple[int, int]
    folder: Path | None
    where: str

    @property
    def sampled_fps(self) -> float:
        """Number of chosen frames per second of the video."""
        return len(self.chosen) / self.total * self.fps

    def blocks(self, temporal: int) -> int:
        """Return the number of temporal patches of `temporal` frames; the last frame is repeated to fill the last."""
        return -(-len(self.chosen) // temporal)

    def seconds(self, temporal: int) -> list[float]:
        """Return the time of each temporal patch: the mean of its first and last frame's."""
        missing = -len(self.chosen) % temporal
        times = [number / self.fps for number in (*self.chosen, *[self.chosen[-1]] * missing)]
        return [(times[i] + times[i + temporal - 1]) / 2 for i in range(0, len(times), temporal)]

    def frames(self) -> Iterator[Image]:
        """Decode and yield the chosen frames one after the other, as RGB images of the same size."""
        frames: Iterator[Image]
        if isinstance(self.source, Path):
            frames = _frames_of_file(self.source, self.chosen, self.where)
        else:
            source = self.source
            frames = (open_image(source[number], self.folder, self.where) for number in self.chosen)
        for number, frame in zip(self.chosen, frames, strict=True):
            if (frame.height, frame.width) != self.size:
                raise DataError(
                    "the frames of a video have different sizes",
                    where=self.where,
                    found=f"frame {number}: {frame.width} x {frame.height}",
                    allowed=f"{self.size[1]} x {self.size[0]}, as the first frame",
                )
            yield frame


def row_videos(row: Row, key: str) -> list[Any]:
    """Return the videos of a row, which are not read yet; the row may lack the column `key`."""
    value = row.column(key, "data.video_key") if row.has(key) else None
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        return [value]
    for video in value:
        frames = video.get("frames", [0]) if isinstance(video, Mapping) else video
        of_file = isinstance(video, str) and video.endswith((".npy", ".gif"))
        if not (isinstance(video, Mapping) or of_file or isinstance(frames, list)) or not frames:
            raise DataError(
                "an entry of the column of videos is not a video",
                where=f"{row.where}: column {key!r}",
                found=f"{video!r:.80}",
                allowed=f"a list of videos, each {FORMS}",
                fix="write [[frame, frame, ...]] for one video of these frames",
            )
    return value


def check_video_marks(text: str, videos: int, key: str | None, row: Row) -> None:
    """Raise an error unless the whole prompt's text has one `<video>` per video of the row."""
    if text.count(VIDEO_MARK) != videos:
        raise DataError(
            f"the prompt has {text.count(VIDEO_MARK)} {VIDEO_MARK} for {videos} videos",
            where=row.where,
            found=text[:120],
            allowed=f"{VIDEO_MARK} once for each video of column {key!r}",
            fix=f"write {VIDEO_MARK} where the video belongs, or {row.column_fix}",
        )


def open_video(value: Any, folder: Path | None, fps: float, most: int | None, where: str) -> VideoClip:
    """Return a row's video, of which only the number and size of the frames are read, with the frames that the model
    gets.

    Args:
        value: the video in the data: frames, the path of a file, or a mapping with one of these and `fps`.
        folder: `data.image_dir`, the folder of relative paths.
        fps: frames per second of a video that does not state them.
        most: maximum number of frames that the model gets, chosen at equal distances; None: all frames.
        where: row and column, for errors.

    Raises:
        DataError: the value is not a video, its file cannot be read, or it has too many frames or pixels.
    """
    given: Any = None
    if isinstance(value, Mapping):
        given = value.get("fps")
        value = value["frames"] if value.get("frames") is not None else value.get("path")
    source: Sequence[Any] | Path
    if isinstance(value, str) and value.endswith((".npy", ".gif")):
        source = path_of(value, folder, where, _NOUN, FORMS)
        with opened(source, where, _NOUN, FORMS) as data:
            state = os.fstat(data.fileno())
        total, size, rate_of_file = _head_of(source, where, (state.st_mtime_ns, state.st_size))
        given = rate_of_file if given is None else given
    elif isinstance(value, list) and value:
        source, total, size = value, len(value), image_size(value[0], folder, where)
    else:
        raise DataError("the value is not a video", where=where, found=f"{value!r:.80}", allowed=FORMS)
    rate = fps if given is None else given
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise DataError("a video has no valid number of frames per second", where=where, found=rate, allowed="fps > 0")
    _check_total(total, where)
    chosen = range(total) if most is None or total <= most else np.linspace(0, total - 1, most).round().astype(int)
    if len(chosen) * size[0] * size[1] > _MOST_PIXELS:
        raise DataError(
            "the frames of a video have too many pixels together",
            where=where,
            found=f"{len(chosen)} frames of {size[1]} x {size[0]}",
            allowed=f"at most {_MOST_PIXELS} pixels",
            fix=f"set data.max_frames to at most {_MOST_PIXELS // (size[0] * size[1])}, or make the frames smaller",
        )
    return VideoClip(source, tuple(map(int, chosen)), float(rate), total, size, folder, where)


def _check_total(total: int, where: str) -> None:
    if not 0 < total <= _MOST_FRAMES:
        raise DataError(
            "a video has too many frames, or none", where=where, found=total, allowed=f"1 to {_MOST_FRAMES}"
        )


def _head_of(file: Path, where: str, state: tuple[int, int]) -> tuple[int, tuple[int, int], float | None]:
    """Return `_read_head`; its errors name the row and column `where`."""
    try:
        return _read_head(file, state)
    except DataError as error:
        place = f"{where}: {error.where}"
        raise DataError(
            error.what, where=place, found=error.found, allowed=error.allowed, fix=error.fix
        ) from error.__cause__


@lru_cache(maxsize=1 << 16)
def _read_head(file: Path, state: tuple[int, int]) -> tuple[int, tuple[int, int], float | None]:
    """Return number, height and width of a file's frames, and frames per second if the file has durations.

    The result is kept for all rows of the file, because each use of a row asks for it, and the durations of a GIF take
    half as long as its frames.

    Args:
        state: time of the last change and size of the file; a changed file is read again.

    Raises:
        DataError: the file, which the error names, cannot be read, or has too many frames or pixels.
    """
    from PIL import Image

    where = str(file)
    with readable(where, _NOUN):
        if file.suffix == ".npy":
            total, height, width, _ = _array(file, where).shape
            check_size(height, width, where, _NOUN)
            return total, (height, width), None
        ignore_size_warnings()
        with Image.open(file, formats=("GIF",)) as gif:
            check_size(gif.height, gif.width, where, _NOUN)
            total, durations = getattr(gif, "n_frames", 1), 0.0
            _check_total(total, where)
            for number in range(total):
                gif.seek(number)
                check_size(gif.height, gif.width, where, _NOUN)  # a frame may be larger than the file's header says
                durations += gif.info.get("duration", 0)
            return total, (gif.height, gif.width), 1000 * total / durations if durations else None


def _array(file: Path, where: str) -> npt.NDArray[np.uint8]:
    array = np.load(file, mmap_mode="r")
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
        raise DataError(
            "the array is not a video",
            where=where,
            found=f"{array.dtype} {list(array.shape)}",
            allowed="uint8 [frames, height, width, 3]",
        )
    return array


def _frames_of_file(file: Path, chosen: Sequence[int], where: str) -> Iterator[Image]:
    from PIL import Image

    with readable(f"{where}: {file}", _NOUN):
        if file.suffix == ".npy":
            array = _array(file, where)
            yield from (Image.fromarray(np.ascontiguousarray(array[number])) for number in chosen)
            return
        with Image.open(file, formats=("GIF",)) as gif:
            for number in chosen:
                gif.seek(number)
                yield gif.convert("RGB")


def fitting_frames(count: int, height: int, width: int, settings: VideoSettings, where: str) -> tuple[int, int]:
    """Return the height and width to which the frames of a video are resized for the model: multiples of a feature's
    side (patch * merge), within the limits on pixels.

    Source: `smart_resize` of transformers' video processors of Qwen2-VL and Qwen3-VL, 5.23.

    Args:
        count: number of frames.
        height, width: sides of the original frames in pixels, above 0.
        where: row and column, for errors.
    """
    unit, frames = settings.patch * settings.merge, count if settings.whole else 1
    if settings.whole and min(height, width) < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise DataError(
            "the frames of a video are too long and narrow",
            where=where,
            found=f"{width} x {height}",
            allowed=f"the longer side at most {_MOST_RATIO} times the shorter",
        )
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    rounded = round(frames / settings.temporal) * settings.temporal if settings.whole else 1
    if rounded * rows * columns > settings.max_pixels:
        shrink = math.sqrt(frames * height * width / settings.max_pixels)
        return max(unit, int(height / shrink / unit) * unit), max(unit, int(width / shrink / unit) * unit)
    if rounded * rows * columns < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (frames * height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return rows, columns
