"""Check that a run still has its folder: a user may delete or move it while the run goes on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import UserError

_LOOK_S = 1.0


class RunFolder:
    """The folder of a run, held open, so that the file system gives its inode to no other folder.

    Args:
        path: an existing folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._own = os.fstat(self._handle)
        self._looked = time.monotonic()

    def close(self) -> None:
        """Release the folder; it may be deleted from now on."""
        os.close(self._handle)

    def is_gone(self) -> bool:
        """Return whether the path is gone or is another folder; writers create missing files again."""
        try:
            return not os.path.samestat(os.stat(self._path), self._own)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a network file system that does not answer properly proves nothing
            return False

    def check(self, *, now: bool = True) -> None:
        """Raise if the folder is gone; unless `now`, look only once in a while.

        Raises:
            UserError: it is gone.
        """
        if now or time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            if self.is_gone():
                raise folder_gone(self._path)


_HELD: dict[Path, RunFolder] = {}


@contextlib.contextmanager
def held(path: Path) -> Iterator[RunFolder]:
    """The folder of the run that this process works on: until the end `refuse_if_gone` looks whether it is there."""
    with contextlib.closing(RunFolder(path)) as folder:
        _HELD[path.absolute()] = folder
        try:
            yield folder
        finally:
            del _HELD[path.absolute()]


def refuse_if_gone(path: Path) -> None:
    """Called before this process writes to a run folder: what it made again would look like a run.

    Raises:
        UserError: it is the folder that this process holds, and that was deleted or moved.
    """
    if (folder := _HELD.get(path.absolute())) is not None:
        folder.check()


def folder_gone(run_dir: Path) -> UserError:
    """Return the error that tells a user that the folder is gone."""
    left = "nothing is there now" if not run_dir.exists() else "a folder with what was written since is there now"
    return UserError(
        "the folder of this run was deleted or moved while the run went on, so the run has ended",
        where=str(run_dir),
        found=f"{left}; checkpoints, metrics and log are lost with the deleted one",
        fix="of a folder that was moved: move it back, and start the same command with this --run-dir, which goes on "
        "from the newest checkpoint; else start the run again",
    )
