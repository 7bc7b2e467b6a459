"""Batch scripts of Slurm as pure text: nothing is queried and nothing started.

    RUN_DIR/launch/job.sh       input of sbatch: the options, and `python3 -m slurm_job` on the first node
    RUN_DIR/launch/slurm_job    copy of `megarl.launchers.slurm_job`: tests nodes, starts node.sh by srun on good ones,
                                and again when one is lost, submits the next job
    RUN_DIR/launch/plan.json    input of that program: numbers of nodes, options of srun, limits
    RUN_DIR/launch/node.sh      one node: modules, environment, `megarl COMMAND recipe.yaml --run-dir RUN_DIR`
    RUN_DIR/launch/recipe.yaml  the resolved recipe
    RUN_DIR/launch/jobs.txt     number, time of submission and number of nodes of each job, tab-separated
    RUN_DIR/launch/chain        how many further jobs may continue the run (launch.slurm.chain)

A job requests a checkpoint from the run (by the file `save`, which the run removes when it has written one) when Slurm
signals that its time limit is near.

All values of a recipe that reach a shell go through `shlex.quote`; the configuration checks that those in `#SBATCH`
lines contain no quotes.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.artifacts.run_folder import LAUNCH_FOLDER
from megarl.config.launch import NO_LIMIT, SlurmConfig, SlurmTeamConfig
from megarl.config.run import RunConfig
from megarl.launchers.bundles import gpus_of_a_node
from megarl.launchers.seats import NODES_OF, resource
from megarl.launchers.slurm_job.files import excluded_by
from megarl.system.errors import ConfigError, count

JOB, NODE, RECIPE, JOBS, CHAIN = "job.sh", "node.sh", "recipe.yaml", "jobs.txt", "chain"
PLAN, STATE, EXCLUDED, EVENTS, TESTS = "plan.json", "state.json", "excluded.jsonl", "events.jsonl", "preflight"
_ENDS_S = 60.0  # seconds for a run that has saved to end its processes and close its record
#: The package that a job runs, copied to the run folder.
DRIVER = "slurm_job"

#: Replaces the plain command: the first node runs Ray's head and the run's driver, and the others wait for its end.
_RAY = """\
over={over}."$MEGARL_ATTEMPT"
kind=()
[ -z "${{{nodes_of}:-}}" ] || kind=(--resources='{{"'"${nodes_of}"'": 1000}}')
address="$MASTER_ADDR:$MASTER_PORT"
export RAY_worker_niceness=0 # Ray's own default, 15, is for machines that do something else beside
export RAY_prestart_worker_first_driver=0 # no actor takes a process that was started without its environment
if [ "$SLURM_NODEID" != 0 ]; then
  for _ in $(seq {limit}); do
    (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null && break
    sleep 1
  done
  {ray} --address="$address" "${{kind[@]}}" --block &
  node=$!
  trap 'kill "$node" 2> /dev/null || true' EXIT
  while kill -0 "$node" 2> /dev/null; do
    [ ! -e "$over" ] || exit 0
    sleep 1
  done
  [ -e "$over" ] && exit 0
  echo "megarl: Ray has ended on node $SLURM_NODEID" >&2
  exit 1
fi
{ray} --head --node-ip-address="$MASTER_ADDR" --port="$MASTER_PORT" --include-dashboard=false \\
  "${{kind[@]}}" --block &
node=$!
trap 'touch "$over"; kill "$node" 2> /dev/null || true' EXIT
for _ in $(seq {limit}); do
  (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null && break
  sleep 1
done
{nodes} "$address" {count} {limit}
RAY_ADDRESS="$address" {command}
"""


@dataclass(frozen=True)
class Submission:
    """The run to submit.

    Attributes:
        config: the recipe, with the site file's values.
        run_dir: the run folder, which all nodes see.
        command: train, sft or eval.
        launcher: torchrun, ray, or local on one node.
        workdir: folder to which the recipe's relative paths refer.
    """

    config: RunConfig
    run_dir: Path
    command: str
    launcher: str
    workdir: Path

    @property
    def slurm(self) -> SlurmConfig:
        """The section `launch.slurm`."""
        return self.config.launch.slurm

    @property
    def folder(self) -> Path:
        """The folder of the job's scripts."""
        return self.run_dir / LAUNCH_FOLDER


def job_script(job: Submission) -> str:
    """Return the batch script for sbatch. Raise ConfigError if a path cannot be written in a `#SBATCH` line."""
    cluster, slurm = job.config.cluster, job.slurm
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    processes = f"{cluster.nproc} processes on {count(cluster.nnodes, 'node')}"
    lines += [f"# {_name(job.config.name)}: {processes}. By hand: sbatch {JOB}"]
    lines += ["set -euo pipefail", f"run_dir={shlex.quote(str(job.run_dir))}"]
    # The following lines run outside of a container. Their variables are passed to all nodes, so there are few.
    python = "python3" if slurm.image is not None else slurm.python or sys.executable
    if slurm.image is not None:
        lines += _modules(slurm)  # modules such as apptainer, which an image does not have
    elif not python.startswith("/"):
        lines += [*_modules(slurm), *_own_lines(slurm)]
    start = f'exec {shlex.quote(python)} -m {DRIVER} "$run_dir"'
    return "\n".join([*lines, "unset PYTHONSAFEPATH", f'cd "$run_dir/{LAUNCH_FOLDER}"', start, ""])


def plan(job: Submission) -> dict[str, Any]:
    """Return the plan of the job, for `megarl.launchers.slurm_job`."""
    slurm, launch, cluster = job.slurm, job.config.launch, job.config.cluster
    tests = ["--run-dir", str(job.run_dir), "--disk-gb", f"{launch.preflight_disk_gb:g}"]
    groups = [
        {
            "team": part.team,
            "nodes": part.nodes,
            "gpus": _gpus_to_test(job.config, part),
            "srun": _srun_options(job, part),
            "start": _start(job, part),
        }
        for part in components(job.config, job.command)
    ]
    return {
        "nodes": cluster.nnodes,
        "spares": launch.spares,
        "restarts": slurm.restarts,
        "warn_s": slurm.warn_s,
        "limit_s": cluster.start_timeout_s,
        "preflight": launch.preflight,
        "clock_s": launch.preflight_clock_s,
        "bandwidth": launch.preflight_bandwidth,
        "tests": tests,
        "exclude": excluded_by(slurm.options),
        "groups": groups,
        "interface": slurm.interface,
        "ray": job.launcher == "ray" and cluster.nnodes > 1,
        "resume": job.config.trainer.resume if job.command == "train" else None,
    }


def node_script(job: Submission) -> str:
    """Return the script that srun starts once per node. It starts the run, or with `preflight ...` the node's tests."""
    slurm = job.slurm
    lines = ["#!/bin/bash", f"# One node of {JOB}: its number is SLURM_NODEID.", "set -euo pipefail"]
    lines += [f"cd {shlex.quote(str(job.workdir))}", *([] if slurm.image else _modules(slurm)), *_own_lines(slurm)]
    if slurm.interface is not None:
        name = shlex.quote(slurm.interface)
        lines += [f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in slurm.environment.items()]
    lines += ['export NODE_RANK="$SLURM_NODEID"']
    python = slurm.python or ("python" if slurm.image is not None else sys.executable)
    # with -P, a folder `kernels` or `tests` in the current folder cannot shadow a package of that name
    tests = shlex.join([python, "-P", "-m", "megarl.launchers.preflight"])
    lines += ['if [ "${1:-}" = preflight ]; then', f'  exec {tests} "${{@:2}}"', "fi"]
    command = [python, "-P", "-m", "megarl", job.command, str(job.folder / RECIPE)]
    command += ["--launcher", job.launcher, "--run-dir", str(job.run_dir)]
    if job.launcher != "ray" or job.config.cluster.nnodes == 1:
        return "\n".join([*lines, f'exec {shlex.join(command)} "$@"', ""])
    return "\n".join([*lines, ""]) + _RAY.format(
        over=shlex.quote(str(job.folder / "over")),
        nodes_of=NODES_OF,
        limit=math.ceil(job.config.cluster.start_timeout_s),
        ray=shlex.join([python, "-P", "-m", "megarl.launchers.ray_start"]),
        nodes=shlex.join([python, "-P", "-m", "megarl.launchers.ray_nodes"]),
        count=job.config.cluster.nnodes,
        command=shlex.join(command) + ' "$@"',
    )


def _modules(slurm: SlurmConfig) -> list[str]:
    """Return script lines that load modules. They allow the unset variables that modules use, and define `module` where
    a batch shell lacks it.
    """
    if not slurm.modules:
        return []
    loads = [f"module load {shlex.quote(module)}" for module in slurm.modules]
    return ["set +eu", "type module > /dev/null 2>&1 || source /etc/profile", "set -e", *loads, "set -u"]


def _own_lines(slurm: SlurmConfig) -> list[str]:
    """Return the site's own lines, which may use unset variables."""
    return ["set +u", *slurm.setup, "set -u"] if slurm.setup else []


@dataclass(frozen=True)
class Component:
    """One component of a Slurm job, which is heterogeneous if it has several: the nodes of one team, or of all teams
    that share nodes.

    Attributes:
        team: the only team on them; empty: all other teams.
        nodes: number of nodes.
        workers: number of workers on all these nodes.
        settings: options of sbatch.
        gpus: GPUs per node, for its workers and for the servers that it starts in addition.
    """

    team: str
    nodes: int
    workers: int
    settings: SlurmConfig | SlurmTeamConfig
    gpus: int


def components(config: RunConfig, job: str) -> list[Component]:
    """Return the components of the job: first the nodes that teams share, then each team's own nodes. `job`: train, sft
    or eval. Raise ConfigError if `launch.slurm.teams` does not match placement and cluster.
    """
    slurm, cluster = config.launch.slurm, config.cluster
    named, apart = config.placement.teams, []
    for name, settings in slurm.teams.items():
        where = f"launch.slurm.teams.{name}"
        if name not in named:
            raise ConfigError(
                "placement.teams does not have this team",
                where=where,
                found=name,
                allowed=sorted(named) or "no name, because placement.teams is empty",
            )
        devices = named[name].devices
        if devices % settings.nodes:
            raise ConfigError(
                f"the workers of the team {name} do not divide evenly over its nodes",
                where=f"{where}.nodes",
                found=settings.nodes,
                allowed=f"a divisor of placement.teams.{name}.devices = {devices}",
            )
        apart.append(Component(name, settings.nodes, devices, settings, devices // settings.nodes))
    nodes = cluster.nnodes - sum(part.nodes for part in apart)
    workers = cluster.nproc - sum(part.workers for part in apart)
    if apart and (nodes < 1 or workers < 1 or workers % nodes):
        raise ConfigError(
            "launch.slurm.teams leaves no node or no worker for the other teams"
            if nodes < 1 or workers < 1
            else "the workers of teams without nodes of their own do not divide evenly over the nodes that are left",
            where="launch.slurm.teams",
            found=f"{workers} workers on {nodes} of cluster.nnodes = {cluster.nnodes}",
            allowed="at least one team and one node that launch.slurm.teams does not name, and equally many workers on "
            "each of these nodes",
        )
    gpus = workers // nodes if apart else gpus_of_a_node(config, job)
    return [Component("", nodes, workers, slurm, gpus), *apart]


def gpus_per_node(config: RunConfig, part: Component) -> int:
    """Return the GPUs to request per node."""
    default = part.gpus if config.cluster.device_memory_gb is not None else 0
    return default if (given := given_gpus(config, part)) is None else given


def given_gpus(config: RunConfig, part: Component) -> int | None:
    """Return the GPUs per node that the recipe or the site file sets; None when neither does."""
    given = part.settings.gpus_per_node
    return config.launch.slurm.gpus_per_node if given is None else given


def gres_of(config: RunConfig, part: Component) -> str | None:
    """Return --gres for these nodes, which replaces --gpus-per-node; a team's own GPUs override the shared setting."""
    team = part.settings
    return team.gres if team.gres is not None or team.gpus_per_node is not None else config.launch.slurm.gres


def _gpus_to_test(config: RunConfig, part: Component) -> int:
    """Return how many GPUs per node the node's tests expect."""
    given = gres_gpus(gres_of(config, part) or "")
    return gpus_per_node(config, part) if given is None else given


def gres_gpus(gres: str) -> int | None:
    """Return the number of GPUs in a --gres; None when it names none."""
    numbers = re.findall(r"(?:^|,)(?:gres/)?gpu(?::[^:,()]+)??(?::(\d+))?(?=$|[,(])", gres)
    return sum(int(number or 1) for number in numbers) if numbers else None


def _options(job: Submission) -> list[str]:
    """Return the `#SBATCH` options; components of a heterogeneous job are separated by `hetjob`."""
    slurm, parts = job.slurm, components(job.config, job.command)
    options = [f"--job-name={_name(job.config.name)}", *_nodes_of(job, parts[0])]
    # Slurm may queue the job again after preemption or the loss of a node: the run resumes from its newest checkpoint.
    options.append("--requeue")
    if job.config.launch.spares:
        options.append("--no-kill")  # the job survives the loss of any node but the first
    options.append(f"--chdir={_path(job.workdir)}")
    options.append(f"--output={_path(job.folder)}/job-%j.txt")
    limit = limit_minutes(slurm.time)
    if limit is None or slurm.warn_s < 60 * limit:
        options.append(f"--signal=B:USR1@{slurm.warn_s}")
    options += ["--open-mode=append", *map(_option, slurm.options)]
    for part in parts[1:]:
        options += ["hetjob", *_nodes_of(job, part), "--requeue", *map(_option, slurm.options)]
    return options


def _nodes_of(job: Submission, part: Component) -> list[str]:
    settings, slurm = part.settings, job.slurm
    spares = 0 if part.team else job.config.launch.spares
    # one number, not a range: for `--nodes=2-4 --ntasks-per-node=1` Slurm 22.05 gave two nodes with four free
    options = [f"--nodes={part.nodes + spares}", "--ntasks-per-node=1"]
    gres = gres_of(job.config, part)
    if gres is not None:
        options.append(f"--gres={_quoted(gres)}")
    elif gpus := gpus_per_node(job.config, part):
        options.append(f"--gpus-per-node={gpus}")
    if (cpus := settings.cpus_per_node or slurm.cpus_per_node) is not None:
        options.append(f"--cpus-per-task={cpus}")
    for key in ("partition", "account", "qos", "time", "constraint", "memory"):
        value = getattr(slurm, key) if getattr(settings, key, None) is None else getattr(settings, key)
        if value is not None:
            options.append(f"--{'mem' if key == 'memory' else key}={_quoted(value)}")
    return options


def limit_minutes(time: str | None) -> float | None:
    """Return the minutes of a `--time` of sbatch; None: the partition's limit, or no limit."""
    return None if time is None or time.lower() in NO_LIMIT else _minutes(time) or None


def saved_in_time(job: Submission) -> RunConfig:
    """Return the recipe with `trainer.save_by_s` set, if the run must save before the time limit of its job."""
    trainer, limit = job.config.trainer, limit_minutes(job.slurm.time)
    if limit is None or trainer.save_by_s is not None or job.command == "eval" or 60 * limit <= 2 * _ENDS_S:
        return job.config
    trainer = trainer.model_copy(update={"save_by_s": 60 * limit - _ENDS_S})
    return job.config.model_copy(update={"trainer": trainer})


def _minutes(time: str) -> float:
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # format D-HH[:MM[:SS]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return 1440.0 * int(days) + 60.0 * hours + minutes + seconds / 60
    if len(parts) < 3:  # format MM[:SS]
        return parts[0] + [*parts, 0][1] / 60
    return 60.0 * parts[0] + parts[1] + parts[2] / 60


def _srun_options(job: Submission, part: Component) -> list[str]:
    slurm, options = job.slurm, []
    if slurm.image is not None and slurm.container != "apptainer":
        options += [f"--container-image={slurm.image}", f"--container-mounts={_mounts(job)}"]
    if (cpus := part.settings.cpus_per_node or slurm.cpus_per_node) is not None:
        options.append(f"--cpus-per-task={cpus}")  # since Slurm 22.05 srun does not inherit this option from sbatch
    return options


def _start(job: Submission, part: Component) -> list[str]:
    slurm, start = job.slurm, ["bash", str(job.folder / NODE)]
    if slurm.teams:
        start = ["env", f"{NODES_OF}={resource(part.team)}", *start]
    if slurm.image is None or slurm.container != "apptainer":
        return start
    # GPU recipes get --nv even if the job requests no GPUs: Slurm may allocate whole nodes, with all of their GPUs.
    nvidia = ["--nv"] if _gpus_to_test(job.config, part) or job.config.cluster.device_memory_gb is not None else []
    return ["apptainer", "exec", *nvidia, "--bind", _mounts(job), slurm.image, *start]


def _mounts(job: Submission) -> str:
    places = [f"{place}:{place}" for place in dict.fromkeys((str(job.run_dir), str(job.workdir)))]
    return ",".join([*places, *job.slurm.mounts])


def _name(name: str) -> str:
    """Return a job name that needs no quotes in a `#SBATCH` line."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:64]


def _option(text: str) -> str:
    name, equals, value = text.partition("=")
    return f"{name}={_quoted(value)}" if equals else text


def _quoted(value: str) -> str:
    return value if shlex.quote(value) == value else f'"{value}"'


def _path(path: Path) -> str:
    """Return a path for a `#SBATCH` line, where `%` begins a replacement."""
    text = str(path)
    if not text.replace("\t", " ").isprintable() or '"' in text or "\\" in text:
        where, allowed = "--run-dir, tracking.dir, or the current folder", 'a path without ", \\ and control characters'
        raise ConfigError("this path cannot be written in a batch script", where=where, found=text, allowed=allowed)
    return _quoted(text.replace("%", "%%"))
