"""A checkpoint that is being written, by a thread of every rank, while training continues.

    main thread      snapshot to host memory -> Saving()    poll() after every step    wait() before the next one
    every thread     writes its files, then seal_K.json (their sizes and checksums), in step_N.tmp-TAG
    rank 0's thread  waits for every seal_K.json -> commits: meta.json, rename, removes seal_K.json

K is the worker's number among all teams; with several teams, rank 0 of the actor's team waits for all of them. Threads
use no collectives, which would mix with those of training; they meet in the folder. So a checkpoint is complete as soon
as its last byte is written, and a run that is killed leaves either a complete checkpoint or a folder that is ignored.
`poll` and `wait` raise a thread's error, on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError
from megarl.system.processes import write_atomically
from megarl.system.tracing import beat, current, phase
from megarl.training.checksums import FileChecksum, few, size_at
from megarl.training.shards import CheckpointError, Snapshot, write_file

_POLL_S = 0.05
_LOOK_S = 1.0  # seconds between two measurements of how much another team has written
_STUCK_S = 20.0  # seconds without a new byte after which a failing run stops waiting for its checkpoint


class _Stopped(Exception):
    """Stops the writing thread, because another rank failed."""


class Saving:
    """Writes this rank's part of a checkpoint in a thread; every rank creates one and calls the same methods.

    Args:
        folder: the checkpoint's folder, which exists; it is removed if a rank fails.
        shard: this rank's tensors.
        files: contents by name of this rank's other files.
        commit: called in rank 0's thread with the checksums of all files, after all are on disk; None: another team
            commits.
        fix: advice to the user in the error if writing fails.
        world: all ranks of the team.
        first: number of the team's first worker.
        others: workers of other teams for whose checksums `commit` waits, by team.
        deadline_s: seconds without growth after which waiting for a team's files fails.

    Attributes:
        ended: monotonic time at which this rank's thread ended; None: it is running.
    """

    def __init__(
        self,
        folder: Path,
        shard: Snapshot,
        files: Mapping[str, bytes],
        commit: Callable[[dict[str, FileChecksum]], None] | None,
        fix: str,
        world: WorkerGroup,
        *,
        first: int = 0,
        others: Mapping[str, range] | None = None,
        deadline_s: float = 0.0,
    ) -> None:
        self._folder, self._shard, self._files, self._commit, self._fix = folder, shard, files, commit, fix
        self._world, self._first, self._others, self._deadline_s = world, first, others or {}, deadline_s
        self._phase = current()
        self._written = self._seen = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.ended: float | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Return whether the checkpoint is complete or, if another team commits it, this team's part. Collective.

        Raises:
            CheckpointError: on every rank of the team: a rank could not write its part.
            WorkerError: on every rank of the team: another team has not written its part within the deadline.
        """
        busy = self._thread.is_alive()  # read first, since the thread may end at any time
        error = None if self._error is None else _describe(self._error)
        everyone = self._world.all_gather_json([busy, self._written, error])
        errors = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(everyone, self._first) if error]
        if errors:
            self._give_up(errors)
        written = sum(count for _, count, _ in everyone)
        # no beat while no bytes are written, so that the watchdog notices a hanging file system
        if written != self._seen:
            self._seen = written
            beat()
        return not any(busy for busy, _, _ in everyone)

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raise the errors of `poll`. Collective."""
        while not self.poll():
            self._thread.join(_POLL_S)
            time.sleep(0.1 * _POLL_S)  # if this rank's thread has ended, `join` does not wait for the other ranks

    def finish_save(self) -> None:
        """Wait until the checkpoint is complete or its files no longer grow, before an error of this rank ends the run.

        Not collective: other ranks wait for this rank while their threads continue to write.
        """
        grown, size = time.monotonic(), -1
        while (self._folder.exists() or self._thread.is_alive()) and time.monotonic() - grown < _STUCK_S:
            before, size = size, self._bytes_except(set())
            if size != before:
                grown = time.monotonic()
                beat()
            time.sleep(_POLL_S)

    def _give_up(self, errors: list[str]) -> None:
        self._stop.set()
        self._thread.join()
        # This rank no longer writes. Exchange errors as JSON, like `poll`, because the device may be busy.
        late = self._world.all_gather_json(str(self._error) if isinstance(self._error, WorkerError) else None)[0]
        free = shutil.disk_usage(self._folder.parent).free / 1e9
        if self._world.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        if late:
            raise WorkerError(late) from self._error
        raise CheckpointError(
            "cannot write the checkpoint",
            where=str(self._folder),
            found=f"{few(errors)}; {free:.3g} GB were free",
            fix=self._fix,
        ) from self._error

    def _run(self) -> None:
        number = self._first + self._world.rank
        try:
            _write(self._folder, number, self._shard, self._files, self._progress)
            if self._world.rank == 0 and self._commit is not None:
                self._commit(self._all_checksums())
        except _Stopped:
            pass
        except BaseException as error:  # `poll` raises it in the main thread
            self._error = error
        finally:
            self.ended = time.monotonic()
            del self._shard, self._files  # frees their memory

    def _progress(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._written += count

    def _all_checksums(self) -> dict[str, FileChecksum]:
        """Wait for the checksum files of this team's ranks, then of other teams' workers; return their contents."""
        ranks = range(self._first, self._first + self._world.size)
        for number in ranks:
            while not _checksums_path(self._folder, number).exists():
                self._progress(0)
                time.sleep(_POLL_S)
        for team, workers in self._others.items():
            self._await_checksums(team, workers)
        checksums: dict[str, FileChecksum] = {}
        for number in chain(ranks, *self._others.values()):
            checksums |= json.loads(_checksums_path(self._folder, number).read_text())
        return checksums

    def _bytes_except(self, names: set[str]) -> int:
        size = 0
        with contextlib.suppress(FileNotFoundError):  # files are renamed meanwhile, and at the end the folder
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    size += 0 if path.name in names else size_at(path)
        return size

    def _await_checksums(self, team: str, workers: range) -> None:
        """Wait for the checksums of another team's workers while its files grow.

        Raises:
            WorkerError: the team's files did not grow within the deadline.
        """
        grown, looked, size = time.monotonic(), 0.0, -1
        local = {shard_name(self._first + rank) for rank in range(self._world.size)}
        for number in workers:
            path = _checksums_path(self._folder, number)
            while not path.exists():
                self._progress(0)
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked, before, size = now, size, self._bytes_except(local)
                    if size != before:
                        grown = now
                        self._progress(max(0, size - before))  # growth counts as a beat
                if now - grown > self._deadline_s:
                    part = f"its part of the checkpoint {self._folder.name.partition('.')[0]}"
                    raise WorkerError(
                        f"timed out waiting for team {team!r} to write {part} in phase {self._phase}: worker {number} "
                        f"has not finished, and no file of the team has grown for {self._deadline_s:g} s "
                        "(cluster.timeout_s); see the log of that worker, and raise the limit if its disk is only slow"
                    )
                time.sleep(_POLL_S)


class PendingSave:
    """Holds the current `Saving` of a run, if any. All methods except `finish_save` are collective over the team.

    Raises (poll, wait):
        CheckpointError: a rank of the team could not write its part; the previous checkpoint is still complete.
        WorkerError: another team has not written its part within the deadline.

    Attributes:
        longest_s: the longest time, in seconds, in which this rank's thread wrote its part of a checkpoint.
    """

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._began, self.longest_s = 0.0, 0.0

    def began(self, saving: Saving, at: float) -> None:
        """Record that a checkpoint began to be written at monotonic time `at`; the previous one must be complete."""
        self._saving, self._began = saving, at

    def _complete(self, saving: Saving) -> None:
        self._saving = None
        if saving.ended is not None:
            self.longest_s = max(self.longest_s, saving.ended - self._began)

    def poll(self) -> None:
        """Check whether the checkpoint that is being saved is complete; if so, end its `Saving`."""
        if self._saving is not None:
            with phase("checkpoint"):
                if self._saving.poll():
                    self._complete(self._saving)

    def finish_save(self) -> None:
        """Call `Saving.finish_save` for the current checkpoint."""
        if self._saving is not None:
            with phase("checkpoint"):
                self._saving.finish_save()

    def wait(self) -> None:
        """Wait until the current checkpoint is complete."""
        if self._saving is not None:
            with phase("checkpoint"):
                self._saving.wait()
                self._complete(self._saving)


def _write(
    folder: Path, number: int, shard: Snapshot, files: Mapping[str, bytes], progress: Callable[[int], None]
) -> None:
    name = shard_name(number)
    checksums = {name: shard.write(folder / name, progress)}
    for name, content in files.items():
        checksums[name] = write_file(folder / name, [content], progress)
    write_atomically(_checksums_path(folder, number), json.dumps(checksums))


def shard_name(number: int) -> str:
    """Return the file name of a worker's tensors."""
    return f"rank_{number}.safetensors"


def _checksums_path(folder: Path, number: int) -> Path:
    return folder / f"seal_{number}.json"


def drop_checksums(folder: Path) -> None:
    """Remove the checksum files of a complete checkpoint; before that, a missing file means a missing part."""
    for path in folder.glob("seal_*.json"):
        path.unlink()


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({Path(error.filename).name})" if error.filename else "")
    return f"{type(error).__name__}: {error}"
