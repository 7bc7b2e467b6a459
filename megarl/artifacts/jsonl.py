"""Append-only files of JSON lines that survive `kill -9`: only the last line can be partial.

Readers skip a partial line, and writers cut it off.

Lines with other damage (zero bytes after a power cut, a full disk) are lost, which is logged.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.artifacts.records import Needs, parse_object, set_aside, warn_once

Record = dict[str, Any]
#: The fields of every line of metrics.jsonl and samples.jsonl.
STEP: Needs = {"step": int, "stage": str}
#: Columns of metrics.jsonl other than metrics.
COLUMNS = frozenset({"step", "stage", "time"})


class JsonlWriter:
    """Writes one record per line; with `durable` every line is on disk when `write` returns.

    Opening cuts off a partial last line of an earlier process, and sets aside a folder in the file's place. A file
    that is deleted meanwhile is created again, without the earlier lines.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            set_aside(path, "a folder")
        self._path, self._durable = path, durable
        self._file = open(path, "ab")  # noqa: SIM115  (closed by `close`)
        complete = _complete_bytes(path)
        if complete != path.stat().st_size:
            self._file.truncate(complete)

    def write(self, record: Record) -> None:
        """Append a record; numbers that JSON cannot hold (NaN, infinity) become null."""
        if not self._path.exists():
            self._file.close()
            self._file = open(self._path, "ab")  # noqa: SIM115
        self._file.write(_line(finite(record)))
        self._file.flush()
        if self._durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path, *, needs: Needs | None = None, must_exist: bool = False) -> list[Record]:
    """Read all complete records, oldest first; none if the file does not exist. Damaged lines are skipped and logged
    once.

    Args:
        path: the file.
        needs: required fields of a line and their types.
        must_exist: raise an error if the file does not exist.

    Raises:
        OSError: with `must_exist`, the file does not exist or cannot be opened.
    """
    if not must_exist and not path.is_file():
        return []
    records, damaged = _parsed(path.read_bytes()[: _complete_bytes(path)], needs or {})
    if damaged:
        warn_once(path, f"{path}: {_lines_text([*damaged])} left out: {next(iter(damaged.values()))[1]}")
    return records


def rewrite_jsonl(path: Path, keep: Callable[[Record], bool], *, needs: Needs | None = None) -> None:
    """Rewrite a file without the records that `keep` rejects and without a partial last line. A crash leaves the old
    or the new file.

    Damaged lines move to NAME.damaged, and a folder in the file's place is set aside; both are logged.
    """
    if path.is_dir():
        set_aside(path, "a folder")
    if not path.is_file():
        return
    records, damaged = _parsed(path.read_bytes()[: _complete_bytes(path)], needs or {})
    if damaged:
        aside = path.with_name(f"{path.name}.damaged")
        with open(aside, "ab") as file:
            file.writelines(line + b"\n" for line, _ in damaged.values())
        reason = next(iter(damaged.values()))[1]
        warn_once(path, f"{path}: {_lines_text([*damaged])} moved to {aside.name}: {reason}")
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        for record in records:
            if keep(record):
                file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None, and convert all keys to text."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _parsed(data: bytes, needs: Needs) -> tuple[list[Record], dict[int, tuple[bytes, str]]]:
    """Return the records of complete lines, and (line, error) of each damaged line by number."""
    records, damaged = [], {}
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            records.append(parse_object(line, needs))
        except ValueError as error:
            damaged[number] = (line, str(error))
    return records, damaged


def _lines_text(numbers: list[int]) -> str:
    """Return the subject of a sentence about damaged lines, such as "line 3 is damaged and"."""
    if len(numbers) == 1:
        return f"line {numbers[0]} is damaged and"
    return f"{len(numbers)} lines from line {numbers[0]} on are damaged and"


def _line(record: Record) -> bytes:
    """Encode a record as one line; lone surrogates, which UTF-8 lacks, become JSON escapes."""
    return json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"


def _complete_bytes(path: Path) -> int:
    """Return the number of bytes up to and including the last newline."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
