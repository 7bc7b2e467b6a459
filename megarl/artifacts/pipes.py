"""Detection of pipes, sockets and devices in place of files: reading one blocks for ever, or never ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megarl.system.errors import UserError

_DEPTH = 3  # levels of subfolders that are searched for pipes, down to RUN_DIR/checkpoints/step_N/FOLDER


def refuse_pipes(folder: Path) -> None:
    """Check that a run or model folder has only files and folders; one that does not exist passes."""
    for path in _special(folder, _DEPTH):
        raise UserError(
            "found a pipe, socket or device instead of a file",
            where=str(path),
            allowed="files and folders",
            fix="remove it",
        )


def is_special(path: Path) -> bool:
    """Return whether a path, or the target of a link, is a pipe, socket or device."""
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
