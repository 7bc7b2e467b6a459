"""One row of data: plain values by column, checked as they are read, and where it came from."""

from __future__ import annotations

import datetime
import decimal
import re
import sys
from collections.abc import Container, Mapping
from typing import Any

from megarl.system.errors import DataError, close_matches

MAX_DEPTH = 64  # lists and objects inside one another; rows are walked recursively, and Python's stack is finite
#: The columns that every sample has for a reward function. `data_source` is the row's own where it has one.
SAMPLE_KEYS = frozenset(
    {"uid", "prompt", "response", "answer", "finish_reason", "response_length", "transcript", "messages", "row"}
)
#: The answer in verl's `reward_model`.
TRUTH = "ground_truth"


PROMPT = "prompt"
"""`Row.unit` of a prompt that stands in the recipe or on the command line: there is no row to take out."""


class MissingColumnError(DataError):
    """A row has no column that a key of the recipe names."""


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
        """`train.jsonl:17` for a line, `train.parquet row 17` for a row without a line, `the prompt '1+1='`."""
        if self.unit == PROMPT:
            return f"the prompt {self.source.partition(':')[2]!r}"
        return f"{self.source}:{self.number}" if self.unit == "line" else f"{self.source} row {self.number}"

    @property
    def way_out(self) -> str:
        """The alternative for users who can do without the column, for fixes."""
        return "write the prompt in another way" if self.unit == PROMPT else "take the row out"

    def column(self, name: str, key: str) -> Any:
        """Return the value of column `name`, which configuration key `key` asks for.

        A name with dots leads into a column: `reward_model.ground_truth` is what the object in `reward_model` holds
        there, and `completions.0.response` is of the first element of a list. A column whose own name has the dots
        comes first.

        Raises:
            MissingColumnError: there is no such column; the message names the row, its columns and the nearest one.
        """
        try:
            return _inside(self, name.split("."), "")
        except _Missing as missing:
            raise self._no_column(name, key, missing) from None

    def has(self, name: str) -> bool:
        """Tell whether `column` finds this one."""
        try:
            _inside(self, name.split("."), "")
        except _Missing:
            return False
        return True

    def _no_column(self, name: str, key: str, missing: _Missing) -> MissingColumnError:
        within = f" in {missing.before!r}" if missing.before else ""
        if not isinstance(missing.holder, Mapping):
            kind = "a list" if isinstance(missing.holder, list) else f"{missing.holder!r:.60}"
            return MissingColumnError(
                f"no {missing.name!r}{within}, which holds {kind}",
                where=self.where,
                found=f"{key}: {name}",
                allowed=f"0 to {len(missing.holder) - 1}, or -1" if isinstance(missing.holder, list) else None,
                fix=f"set {key} to the column that holds it",
            )
        near = close_matches(missing.name, missing.holder)
        better = f"{missing.before}.{near[0]}" if near and missing.before else next(iter(near), None)
        names = ", ".join(map(str, missing.holder)) or "none"
        return MissingColumnError(
            f"no column {name!r}" if not within else f"no {missing.name!r}{within}",
            where=self.where,
            allowed=f"columns here: {names}" if not within else f"names there: {names}",
            fix=f"set {key} to {better!r}" if better else f"set {key} to the column that holds it{_hint(self, key)}",
        )


class _Missing(Exception):
    """A name of a path is not there. `before`: the path as far as it led, to `holder`."""

    def __init__(self, name: str, before: str, holder: Any) -> None:
        self.name, self.before, self.holder = name, before, holder


def _inside(value: Any, parts: list[str], before: str) -> Any:
    """Return the value that the path `parts` leads to in `value`.

    Raises:
        _Missing: it leads nowhere.
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
    """Return the hint for a row that lacks a column, by its form: messages, a preference pair, an answer in an
    object."""
    if {"chosen", "rejected"} <= row.keys():
        return (
            ". The row is a pair of preferences: algorithm.pipeline: dpo with a section preference learns from it, "
            "megarl sft its chosen response (sft.response_key: chosen), and RL needs prompts and a reward"
        )
    if key == "data.answer_key":
        inner = [f"{name}.{TRUTH}" for name, value in row.items() if isinstance(value, dict) and TRUTH in value]
        return f", such as {inner[0]!r}" if inner else ""
    talks = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    talks = [name for name in talks if {"role", "from"} & row[name][0].keys()]
    return f", such as {talks[0]!r}" if talks else ""


def reference_of(row: Row, key: str | None, *, demanded: bool) -> Any:
    """Return the row's reference answer, of the column `key`; None: it has none.

    Raises:
        DataError: it has none, and something reads it.
    """
    if key is None:
        return None
    if demanded:
        return row.column(key, "data.answer_key")
    try:
        return _inside(row, key.split("."), "")
    except _Missing:
        return None


def hidden_columns(row: Row, prompt_key: str, answer_key: str | None) -> list[str]:
    """Return the columns that a reward function finds in `sample["row"]` only: a sample has a value of this name
    itself."""
    own = {"prompt": prompt_key, "messages": prompt_key, "answer": answer_key}
    return [name for name in row if name in SAMPLE_KEYS and own.get(name) != name]


def make_row(value: Any, source: str, number: int, unit: str) -> Row:
    """Return the row from a parsed value; dates and decimals become text."""
    if not isinstance(value, Mapping):
        where = f"{source}:{number}" if unit == "line" else f"{source} row {number}"
        raise DataError(
            "a row must be an object with named columns", where=where, found=value, allowed='{"column": ...}'
        )
    row = Row({}, source, number, unit)
    for name, item in value.items():
        if not isinstance(name, str):
            raise DataError("a column name must be text", where=row.where, found=name)
        check_text(name, "a column name", row)
        row[name] = _plain(item, row, name)
    return row


def without_nulls(value: Any) -> Any:
    """Drop keys whose value is null: tables store every key for every row, null where a row has none."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def check_text(text: str, what: str, row: Row) -> None:
    """Refuse text that no file and no tokenizer can hold: half a surrogate pair, as `"\\ud83d"` in JSON makes it.

    Raises:
        DataError: names `what` and the row.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} holds half of a surrogate pair, which is no character",
            where=row.where,
            found=text[max(0, error.start - 20) : error.start + 20],
            allowed="text that UTF-8 can hold",
            fix="write the whole character, or take it out; text that was cut by length often ends in such a half",
        ) from error


def _plain(value: Any, row: Row, column: str, depth: int = 0) -> Any:
    if type(value) is str:
        check_text(value, f"column {column!r}", row)
        return value
    if type(value) is int:
        return _checked_int(value, row, column)
    if value is None or type(value) in (float, bool, bytes) or hasattr(value, "getexif"):  # bytes and images of PIL
        return value
    if depth > MAX_DEPTH:
        raise DataError(
            f"column {column!r} holds more than {MAX_DEPTH} lists and objects inside one another", where=row.where
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
        f"column {column!r} holds a value that is not plain data",
        where=row.where,
        found=type(value).__name__,
        allowed="text, numbers, true/false, null, lists and objects of those",
        fix="leave the column out, or convert it in a pkg.mod:fn source",
    )


def _checked_int(value: int, row: Row, column: str) -> int:
    """Return the number, when Python writes it out as digits: rewards, templates and logs do that."""
    if value.bit_length() > 1024:
        try:
            str(value)
        except ValueError as error:
            raise DataError(
                f"column {column!r} holds a number of more than {sys.get_int_max_str_digits()} digits",
                where=row.where,
                fix="write it as text",
            ) from error
    return value


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


def refuse_media(row: Row, texts: Container[str], images: str | None = None) -> None:
    """Refuse a row with a column of pictures, video or sound, told by its name or by what it holds.

    Numbers, true and false, null and what is empty are none. `texts` are columns that are read as text, and `images`
    (`data.image_key`) is the one whose images the model sees.

    Raises:
        DataError: names row and column.
    """
    for name, value in row.items():
        if name in texts or (images is not None and name == images.partition(".")[0]):
            continue
        if (_NAME.fullmatch(name) and _may_be_media(value)) or _is_media(value):
            raise DataError(
                f"column {name!r} holds pictures, video or sound that nothing reads",
                where=row.where,
                found=repr(value)[:80],
                fix=f"for images and a vision-language model set data.image_key to {name!r}; else {MEDIA_FIX}",
            )


def _may_be_media(value: Any) -> bool:
    return isinstance(value, str | list | dict) and bool(value)


def _is_media(value: Any) -> bool:
    """Tell whether `value` holds media, such as a picture."""
    if isinstance(value, list):
        return bool(value) and all(_is_media(item) for item in value)
    if isinstance(value, bytes) or hasattr(value, "getexif"):
        return True
    if isinstance(value, dict) and any(isinstance(item, bytes) for item in value.values()):
        return True
    if isinstance(value, dict):  # as the `datasets` package stores them
        return value.keys() in ({"bytes", "path"}, {"array", "path", "sampling_rate"})
    return isinstance(value, str) and _FILE.fullmatch(value[:_LOOKED_AT]) is not None
