"""Heartbeats and failure reports of a worker, and how a launcher reads them.

    worker                         RUN_DIR                          launcher
    megarl.system.tracing -> Heartbeat ->   heartbeats/rank_K   -> read_beat -> Watch   no beat for too long: a hang
    exception    -> write_error -> errors/rank_K.json  -> read_errors          which rank failed first, and where

A heartbeat shows progress, not that the process is alive: it changes when a phase opens or closes, and when long work
inside a phase calls `tracing.beat` (decode steps, micro-batches, tensors read or written). So a rank that waits for
ever looks stuck although its process is healthy. A beat is a copy into a memory-mapped file of one block (about 2
microseconds), so every beat is recorded without a rate limit. In a run on several machines the file is on the rank's
own machine (`megarl.runtime.machine_beats`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import re
import shutil
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megarl.artifacts import records
from megarl.artifacts.lock import is_taken
from megarl.artifacts.records import Needs, read_record
from megarl.artifacts.run_folder import folder_gone
from megarl.runtime.machine_beats import LOOK_S, Copier, local_folder, machines_of, takes_turns
from megarl.system import tracing
from megarl.system.credentials import mask
from megarl.system.errors import MegarlError, UserError, is_full, means_out_of_memory, no_room, text_of
from megarl.system.imports import is_of_user
from megarl.system.parents import began
from megarl.system.processes import write_atomically
from megarl.system.rendezvous import ranks_text

# fields: sequence number (odd: being written), number of heartbeats, step, pid, unix time, text length, work finished
_HEADER = struct.Struct("<QQqQdH?")
_SIZE = 512
_LOOK_S = 2.0  # seconds between two checks that the heartbeat file still exists
_TEXT_MAX = _SIZE - _HEADER.size

# Messages of errors that a rank gets when *another* rank is gone. Such an error is not the root cause if there is any
# other error.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|(wait|socket) timeout|timed out (waiting|after)"
    r"|remote process (has )?(exited|terminated)|heartbeat.*(lost|timeout)|(recvvalue|to recv) failed"
    r"|aborted communicator|actor died|actor \S+ is unavailable|owner has exited|copies of \S+ have been lost",
    re.IGNORECASE,
)
_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
# errors of Ray after the loss of another team's process
_PEER_TYPES |= {"ActorDiedError", "ActorUnavailableError", "ObjectLostError", "OwnerDiedError"}


@dataclasses.dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank; `time`: unix time in seconds; `over`: the rank has finished its work."""

    changes: int
    step: int
    pid: int
    time: float
    phase: str
    host: str
    over: bool = False


class Heartbeat:
    """Records the heartbeats of this process in RUN_DIR/heartbeats/rank_K. In a run on several machines, records
    them in a local file that a `Copier` copies to the run folder."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        path, self._copier = _beat_path(run_dir, rank), None
        path.parent.mkdir(parents=True, exist_ok=True)
        if (turn := takes_turns()) is not None:
            path = local_folder(run_dir) / path.name
            _remove_dead(path.parent)
            self._copier = Copier(run_dir, turn)
        self._path = path
        self._host = socket.gethostname()
        self._lock = threading.Lock()
        self._changes = 0
        self._over = False
        self._begin_file()
        tracing.on_change(self.beat)

    def _begin_file(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_bytes(bytes(_SIZE))
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._record(tracing.current())
        if self._path.is_dir():
            records.set_aside(self._path, "a folder where a file belongs")
        temporary.rename(self._path)  # readers never find a file without a first heartbeat
        self._looked = time.monotonic()

    def beat(self, path: str) -> None:
        """Record progress of the main thread in phase `path`; a deleted file is created again."""
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S:
                self._recreate()
            self._record(path)

    def _recreate(self) -> None:
        """Create the heartbeat file again if it was deleted; without it the launcher would end a healthy run."""
        self._looked = time.monotonic()
        # If the run folder is gone, the launcher notices it; other errors are temporary.
        with contextlib.suppress(OSError):
            if not self._path.is_file():
                self._path.parent.mkdir(exist_ok=True)
                self._begin_file()

    def _record(self, path: str) -> None:
        text = f"{self._host} {path}".encode()[:_TEXT_MAX]
        self._changes += 1
        head = (self._changes, tracing.step_now, os.getpid(), time.time(), len(text), self._over)
        _HEADER.pack_into(self._map, 0, 2 * self._changes - 1, *head)
        self._map[_HEADER.size : _HEADER.size + len(text)] = text
        _HEADER.pack_into(self._map, 0, 2 * self._changes, *head)

    def finish(self) -> None:
        """Record that this process has finished its work; a process that ends without this record counts as failed."""
        self._over, self._looked = True, -math.inf
        self.beat(tracing.current())
        if self._copier is not None:
            with contextlib.suppress(OSError):  # if the run folder is gone, the launcher reports it
                self._copier.copy()


def _beat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "heartbeats" / f"rank_{rank}"


def _remove_dead(folder: Path) -> None:
    """Remove heartbeat files of processes of this machine that have ended; their ranks may run elsewhere now."""
    for path in folder.glob("rank_*"):
        with contextlib.suppress(OSError):
            beat = _parse(path.read_bytes())
            if beat is not None and began(beat.pid) is None:
                path.unlink()


def forget_dead(run_dir: Path) -> None:
    """Remove heartbeat files that ended processes of this run left on this machine, if it is on several machines."""
    if machines_of(run_dir) is not None:
        _remove_dead(local_folder(run_dir))


def read_beat(run_dir: Path, rank: int) -> Beat | None:
    """Return the last heartbeat of `rank`; None before the first. Reads again if the rank was writing meanwhile."""
    if (machines := machines_of(run_dir)) is not None:
        beats = [beat for block in machines.blocks(rank) if (beat := _parse(block)) is not None]
        return max(beats, key=lambda beat: beat.time, default=None)  # a rank that has moved has one on each machine
    path = _beat_path(run_dir, rank)
    for _ in range(1000):
        try:
            data, again = path.read_bytes(), path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):  # the rank's next beat moves a folder of this name aside
            return None
        if data == again and (beat := _parse(data)) is not None:
            return beat
    return None


def _parse(block: bytes) -> Beat | None:
    """Return the heartbeat from a file's bytes, whose zeros at the end may be missing; None: it was being written."""
    data = block.ljust(_SIZE, b"\0")
    sequence, changes, step, pid, unix_time, length, over = _HEADER.unpack_from(data)
    if sequence % 2:
        return None
    host, _, text = data[_HEADER.size : _HEADER.size + length].decode(errors="replace").partition(" ")
    return Beat(changes, step, pid, unix_time, text, host, over)


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    `exit_code`: exit code for the whole command. `explained`: the message suffices without a traceback, because megarl
    raised the error itself and no other error caused it. `repeats`: a resumed run would raise the error again.
    """

    rank: int
    phase: str
    step: int
    type: str
    message: str
    traceback: str
    time: float
    exit_code: int
    user_error: bool = False
    explained: bool = False
    repeats: bool = False

    @property
    def peer_lost(self) -> bool:
        """Return whether this error is only a consequence of another rank's end."""
        return not self.user_error and (self.type in _PEER_TYPES or bool(_PEER_LOST.search(self.message)))

    @property
    def out_of_memory(self) -> bool:
        """Return whether the rank ran out of host or device memory."""
        return not self.user_error and means_out_of_memory(self.type, self.message)


def failure_of(error: BaseException, rank: int) -> RankFailure:
    """Return a description of `error`, raised in this process, with its phase and step."""
    return RankFailure(
        rank=rank,
        phase=tracing.failed_at(error),
        step=tracing.step_now,
        type=type(error).__name__,
        message=mask(text_of(error)),
        traceback=mask("".join(traceback.format_exception(error))),
        time=time.time(),
        exit_code=error.exit_code if isinstance(error, MegarlError) else 1,
        user_error=isinstance(error, UserError),
        explained=isinstance(error, MegarlError) and error.__cause__ is None,
        repeats=_repeats(error),
    )


def _repeats(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes would occur again if the run were restarted."""
    if error is None:
        return False
    repeats = error.repeats if isinstance(error, MegarlError) else is_of_user(error)
    return repeats or _repeats(error.__cause__)


def write_error(run_dir: Path, failure: RankFailure) -> None:
    """Write `failure` to RUN_DIR/errors/rank_K.json for the launcher, or to stderr if that fails.

    Nothing is written if the run folder was deleted; the launcher reports this itself.
    """
    if not run_dir.is_dir():
        return
    try:
        write_atomically(
            run_dir / "errors" / f"rank_{failure.rank}.json", json.dumps(dataclasses.asdict(failure), indent=2)
        )
    except OSError as error:
        text = failure.message if failure.explained else failure.traceback
        print(f"{text}\nRUN_DIR/errors cannot be written: {error}", file=sys.stderr, flush=True)


_reported: tuple[BaseException, RankFailure] | None = None


def report(run_dir: Path, error: BaseException, rank: int) -> RankFailure:
    """Report `error` to the launcher and return its description; a second call for the same error returns the first."""
    global _reported
    if _reported is None or _reported[0] is not error:
        failure = failure_of(error, rank)
        cause = folder_gone(run_dir) if not run_dir.is_dir() else no_room(run_dir) if is_full(error) else None
        if cause is not None:
            failure = dataclasses.replace(
                failure, message=str(cause), exit_code=cause.exit_code, user_error=True, explained=True, repeats=True
            )
        _reported = (error, failure)
        if is_taken(run_dir):  # RUN_DIR/errors belongs to another attempt
            print(f"megarl: rank {rank}: {failure.message}", file=sys.stderr, flush=True)
        else:
            write_error(run_dir, failure)
    return _reported[1]


#: Files in RUN_DIR/errors as (name, inode, modification time), which differ between an old and a new error of a name.
Old = frozenset[tuple[str, int, int]]


def old_errors(run_dir: Path) -> Old:
    """Return the error files that exist before an attempt starts, to distinguish them from the attempt's own."""
    files = set()
    for path in (run_dir / "errors").glob("rank_*.json"):
        with contextlib.suppress(FileNotFoundError):  # the first machine removes the files
            files.add(_mark(path))
    return frozenset(files)


def _mark(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return path.name, status.st_ino, status.st_mtime_ns


_FAILURE_FIELDS = {field.name for field in dataclasses.fields(RankFailure)}
_FAILURE_NEEDS: Needs = {
    "time": (int, float),
    **dict.fromkeys(("rank", "step", "exit_code"), int),
    **dict.fromkeys(("phase", "type", "message", "traceback"), str),
}


def read_errors(run_dir: Path, old: Old = frozenset()) -> dict[int, RankFailure]:
    """Return the failures in RUN_DIR/errors by rank, without `old` and damaged files."""
    failures = []
    for path in (run_dir / "errors").glob("rank_*.json"):
        with contextlib.suppress(FileNotFoundError):  # another machine's launcher may move the file aside
            if (not old or _mark(path) not in old) and (record := read_record(path, _FAILURE_NEEDS)):
                known = {name: value for name, value in record.items() if name in _FAILURE_FIELDS}
                failures.append(RankFailure(**known))
    return {failure.rank: failure for failure in failures}


def forget(run_dir: Path) -> None:
    """Remove heartbeats and errors of an earlier command in the same run folder."""
    _remove_beats(run_dir)
    shutil.rmtree(run_dir / "errors", ignore_errors=True)


def keep_attempt(run_dir: Path, attempt: int) -> None:
    """Move the error files of a failed attempt to errors/attempt_K, and remove its heartbeats."""
    _remove_beats(run_dir)
    folder = run_dir / "errors" / f"attempt_{attempt}"
    for path in list((run_dir / "errors").glob("*.json")):
        folder.mkdir(parents=True, exist_ok=True)
        path.replace(folder / path.name)


def _remove_beats(run_dir: Path) -> None:
    for pattern in ("heartbeats/*", "heartbeats/.rank_*"):
        for path in run_dir.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    if (machines := machines_of(run_dir)) is not None:
        machines.forget()


def set_aside(run_dir: Path, ranks: Iterable[int], number: int) -> list[Path]:
    """Remove the heartbeats and rename the error files of `ranks` before they start again for the `number`-th time.

    Returns:
        The renamed files, RUN_DIR/errors/restart_NUMBER_rank_K.json.
    """
    kept = []
    for rank in ranks:
        _beat_path(run_dir, rank).unlink(missing_ok=True)
        if (machines := machines_of(run_dir)) is not None:
            machines.forget(rank)
        error = run_dir / "errors" / f"rank_{rank}.json"
        with contextlib.suppress(FileNotFoundError):
            kept.append(error.rename(error.with_name(f"restart_{number}_{error.name}")))
    return kept


class Watch:
    """Finds ranks that never send a heartbeat and ranks that make no progress for too long.

    All times are from this process's monotonic clock, so the clocks of other machines do not matter.

    Args:
        timeout_s: allowed seconds without progress.
        start_timeout_s: allowed seconds until the first heartbeat.
        names: returns the names of ranks for messages.

    Attributes:
        stuck: ranks that had sent heartbeats but made no progress for too long, at the last `check`.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: Iterable[int],
        timeout_s: float,
        start_timeout_s: float,
        names: Callable[[Sequence[int]], str] = ranks_text,
    ) -> None:
        self._run_dir, self._timeout_s, self._start_timeout_s = run_dir, timeout_s, start_timeout_s
        self._names = names
        self._seen: dict[int, tuple[int, float]] = {}
        self._before: dict[int, tuple[str, int]] = {}  # rank -> host and pid of its former process
        self.stuck: list[int] = []
        self._looked = 0.0
        self.begin_again(ranks)

    def begin_again(self, ranks: Iterable[int]) -> None:
        """Forget the heartbeats of `ranks`, which are being started or restarted, and measure their silence from
        now."""
        for rank in ranks:
            # its machine's file may contain the old process's heartbeat until that machine writes the file again
            if rank in self._seen and (beat := read_beat(self._run_dir, rank)) is not None:
                self._before[rank] = beat.host, beat.pid
            self._seen[rank] = -1, time.monotonic()

    def check(self, live: Iterable[int]) -> str | None:
        """Return a sentence that names the `live` ranks that are late or stuck; None: all make progress."""
        live, now = sorted(live), time.monotonic()
        if machines_of(self._run_dir) is not None:  # read these shared files less often
            if now - self._looked < min(LOOK_S, self._timeout_s / 10, self._start_timeout_s / 10):
                return None
            self._looked = now
        for rank in live:
            beat = read_beat(self._run_dir, rank)
            old = beat is None or self._before.get(rank) == (beat.host, beat.pid)
            if beat is not None and not old and beat.changes != self._seen[rank][0]:
                self._seen[rank] = (beat.changes, now)
        missing = [rank for rank in live if self._seen[rank][0] < 0]
        late = [rank for rank in missing if now - self._seen[rank][1] > self._start_timeout_s]
        stuck = [r for r in live if r not in missing and now - self._seen[r][1] > self._timeout_s]
        self.stuck = stuck
        if late:
            return f"{self._names(late)} did not report in within {self._start_timeout_s:g} s (cluster.start_timeout_s)"
        if stuck:
            return f"{self._names(stuck)} made no progress for {self._timeout_s:g} s (cluster.timeout_s)"
        return None


def where_text(beat: Beat | None) -> str:
    """Return a rank's phase as text, like `in phase step/rollout at step 3`; `beat`: its last heartbeat, if any."""
    if beat is None:
        return "before it reported in"
    return f"in phase {beat.phase} at step {beat.step}"
