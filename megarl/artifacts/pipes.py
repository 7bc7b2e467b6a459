"""Refusal of pipes, sockets and devices where files belong: reading one waits for ever, or never ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megarl.system.errors import UserError

_DEPTH = 3  # folders inside one another: RUN_DIR/checkpoints/step_N


def refuse_pipes(folder: Path) -> None:
    """Refuse a run or model folder that holds something that is neither a file nor a folder.

    Raises:
        UserError: names it. A folder that is not there holds nothing.
    """
    for path in _special(folder, _DEPTH):
        raise UserError(
            "a pipe, socket or device stands where a file belongs",
            where=str(path),
            allowed="files and folders",
            fix="remove it",
        )


def is_special(path: Path) -> bool:
    """Return whether this, or what a link leads to, is a pipe, socket or device."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _special(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _special(Path(entry.path), depth - 1) if depth else ()
        elif not entry.is_file(follow_symlinks=False) and is_special(Path(entry.path)):
            yield Path(entry.path)
