"""Workers as child processes on this machine. No scheduler, no extra package."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from megarl.errors import ConfigError
from megarl.launchers.common import Job, process_environment, warn_of_few_cores
from megarl.launchers.output import pump
from megarl.processes import free_port

GRACE_S = 3.0


def start(job: Job) -> LocalWorkers:
    """Start `cluster.nproc` workers that meet at a free port of the loopback device."""
    cluster = job.config.cluster
    if cluster.nnodes != 1:
        raise ConfigError(
            "the local launcher starts processes on one machine only",
            where="cluster.nnodes",
            found=cluster.nnodes,
            allowed="1",
            fix="use --launcher torchrun or --launcher ray",
        )
    workers = LocalWorkers()
    shared = os.environ | process_environment(job.config, cluster.nproc)
    warn_of_few_cores(job, shared, cluster.nproc)
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(cluster.nproc)}
    shared["LOCAL_WORLD_SIZE"] = shared["WORLD_SIZE"]
    command = [sys.executable, "-m", "megarl.runtime.worker", "--entry", job.entry, "--config", str(job.config_path)]
    try:
        for rank in range(cluster.nproc):
            workers.add(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, job)
    except BaseException:
        workers.stop()
        raise
    return workers


class LocalWorkers:
    """Child processes, each the leader of its own session: a Ctrl-C on the terminal reaches the launcher alone."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pumps: list[threading.Thread] = []

    def add(self, command: list[str], environment: dict[str, str], job: Job) -> None:
        """Start the next rank."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        self._pumps.append(pump(process.stdout, len(self._processes), job.log))
        self._processes.append(process)

    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(len(self._processes)))

    def poll(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        return {rank: code for rank, p in enumerate(self._processes) if (code := p.poll()) is not None}

    def cause(self, rank: int) -> str | None:
        """Nothing beyond the exit code."""
        return None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL, to every worker and to the processes it started."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while len(self.poll()) < len(self._processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)  # also reaches helpers of a worker that has ended
        for process in self._processes:
            process.wait()
        for thread in self._pumps:
            thread.join(timeout=1.0)  # a helper that outlived its worker may still hold the pipe

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
