"""Mail between teams in tests: a folder with a file for each, for threads and for processes."""

from __future__ import annotations

import time
from pathlib import Path

from megarl.system.processes import write_atomically


class FolderMail:
    """Texts by name; whoever reads waits for them, no longer than `timeout` seconds."""

    def __init__(self, folder: Path, timeout: float = 60.0) -> None:
        self._folder, self._timeout = folder, timeout

    def _file(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")

    def post(self, name: str, text: str) -> None:
        assert not self._file(name).exists(), name
        write_atomically(self._file(name), text)

    def read(self, name: str) -> str:
        deadline = time.monotonic() + self._timeout
        while not self._file(name).exists():
            assert time.monotonic() < deadline, f"nobody posts {name}"
            time.sleep(0.01)
        return self._file(name).read_text()

    read_together = read
