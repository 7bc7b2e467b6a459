"""Files that killed processes left in the system's temporary folder and in shared memory.

    /tmp       megarl-XXXXXXXX (sockets of a server, or the folder of a Ray, which may also be in RAY_TMPDIR),
               megarl-command-*, torchelastic_*, torch-shm-dir-*
    /dev/shm   torch_PID_*, and files of servers with the run's name

Only files of this user count that no process has open or mapped, or names in its environment or command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHARED = Path("/dev/shm")
PREFIX = "megarl-"
_FOLDERS = re.compile(r"megarl-[a-z0-9_]{8}|torchelastic_.+|torch-shm-dir-.+")
_FILES = re.compile(r"megarl-command-.+")
_SHARED = re.compile(r"torch_(?P<pid>\d+)_.+|(sglang_loads|sgl_shm)_megarl_.+")
_JUST_MADE_S = 60.0  # seconds after which a process has opened or named a file or folder that it uses
_UNSEEN_S = 3600.0  # the same limit in a container, which cannot see whether outside processes use the file
_ALL_PROCESSES = 4026531836  # inode of the root PID namespace, in which all processes are visible


def ray_parents() -> list[Path]:
    """Return the folders in which Ray may create its temporary folder, its first choice first."""
    given = os.environ.get("RAY_TMPDIR")
    return [Path(given)] if given else [Path(tempfile.gettempdir()), Path("/tmp")]


def leftovers(temporary: Path | None = None, shared: Path | None = None) -> list[Path]:
    """Return the temporary files and folders of ended runs that no process needs any more."""
    folders = [temporary] if temporary is not None else [Path(tempfile.gettempdir()), *ray_parents()]
    old = [path for path in _candidates(list(dict.fromkeys(folders)), shared or SHARED) if _is_old(path)]
    unnamed = {path.name.encode() for path in old}
    texts = _named_by_processes()
    while unnamed and (text := next(texts, None)) is not None:
        unnamed -= {name for name in unnamed if name in text}
    return [path for path in old if path.name.encode() in unnamed]


def remove_leftovers(temporary: Path | None = None, shared: Path | None = None) -> list[Path]:
    """Remove files and folders that ended runs left in temporary folders, where allowed; return the removed ones."""
    removed = leftovers(temporary, shared)
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return [path for path in removed if not path.exists()]


def _candidates(temporary: list[Path], shared: Path) -> Iterator[Path]:
    """Yield this user's files and folders with names that megarl, torch and SGLang give to temporary files, except
    those whose name contains the id of a running process.
    """
    for folder in temporary:
        yield from (path for path in _own_files(folder, _FOLDERS) if path.is_dir())
        yield from (path for path in _own_files(folder, _FILES) if path.is_file())
    for path in _own_files(shared, _SHARED):
        match = _SHARED.fullmatch(path.name)
        if match and not (match["pid"] and Path("/proc", match["pid"]).is_dir()):
            yield path


def _own_files(folder: Path, names: re.Pattern[str]) -> Iterator[Path]:
    """Yield the files and folders in `folder` that belong to this user and whose names match, but no symbolic links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not names.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                if not entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    yield Path(entry.path)


def _is_old(path: Path) -> bool:
    """Return whether a file is so old that a process that uses it would by now have it open or name it."""
    try:
        age = time.time() - path.stat().st_mtime
        sees_all = os.stat("/proc/self/ns/pid").st_ino == _ALL_PROCESSES
    except OSError:
        return False
    match = _SHARED.fullmatch(path.name)
    return age > (_UNSEEN_S if not sees_all else 0 if match and match["pid"] else _JUST_MADE_S)


def _named_by_processes() -> Iterator[bytes]:
    """Yield texts from /proc in which this user's processes name files: sockets, environment variables, command lines
    and open files. Memory maps come last, because the kernel needs the longest time to write them.
    """
    with contextlib.suppress(OSError):
        yield Path("/proc/net/unix").read_bytes()
    processes = list(_own_processes())
    for process in processes:
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                yield (process / name).read_bytes()
        with contextlib.suppress(OSError):
            for link in [process / "cwd", *(process / "fd").iterdir()]:
                with contextlib.suppress(OSError):
                    yield os.fsencode(os.readlink(link))
    for process in processes:
        with contextlib.suppress(OSError):
            yield (process / "maps").read_bytes()


def _own_processes() -> Iterator[Path]:
    """Yield the folders in /proc of this user's processes, and of processes whose owner cannot be read."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid != os.getuid():
                continue
        yield process
