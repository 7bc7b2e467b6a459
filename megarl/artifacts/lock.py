"""The lock of a run folder: one command at a time, and no worker of an earlier attempt writes after a later one starts.

    first machine's launcher   .lock        locked by flock, if the file system supports it
                               .lock.json   the holder: attempt, process, machines; touched every 2 s
    other machines' launchers  .lock.K, .lock.K.json    the same for machine K
    worker                     reads its attempt at the start: MEGARL_ATTEMPT, else .lock.json
                               reads .lock.json before it writes, and exits if another attempt holds the folder

.lock.json is created exclusively. It is taken from another command only if that has ended: its process on this machine
is gone or, on another machine, it was silent for `SILENT_S`. So the lock also works where flock is missing (Lustre
without it) or local to a machine. flock in addition gives the kernel's immediate answer, also across containers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.artifacts.records import Needs, read_record
from megarl.artifacts.run_folder import refuse_if_gone
from megarl.system.errors import UserError, WorkerError
from megarl.system.parents import began
from megarl.system.processes import process_scope, write_atomically

#: Environment variable of a worker: its attempt. Empty or absent: the attempt in the folder's record when the worker
#: starts.
ATTEMPT = "MEGARL_ATTEMPT"
#: Seconds between two heartbeats of a holder, and seconds of silence after which another machine may take the folder.
BEAT_S, SILENT_S = 2.0, 30.0
_LOOK_S = 0.25
_SETTLE_S = 1.0  # seconds to wait after taking over a lock, because another command may have done so at the same time
_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
_NEEDS: Needs = {
    "attempt": str,
    "host": str,
    "place": str,
    "pid": int,
    "began": int,
    "machines": int,
    "meets": str,
    "folder": int,
}
log = logging.getLogger(__name__)


class FolderTaken(WorkerError):
    """Another attempt holds the run folder; this process exits without writing there."""

    repeats = True


class FolderLock:
    """The lock of a run folder for one machine's part of a command; a context manager.

    Args:
        run_dir: the folder.
        machine: number of this machine within the command.
        machines: number of machines.
        meets: rendezvous address, equal on all machines of one command.

    Attributes:
        machine: number of this machine.
        notes: lines for the log of the run.
    """

    def __init__(self, run_dir: Path, machine: int = 0, machines: int = 1, meets: str = "") -> None:
        self._run_dir, self.machine = run_dir, machine
        self._path, self._record = (
            run_dir / (f".lock.{machine}" if machine else ".lock"),
            _record_path(run_dir, machine),
        )
        self._joins = {"machines": machines, "meets": meets} if machine else None
        host, place = socket.gethostname(), process_scope()
        self._mine = {"attempt": _new_attempt(), "host": host, "place": place, "pid": os.getpid()}
        self._mine |= {"began": began(os.getpid()), "machines": machines, "meets": meets}
        self._mine |= {"folder": run_dir.stat().st_ino}
        self._kernel = False  # whether flock works among this machine's processes
        self._over = threading.Event()
        self.notes: list[str] = []

    def __enter__(self) -> FolderLock:
        self._file = self._path.open("a")
        try:
            self._flock()
            if self._joins is not None:
                self._await_end(_record_path(self._run_dir), self._joins)
            self._create()
        except BaseException:
            self._file.close()
            raise
        threading.Thread(target=self._beat, name="folder-lock", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            if self.is_ours():
                self._record.unlink()
        self._file.close()

    def begin_attempt(self) -> str:
        """Start a new attempt of this command, after which workers of the previous one must not write; return its name.

        Raises:
            FolderTaken: another command has taken the folder.
        """
        if not self.is_ours():
            raise FolderTaken(_taken_text(self._run_dir, read_record(self._record, tell=False)))
        following = self._mine | {"attempt": _new_attempt()}
        write_atomically(self._record, json.dumps(following))
        self._mine = following
        return str(following["attempt"])

    def is_ours(self) -> bool:
        """Return whether no other command has taken the folder; an unreadable record counts as ours."""
        attempt = self._mine["attempt"]
        return bool(read_record(self._record, tell=False).get("attempt", attempt) == attempt)

    def _flock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._kernel = True
        except BlockingIOError as error:
            raise self._refusal(read_record(self._record, tell=False)) from error
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            self.notes.append(
                f"megarl: warning: the file system of {self._run_dir} has no flock ({error.strerror}): "
                f"{self._record.name} keeps other commands out, which take the folder when this one's process has "
                f"ended, or on another machine when it was silent for {SILENT_S:g} s"
            )

    def _create(self) -> None:
        """Create the lock's record, a file that names this command. If another command has one, wait until it ends."""
        contested = False
        while True:
            try:
                with self._record.open("x") as file:
                    json.dump(self._mine, file)
                break
            except FileExistsError:
                sure = self._await_end(self._record)
                if sure is not None:
                    contested = contested or not (sure and self._kernel)
                    self._record.unlink(missing_ok=True)
        if contested:
            time.sleep(_SETTLE_S)
            if not self.is_ours():
                raise self._refusal(read_record(self._record, tell=False))

    def _await_end(self, record: Path, joins: Mapping[str, Any] | None = None) -> bool | None:
        """Find out whether the command that wrote a record has ended, which may take a wait on another machine.

        Return True if it certainly has ended, False if it probably has, None if there is no record to wait for any
        more. Raise UserError if the command is alive.

        Args:
            record: path of a command's record.
            joins: fields by which this machine recognises its own command; a record with these fields ends the wait.
        """
        first, start, announced = _touched(record), time.monotonic(), False
        while (touched := _touched(record)) is not None:
            holder = read_record(record, _NEEDS, tell=False)
            if joins and joins.items() <= holder.items():
                return None
            gone = _is_gone(holder, self._run_dir, kernel=self._kernel and joins is None)
            if gone:
                return True
            waited = time.monotonic() - start
            if joins and not holder:
                # The file has no record yet: the command that created it may be writing. Count its heartbeats from now.
                first = touched
            if gone is not None or (first is not None and touched - first > _SETTLE_S):
                raise self._refusal(holder)
            if waited > SILENT_S or self._now() - touched > SILENT_S:
                self.notes.append(
                    f"megarl: {_owner(holder)} held this run folder but was silent for {SILENT_S:g} s; it is taken"
                )
                return False
            if not announced:
                announced = True
                log.warning("%s holds %s: waiting up to %g s for a sign of life", _owner(holder), record, SILENT_S)
            time.sleep(_LOOK_S)
        return None

    def _now(self) -> float:
        """Return the current time of the file system, whose clock may differ."""
        os.utime(self._path)
        return self._path.stat().st_mtime

    def _refusal(self, holder: Mapping[str, Any]) -> UserError:
        machines = holder.get("machines", 1)
        return UserError(
            "another run is using this run folder",
            where="--run-dir",
            found=f"{self._run_dir}, by {_owner(holder)}" + (f", on {machines} machines" if machines > 1 else ""),
            fix="wait until it ends, or stop it"
            if self._joins is None
            else "wait until it ends, or stop it; machines of one command need the same MASTER_ADDR and MASTER_PORT, "
            f"here {self._joins['meets']}, there {holder.get('meets') or 'none'}",
        )

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self.is_ours():
                    os.utime(self._record)


def join_attempt(run_dir: Path) -> None:
    """Set the id of this process's attempt in its environment from the run folder's record, if it is not set."""
    if not os.environ.get(ATTEMPT):
        os.environ[ATTEMPT] = read_record(_record_path(run_dir), tell=False).get("attempt", "")


def refuse_if_taken(run_dir: Path) -> None:
    """Check that this worker may write to its run folder.

    Raises:
        FolderTaken: another attempt holds the folder.
    """
    refuse_if_gone(run_dir)
    if is_taken(run_dir):
        raise FolderTaken(_taken_text(run_dir, read_record(_record_path(run_dir), tell=False)))


def is_taken(run_dir: Path) -> bool:
    """Return whether another attempt holds the folder; False without a readable record."""
    attempt = os.environ.get(ATTEMPT)
    return bool(attempt) and read_record(_record_path(run_dir), tell=False).get("attempt", attempt) != attempt


def is_held(run_dir: Path) -> bool:
    """Return whether a command holds the folder; False if that is unknown."""
    kernel = False
    try:
        with (run_dir / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            kernel = True
    except BlockingIOError:
        return True
    except OSError:
        pass
    touched = _touched(_record_path(run_dir))
    gone = _is_gone(read_record(_record_path(run_dir), _NEEDS, tell=False), run_dir, kernel=kernel)
    return touched is not None and (time.time() - touched < SILENT_S if gone is None else not gone)


def _record_path(run_dir: Path, machine: int = 0) -> Path:
    return run_dir / (f".lock.{machine}.json" if machine else ".lock.json")


def _new_attempt() -> str:
    return secrets.token_hex(8)


def _touched(path: Path) -> float | None:
    """Return when a file was last touched, or None if it is gone; opening it first refreshes a network file system."""
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: another machine has just removed the file
            raise
        return None


def _is_gone(holder: Mapping[str, Any], run_dir: Path, *, kernel: bool) -> bool | None:
    """Return whether the process that holds a run folder has ended; None if this machine cannot find out.

    Args:
        holder: content of the folder's record, which names the process.
        run_dir: the run folder. If it is a copy of the folder for which the record was written, no process holds it.
        kernel: whether flock shows that no process of this machine holds the folder.
    """
    if not holder:
        return None
    here = holder["place"].split()[0] == process_scope().split()[0]
    if here and holder["folder"] != run_dir.stat().st_ino:
        return True
    if holder["place"] == process_scope():
        with contextlib.suppress(OSError):
            return began(holder["pid"]) != holder["began"]
        return None
    return True if kernel and here else None


def _owner(holder: Mapping[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}" if "pid" in holder and "host" in holder else "a command"


def _taken_text(run_dir: Path, holder: Mapping[str, Any]) -> str:
    return (
        f"{_owner(holder)} has taken the run folder {run_dir} (attempt {holder.get('attempt', 'unknown')}): process "
        f"{os.getpid()} on {socket.gethostname()}, of an earlier attempt ({os.environ.get(ATTEMPT) or 'launcher'}), "
        "exits without writing there"
    )
