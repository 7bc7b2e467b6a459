"""Files that are written at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.system.processes import write_atomically


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_a_file_written_at_once_follows_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
