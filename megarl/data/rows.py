"""A data row: plain values by column, checked when they are read, with the place they were read from."""

from __future__ import annotations

import datetime
import decimal
import re
import sys
from collections.abc import Container, Mapping
from typing import Any

from megarl.system.errors import DataError, close_matches

# maximum number of levels of nested lists and objects; rows are walked recursively, and Python's stack is finite
MAX_DEPTH = 64
#: Keys of the sample that a reward function gets, except `data_source`, which has the value of the row's column
#: `data_source` if the row has this column.
SAMPLE_KEYS = frozenset(
    {"uid", "prompt", "response", "answer", "finish_reason", "response_length", "transcript", "messages", "row"}
)
#: Name of the answer inside verl's column `reward_model`.
TRUTH = "ground_truth"


PROMPT = "prompt"
"""`Row.unit` of a prompt written in the recipe or on the command line, so there is no file and line."""


class MissingColumnError(DataError):
    """A row lacks the column that a recipe key names."""


class Row(dict):
    """One data row: column -> plain JSON value, plus where it was read.

    Attributes:
        source: file, hub name, or function.
        number: line of the file (jsonl, csv) or row counted from 1 (`unit` says which).
        unit: line, row, or PROMPT for a source that is the prompt itself.
    """

    __slots__ = ("number", "source", "unit")

    def __init__(self, values: Mapping[str, Any], source: str, number: int, unit: str = "row") -> None:
        super().__init__(values)
        self.source, self.number, self.unit = source, number, unit

    @property
    def where(self) -> str:
        """The row's place for error messages: `train.jsonl:17`, `train.parquet row 17` or `the prompt '1+1='`."""
        if self.unit == PROMPT:
            return f"the prompt {self.source.partition(':')[2]!r}"
        return f"{self.source}:{self.number}" if self.unit == "line" else f"{self.source} row {self.number}"

    @property
    def column_fix(self) -> str:
        """The way to avoid a bad value in a column without correcting it, as text for an error's `fix`."""
        return "write the prompt in another way" if self.unit == PROMPT else "remove the row"

    def column(self, name: str, key: str) -> Any:
        """Return the value of column `name`, which configuration key `key` names.

        A name with dots is a path into a column: `reward_model.ground_truth` is a key of the object in column
        `reward_model`, and `completions.0.response` a key of the first element of a list. A column whose name itself
        contains the dots wins.

        Raises:
            MissingColumnError: the column is missing; the message names the row, its columns and the closest match.
        """
        try:
            return _inside(self, name.split("."), "")
        except _Missing as missing:
            raise self._no_column(name, key, missing) from None

    def has(self, name: str) -> bool:
        """Return whether the row has column `name`, which may be a path with dots."""
        try:
            _inside(self, name.split("."), "")
        except _Missing:
            return False
        return True

    def _no_column(self, name: str, key: str, missing: _Missing) -> MissingColumnError:
        within = f" in {missing.before!r}" if missing.before else ""
        if not isinstance(missing.holder, Mapping):
            kind = "a list" if missing.holder and isinstance(missing.holder, list) else f"{missing.holder!r:.60}"
            return MissingColumnError(
                f"no {missing.name!r}{within}, which is {kind}",
                where=self.where,
                found=f"{key}: {name}",
                allowed=f"0 to {len(missing.holder) - 1}, or -1"
                if isinstance(missing.holder, list) and missing.holder
                else None,
                fix=f"set {key} to the column with the value",
            )
        near = close_matches(missing.name, missing.holder)
        better = f"{missing.before}.{near[0]}" if near and missing.before else next(iter(near), None)
        names = ", ".join(map(str, missing.holder)) or "none"
        return MissingColumnError(
            f"no column {name!r}" if not within else f"no {missing.name!r}{within}",
            where=self.where,
            allowed=f"columns here: {names}" if not within else f"names there: {names}",
            fix=f"set {key} to {better!r}" if better else f"set {key} to the column with the value{_hint(self, key)}",
        )


class _Missing(Exception):
    """Part `name` of a dotted path is missing in `holder`, the value at the path `before`."""

    def __init__(self, name: str, before: str, holder: Any) -> None:
        self.name, self.before, self.holder = name, before, holder


def _inside(value: Any, parts: list[str], before: str) -> Any:
    """Return the value at the path `parts` inside `value`; `before` is the path that led to `value`.

    Raises:
        _Missing: a part of the path is missing.
    """
    if not parts:
        return value
    if isinstance(value, Mapping):
        for count in range(len(parts), 0, -1):
            name = ".".join(parts[:count])
            if name in value:
                return _inside(value[name], parts[count:], f"{before}.{name}".lstrip("."))
    elif isinstance(value, list) and parts[0].removeprefix("-").isdecimal():
        place = int(parts[0])
        if -len(value) <= place < len(value):
            return _inside(value[place], parts[1:], f"{before}.{parts[0]}")
    raise _Missing(parts[0] if before else ".".join(parts), before, value)


def _hint(row: Row, key: str) -> str:
    """Return text for the end of an error's fix: a better column for `key`, or a pipeline that suits the row."""
    if {"chosen", "rejected"} <= row.keys():
        return (
            ". The row is a preference pair: train on it with algorithm.pipeline: dpo and a section preference, or on "
            "its chosen response with megarl sft (sft.response_key: chosen); RL needs prompts and a reward"
        )
    if key == "data.answer_key":
        inner = [f"{name}.{TRUTH}" for name, value in row.items() if isinstance(value, dict) and TRUTH in value]
        return f", such as {inner[0]!r}" if inner else ""
    talks = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    talks = [name for name in talks if {"role", "from"} & row[name][0].keys()]
    return f", such as {talks[0]!r}" if talks else ""


def reference_of(row: Row, key: str | None, *, demanded: bool) -> Any:
    """Return the row's reference answer from column `key`, or None if the row has none."""
    if key is None:
        return None
    if demanded:
        return row.column(key, "data.answer_key")
    try:
        return _inside(row, key.split("."), "")
    except _Missing:
        return None


def hidden_columns(row: Row, prompt_key: str, answer_key: str | None) -> list[str]:
    """Return the columns that a reward function reads only as `sample["row"][name]`, because `sample[name]` holds
    something else.
    """
    columns = {"prompt": prompt_key, "messages": prompt_key, "answer": answer_key}
    return [name for name in row if name in SAMPLE_KEYS and columns.get(name) != name]


def make_row(value: Any, source: str, number: int, unit: str) -> Row:
    """Make a row from a parsed object and check that its values are plain data; dates and decimals become text."""
    if not isinstance(value, Mapping):
        where = f"{source}:{number}" if unit == "line" else f"{source} row {number}"
        raise DataError(
            "a row must be an object with named columns", where=where, found=value, allowed='{"column": ...}'
        )
    row = Row({}, source, number, unit)
    for name, item in value.items():
        if not isinstance(name, str):
            raise DataError("a column name must be text", where=row.where, found=name, fix="rename the column")
        check_text(name, "a column name", row)
        row[name] = _plain(item, row, name)
    return row


def without_nulls(value: Any) -> Any:
    """Return the value without keys that are null, at any depth: tables store every key in every row."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def check_text(text: str, what: str, row: Row) -> None:
    """Raise an error if the text contains half of a surrogate pair (`"\\ud83d"` in JSON), which UTF-8 cannot encode.

    Args:
        what: what the text is, for the message.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} contains half of a surrogate pair, which is not a character",
            where=row.where,
            found=text[max(0, error.start - 20) : error.start + 20],
            allowed="text that can be written as UTF-8",
            fix="write the whole character, or remove it; text cut at a fixed length often ends in such a half",
        ) from error


def _plain(value: Any, row: Row, column: str, depth: int = 0) -> Any:
    if type(value) is str:
        check_text(value, f"column {column!r}", row)
        return value
    if type(value) is int:
        if value.bit_length() > 1024:  # rewards, templates and logs print the number, and Python limits the digits
            try:
                str(value)
            except ValueError as error:
                raise DataError(
                    f"column {column!r} contains a number of more than {sys.get_int_max_str_digits()} digits",
                    where=row.where,
                    fix="write it as text",
                ) from error
        return value
    # an object with getexif is a PIL image
    if value is None or type(value) in (float, bool, bytes) or hasattr(value, "getexif"):
        return value
    if depth > MAX_DEPTH:
        raise DataError(
            f"column {column!r} nests lists and objects more than {MAX_DEPTH} levels deep",
            where=row.where,
            fix="store this value as JSON text",
        )
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key in value:
            check_text(key, f"a name in column {column!r}", row)
        return {key: _plain(item, row, column, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, row, column, depth + 1) for item in value]
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise DataError(
        f"column {column!r} contains a value that is not plain data",
        where=row.where,
        found="an object with a name that is not text" if isinstance(value, Mapping) else type(value).__name__,
        allowed="text, numbers, true, false, null, and lists and objects of these",
        fix="leave the column out, or convert it in a pkg.mod:fn source",
    )


MEDIA_FIX = "remove it from the data (a pkg.mod:fn source can), or train on rows of text"
_NAME = re.compile(
    r"(multi_?modal|mm)_(data|inputs)|pixel_values\w*|waveforms?|"
    r"((input|decoded|raw|original|question|query)_)?(image|img|picture|video|audio)s?(_?(path|file|url|uri|bytes|base64|b64|data|feature)s?)?(_?\d+)?",
    re.IGNORECASE,
)
_FILE = re.compile(
    r"data:(image|video|audio)/[\w.+-]+;.*|\S+\.(png|jpe?g|gif|webp|bmp|tiff?|npy|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg|m4a)",
    re.IGNORECASE | re.DOTALL,
)
_LOOKED_AT = 300  # number of characters at the start of a value that are matched against _FILE


def refuse_media(row: Row, texts: Container[str], shown: Container[str] = ()) -> None:
    """Raise an error for a column of images, video or sound, recognised by its name or its value.

    Numbers, true, false, null and empty values never count as media.

    Args:
        texts: columns that are read as text; they are not checked.
        shown: columns of images and videos that the model gets; they are not checked either.
    """
    for name, value in row.items():
        if name in texts or name in shown:
            continue
        if (_NAME.fullmatch(name) and isinstance(value, str | list | dict) and value) or _is_media(value):
            raise DataError(
                f"column {name!r} contains images, video or sound, which this run does not read",
                where=row.where,
                found=repr(value)[:80],
                fix=f"with a vision-language model set data.image_key to {name!r} for images, or data.video_key for "
                f"videos; else {MEDIA_FIX}",
            )


def _is_media(value: Any) -> bool:
    """Return whether `value` is an image, video or sound: bytes, a PIL image, a file name, an object with the bytes as
    the `datasets` package stores it, or a list of these."""
    if isinstance(value, list):
        return bool(value) and all(_is_media(item) for item in value)
    if isinstance(value, bytes) or hasattr(value, "getexif"):
        return True
    if isinstance(value, dict) and any(isinstance(item, bytes) for item in value.values()):
        return True
    if isinstance(value, dict):  # the `datasets` package stores images as dictionaries
        return value.keys() in ({"bytes", "path"}, {"array", "path", "sampling_rate"})
    return isinstance(value, str) and _FILE.fullmatch(value[:_LOOKED_AT]) is not None
