"""Images of rows are read, resized for a vision encoder, and cut into patches.

An image of a row is the path of a file (relative to `data.image_dir`), its bytes, a mapping with `bytes` or `path` like
those of the `datasets` package, or a PIL image. It is converted to 8-bit RGB: transparency is blended with white,
16-bit greys keep their upper bits, and the Exif orientation is applied.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megarl.architectures.vision_language import ImageSettings
from megarl.artifacts.pipes import is_special
from megarl.config.data import DataConfig
from megarl.system.errors import ConfigError, DataError, MegarlError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Limit of an image file's pixels: a larger one is a mistake, or an attack by a small file with many pixels.
MOST_PIXELS = 100_000_000
#: Held while an image object of PIL is read.
_WHOLE_IMAGES = threading.Lock()
_LEAST_SIDE, _MOST_RATIO = 2, 200
_LONGEST_PATH = 4096
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_ORIENTATION, _FIRST_TURN, _FIRST_TURNED = 0x0112, 2, 5  # Exif orientations from 5 on exchange width and height
#: Members of `PIL.Image.Transpose` for the Exif orientations from `_FIRST_TURN` on.
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_DATA_URL, _FILE_URL = "data:image/", "file://"
_OF_NETWORK = ("http://", "https://", "s3://", "gs://")
FORMS = "the path of a file, bytes, {bytes, path}, or an image of PIL"


def image_folder(config: DataConfig) -> Path | None:
    """Return `data.image_dir`; raises ConfigError if the folder does not exist."""
    folder = None if config.image_dir is None else Path(config.image_dir).expanduser()
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            "the folder of images is a file" if folder.exists() else "the folder of images does not exist",
            where="data.image_dir",
            found=str(folder),
            fix="check the path",
        )
    return folder


def open_image(value: Any, folder: Path | None, where: str) -> Image:
    """Return the image as 8-bit RGB."""
    with _reading(value, folder, where) as (image, name):
        image.load()
        return _as_rgb(image, name)


def image_size(value: Any, folder: Path | None, where: str) -> tuple[int, int]:
    """Return height and width of an image after reading only the file's first bytes. Raises as `open_image`."""
    from PIL import Image

    with _reading(value, folder, where) as (image, _):
        # PIL's class for PNG files would decode all pixels to look for an Exif entry after them.
        turned = _orientation(Image.Image.getexif(image)) >= _FIRST_TURNED
        return (image.width, image.height) if turned else (image.height, image.width)


def _orientation(exif: Mapping[int, Any]) -> int:
    """Return the Exif orientation, 1 (upright) to 8; an invalid entry counts as 1."""
    value = exif.get(_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= len(_TURNS) + 1 else 1


@contextmanager
def _reading(value: Any, folder: Path | None, where: str) -> Iterator[tuple[Image, str]]:
    """Open an image without reading its pixels; yields the image, and its place for error messages."""
    from PIL import Image

    if isinstance(value, Image.Image):
        check_size(value.height, value.width, where)
        # PIL may read the image's file only now, which two threads must not do with one object.
        with _WHOLE_IMAGES, readable(where):
            yield value, where
        return
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    source: BinaryIO | None = None
    if isinstance(value, str) and value.startswith(_DATA_URL):
        value = _decoded(value, where)
    if isinstance(value, str):
        file = path_of(value, folder, where)
        source, where = opened(file, where), f"{where}: {file}"
    elif isinstance(value, bytes):
        source = io.BytesIO(value)
    if source is None:
        raise DataError("the value is not an image", where=where, found=type(value).__name__, allowed=FORMS)
    with source, readable(where):
        yield _opened_image(source, where), where


def _opened_image(source: BinaryIO, where: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    ignore_size_warnings()
    try:
        image = Image.open(source, formats=_FORMATS)
    except UnidentifiedImageError as error:
        source.seek(0)
        head = source.read(16)
        problem = "the file is not an image in a format that megarl reads"
        raise DataError(problem, where=where, found=head, allowed=", ".join(_FORMATS)) from error
    except Image.DecompressionBombError as error:
        raise _too_large(str(error), where) from error
    check_size(image.height, image.width, where)
    # A phone's JPEG may be an MPO file, whose further frames, such as previews, are ignored. (`n_frames` would read the
    # whole file.)
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise DataError(
            "the image has several frames",
            where=where,
            found=f"several frames ({image.format})",
            allowed="one frame",
            fix="save each frame as a separate image",
        )
    return image


def ignore_size_warnings() -> None:
    """Turn off PIL's warning about images with many pixels; `check_size` applies this module's limit, `MOST_PIXELS`."""
    from PIL import Image

    # This filter is never removed: `warnings.catch_warnings` would change the filters of all threads when it ends.
    if not any(category is Image.DecompressionBombWarning for _, _, category, *_ in warnings.filters):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)


@contextmanager
def readable(where: str, noun: str = "image") -> Iterator[None]:
    """Convert every exception that PIL raises for a damaged file to a DataError at `where`; `noun`: `image` or `video`,
    for the message."""
    try:
        yield
    except (MemoryError, MegarlError):
        raise
    except Exception as error:  # decoders raise many kinds: TypeError, struct.error, KeyError, EOFError, ...
        raise DataError(
            f"the {noun} cannot be read: {str(error) or type(error).__name__}",
            where=where,
            fix="copy the file again, or remove the row",
        ) from error


def check_size(height: int, width: int, where: str, noun: str = "image") -> None:
    """Raise a DataError at `where` if an image has too many pixels, or sides that no encoder accepts.

    Args:
        noun: `image` or `video`, for the message.
    """
    short, long = min(width, height), max(width, height)
    if width * height > MOST_PIXELS:
        raise _too_large(f"{width} x {height}", where, noun)
    if short < _LEAST_SIDE or long > _MOST_RATIO * short:
        raise DataError(
            f"the {noun} has a size that no vision encoder accepts",
            where=where,
            found=f"{width} x {height}",
            allowed=f"sides of at least {_LEAST_SIDE} pixels, the longer at most {_MOST_RATIO} times the shorter",
        )


def _too_large(found: str, where: str, noun: str = "image") -> DataError:
    limit = "data.max_pixels" if noun == "image" else "data.video_max_pixels"
    return DataError(
        f"the {noun} has too many pixels",
        where=where,
        found=found,
        allowed=f"at most {MOST_PIXELS} pixels",
        fix=f"make the {noun} smaller; it is scaled down to {limit} anyway",
    )


def _as_rgb(image: Image, where: str) -> Image:
    from PIL import Image

    check_size(image.height, image.width, where)
    # `ImageOps.exif_transpose` would write all entries again, and raises if one has a type that PIL does not expect.
    turn = _orientation(image.getexif())
    if turn >= _FIRST_TURN:
        image = image.transpose(Image.Transpose[_TURNS[turn - _FIRST_TURN]])
    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise DataError(
            "the image has 32-bit values, whose range from black to white is unknown",
            where=where,
            found=f"mode {image.mode}",
            allowed="8 or 16 bits for each colour",
            fix="convert the image to 8 bits",
        )
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("RGB")


def _decoded(url: str, where: str) -> bytes:
    head, _, text = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("the data is not base64")
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(
            "the data URL of an image is invalid", where=where, found=url[:60], allowed="data:image/png;base64,..."
        ) from error


def path_of(text: str, folder: Path | None, where: str, noun: str = "image", forms: str = FORMS) -> Path:
    """Return the path of an image or video.

    Args:
        text: a path, or a URL with file://.
        folder: the folder to which a relative path is relative; None: the working folder.
        noun: `image` or `video`, for messages.
        forms: the allowed forms of a value in the data, for messages.

    Raises:
        DataError: the text is not a path, or it is the address of a server.
    """
    text = text.removeprefix(_FILE_URL)
    if text.startswith(_OF_NETWORK):
        raise DataError(
            f"{noun}s are not fetched from the network",
            where=where,
            found=text[:120],
            allowed=forms,
            fix=f"copy the {noun} to a file first",
        )
    try:
        if len(text) > _LONGEST_PATH or "\0" in text:
            raise ValueError(f"the text has more than {_LONGEST_PATH} characters, or a NUL character")
        file = Path(text).expanduser()
    except (ValueError, RuntimeError) as error:  # raised for ~name if no user has this name
        raise DataError(
            f"this text is not the path of {'an' if noun == 'image' else 'a'} {noun}: {error}",
            where=where,
            found=text[:60],
            allowed=forms,
            fix="check the path"
            + ("; put data:image/png;base64, before an image in base64" if noun == "image" else ""),
        ) from error
    return file if folder is None or file.is_absolute() else folder / file


def opened(file: Path, where: str, noun: str = "image", forms: str = FORMS) -> BinaryIO:
    """Open a file for reading; raises DataError if it is missing, a folder, a pipe, or may not be read."""
    try:
        if is_special(file):
            raise OSError("the path is a pipe, socket or device")
        return file.open("rb")
    except OSError as error:
        raise DataError(
            f"the {noun} cannot be read: {error.strerror or error}",
            where=where,
            found=str(file),
            allowed=forms,
            fix="check the path, and data.image_dir, the folder of relative paths",
        ) from error


def resized(image: Image, settings: ImageSettings) -> npt.NDArray[np.uint8]:
    """Resize an RGB image for the encoder; returns its pixels [height, width, 3].

    Interpolation is bicubic, as in transformers' PIL processor for these models.
    """
    from PIL import Image

    height, width = fitting_size(image.height, image.width, settings)
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def fitting_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Return a height and width near the given ones, both multiples of a feature's side (patch * merge), with a number
    of pixels within the limits.
    Source: `smart_resize` of transformers' processor of Qwen2-VL, 5.23.
    """
    unit, least, most = settings.patch * settings.merge, settings.min_pixels, settings.max_pixels
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        return max(unit, int(height / shrink / unit) * unit), max(unit, int(width / shrink / unit) * unit)
    if rows * columns < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return rows, columns


def patchify(pixels: npt.NDArray[np.uint8], patch: int, merge: int) -> npt.NDArray[np.uint8]:
    """Cut pixels [height, width, 3] into patches [rows * columns, 3 * patch * patch].

    The merge x merge patches of one feature are neighbours; a patch lists red, then green, then blue values.
    """
    rows, columns = (side // patch // merge for side in pixels.shape[:2])
    cut = pixels.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(cut).reshape(-1, 3 * patch * patch)


def unpatchify(values: npt.NDArray[np.uint8], rows: int, columns: int, merge: int) -> npt.NDArray[np.uint8]:
    """Return the pixels [height, width, 3] of patches: the inverse of `patchify`."""
    patch = math.isqrt(values.shape[1] // 3)
    cut = values.reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
    return cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)
