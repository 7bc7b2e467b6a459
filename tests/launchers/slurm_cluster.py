"""A real Slurm with virtual nodes on this machine, for tests: munge, slurmctld and one slurmd per node."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.launchers.slurm_job.nodes import PORTS

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
_START_S = 30.0

_CONF = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/pgid
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={spool}/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SwitchType=switch/none
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
SlurmdTimeout=10
FirstJobId={job}
AuthInfo=cred_expire=15
EnforcePartLimits=ALL
SlurmctldPort={controller}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr={address} Port=[{first}-{last}] CPUs=2 RealMemory=1000 State=UNKNOWN
{more}
"""
PARTITION = "PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO"


class DoesNotRunHere(RuntimeError):
    """Slurm or munge does not start on this machine; the message says why."""


def missing() -> str:
    """Why there can be no Slurm here; empty: nothing."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: Debian's slurm-wlm and munge have them"
    return "" if address() else "this machine has no address but its own loopback"


def address() -> str:
    """This machine's own address, which other machines would call; loopback is refused between nodes. Empty: none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def _free_ports(count: int) -> list[int]:
    """Ports one after another that nobody listens at, below those where runs meet."""
    for first in range(11000 + os.getpid() % 500 * 16, PORTS[0] - count, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("", port)))
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs.

    Attributes:
        conf: its slurm.conf.
        daemons: slurmd of each node, by name.
    """

    conf: Path
    daemons: dict[str, subprocess.Popen[bytes]]

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Return the processes that jobs have started on a node, or on all of them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.environ()
                here = own.get("SLURM_CONF") == str(self.conf) and "SLURMD_NODENAME" in own
                if here and node in (None, own["SLURMD_NODENAME"]):
                    found.append(process)
        return found

    def lose(self, node: str) -> None:
        """What is left of a node whose power is cut: neither its slurmd nor anything that this has started."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        tasks, keepers = {}, set()
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                tasks[process] = process.parents()
                keepers |= {parent for parent in tasks[process] if parent.name().startswith("slurmstepd")}
        # Nobody may live to tell of the others' end: slurmstepd would, and the child of an srun, which watches it.
        for process in [*keepers, *sorted(tasks, key=lambda task: -len(tasks[task]))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 2, more: str = PARTITION) -> Iterator[Cluster]:
    """Yields a cluster that runs until the end of the block.

    Args:
        folder: a new one for its files.
        nodes: their number; they are n1, n2 and so on.
        more: lines of slurm.conf.

    Raises:
        DoesNotRunHere: its nodes are not idle within half a minute.
    """
    # Sockets lie there, whose paths have 108 bytes at most: those of pytest's folders are longer.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as spool:
        yield from _cluster(folder, Path(spool), nodes, more)


def _cluster(folder: Path, spool: Path, nodes: int, more: str) -> Iterator[Cluster]:
    _start_munge()
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    controller, *ports = _free_ports(nodes + 1)
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=socket.gethostname(), address=address(), folder=folder, spool=spool, nodes=nodes,
            controller=controller, first=ports[0], last=ports[-1], more=more,
            job=1 + os.getpid() % 97 * 100,  # the ports of a run go by it, and other tests have clusters of their own
        )
    )  # fmt: skip
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    started = [subprocess.Popen(["slurmctld", "-D", "-f", str(conf)], env=environment, stderr=subprocess.DEVNULL)]
    try:
        for name in (f"n{number}" for number in range(1, nodes + 1)):
            daemons[name] = subprocess.Popen(
                ["slurmd", "-D", "-f", str(conf), "-N", name], env=environment, stderr=subprocess.DEVNULL
            )
            started.append(daemons[name])
        _wait_until_idle(environment, nodes, folder)
        yield Cluster(conf, daemons)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _wait_until_idle(environment: dict[str, str], nodes: int, folder: Path) -> None:
    until, said = time.monotonic() + _START_S, ""
    while time.monotonic() < until:
        asked = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        said = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False).stdout
        if sum(line.split()[1:] == ["idle"] for line in set(said.splitlines())) == nodes:  # a line for each partition
            return
        time.sleep(0.2)
    logs = "".join(file.read_text()[-2000:] for file in sorted(folder.glob("*.log")))
    raise DoesNotRunHere(f"Slurm's nodes are not idle within {_START_S:.0f} s: {said}\n{logs}")


def _start_munge() -> None:
    if subprocess.run(["pgrep", "-x", "munged"], capture_output=True, check=False).returncode == 0:
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged"], check=False)
    until = time.monotonic() + _START_S
    while subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
        if time.monotonic() > until:
            raise DoesNotRunHere("munged does not start")
        time.sleep(0.2)
