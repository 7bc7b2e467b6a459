"""The folder of a Ray that megarl starts, which other users of the machine cannot enter.

RAY_TMPDIR, or the folder of temporary files
    megarl-XXXXXXXX    mode 0700, new for every Ray
        r                    Ray's folder; Ray gives it and all that it makes there mode 0777
            session_...        sockets, logs, files of spilled objects
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from megarl.system.errors import ConfigError, UnavailableError
from megarl.system.leftovers import PREFIX, ray_parents

INNER = "r"
#: Longest path of a socket in Ray's folder; Linux allows paths of `_LONGEST` bytes.
_SOCKET = "session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LONGEST = 107
#: User id that root's folders seem to have where a user namespace does not map root.
_UNMAPPED = 65534


def make_ray_folder() -> Path:
    """Create the private folder of one Ray and return it; Ray uses `folder / INNER`. The folder is in RAY_TMPDIR
    (created if missing), or in the folder of temporary files, or in /tmp if the paths of sockets would be too long
    there.
    """
    where = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    parents = [parent.resolve() for parent in ray_parents()]
    parent = next((parent for parent in parents if len(os.fsencode(parent)) <= _room()), None)
    if parent is None:
        raise ConfigError(
            "paths of Ray's sockets would be too long in this folder",
            where=where,
            found=str(parents[0]),
            allowed=f"a path of at most {_room()} bytes",
            fix="set RAY_TMPDIR to a shorter path, such as a folder on a local disk",
        )
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared_folder(parent)
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # created with mode 0700, and never an existing folder
    except OSError as error:
        problem = f"Ray's folder cannot be created ({error.strerror})"
        fix = "set RAY_TMPDIR to a folder that you may write to, on a disk with free space"
        raise UnavailableError(problem, where=where, found=str(parent), fix=fix) from error


def _refuse_shared_folder(parent: Path) -> None:
    """Refuse a folder in which another user could replace one of this user's folders."""
    for folder in (parent, *parent.parents):
        status = folder.stat()
        foreign = folder == parent and status.st_uid not in (0, os.getuid(), _UNMAPPED)
        if foreign or (status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX):
            raise ConfigError(
                "other users can replace files in this folder, and so take over a run's Ray",
                where="RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR",
                found=f"{folder}, mode {stat.S_IMODE(status.st_mode):04o}, of user {status.st_uid}",
                allowed="a folder of yours or of root; without the sticky bit neither it nor a folder above may "
                "be writable for all",
                fix=f"{'' if foreign else f'chmod o-w {folder}, or '}set RAY_TMPDIR to a folder of yours",
            )


def _room() -> int:
    """Return the maximum bytes of the path of a folder for Ray: with a longer one its sockets' paths exceed Linux's
    limit."""
    return _LONGEST - len(f"/{PREFIX}XXXXXXXX/{INNER}/{_SOCKET}")
