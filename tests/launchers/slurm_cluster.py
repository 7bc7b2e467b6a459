"""A real Slurm with virtual nodes on this machine, for tests: munge, slurmctld and one slurmd per node."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

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
SlurmdSpoolDir={folder}/spool.%n
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
EnforcePartLimits=ALL
SlurmctldPort={controller}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr={address} Port=[{first}-{last}] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


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
    """Ports one after another that nobody listens at."""
    for first in range(17000 + os.getpid() % 500 * 8, 32000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("", port)))
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 2) -> Iterator[Path]:
    """Yields slurm.conf of a cluster that runs until the end of the block.

    Raises:
        DoesNotRunHere: its nodes are not idle within half a minute.
    """
    _start_munge()
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    controller, *ports = _free_ports(nodes + 1)
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=socket.gethostname(), address=address(), folder=folder, nodes=nodes, controller=controller,
            first=ports[0], last=ports[-1],
        )
    )  # fmt: skip
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    started = [subprocess.Popen(["slurmctld", "-D", "-f", str(conf)], env=environment, stderr=subprocess.DEVNULL)]
    try:
        for number in range(1, nodes + 1):
            started.append(
                subprocess.Popen(
                    ["slurmd", "-D", "-f", str(conf), "-N", f"n{number}"], env=environment, stderr=subprocess.DEVNULL
                )
            )
        _wait_until_idle(environment, nodes, folder)
        yield conf
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
        if said.split().count("idle") == nodes:
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
