"""Whether a run still has its folder: who deletes or moves it while the run goes on takes all that the run makes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megarl.errors import UserError

_LOOK_S = 1.0


class RunFolder:
    """The folder of a run, held open: its number on the file system is given to no other folder meanwhile.

    Args:
        path: it exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._own = os.fstat(self._handle)
        self._looked = time.monotonic()

    def close(self) -> None:
        """It may be deleted from now on."""
        os.close(self._handle)

    def is_gone(self) -> bool:
        """Nothing has this path any more, or another folder: writers make what they need again."""
        try:
            return not os.path.samestat(os.stat(self._path), self._own)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a file system of the network that does not answer as it should says nothing
            return False

    def check(self, *, now: bool = True) -> None:
        """Refuse to go on without the folder; unless `now`, look once in a while only.

        Raises:
            UserError: it is gone.
        """
        if now or time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            if self.is_gone():
                raise folder_gone(self._path)


def folder_gone(run_dir: Path) -> UserError:
    """Tell a user that the folder is gone."""
    left = "nothing is there now" if not run_dir.exists() else "a folder with what was written since is there now"
    return UserError(
        "the folder of this run was deleted or moved while the run went on, so the run has ended",
        where=str(run_dir),
        found=f"{left}; checkpoints, metrics and log are lost with the deleted one",
        fix="of a folder that was moved: move it back, and start the same command with this --run-dir, which goes on "
        "from the newest checkpoint; else start the run again",
    )
