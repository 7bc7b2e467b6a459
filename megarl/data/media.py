"""Columns that look like pictures, video or sound, which no model here is shown: refused by name, not dropped."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from megarl.data.rows import Row
from megarl.errors import DataError

MEDIA_FIX = "take it out of the data (a pkg.mod:fn source can), or train on rows of text"
_NAME = re.compile(
    r"(multi_?modal|mm)_(data|inputs)|pixel_values\w*|waveforms?|"
    r"((input|decoded|raw|original|question|query)_)?(image|img|picture|video|audio)s?(_?(path|file|url|uri|bytes|base64|b64|data|feature)s?)?(_?\d+)?",
    re.IGNORECASE,
)
_FILE = re.compile(
    r"data:(image|video|audio)/[\w.+-]+;.*|\S+\.(png|jpe?g|gif|webp|bmp|tiff?|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg|m4a)",
    re.IGNORECASE | re.DOTALL,
)
_LOOKED_AT = 300  # characters of a value


def refuse_media(row: Row, texts: Container[str]) -> None:
    """Refuse a row with a column of pictures, video or sound, told by its name or by what it holds.

    Numbers, true and false, null and what is empty are none. `texts` are columns that are read as text.

    Raises:
        DataError: names row and column.
    """
    for name, value in row.items():
        if name in texts:
            continue
        if (_NAME.fullmatch(name) and _may_be_media(value)) or _is_media(value):
            raise DataError(
                f"column {name!r} holds pictures, video or sound, and models here read text only",
                where=row.where,
                found=repr(value)[:80],
                fix=MEDIA_FIX,
            )


def _may_be_media(value: Any) -> bool:
    return isinstance(value, str | list | dict) and bool(value)


def _is_media(value: Any) -> bool:
    """A file name or data of a picture, video or sound; or a list of such."""
    if isinstance(value, list):
        return bool(value) and all(_is_media(item) for item in value)
    if isinstance(value, dict):  # as the `datasets` package stores them
        return value.keys() in ({"bytes", "path"}, {"array", "path", "sampling_rate"})
    return isinstance(value, str) and _FILE.fullmatch(value[:_LOOKED_AT]) is not None
