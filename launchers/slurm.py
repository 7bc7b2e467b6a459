"""Batch scripts of Slurm: pure text, nothing is asked and nothing started.

    RUN_DIR/launch/job.sh       what sbatch takes: how many nodes, where they meet, srun of node.sh on each
    RUN_DIR/launch/node.sh      one node: modules, environment, `megarl COMMAND recipe.yaml --run-dir RUN_DIR`
    RUN_DIR/launch/recipe.yaml  the resolved recipe
    RUN_DIR/launch/jobs.txt     number, time and nodes of each job that was submitted, tab-separated
    RUN_DIR/launch/chain        how many jobs may still submit themselves (launch.slurm.chain)

A job of a chain asks the run for a checkpoint when Slurm says that its time limit is near (`save`, which the run
removes when it has written one), submits the next job, which begins when this one has ended, and ends.

All values of a recipe that reach a shell go through `shlex.quote`; those in `#SBATCH` lines have no quotes in them:
the configuration checks that.
"""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from megarl.artifacts import batch
from megarl.config.launch import SlurmConfig
from megarl.config.run import RunConfig
from megarl.errors import ConfigError

JOB, NODE, RECIPE, JOBS, CHAIN = "job.sh", "node.sh", "recipe.yaml", "jobs.txt", "chain"
#: Ports of the first node where processes meet: one of these, by the number of the job.
_PORTS = (20000, 10000)
#: Seconds of `warn_s` that are left for the end of a job when no checkpoint comes.
_LEFT_S = 20

_MEET = """\
# Where processes meet: the address that Slurm itself knows the first node by.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_ADDR=$(scontrol show node --oneliner "$head" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
"""
_MEET_ON = """\
# Where processes meet: the first node's address in the network {interface}.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_ADDR=$(srun --nodes=1 --ntasks=1 --nodelist="$head" ip -4 -oneline address show dev {interface} |
  awk 'NR == 1 {{ sub("/.*", "", $4); print $4 }}')
"""
_MET = """\
[ -n "$MASTER_ADDR" ] || {{ echo "megarl: no address of the first node, $head" >&2; exit 1; }}
MASTER_PORT=$(({first} + SLURM_JOB_ID % {ports}))
export MASTER_ADDR MASTER_PORT
"""

_TOKEN = """\
# Who calls the job's Ray must know this; it is in no file.
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0

"""
#: In place of a plain command: the first node has Ray's head and what drives the run, the others wait for its end.
_RAY = """\
over={over}."$SLURM_JOB_ID"
address="$MASTER_ADDR:$MASTER_PORT"
if [ "$SLURM_NODEID" != 0 ]; then
  for _ in $(seq {limit}); do
    (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null && break
    sleep 1
  done
  {ray} start --address="$address" --block &
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
{ray} start --head --node-ip-address="$MASTER_ADDR" --port="$MASTER_PORT" --include-dashboard=false --block &
node=$!
trap 'touch "$over"; kill "$node" 2> /dev/null || true' EXIT
for _ in $(seq {limit}); do
  (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null && break
  sleep 1
done
{nodes} "$address" {count} {limit}
RAY_ADDRESS="$address" {command}
"""

#: In place of a plain srun: `again` runs when the signal of `--signal` comes.
_CHAIN = """\
launch="$run_dir/launch"
rm -f "$launch/{save}"
{srun} &
step=$!

# Before the time limit: a checkpoint, the next job of the chain, the end.
again() {{
  trap '' USR1
  left=$(cat "$launch/{chain}")
  if [ "$left" -gt 0 ]; then
    echo "megarl: the time limit is near: asking for a checkpoint, {wait} s at most"
    touch "$launch/{save}"
    for _ in $(seq {wait}); do
      [ -e "$launch/{save}" ] || break
      kill -0 "$step" 2> /dev/null || break
      sleep 1
    done
    if [ -e "$launch/{save}" ]; then
      echo "megarl: no checkpoint was written in time; the next job goes on from an earlier one" >&2
    fi
    kill -TERM "$step" 2> /dev/null || true
    wait "$step" || true
    next=$(sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" "$launch/{job}")
    echo $((left - 1)) > "$launch/{chain}"
    printf '%s\\t%s\\t%s\\n' "${{next%%;*}}" "$(date '+%F %T')" "$SLURM_JOB_NUM_NODES" >> "$launch/{jobs}"
    echo "megarl: job $next goes on"
    exit 0
  fi
  echo "megarl: the time limit is near, and no job of the chain is left" >&2
  wait "$step"
}}
trap again USR1
wait "$step"
"""


@dataclass(frozen=True)
class Submission:
    """What is submitted.

    Attributes:
        config: of the run, with what the site's file says.
        run_dir: its folder, which all nodes see.
        command: train, sft or eval.
        launcher: torchrun, ray, or local on one node.
        workdir: folder that relative paths of the recipe are in.
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
        """Where the scripts are."""
        return self.run_dir / batch.FOLDER


def job_script(job: Submission) -> str:
    """What sbatch takes.

    Raises:
        ConfigError: a path that cannot stand in a `#SBATCH` line.
    """
    cluster = job.config.cluster
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    lines += [f"# {job.config.name}: {cluster.nproc} processes on {cluster.nnodes} nodes. By hand: sbatch {JOB}"]
    lines += ["set -euo pipefail", f"run_dir={shlex.quote(str(job.run_dir))}", ""]
    text = "\n".join(lines)
    if cluster.nnodes > 1:
        meet = _MEET if job.slurm.interface is None else _MEET_ON.format(interface=shlex.quote(job.slurm.interface))
        text += meet + _MET.format(first=_PORTS[0], ports=_PORTS[1]) + "\n"
        text += _TOKEN if job.launcher == "ray" else ""
    if not job.slurm.chain:
        return f"{text}{_srun(job)}\n"
    wait = max(1, job.slurm.warn_s - _LEFT_S)
    names = {"save": batch.SAVE, "chain": CHAIN, "job": JOB, "jobs": JOBS}
    return text + _CHAIN.format(srun=_srun(job), wait=wait, **names)


def node_script(job: Submission) -> str:
    """What srun starts once on every node."""
    slurm = job.slurm
    lines = ["#!/bin/bash", f"# One node of {JOB}: its number is SLURM_NODEID.", "set -euo pipefail"]
    lines += [f"cd {shlex.quote(str(job.workdir))}"]
    lines += [f"module load {shlex.quote(module)}" for module in slurm.modules]
    lines += slurm.setup
    if slurm.interface is not None:
        name = shlex.quote(slurm.interface)
        lines += [f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in slurm.environment.items()]
    lines += ['export NODE_RANK="$SLURM_NODEID"']
    python = slurm.python or ("python" if slurm.image is not None else sys.executable)
    # -P: a folder `kernels` or `tests` of the current folder hides no package.
    command = [python, "-P", "-m", "megarl", job.command, str(job.folder / RECIPE)]
    command += ["--launcher", job.launcher, "--run-dir", str(job.run_dir)]
    if job.launcher != "ray" or job.config.cluster.nnodes == 1:
        return "\n".join([*lines, f"exec {shlex.join(command)}", ""])
    return "\n".join([*lines, ""]) + _RAY.format(
        over=shlex.quote(str(job.folder / "over")),
        limit=math.ceil(job.config.cluster.start_timeout_s),
        ray=shlex.join([python, "-P", "-m", "ray.scripts.scripts"]),
        nodes=shlex.join([python, "-P", "-m", "megarl.launchers.ray_nodes"]),
        count=job.config.cluster.nnodes,
        command=shlex.join(command),
    )


def gpus_per_node(config: RunConfig) -> int:
    """GPUs that a node is asked for."""
    given = config.launch.slurm.gpus_per_node
    if given is not None:
        return given
    return config.cluster.nproc // config.cluster.nnodes if config.cluster.device_memory_gb is not None else 0


def _options(job: Submission) -> list[str]:
    slurm, cluster = job.slurm, job.config.cluster
    found = [f"--job-name={_name(job.config.name)}", f"--nodes={cluster.nnodes}", "--ntasks-per-node=1"]
    if slurm.gres is not None:
        found.append(f"--gres={_quoted(slurm.gres)}")
    elif gpus := gpus_per_node(job.config):
        found.append(f"--gpus-per-node={gpus}")
    if slurm.cpus_per_node is not None:
        found.append(f"--cpus-per-task={slurm.cpus_per_node}")
    for key in ("partition", "account", "qos", "time", "constraint"):
        value = getattr(slurm, key)
        if value is not None:
            found.append(f"--{key}={_quoted(value)}")
    found.append(f"--chdir={_path(job.workdir)}")
    found.append(f"--output={_path(job.folder)}/job-%j.txt")
    if slurm.chain:
        found.append(f"--signal=B:USR1@{slurm.warn_s}")
    return [*found, "--open-mode=append", *map(_option, slurm.options)]


def _srun(job: Submission) -> str:
    slurm, node = job.slurm, f'"$run_dir/launch/{NODE}"'
    options = ["--kill-on-bad-exit=1", f"--output={shlex.quote(_percent(job.folder) + '/job-%j.node-%n.txt')}"]
    start = f"bash {node}"
    if slurm.image is not None:
        places = [f"{place}:{place}" for place in dict.fromkeys((str(job.run_dir), str(job.workdir)))]
        mounts = ",".join([*places, *slurm.mounts])
        if slurm.container == "apptainer":
            nvidia = " --nv" if gpus_per_node(job.config) else ""
            start = f"apptainer exec{nvidia} --bind {shlex.quote(mounts)} {shlex.quote(slurm.image)} {start}"
        else:
            options += [f"--container-image={shlex.quote(slurm.image)}", f"--container-mounts={shlex.quote(mounts)}"]
    if slurm.cpus_per_node is not None:
        options.append(f"--cpus-per-task={slurm.cpus_per_node}")  # srun does not take it from sbatch since Slurm 22.05
    return f"srun {' '.join(options)} \\\n  {start}"


def _name(name: str) -> str:
    """A job name that stands in a `#SBATCH` line as it is."""
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_.-") else "-" for sign in name)[:64]


def _option(text: str) -> str:
    name, equals, value = text.partition("=")
    return f"{name}={_quoted(value)}" if equals else text


def _quoted(value: str) -> str:
    return value if shlex.quote(value) == value else f'"{value}"'


def _percent(path: Path) -> str:
    return str(path).replace("%", "%%")


def _path(path: Path) -> str:
    """A path in a `#SBATCH` line; `%` begins a replacement there."""
    text = str(path)
    if len(text.splitlines()) != 1 or '"' in text or "\\" in text:
        raise ConfigError(
            "a path that cannot stand in a batch script",
            where="--run-dir, tracking.dir, or the current folder",
            found=text,
            allowed='a path without ", \\ and line breaks',
        )
    return _quoted(_percent(path))
