"""Append-only JSON lines that survive `kill -9`: at most the last line is partial; readers skip it, writers cut it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.errors import DataError

Record = dict[str, Any]


class JsonlWriter:
    """Appends one record per line; with `durable` every line is on disk when `write` returns.

    A partial last line of an earlier process is cut when the file is opened.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._durable = durable
        self._file = open(path, "ab")  # noqa: SIM115  (lives as long as the writer)
        complete = _complete_bytes(path)
        if complete != path.stat().st_size:
            self._file.truncate(complete)

    def write(self, record: Record) -> None:
        """Append a record; numbers that JSON cannot hold (NaN, infinity) become null."""
        self._file.write(_line(_finite(record)))
        self._file.flush()
        if self._durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path, *, must_exist: bool = False) -> list[Record]:
    """All complete records, oldest first; an absent file has none.

    Raises:
        FileNotFoundError: with `must_exist`, of an absent file.
        DataError: a line other than a partial last one is not a JSON object.
    """
    if not must_exist and not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_bytes()[: _complete_bytes(path)].split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"not JSON: {error}", where=f"{path}:{number}") from error
        if not isinstance(record, dict):
            raise DataError("not a JSON object", where=f"{path}:{number}", found=record)
        records.append(record)
    return records


def rewrite_jsonl(path: Path, keep: Callable[[Record], bool]) -> None:
    """Drop the records that `keep` refuses, and a partial last line. Atomic: a crash leaves the old or the new file."""
    if not path.is_file():
        return
    kept = [record for record in read_jsonl(path) if keep(record)]
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        for record in kept:
            file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _line(record: Record) -> bytes:
    """One line. Half a surrogate pair, which UTF-8 cannot hold, is written as the escape that JSON has for it."""
    return json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"


def _complete_bytes(path: Path) -> int:
    """Bytes up to and including the last newline."""
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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
