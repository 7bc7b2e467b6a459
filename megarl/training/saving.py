"""A checkpoint on its way to disk, written by a thread of every rank while training goes on.

    main thread      snapshot to host memory -> Saving()    poll() after every step    wait() before the next one
    every thread     its files -> seal_K.json (their sizes and checksums), in step_N.tmp-TAG
    rank 0's thread  waits for every seal_K.json -> commit: meta.json, rename

Threads use no collective: theirs would mix with those of training. They meet in the folder, so a checkpoint is complete
as soon as its last byte is written, and a run that is killed at any moment leaves it complete or as a folder that
nobody reads. What fails in a thread is raised by `poll` and `wait`, on all ranks alike.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.comm import WorkerGroup
from megarl.phase import beat
from megarl.processes import write_atomically
from megarl.training.intact import Seal, few
from megarl.training.shards import CheckpointError, Snapshot, write_file

_POLL_S = 0.05


class _Stopped(Exception):
    """Another rank failed."""


class Saving:
    """Starts to write this rank's part of a checkpoint; every rank makes one, and calls the same methods.

    Args:
        folder: exists; removed again when a rank fails.
        shard: this rank's tensors.
        files: contents by name of this rank's other files.
        commit: called in rank 0's thread with the seals of all files, once they are all on disk.
        fix: what to do when it cannot be written.
        world: all ranks.
    """

    def __init__(
        self,
        folder: Path,
        shard: Snapshot,
        files: Mapping[str, bytes],
        commit: Callable[[dict[str, Seal]], None],
        fix: str,
        world: WorkerGroup,
    ) -> None:
        self._folder, self._shard, self._files, self._commit, self._fix = folder, shard, files, commit, fix
        self._world = world
        self._written = self._seen = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Is it complete? Collective.

        Raises:
            CheckpointError: on every rank alike: a rank could not write its part.
        """
        busy = self._thread.is_alive()  # asked first: a thread that has ended changes nothing below
        error = None if self._error is None else _describe(self._error)
        everyone = self._world.all_gather_json([busy, self._written, error])
        errors = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(everyone) if error]
        if errors:
            self._give_up(errors)
        written = sum(count for _, count, _ in everyone)
        if written != self._seen:  # no beats while nothing is written: a file system that hangs is noticed
            self._seen = written
            beat()
        return not any(busy for busy, _, _ in everyone)

    def wait(self) -> None:
        """Until it is complete. Collective; errors as in `poll`."""
        while not self.poll():
            self._thread.join(_POLL_S)
            time.sleep(0.1 * _POLL_S)  # others still write

    def _give_up(self, errors: list[str]) -> None:
        self._stop.set()
        self._thread.join()
        self._world.all_gather_json(None)  # nobody writes any more; like `poll` off the device, which may be busy
        free = shutil.disk_usage(self._folder.parent).free / 1e9
        if self._world.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        raise CheckpointError(
            "the checkpoint could not be written",
            where=str(self._folder),
            found=f"{few(errors)}; {free:.3g} GB were free",
            fix=self._fix,
        ) from self._error

    def _run(self) -> None:
        try:
            shard = shard_name(self._world.rank)
            seals = {shard: self._shard.write(self._folder / shard, self._progress)}
            for name, content in self._files.items():
                seals[name] = write_file(self._folder / name, [content], self._progress)
            write_atomically(_seal_path(self._folder, self._world.rank), json.dumps(seals))
            if self._world.rank == 0:
                self._commit(self._all_seals())
        except _Stopped:
            pass
        except BaseException as error:  # raised in the main thread, by `poll`
            self._error = error
        finally:
            del self._shard  # its memory

    def _progress(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._written += count

    def _all_seals(self) -> dict[str, Seal]:
        """Seals of the files of all ranks, as they come."""
        seals: dict[str, Seal] = {}
        for rank in range(self._world.size):
            path = _seal_path(self._folder, rank)
            while not path.exists():
                self._progress(0)
                time.sleep(_POLL_S)
            seals |= json.loads(path.read_text())
            path.unlink()
        return seals


def shard_name(rank: int) -> str:
    """File of a rank's tensors."""
    return f"rank_{rank}.safetensors"


def _seal_path(folder: Path, rank: int) -> Path:
    return folder / f"seal_{rank}.json"


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({Path(error.filename).name})" if error.filename else "")
    return f"{type(error).__name__}: {error}"
