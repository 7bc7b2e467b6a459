"""Split the training files into rows to train on and held-out rows: `data.val_split`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from megarl.config.data import DataConfig
from megarl.data.images import readable
from megarl.data.render import Split
from megarl.data.rows import Row
from megarl.system.errors import DataError

_KEY = "data.val_split"
_BITS = 64


def split_rows(rows: Sequence[Row], config: DataConfig, split: Split) -> list[Row]:
    """Return the held-out rows (split "val"), or all other rows ("train").

    Rows with the same prompt and images are in the same split; preference pairs without a column of prompts are only if
    they are equal as a whole. A hash of both selects held-out prompts: for a share,
    hashes below that share of the range, so that added rows do not move other rows to the other split; for a count, the
    smallest hashes.
    """
    assert config.val_split is not None, "split_rows needs data.val_split"
    numbers = []
    for row in rows:
        content = _content(row, config)
        with readable(row.where if config.image_key is None else f"{row.where}: column {config.image_key!r}"):
            text = json.dumps(content, sort_keys=True, default=_plain)
        # blake2b gives the same number in every process, unlike Python's own hash.
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BITS // 8).digest()
        numbers.append(int.from_bytes(digest))
    different = sorted(set(numbers))
    if config.val_split < 1:
        limit = config.val_split * 2**_BITS
    else:
        count = int(config.val_split)
        limit = different[count] if count < len(different) else 2**_BITS
    chosen = [row for row, number in zip(rows, numbers, strict=True) if (number < limit) == (split == "val")]
    if chosen:
        return chosen
    raise DataError(
        "no prompt is held out" if split == "val" else "every prompt is held out, so none is left to train on",
        where=_KEY,
        found=f"{config.val_split:g} of {len(different)} different prompts",
        allowed="a share below 1, or a number of prompts, that holds out at least one prompt and leaves at least one",
        fix="choose another value, or name separate files in data.val_files",
    )


def _content(row: Row, config: DataConfig) -> Any:
    """Return the parts of a row that must not be in both splits: the prompt and its images."""
    if not row.has(config.prompt_key):
        return row  # a preference pair whose prompt is only inside its responses: all of the row is hashed
    image_key = config.image_key
    images = row.column(image_key, "data.image_key") if image_key is not None and row.has(image_key) else None
    content = [row.column(config.prompt_key, "data.prompt_key"), images]
    if config.video_key is not None and row.has(config.video_key):
        content.append(row.column(config.video_key, "data.video_key"))
    return content


def _plain(value: Any) -> Any:
    """Return a plain value for an image: a hash of its bytes, and mode and size of a PIL image."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return [value.mode, value.size, _plain(value.tobytes())]
    return hashlib.blake2b(value).hexdigest()
