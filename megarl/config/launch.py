"""The recipe's section `launch`: how the run is started on a cluster."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)

from megarl.config.base import Seconds, Section


def _one_word(text: str) -> str:
    if not text or not text.isprintable() or text != "".join(text.split()) or any(sign in text for sign in "\"'\\"):
        raise ValueError("one word without quotes")
    return text


def _one_line(text: str) -> str:
    if not text or not text.isprintable() or any(sign in text for sign in '"\\'):
        raise ValueError('one line without control characters, " and \\')
    return text


def _named(values: dict[str, str]) -> dict[str, str]:
    wrong = [name for name in values if not (name.isidentifier() and name.isascii())]
    if wrong or any("\0" in value for value in values.values()):
        raise ValueError(f"names of letters, digits and _, not {wrong[0]!r}" if wrong else "values without NUL")
    return values


def option_parts(text: str) -> tuple[str, str]:
    """Return name and value of an option of sbatch, each empty if missing.

    >>> option_parts("--gres=gpu:8"), option_parts("--gres gpu:8"), option_parts("-N4"), option_parts("-W")
    (('--gres', 'gpu:8'), ('--gres', 'gpu:8'), ('-N', '4'), ('-W', ''))
    """
    text = text.strip()
    end = re.search(r"[=\s]|$", text).start() if text.startswith("--") else 2  # type: ignore[union-attr]
    return text[:end], text[end:].lstrip("= \t")


def _option(text: str) -> str:
    name, _ = option_parts(text)
    if not name.startswith("-"):
        raise ValueError(f"options of sbatch begin with -, as --exclusive, and not {text!r}")
    if name in _WRITTEN:
        raise ValueError(f"options that other keys do not give: {name} is {_WRITTEN[name]}")
    return text


def _memory(text: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?B?", text, re.IGNORECASE):
        raise ValueError("a whole number with K, M, G or T, as 200G, or 0 for all that a node has")
    return text


#: Options that the batch script has already, and the keys that they come from.
_WRITTEN = {
    "--nodes": "cluster.nnodes and launch.spares",
    "-N": "cluster.nnodes and launch.spares",
    "--ntasks": "one for each node",
    "-n": "one for each node",
    "--ntasks-per-node": "1",
    "--job-name": "name",
    "-J": "name",
    "--output": "in RUN_DIR/launch",
    "-o": "in RUN_DIR/launch",
    "--chdir": "the folder that is submitted from",
    "-D": "the folder that is submitted from",
    "--signal": "launch.slurm.warn_s",
    "--gpus-per-node": "launch.slurm.gpus_per_node, or launch.slurm.gres for a kind",
    "--cpus-per-task": "launch.slurm.cpus_per_node",
    "-c": "launch.slurm.cpus_per_node",
    "--partition": "launch.slurm.partition",
    "-p": "launch.slurm.partition",
    "--time": "launch.slurm.time",
    "-t": "launch.slurm.time",
    "--mem": "launch.slurm.memory",
}


def _as_text(value: object) -> object:
    """Return a number of minutes or megabytes as text, so that it needs no quotes."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


NO_LIMIT = ("unlimited", "infinite", "-1")
"""Of time, for sbatch; 0 is another one."""


def _time(text: str) -> str:
    if text.lower() not in NO_LIMIT and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ValueError("minutes, HH:MM:SS, D-HH:MM:SS or UNLIMITED")
    return text


def _texts(values: object) -> object:
    """Return values with numbers as text. Booleans still need quotes: programs read them in different ways."""
    if not isinstance(values, dict):
        return values
    if wrong := [name for name, value in values.items() if isinstance(value, bool) or value is None]:
        raise ValueError(f"{wrong[0]} needs quotes, as '1' or 'true'")
    return {name: str(value) if isinstance(value, int | float) else value for name, value in values.items()}


def _quantity(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?([KMGTPE]i?|m|k|[eE]\d+)?", text):
        raise ValueError("a number with a unit, as 64Gi, 500m or 32")
    return text


#: Text that stands in a `#SBATCH` line without quotes.
Word = Annotated[str, AfterValidator(_one_word)]
#: Text that stands between quotes in a `#SBATCH` line.
Line = Annotated[str, AfterValidator(_one_line)]


class SlurmTeamConfig(Section):
    """A team's own nodes: a component of a heterogeneous job. A null key is as in launch.slurm."""

    nodes: PositiveInt = Field(description="of cluster.nnodes; the team's workers divide evenly over them")
    partition: Word | None = Field(None, description="sbatch --partition")
    constraint: Line | None = Field(None, description="sbatch --constraint")
    gpus_per_node: NonNegativeInt | None = Field(
        None, description="sbatch --gpus-per-node; null: one for each worker of the team on a node, as in launch.slurm"
    )
    gres: Line | None = Field(None, description="sbatch --gres in place of --gpus-per-node")
    cpus_per_node: PositiveInt | None = Field(None, description="sbatch --cpus-per-task")


class SlurmConfig(Section):
    """Resources and options of a Slurm job. A null or empty key is taken from the site's file (`launch.cluster`)."""

    partition: Word | None = Field(None, description="sbatch --partition")
    account: Word | None = Field(None, description="sbatch --account")
    qos: Word | None = Field(None, description="sbatch --qos")
    time: Annotated[str, BeforeValidator(_as_text), AfterValidator(_time)] | None = Field(
        None, description="sbatch --time: minutes, HH:MM:SS or D-HH:MM:SS; null: the partition's"
    )
    constraint: Line | None = Field(None, description="sbatch --constraint")
    gpus_per_node: NonNegativeInt | None = Field(
        None,
        description="sbatch --gpus-per-node; null: with cluster.device_memory_gb one for each process of a node and "
        "its servers', else none",
    )
    gres: Line | None = Field(None, description="sbatch --gres in place of --gpus-per-node, as `gpu:h100:8`")
    cpus_per_node: PositiveInt | None = Field(
        None,
        description="sbatch --cpus-per-task of a node's one task; null: Slurm's default, one core at many sites",
    )
    memory: Annotated[str, BeforeValidator(_as_text), AfterValidator(_memory)] | None = Field(
        None, description="sbatch --mem, of a node, as `200G`; 0: all that it has; null: the partition's"
    )
    chain: NonNegativeInt = Field(
        0,
        description="further jobs that a run submits, one after another, when the time limit comes before its last "
        "step; 0: none",
    )
    warn_s: PositiveInt = Field(
        300,
        description="seconds before the time limit at which the running step ends and a checkpoint is written; Slurm "
        "may begin up to a minute earlier",
    )
    restarts: NonNegativeInt = Field(
        3,
        description="consecutive restarts of a run that lost nodes, in this or another job; a newer checkpoint resets"
        " the count",
    )
    teams: dict[str, SlurmTeamConfig] = Field(
        default_factory=dict,
        description="teams of placement.teams on nodes of their own, with other hardware (a heterogeneous job, under "
        "Ray); other teams share the rest",
    )
    options: list[Annotated[Line, AfterValidator(_option)]] = Field(
        default_factory=list, description="further options of sbatch, as `--exclusive`"
    )
    modules: list[Word] = Field(
        default_factory=list,
        description="`module load` on every node; with an image only on the first node, outside it, whose environment"
        " goes to the others",
    )
    setup: list[str] = Field(
        default_factory=list,
        description="lines of bash on every node before megarl starts, inside an image, as `ulimit -l unlimited`; the"
        " interpreter is `python`'s",
    )
    environment: Annotated[dict[str, str], BeforeValidator(_texts), AfterValidator(_named)] = Field(
        default_factory=dict, description="variables on every node; no credentials, the file is plain text"
    )
    python: str | None = Field(
        None,
        description="interpreter on the nodes, as `/shared/venv/bin/python`; null: the submitting one, which they "
        "must see; in a container `python`",
    )
    interface: Word | None = Field(
        None, description="network in which processes meet, as `ib0`; null: that of Slurm's addresses of the nodes"
    )
    image: str | None = Field(None, description="container image that megarl runs in; null: none")
    container: Literal["pyxis", "apptainer"] | None = Field(None, description="what starts the image; null: pyxis")
    mounts: list[str] = Field(
        default_factory=list,
        description="FROM:TO of the container, in addition to the run folder and the submission folder",
    )


#: A quantity of Kubernetes: `64Gi`, `500m`, `32`.
Quantity = Annotated[str, BeforeValidator(_as_text), AfterValidator(_quantity)]
#: A name of an object of Kubernetes.
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]


class KubernetesConfig(Section):
    """Resources and options of a Kubernetes job. Each node of the run is a pod."""

    kind: Literal["jobset", "rayjob"] | None = Field(
        None, description="jobset: torchrun in every pod; rayjob: a Ray cluster by KubeRay; null: rayjob for several "
        "teams or launch.launcher=ray, else jobset"
    )  # fmt: skip
    image: str | None = Field(None, description="container image with megarl (Dockerfile, Dockerfile.gpu); needed")
    claim: ObjectName | None = Field(
        None, description="persistent volume claim for run folders, which all pods can write to; needed"
    )
    mount: Annotated[str, Field(pattern=r"^/[^\s\"'\\:]+$")] = Field(
        "/data/runs", description="where pods have the claim"
    )
    namespace: ObjectName | None = Field(None, description="null: the one of kubectl's context")
    service_account: ObjectName | None = Field(None, description="of the pods; null: the namespace's")
    image_pull_secret: ObjectName | None = Field(None, description="name of the secret that the image is pulled with")
    queue: ObjectName | None = Field(None, description="local queue of Kueue; null: none")
    gpus_per_node: NonNegativeInt | None = Field(
        None,
        description="nvidia.com/gpu of a pod; null: with cluster.device_memory_gb one for each of its processes and "
        "its servers', else 0",
    )
    cpus_per_node: Quantity | None = Field(None, description="requested CPUs of a pod; null: none are requested")
    memory: Quantity | None = Field(None, description="memory of a pod, requested and its limit; null: none")
    shared_memory: Quantity = Field("16Gi", description="size of /dev/shm, which counts as memory of the pod")
    node_selector: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict, description="labels of machines that pods may be on"
    )
    environment: Annotated[dict[str, str], BeforeValidator(_texts), AfterValidator(_named)] = Field(
        default_factory=dict, description="variables of the pods; no credentials"
    )
    resources: Annotated[dict[str, Quantity], BeforeValidator(_texts)] = Field(
        default_factory=dict, description="further resources of a pod, requested and their limit, as rdma/hca: 1"
    )
    annotations: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict, description="of the pods"
    )
    pod: dict[str, Any] = Field(
        default_factory=dict,
        description="further fields of the pods' spec, as tolerations, affinity, hostNetwork; volumes are added",
    )
    container: dict[str, Any] = Field(
        default_factory=dict,
        description="further fields of their container, as securityContext; volumeMounts are added",
    )
    secrets: Annotated[dict[str, str], AfterValidator(_named)] = Field(
        default_factory=dict, description="variables out of secrets of the namespace, as HF_TOKEN: my-secret/token"
    )


class LaunchConfig(Section):
    """The way in which the run is started."""

    launcher: Literal["local", "torchrun", "ray"] = Field(
        "local", description="what starts the workers, unless --launcher says another"
    )
    spares: NonNegativeInt = Field(
        0,
        description="nodes of a batch job in addition to cluster.nnodes, which it waits for; they replace nodes that "
        "fail",
    )
    preflight: bool = Field(
        True, description="a batch job tests its nodes before the run and leaves out those that fail"
    )
    preflight_disk_gb: NonNegativeFloat = Field(
        1.0, description="free GB that a node needs for the run folder and for temporary files"
    )
    preflight_clock_s: Seconds = Field(
        1.0, description="seconds that the clock of a node may differ from the median of all"
    )
    preflight_bandwidth: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="a node fails whose all-reduce with its best neighbour is below this share of the median"
    )
    cluster: str | None = Field(
        None,
        description="cluster in the site's file, ~/.config/megarl/clusters.yaml (or MEGARL_CLUSTERS), whose keys of "
        "launch.slurm are used; null: the only one",
    )
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="batch jobs")
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig, description="jobs of Kubernetes")
