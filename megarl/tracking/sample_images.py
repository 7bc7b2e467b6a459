"""Small copies of the samples' images for the report: RUN_DIR/images/DIGEST.png, one file per distinct image.

Validation shows the same prompts repeatedly, so files are named by their content.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.system.processes import write_atomically

FOLDER = "images"
#: Longest side in pixels: smaller images are enlarged to be visible, larger ones reduced.
_LEAST, _MOST = 96, 192
#: Maximum number of images shown of a sample.
MOST_SHOWN = 8
#: Largest total size of the images in a report, in bytes; others stay in the run folder.
REPORT_BYTES = 4 << 20
_NAME = re.compile(rf"{FOLDER}/[0-9a-f]{{16}}\.png")


def write_images(run_dir: Path, images: Sequence[tuple[int, NDArray[np.uint8]]]) -> list[str]:
    """Write small copies of the first `MOST_SHOWN` images (signed 64-bit digest, pixels uint8 [height, width, 3]) of a
    sample; return their paths relative to the run folder.
    """
    names = []
    for digest, pixels in images[:MOST_SHOWN]:
        name = f"{FOLDER}/{digest & (1 << 64) - 1:016x}.png"
        if not (run_dir / name).exists():
            (run_dir / FOLDER).mkdir(exist_ok=True)
            write_atomically(run_dir / name, thumbnail(pixels))
        names.append(name)
    return names


def thumbnail(pixels: NDArray[np.uint8]) -> bytes:
    """Return a small PNG of pixels uint8 [height, width, 3]."""
    from PIL import Image

    image, longest = Image.fromarray(pixels), max(pixels.shape[:2])
    scale = min(max(longest, _LEAST), _MOST) / longest
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def data_uri(file: Path) -> str:
    """Return an image file (PNG or SVG) as a data URI. Inside <img> it cannot run scripts."""
    kind = "svg+xml" if file.suffix == ".svg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def embedded(folder: Path, rows: Sequence[dict[str, Any]]) -> tuple[dict[str, str], int]:
    """Return the images of a report's rows as data URIs by path, and the number of omitted images. Names in a row's
    `images` without an image file in the run folder are removed from the row.
    """
    pictures: dict[str, str] = {}
    left, without = REPORT_BYTES, set[str]()
    for row in sorted(rows, key=lambda row: row["step"], reverse=True):
        names = row.get("images")
        if names is None:
            continue
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        row["images"] = [name for name in names if _NAME.fullmatch(name) and (folder / name).is_file()]
        for name in row["images"]:
            size = (folder / name).stat().st_size
            if name not in pictures and size <= left:
                left -= size
                pictures[name] = data_uri(folder / name)
            elif name not in pictures:
                without.add(name)
    return pictures, len(without)
