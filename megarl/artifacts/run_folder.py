"""The folder of a run: whether it still exists, its damaged files, and what a start writes into it.

    launcher -> config.next.yaml -> read by every rank -> accepted: config.yaml (rank 0, with the run's record)
                                                        -> refused: removed; config.yaml still fits the checkpoints
    actor's team -> reference.next, start.next -> other teams make their models -> accepted: reference/
                                                                               -> refused:  removed

A new run folder has config.yaml from the beginning. A worker that is waiting when another one refuses the start gets
killed, so the process that kills it removes the files of the start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.artifacts.records import RUN, Needs, parse_object, set_aside
from megarl.system.errors import UserError
from megarl.system.processes import write_atomically

CONFIG, NEXT_CONFIG = "config.yaml", "config.next.yaml"
NEXT_REFERENCE = "reference.next"  # the reference model of a start that may still be refused
START_WEIGHTS = "start.next"  # the weights from which RL starts, until all teams have their models
LAUNCH_FOLDER = "launch"
COLD_START = "cold_start"  # checkpoints of a cold start that has not finished
#: A request for a checkpoint: written by the job into RUN_DIR/launch when its time limit is near, or into RUN_DIR by an
#: interrupted launcher; the run removes it once it has written a checkpoint.
SAVE_REQUEST = "save"

_LOOK_S = 1.0
_FOLDERS = (
    "checkpoints",
    COLD_START,
    "errors",
    "heartbeats",
    "images",
    "launch",
    "logs",
    "servers",
    "sync",
    "trace",
    "videos",
)
_OF_FILES = (".", "checkpoints", "errors", "heartbeats", "logs", "trace")
_SUFFIXES = frozenset({".html", ".json", ".jsonl", ".svg", ".txt", ".yaml"})
#: Entries that mark a run's folder, even after a refused start or with only a job's files.
_MARKS = frozenset({RUN, "log.txt", "metrics.jsonl", "checkpoints", LAUNCH_FOLDER})
_LOCK = ".lock"  # prefix of a run's lock files
_NOT_FILES = frozenset({"lost+found"})  # created by the file system of a volume
_NAMED = 3
_RECORDS: dict[str, Needs] = {
    RUN: {},
    "checkpoints/best.json": {"step": int},
    "mlflow.*.json": {"uri": str, "run_id": str, "status": str},
}


class RunFolder:
    """The folder of a run, kept open so that the file system does not reuse its inode for another folder.

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
        """Return whether the path no longer exists or is another folder."""
        try:
            return not os.path.samestat(os.stat(self._path), self._own)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # an error of a network file system does not show that the folder is gone
            return False

    def check(self, *, now: bool = True) -> None:
        """Raise an error if the folder is gone; unless `now`, look at most once per second."""
        if now or time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            if self.is_gone():
                raise folder_gone(self._path)


_HELD: dict[Path, RunFolder] = {}


@contextlib.contextmanager
def held(path: Path) -> Iterator[RunFolder]:
    """Keep the folder of this process's run open; inside the block `refuse_if_gone` checks it."""
    with contextlib.closing(RunFolder(path)) as folder:
        _HELD[path.absolute()] = folder
        try:
            yield folder
        finally:
            del _HELD[path.absolute()]


def refuse_if_gone(path: Path) -> None:
    """Raise an error if the run folder is gone; call this before a write that would create a folder like a run's."""
    if (folder := _HELD.get(path.absolute())) is not None:
        folder.check()


def folder_gone(run_dir: Path) -> UserError:
    """Return the error for a run folder that is gone."""
    left = "nothing is at this path now" if not run_dir.exists() else "this path is now a folder with later files"
    return UserError(
        "the run has ended because its folder was deleted or moved",
        where=str(run_dir),
        found=f"{left}; checkpoints, metrics and log are lost with a deleted folder",
        fix="if the folder was moved: move it back, and run the same command with this --run-dir, which continues from "
        "the newest checkpoint; otherwise start the run again",
    )


def refuse_other_files(run_dir: Path) -> None:
    """Raise an error if a folder for a run has files, but none that belongs to a run."""
    if not run_dir.is_dir():
        return
    names = sorted(os.listdir(run_dir))
    others = [name for name in names if not name.startswith(".") and name not in _NOT_FILES]
    if not others or any(name in _MARKS or name.startswith(_LOCK) for name in names):
        return
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    raise UserError(
        "this folder has files that do not belong to a run",
        where="--run-dir",
        found=f"{run_dir}: {', '.join(others[:_NAMED])}{more}",
        allowed="the folder of a run, an empty folder, or a new one",
        fix=f"use a new folder, such as {run_dir / 'run'}",
    )


def drop_start(run_dir: Path) -> None:
    """Remove the weights that exist only for a start. One process calls this, when no other one uses them."""
    for name in (NEXT_REFERENCE, START_WEIGHTS):
        shutil.rmtree(run_dir / name, ignore_errors=True)


def write_next_config(run_dir: Path, text: str) -> None:
    """Write the configuration of a start; the previous one is kept until `accept_config`."""
    discard_config(run_dir)
    path = run_dir / CONFIG
    write_atomically(run_dir / NEXT_CONFIG if path.is_file() and path.read_bytes() != text.encode() else path, text)


def next_config(run_dir: Path) -> Path:
    """Return the path of the configuration that the ranks of this start read."""
    return path if (path := run_dir / NEXT_CONFIG).is_file() else run_dir / CONFIG


def accept_config(run_dir: Path) -> None:
    """Replace the run's configuration with the configuration of this start. One process calls this."""
    if (run_dir / NEXT_CONFIG).is_file():
        (run_dir / NEXT_CONFIG).replace(run_dir / CONFIG)


def restore_config(run_dir: Path, text: str) -> None:
    """Write the configuration of a finished run again if it was deleted."""
    if not (run_dir / CONFIG).is_file():
        write_atomically(run_dir / CONFIG, text)


def discard_config(run_dir: Path) -> None:
    """Remove a configuration that was never accepted."""
    (run_dir / NEXT_CONFIG).unlink(missing_ok=True)


def repair(run_dir: Path) -> None:
    """Set aside damaged files, with a log line for each; keep intact and unknown files.

    Writers repair files of JSON lines (`megarl.artifacts.jsonl`); checkpoints have checksums and their own recovery.
    Only the holder of the folder's lock calls this.
    """
    for name in _FOLDERS:
        if (run_dir / name).is_file():
            set_aside(run_dir / name, "a file where a folder belongs")
    for name in _OF_FILES:
        for path in (run_dir / name).glob("*"):
            named_as_file = path.suffix in _SUFFIXES or name == "heartbeats"
            if named_as_file and path.is_dir() and not path.is_symlink():
                set_aside(path, "a folder where a file belongs")
    for pattern, needs in _RECORDS.items():
        for path in run_dir.glob(pattern):
            try:
                parse_object(path.read_bytes(), needs)
            except ValueError as error:
                set_aside(path, str(error))
