"""A file of records that outlives its writer: whoever opens it again finds all that was appended.

    9a4ad20f {"journal": 1, "of": "store-1f0e"}       checksum of the record, and the record: one line of JSON
    8d2b01aa ["train",0,1,2,["give","train",0,...
    03c1a4f7 ["train",0,                              torn: its writer died, and nobody was told that it is there

A record is with the operating system when `append` returns. So it outlives the process, not the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from megarl.disaggregated.buffer.core import StoreError

_FORMAT = 1
_CHECKSUM = 9  # bytes: eight digits and a space


class Journal:
    """The journal of one writer. It reads before it writes: `records` first, to the end.

    Args:
        path: of the file.
        of: whose it is. What another has left there is replaced.

    Attributes:
        size: of the file in bytes.
    """

    def __init__(self, path: Path, of: str) -> None:
        self._path, self._head = path, json.dumps({"journal": _FORMAT, "of": of})
        self._file: BinaryIO | None = None
        self.size = 0

    def records(self) -> Iterator[bytes]:
        """What was appended since the journal began, or since it was last replaced; then it is open.

        Raises:
            StoreError: a record is damaged, and others come after it.
        """
        if self._path.is_file():
            with self._path.open("rb") as file:
                head = _record(file.readline())
                if head == self._head.encode():
                    self.size = file.tell()
                    yield from self._rest(file)
        if self.size:
            self._file = self._path.open("r+b", buffering=0)
            self._file.truncate(self.size)
            self._file.seek(self.size)
        else:
            self.replace([])

    def _rest(self, file: BinaryIO) -> Iterator[bytes]:
        for line in file:
            record = _record(line)
            if record is None:
                if file.read(1):
                    raise StoreError(
                        f"{self._path}: the record at byte {self.size} is damaged, and others come after it: the "
                        "store cannot go on from its journal"
                    )
                return
            self.size += len(line)
            yield record

    def append(self, record: str) -> None:
        """Add one line of JSON.

        Raises:
            StoreError: it cannot be written, or an earlier one could not.
        """
        if self._file is None:
            raise StoreError(f"{self._path}: the journal of the store ends where it could not be written")
        line = _line(record)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError as error:
            self._file.close()
            self._file = None
            raise StoreError(f"{self._path}: the journal of the store cannot be written: {error}") from error
        self.size += len(line)

    def replace(self, records: Iterable[str]) -> None:
        """Forget all records for these; whoever opens the file finds the old ones or the new ones.

        Raises:
            StoreError: they cannot be written; the old ones are there, or nothing more can be appended.
        """
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with new.open("wb") as file:
                file.writelines(map(_line, [self._head, *records]))
            os.replace(new, self._path)
            if self._file is not None:
                self._file.close()  # the file has no name any more: what was written there would be lost
                self._file = None
            self._file = self._path.open("ab", buffering=0)
            self.size = self._path.stat().st_size
        except OSError as error:
            raise StoreError(f"{self._path}: the journal of the store cannot be written: {error}") from error


def _line(record: str) -> bytes:
    body = record.encode()
    return b"%08x %s\n" % (crc32(body), body)


def _record(line: bytes) -> bytes | None:
    """None: it is torn."""
    body = line[_CHECKSUM:-1]
    return body if line[:_CHECKSUM] == b"%08x " % crc32(body) and line[-1:] == b"\n" else None
