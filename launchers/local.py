"""Starts workers as child processes on this machine; several teams use Ray, one team needs no extra package."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from megarl.launchers.common import (
    Job,
    Workers,
    code_of,
    layout_environment,
    own_environment,
    process_environment,
    warn_of_few_cores,
    warn_of_removed_settings,
)
from megarl.launchers.output import pump
from megarl.system.errors import ConfigError
from megarl.system.processes import JOB_BEGAN, LOOPBACK
from megarl.system.rendezvous import LISTENER, listen


def start(job: Job) -> Workers:
    """Start `cluster.nproc` workers with their rendezvous on a port of the loopback device; with several teams, start a
    Ray of its own for the run.
    """
    cluster = job.config.cluster
    if cluster.nnodes != 1:
        raise ConfigError(
            "the local launcher starts processes on one machine only",
            where="cluster.nnodes",
            found=cluster.nnodes,
            allowed="1",
            fix="use --launcher ray" if job.separate else "use --launcher torchrun or --launcher ray",
        )
    shared = os.environ | process_environment(job.config, cluster.nproc) | own_environment(job) | {JOB_BEGAN: job.began}
    warn_of_few_cores(job, shared, cluster.nproc)
    warn_of_removed_settings(job)
    if job.separate:
        from megarl.launchers import ray

        return ray.start(job, own=True)
    workers = LocalWorkers(job)
    shared |= layout_environment(job.config.actor.parallel)
    shared |= {"MASTER_ADDR": LOOPBACK[0], "WORLD_SIZE": str(cluster.nproc), "LOCAL_WORLD_SIZE": str(cluster.nproc)}
    command = [sys.executable, "-m", "megarl.runtime.worker", "--entry", job.entry, "--config", str(job.config_path)]
    try:
        # rank 0 inherits the socket, so no other process can take the port in between
        with listen(LOOPBACK[0]) as listener:
            shared["MASTER_PORT"] = str(listener.getsockname()[1])
            for rank in range(cluster.nproc):
                of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if rank == 0:
                    of_rank[LISTENER] = str(listener.fileno())
                workers.add(command, shared | of_rank, [listener.fileno()] if rank == 0 else [])
    except BaseException:
        workers.stop()
        raise
    return workers


class LocalWorkers:
    """Child processes, each in its own session, so that Ctrl-C on the terminal reaches only the launcher."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pumps: list[threading.Thread] = []

    def add(self, command: list[str], environment: dict[str, str], handles: Sequence[int]) -> None:
        """Start the next rank, which inherits the file descriptors `handles`."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=handles,
        )
        assert process.stdout is not None
        self._pumps.append(pump(process.stdout, len(self._processes), self._job.log))
        self._processes.append(process)

    def ranks(self) -> list[int]:
        """Return all ranks."""
        return list(range(len(self._processes)))

    def poll(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended."""
        codes = {rank: code for rank, p in enumerate(self._processes) if (code := p.poll()) is not None}
        return {rank: code_of(self._job.run_dir, rank, code) for rank, code in codes.items()}

    def cause(self, rank: int) -> str | None:
        """Return None: only the exit code is known."""
        return None

    def stop(self) -> None:
        """Send SIGKILL to every worker and its processes, since workers leave other signals to the launcher."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for thread in self._pumps:
            thread.join(timeout=1.0)  # wait no longer: a child that outlived its worker may hold the pipe open
