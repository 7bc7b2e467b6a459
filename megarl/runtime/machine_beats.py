"""Heartbeats of a run on several machines: one small file per machine on the shared file system, written once a second.

    ranks of a machine   each beat goes to a memory-mapped file on this machine (`local_folder`)
    one of them          copies these files, with the sizes of the ranks' logs, into RUN_DIR/heartbeats/machine_NAME
    a launcher           reads its own machine's files directly, and those of other machines every five seconds, or
                         for a report of a failure, if they were read more than a second ago

So a launcher of 1,024 ranks opens 128 files in five seconds, not 2,048 ten times a second, and the ranks' pages are
never mapped over a network. If the rank that copies stops, another rank of the machine takes over: every second each
rank checks when the last copy was made, and ranks with higher numbers on the machine wait longer before they copy.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import socket
import struct
import tempfile
import threading
import time
import zlib
from pathlib import Path

from megarl.system.processes import process_scope

BY_MACHINE = "MEGARL_BEATS_BY_MACHINE"  # environment variable, set for workers of runs on several machines
_EVERY_S = 1.0
#: Seconds after which a launcher reads the files of all machines again while nothing fails.
LOOK_S = 5.0
_TURN_S = 1.0  # seconds that each rank of a machine waits longer than the one before it until it takes over copying
_COPIED = "copied"  # local file with the time of the last copy, on the monotonic clock that a machine's processes share
_TIME = struct.Struct("<d")
_by_machine = False  # whether this process was started with `BY_MACHINE`


def local_folder(run_dir: Path) -> Path:
    """Return this machine's folder for the heartbeats of a run, which only this user can read.

    Raises:
        OSError: this name is a symbolic link, or belongs to another user.
    """
    # by machine, because machines may share the folder of temporary files, and heartbeats have ids of local processes
    key = _machine().encode() + b"\0" + os.fsencode(run_dir.resolve())
    name = hashlib.sha256(key).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"megarl-beats-{os.geteuid()}-{name}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise OSError(
            f"the folder for heartbeats belongs to another user or is a link: {folder}; remove it, or set TMPDIR"
        )
    return folder


def _machine() -> str:
    """Return a name that no other machine of the run has, even if their host names are equal, as in cloned images."""
    host = socket.gethostname()
    return f"{host}-{hashlib.sha256(f'{host} {process_scope()}'.encode()).hexdigest()[:12]}"


def takes_turns() -> int | None:
    """Return this rank's number on its machine if its heartbeats go to the machine's file; None: to its own file.

    Processes that this one starts do not inherit the setting: they may launch runs of their own.
    """
    global _by_machine
    _by_machine = os.environ.pop(BY_MACHINE, None) is not None or _by_machine
    return int(os.environ.get("LOCAL_RANK", "0")) if _by_machine else None


class Copier:
    """Copies the heartbeats of all ranks of this machine into one file on the shared file system, once a second. Each
    rank has a copier, but copies only if the ranks with lower numbers have not done so.

    Args:
        turn: this rank's number on its machine.
    """

    def __init__(self, run_dir: Path, turn: int) -> None:
        self._run_dir, self._folder = run_dir, local_folder(run_dir)
        self._target = run_dir / "heartbeats" / f"machine_{_machine()}"
        self._wait_s = _EVERY_S + _TURN_S * turn
        threading.Thread(target=self._keep_copying, name="copy-beats", daemon=True).start()

    def is_due(self) -> bool:
        """Return whether the machine's last copy is so old that this rank has to copy."""
        last = 0.0
        with contextlib.suppress(FileNotFoundError, struct.error):
            (last,) = _TIME.unpack((self._folder / _COPIED).read_bytes())
        age = time.monotonic() - last
        return age < 0 or age >= self._wait_s - _EVERY_S / 2  # below 0: a copy from before a reboot

    def copy(self) -> None:
        """Copy the heartbeats of all ranks of this machine, and the sizes of their logs, now."""
        temporary = self._folder / f".{_COPIED}.{os.getpid()}"
        temporary.write_bytes(_TIME.pack(time.monotonic()))
        temporary.rename(self._folder / _COPIED)
        ranks = {}
        for path in self._folder.glob("rank_*"):
            with contextlib.suppress(OSError):  # the file was removed meanwhile
                rank = path.name.partition("_")[2]
                log = self._run_dir / "logs" / f"rank_{rank}.txt"
                size = log.stat().st_size if log.exists() else 0
                if (block := _whole(path)) is not None:
                    ranks[rank] = [base64.b64encode(block.rstrip(b"\0")).decode(), size]
        data = json.dumps(ranks).encode()
        # not by renaming: on a network file system, other machines may read the old file for up to a minute
        handle = os.open(self._target, os.O_WRONLY | os.O_CREAT, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(b"%08x" % zlib.crc32(data) + data)
            file.truncate()

    def _keep_copying(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            # if the run folder is gone, the launcher reports it; after other errors the next copy may succeed
            with contextlib.suppress(OSError):
                if self.is_due():
                    self.copy()


def _whole(path: Path) -> bytes | None:
    """Return the bytes of a heartbeat file between two writes; None: the rank was writing at each of 100 attempts."""
    for _ in range(100):
        data, again = path.read_bytes(), path.read_bytes()
        if data == again and data[0] % 2 == 0:  # the sequence number is odd while a rank writes
            return data
    return None


class MachineBeats:
    """The heartbeats of all ranks of a run, as a launcher reads them from the machines' files."""

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._local = run_dir / "heartbeats", local_folder(run_dir)
        self._blocks: dict[int, list[bytes]] = {}
        self._sizes: dict[int, int] = {}
        self._here: set[int] = set()  # ranks of this machine
        self._records: dict[str, tuple[bytes, dict[str, tuple[str, int]]]] = {}
        self._read = 0.0

    def blocks(self, rank: int) -> list[bytes]:
        """Return the contents of a rank's heartbeat file: for a rank on this machine the file itself, else the copies
        in other machines' files. After a rank has moved, several machines have one."""
        self._refresh(_EVERY_S)
        if rank in self._here or rank not in self._blocks:
            with contextlib.suppress(OSError):
                data = _whole(self._local / f"rank_{rank}")
                return [] if data is None else [data]
        return self._blocks.get(rank, [])

    def is_here(self, rank: int) -> bool:
        """Return whether a rank has sent its heartbeats on this machine."""
        self._refresh(LOOK_S)
        return rank in self._here

    def log_size(self, rank: int) -> int | None:
        """Return the size in bytes of a rank's log, as its machine last reported it; None: not reported."""
        self._refresh(LOOK_S)
        return self._sizes.get(rank)

    def forget(self, rank: int | None = None) -> None:
        """Remove this machine's heartbeat file of `rank` (None: of all ranks), and forget all copies that were read."""
        for path in self._local.glob("rank_*" if rank is None else f"rank_{rank}"):
            path.unlink(missing_ok=True)
        self._records, self._blocks, self._read = {}, {}, 0.0

    def _refresh(self, age_s: float) -> None:
        """Read the machines' files again if the last time was at least `age_s` seconds ago. If a file is being written,
        keep what it had before."""
        now = time.monotonic()
        if now - self._read < age_s:
            return
        self._here = {int(path.name.partition("_")[2]) for path in self._local.glob("rank_*")}
        self._read, records = now, {}
        for path in self._folder.glob("machine_*"):
            with contextlib.suppress(OSError, ValueError):
                data = path.read_bytes()
                before = self._records.get(path.name)
                if before is not None and before[0] == data:
                    records[path.name] = before
                elif int(data[:8], 16) == zlib.crc32(data[8:]):
                    records[path.name] = data, json.loads(data[8:])
                elif before is not None:
                    records[path.name] = before
        blocks: dict[int, list[bytes]] = {}
        for _, ranks in records.values():
            for rank, (block, size) in ranks.items():
                blocks.setdefault(int(rank), []).append(base64.b64decode(block))
                self._sizes[int(rank)] = max(size, self._sizes.get(int(rank), 0))
        self._records, self._blocks = records, blocks  # replaced at once: a thread that follows logs reads them


_views: dict[Path, MachineBeats] = {}


def watch_machines(run_dir: Path) -> None:
    """Make this process, a launcher, read the heartbeats of the run in `run_dir` from one file per machine."""
    _views[run_dir] = MachineBeats(run_dir)


def machines_of(run_dir: Path) -> MachineBeats | None:
    """Return the heartbeats of a run for which this process has called `watch_machines`; None for other runs."""
    return _views.get(run_dir)
