"""Checks that the run's Ray can be reached, and is still alive.

Ray itself silently ends the launcher a minute after its control store (gcs_server, which manages all actors) has died.
These checks detect it earlier.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from megarl.launchers.ray_folder import INNER
from megarl.system.errors import UnavailableError, WorkerError
from megarl.system.processes import oom_kills, signal_name

_PARTS = {"gcs_server": "control store", "raylet": "node manager"}
_LOGS = "logs"
_RAYLET = "RAY_RAYLET_PID"  # environment variable of a node manager's processes
_ASK_S = 5.0  # seconds between two probes of a remote control store (GCS), and deadline of a reply
_SILENT_S = 30.0  # seconds without a reply after which a control store counts as lost; Ray ends its clients after 60 s
_LEAVE_S = 15.0
_DIES_S = 5.0  # seconds to wait for a dead process's exit code, which exists once all of its threads have ended


class OwnRay:
    """A Ray that this process started: its control store (gcs_server) and its node manager (raylet) are children of
    this process.

    Args:
        folder: folder of this Ray, from `make_ray_folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = os.open(folder, os.O_RDONLY)  # `leftovers` keeps the folder while this process holds it open
        self._parts = [child for child in psutil.Process().children() if child.name() in _PARTS]
        self._names = {part.pid: part.name() for part in self._parts}
        self._oom_kills = oom_kills()
        self._lost: str | None = None
        self._session = next((folder / INNER).glob(f"session_*_{os.getpid()}"), None)

    def forget(self) -> None:
        """Remove Ray's folder, including its logs, after Ray has ended normally."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._held)

    def lost(self) -> str | None:
        """Describe which part of Ray died, how, and the fix; None while all parts are alive."""
        if self._lost is None:
            dead = next((part for part in self._parts if not part.is_running() or _is_zombie(part)), None)
            logs = "" if self._session is None else f"\n  logs:    {self._session / _LOGS}, until the next start"
            self._lost = None if dead is None else self._loss_of(dead) + logs
        return self._lost

    def _loss_of(self, dead: psutil.Process) -> str:
        name, how = self._names[dead.pid], "has ended"
        with contextlib.suppress(psutil.Error, psutil.TimeoutExpired):
            code = dead.wait(_DIES_S)
            if code and code < 0:
                how = f"was killed by signal {-code} ({signal_name(-code)})"
            if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
                how += ": killed by the kernel, out of memory"
        return lost_text(f"Ray's {_PARTS[name]} ({name}, process {dead.pid})", how)

    def leave(self) -> None:
        """Kill what remains of Ray, and remove its session's files except the logs, which stay until the next start."""
        remaining: list[psutil.Process] = []
        for part in self._parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                remaining += part.children(recursive=True)
        numbers = {str(part.pid) for part in self._parts}
        for process in psutil.process_iter():  # processes of a dead node manager, which have another parent now
            with contextlib.suppress(psutil.Error, OSError):
                if process.uids().real == os.getuid() and process.environ().get(_RAYLET) in numbers:
                    remaining.append(process)
        for process in [*remaining, *self._parts]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(remaining, timeout=_LEAVE_S)
        _shut_down()
        for path in [] if self._session is None else self._session.iterdir():
            if path.name != _LOGS:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


class ClusterRay:
    """A cluster that this process did not start.

    Args:
        address: address of its control store (Ray's GCS), host:port.
    """

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._asked = self._heard = time.monotonic()

    def lost(self) -> str | None:
        """Return a message that Ray's control store has not replied for too long, with the fix; None while it does."""
        now = time.monotonic()
        if now - self._asked > _ASK_S:
            self._asked = now
            with contextlib.suppress(OSError):
                socket.create_connection((self._host.strip("[]"), self._port), timeout=_ASK_S).close()
                self._heard = now
        silent = self._asked - self._heard
        if silent < _SILENT_S:
            return None
        return lost_text(f"Ray's control store at {self._host}:{self._port}", f"has not answered for {silent:.0f} s")

    def forget(self) -> None:
        """Do nothing, since the cluster does not belong to this run."""

    def leave(self) -> None:
        """Leave the cluster without a message; its nodes end the processes that they started."""
        _shut_down()


def lost_text(what: str, how: str) -> str:
    """Describe the loss of a process `what` that every worker needs (such as Ray's control store), and the fix."""
    return (
        f"{what} {how}, and no worker can continue without it\n  fix:     continue from the newest checkpoint: by "
        "hand, or automatically with cluster.max_restarts and trainer.save_every"
    )


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _shut_down() -> None:
    """Leave Ray within `_LEAVE_S` seconds, because it may wait for a dead process."""
    import ray

    with contextlib.suppress(WorkerError):
        within(_LEAVE_S, ray.shutdown, f"Ray has not ended within {_LEAVE_S:g} s")


def check_reachable(address: str, limit_s: float) -> None:
    """Raise UnavailableError if nothing accepts a connection within `limit_s` seconds at the address of a Ray cluster;
    Ray itself would retry for minutes. Addresses without host and port, such as `auto`, are left to Ray.
    """
    place = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = place.hostname, place.port
        if host is None or port is None:
            return
        socket.create_connection((host, port), timeout=limit_s).close()
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"no Ray cluster replies at this address ({getattr(error, 'strerror', None) or error})",
            where="RAY_ADDRESS",
            found=address,
            allowed="host:port of a running cluster's head node",
            fix="start it (ray start --head), correct the address, or unset RAY_ADDRESS to start Ray for this run",
        ) from error


def within(limit_s: float, call: Callable[[], object], late: str) -> None:
    """Run `call()` for at most `limit_s` seconds in a thread, as it waits inside Ray's native code, which cannot be
    interrupted. Raise WorkerError with the message `late` if it took longer; the thread is abandoned.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ray-init", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise WorkerError(late)
    if errors:
        raise errors[0]
