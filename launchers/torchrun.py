"""Starts workers under torchrun (torch.distributed.run), on one machine or several.

The launcher starts one torchrun agent per machine as a child, `python -m megarl.launchers.torchrun ARGS`, and watches
the workers through the run folder. On several machines start the same command on each, with NODE_RANK, MASTER_ADDR and
MASTER_PORT set and `--run-dir` on a file system that they share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megarl.launchers.common import (
    ENDED_EARLY,
    Job,
    code_of,
    layout_environment,
    own_environment,
    process_environment,
    warn_of_few_cores,
    warn_of_removed_settings,
)
from megarl.launchers.output import Follower
from megarl.runtime.health import read_beat
from megarl.system.errors import ConfigError
from megarl.system.parents import PARENTS, as_parent, began
from megarl.system.processes import (
    CAUGHT,
    JOB_BEGAN,
    LOOPBACK,
    die_with_parents,
    raise_descriptor_limit,
    write_atomically,
)
from megarl.system.rendezvous import LISTENER, given_listener, is_loopback, listen, number_in_environment

GRACE_S = 3.0
#: Signal that ends the agent, which then ends the workers. Batch systems send other signals to every process of a job,
#: which the launcher handles.
_END = signal.SIGUSR2
AGENT_REPORT = "MEGARL_AGENT_REPORT"


def start(job: Job) -> TorchrunWorkers:
    """Start the torchrun agent of this machine."""
    cluster = job.config.cluster
    if job.placement is not None and job.placement.separate:
        raise ConfigError(
            "torchrun starts only one team, but this run has several",
            where="--launcher",
            found=f"torchrun, for the teams {', '.join(team.name for team in job.placement.teams)}",
            allowed="local, ray",
            fix="use --launcher ray, or local on one machine; or leave placement out, so that all roles share one team",
        )
    if cluster.nproc % cluster.nnodes:
        problem, allowed = "processes do not divide evenly over the machines", f"a multiple of {cluster.nnodes}"
        raise ConfigError(problem, where="cluster.nproc", found=cluster.nproc, allowed=f"{allowed} (cluster.nnodes)")
    here = cluster.nproc // cluster.nnodes
    address, port = _rendezvous(cluster.nnodes)
    # The first machine's agent inherits the socket: a port in use is reported here, and no process takes it in between.
    first = job.machine == 0
    with listen(address, port, one_machine=cluster.nnodes == 1) if first else contextlib.nullcontext() as listener:
        port = port if listener is None else listener.getsockname()[1]
        return _start_agent(job, here, address, port, listener)


def _start_agent(job: Job, here: int, address: str, port: int, listener: socket.socket | None) -> TorchrunWorkers:
    """Start this machine's agent with `here` ranks; `listener` is the socket of the run's store, if it is here."""
    nnodes = job.config.cluster.nnodes
    arguments = [f"--nnodes={nnodes}", f"--nproc-per-node={here}", f"--node-rank={job.machine}"]
    arguments += [f"--master-addr={address}", f"--master-port={port}", "--max-restarts=0"]
    arguments += [f"--signals-to-handle={_END.name}"]
    arguments += ["-m", "megarl.runtime.worker", "--entry", job.entry]
    arguments += ["--config", str(job.config_path), "--log-dir", str(job.log_dir)]
    ranks = list(range(job.machine * here, (job.machine + 1) * here))
    environment = os.environ | process_environment(job.config, here) | layout_environment(job.config.actor.parallel)
    environment[JOB_BEGAN] = job.began
    warn_of_few_cores(job, environment, here)
    warn_of_removed_settings(job)
    handles = []
    if listener is not None:
        handles = [listener.fileno()]
        environment[LISTENER] = str(listener.fileno())
    return TorchrunWorkers(job, ranks, arguments, environment, handles)


def _rendezvous(nnodes: int) -> tuple[str, int]:
    if nnodes == 1:
        return LOOPBACK[0], 0
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            "several machines need a rendezvous address",
            where="cluster.nnodes",
            found=nnodes,
            fix=f"set {', '.join(missing)} in the environment of each machine, and the same shared --run-dir",
        )
    address = os.environ["MASTER_ADDR"]
    if is_loopback(address):
        raise ConfigError(
            "other machines cannot reach the loopback device of the first one",
            where="MASTER_ADDR",
            found=address,
            allowed=f"with cluster.nnodes = {nnodes}: an address of the first machine, the same on every machine",
            fix="set MASTER_ADDR to the first machine's address in the private network",
        )
    return address, number_in_environment("MASTER_PORT")


class TorchrunWorkers:
    """The ranks below one torchrun agent."""

    def __init__(
        self, job: Job, ranks: list[int], arguments: list[str], environment: dict[str, str], handles: Sequence[int]
    ) -> None:
        self._job, self._ranks = job, ranks
        self._first: list[int] | None = None  # ranks that ended first, without an error
        self._report = job.run_dir / "errors" / f"agent_{job.machine}.json"
        self._follower = Follower(job.log_dir, ranks, job.log)
        job.log_dir.mkdir(exist_ok=True)
        with (job.log_dir / f"agent_{job.machine}.txt").open("ab") as output:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", "megarl.launchers.torchrun", *arguments],
                env=environment | own_environment(job) | {AGENT_REPORT: str(self._report)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=handles,
            )

    def ranks(self) -> list[int]:
        """Return the ranks of this machine."""
        return self._ranks

    def poll(self) -> dict[int, int]:
        """Return the ranks' exit codes once the agent has ended; it reports which ranks failed before it ended the
        others.
        """
        code = self._agent.poll()
        if code is None:
            self._note_first()
            return {}
        if code == 0:
            return {rank: code_of(self._job.run_dir, rank, 0) for rank in self._ranks}
        if self._report.exists():
            reported = {int(rank): status for rank, status in json.loads(self._report.read_text()).items()}
            # The agent's report may lack a rank that ended early with exit code 0: add the ranks that ended first.
            return {rank: ENDED_EARLY for rank in self._first or [] if rank not in reported} | reported
        return {self._ranks[0]: code}

    def _note_first(self) -> None:
        """Record which ranks ended first before their work was done, since the agent ends the others when one fails."""
        beats = {rank: read_beat(self._job.run_dir, rank) for rank in self._ranks}
        gone = [rank for rank, beat in beats.items() if beat is not None and not beat.over and began(beat.pid) is None]
        if gone and self._first is None:
            errors = self._job.errors()
            self._first = [rank for rank in gone if rank not in errors]

    def cause(self, rank: int) -> str | None:
        """Return that torchrun itself failed and where its output is; None if it reported a rank or did not fail."""
        if self._report.exists() or self._agent.poll() == 0:
            return None
        return f"could not run: torchrun ended with exit code {self._agent.poll()}, see {self._job.log_dir}/agent_*.txt"

    def stop(self) -> None:
        """End the agent, which ends its workers; then kill any remaining process of either."""
        import psutil

        # Workers have sessions of their own, so killpg does not reach them; SIGKILL also ends a stopped process.
        below = set[psutil.Process]()
        for number in (_END, signal.SIGKILL):
            if self._agent.poll() is None:
                with contextlib.suppress(psutil.Error):
                    below.update(psutil.Process(self._agent.pid).children(recursive=True))
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._agent.pid, number)
                deadline = time.monotonic() + GRACE_S
                while self._agent.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
        self._agent.wait()
        for process in below:
            # raised if the process has ended, even if another one has its number now
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._follower.close()


def agent(arguments: list[str], report: Path) -> int:
    """Run torchrun in this process; write {rank: exit code} of the ranks that failed by themselves to `report`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from megarl.system.compat.torchrun import end_workers_with, serve_on

    for number in CAUGHT:  # use handlers, which workers do not inherit, instead of ignoring the signals
        signal.signal(number, _left_to_launcher)
    end_workers_with(_END)
    raise_descriptor_limit()  # every rank opens a connection to the store of torchrun's agent
    listener = given_listener()
    if listener is not None:
        serve_on(listener)
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        # After a failure torchrun ends the other ranks with this signal, so they did not fail themselves.
        failed = {rank: code for rank, code in codes.items() if code != -_END}
        write_atomically(report, json.dumps(failed or codes))
        return 1
    return 0


def _left_to_launcher(number: int, frame: FrameType | None) -> None:
    """Ignore a signal that stops the run: the launcher got it too, and ends this process after the run has saved."""


if __name__ == "__main__":
    die_with_parents()
    os.environ |= as_parent(os.environ.get(PARENTS))  # so that workers also end when the launcher ends
    sys.exit(agent(sys.argv[1:], Path(os.environ[AGENT_REPORT])))
