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


def _matching(pattern: str, form: str) -> AfterValidator:
    """Return a validator that refuses text that does not match `pattern`; `form` describes the pattern in the error."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(form)
        return text

    return AfterValidator(check)


def _one_word(text: str) -> str:
    if not text or not text.isprintable() or text != "".join(text.split()) or any(sign in text for sign in "\"'\\"):
        raise ValueError("the value must be one word without quotes and backslashes")
    return text


def _one_line(text: str) -> str:
    if not text or not text.isprintable() or any(sign in text for sign in '"\\'):
        raise ValueError('the value must be one line of text, without control characters, " and \\')
    return text


def _named(values: dict[str, str]) -> dict[str, str]:
    wrong = [name for name in values if not (name.isidentifier() and name.isascii())]
    if wrong or any("\0" in value for value in values.values()):
        raise ValueError(
            f"names must have only letters, digits and _, and begin with no digit, unlike {wrong[0]!r}"
            if wrong
            else "values must not contain NUL"
        )
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
        raise ValueError(f"an option of sbatch must begin with -, such as --exclusive, not {text!r}")
    if name in _WRITTEN:
        raise ValueError(f"the batch script sets the option {name} itself ({_WRITTEN[name]})")
    return text


#: Options that the batch script sets itself, and the key that each comes from.
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
    "--chdir": "the folder from which the job is submitted",
    "-D": "the folder from which the job is submitted",
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
    """Return a number of minutes or megabytes as text, so that users need not quote it."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


NO_LIMIT = ("unlimited", "infinite", "-1")
"""What sbatch takes as no time limit. 0 also means no limit to sbatch."""


def _texts(values: object) -> object:
    """Return a mapping of names to texts, with numbers as text. Refuse booleans and null without quotes, because
    programs expect different spellings of them."""
    if not isinstance(values, dict):
        return values
    if wrong := [name for name, value in values.items() if isinstance(value, bool) or value is None]:
        raise ValueError(f"the value of {wrong[0]} needs quotes, such as '1' or 'true'")
    return {name: str(value) if isinstance(value, int | float) else value for name, value in values.items()}


_TIME = _matching(rf"(?i)({'|'.join(NO_LIMIT)}|(\d+-)?\d+(:\d+){{0,2}})", "minutes, HH:MM:SS, D-HH:MM:SS or UNLIMITED")
_MEMORY = _matching(
    r"(?i)\d+[KMGT]?B?", "a whole number with K, M, G or T, such as 200G, or 0 for all memory of a node"
)
#: Text that a `#SBATCH` line may hold without quotes.
Word = Annotated[str, AfterValidator(_one_word)]
#: Text that a `#SBATCH` line may hold between quotes.
Line = Annotated[str, AfterValidator(_one_line)]


class SlurmTeamConfig(Section):
    """Nodes of one team: a component of a heterogeneous job. A key that is null takes its value from launch.slurm."""

    nodes: PositiveInt = Field(
        description="nodes of cluster.nnodes that the team gets; its workers divide evenly over them"
    )
    partition: Word | None = Field(None, description="sbatch --partition")
    constraint: Line | None = Field(None, description="sbatch --constraint")
    gpus_per_node: NonNegativeInt | None = Field(
        None, description="sbatch --gpus-per-node; null: one for each worker of the team on a node, as in launch.slurm"
    )
    gres: Line | None = Field(None, description="sbatch --gres in place of --gpus-per-node")
    cpus_per_node: PositiveInt | None = Field(None, description="sbatch --cpus-per-task")


class SlurmConfig(Section):
    """Resources and options of a Slurm job. A null or empty key is taken from the cluster's entry in the site file
    (`launch.cluster`).
    """

    partition: Word | None = Field(None, description="sbatch --partition")
    account: Word | None = Field(None, description="sbatch --account")
    qos: Word | None = Field(None, description="sbatch --qos")
    time: Annotated[str, BeforeValidator(_as_text), _TIME] | None = Field(
        None, description="sbatch --time: minutes, HH:MM:SS or D-HH:MM:SS; null: the partition's default"
    )
    constraint: Line | None = Field(None, description="sbatch --constraint")
    gpus_per_node: NonNegativeInt | None = Field(
        None,
        description="sbatch --gpus-per-node; null: one for each process on a node and each rank of its servers when "
        "cluster.device_memory_gb is set, else none",
    )
    gres: Line | None = Field(None, description="sbatch --gres in place of --gpus-per-node, such as `gpu:h100:8`")
    cpus_per_node: PositiveInt | None = Field(
        None,
        description="sbatch --cpus-per-task for the one task of a node; null: Slurm's default, which is one core at "
        "many sites",
    )
    memory: Annotated[str, BeforeValidator(_as_text), _MEMORY] | None = Field(
        None,
        description="sbatch --mem, the memory of a node, such as `200G`; 0: all of it; null: the partition's default",
    )
    chain: NonNegativeInt = Field(
        0,
        description="jobs that a run may submit after the first, one after another, when the time limit ends a job "
        "before the last step; 0: none",
    )
    warn_s: PositiveInt = Field(
        300,
        description="seconds before the time limit at which the run ends its step and writes a checkpoint; Slurm may "
        "begin up to a minute earlier",
    )
    restarts: NonNegativeInt = Field(
        3,
        description="consecutive restarts of a run that lost nodes, in the same job or a later one; a newer "
        "checkpoint resets the count",
    )
    teams: dict[str, SlurmTeamConfig] = Field(
        default_factory=dict,
        description="teams of placement.teams that get nodes of their own with other hardware (a heterogeneous job, "
        "under Ray); the other teams share the remaining nodes",
    )
    options: list[Annotated[Line, AfterValidator(_option)]] = Field(
        default_factory=list, description="further options of sbatch, such as `--exclusive`"
    )
    modules: list[Word] = Field(
        default_factory=list,
        description="names for `module load`, run on every node; with a container image only on the first node, "
        "outside the image, and its environment is passed to the other nodes",
    )
    setup: list[str] = Field(
        default_factory=list,
        description="lines of bash to run on every node before megarl starts (inside the image, if there is one), "
        "such as `ulimit -l unlimited`; they do not change the interpreter, which `python` names",
    )
    environment: Annotated[dict[str, str], BeforeValidator(_texts), AfterValidator(_named)] = Field(
        default_factory=dict,
        description="environment variables on every node; put no credentials here, the file is plain text",
    )
    python: str | None = Field(
        None,
        description="interpreter on the nodes, such as `/shared/venv/bin/python`; null: the submitting interpreter, "
        "which all nodes must see, or `python` in a container",
    )
    interface: Word | None = Field(
        None,
        description="network interface over which processes connect, such as `ib0`; null: the one that has the "
        "nodes' Slurm addresses",
    )
    image: str | None = Field(None, description="container image that megarl runs in; null: none")
    container: Literal["pyxis", "apptainer"] | None = Field(None, description="tool that starts the image; null: pyxis")
    mounts: list[str] = Field(
        default_factory=list,
        description="mounts FROM:TO in the container, in addition to the run folder and the submission folder",
    )


_QUANTITY = _matching(r"\d+(\.\d+)?([KMGTPE]i?|m|k|[eE]\d+)?", "a number with a unit, as 64Gi, 500m or 32")
#: Text that is a Kubernetes quantity.
Quantity = Annotated[str, BeforeValidator(_as_text), _QUANTITY]
#: Text that is the name of a Kubernetes object.
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]


class KubernetesConfig(Section):
    """Resources and options of a Kubernetes job. Each node of the run is a pod."""

    kind: Literal["jobset", "rayjob"] | None = Field(
        None, description="jobset: torchrun in every pod; rayjob: a Ray cluster by KubeRay; null: rayjob for several "
            "teams or launch.launcher=ray, else jobset"
    )  # fmt: skip
    image: str | None = Field(None, description="container image with megarl (Dockerfile, Dockerfile.gpu); required")
    claim: ObjectName | None = Field(
        None, description="persistent volume claim for run folders, writable by all pods; required"
    )
    mount: Annotated[str, Field(pattern=r"^/[^\s\"'\\:]+$")] = Field(
        "/data/runs", description="path at which pods mount the claim"
    )
    namespace: ObjectName | None = Field(
        None, description="Kubernetes namespace; null: the namespace of kubectl's context"
    )
    service_account: ObjectName | None = Field(
        None, description="service account of the pods; null: the namespace's default"
    )
    image_pull_secret: ObjectName | None = Field(None, description="name of the secret with which the image is pulled")
    queue: ObjectName | None = Field(None, description="local queue of Kueue; null: none")
    gpus_per_node: NonNegativeInt | None = Field(
        None,
        description="nvidia.com/gpu of a pod; null: one for each of its processes and each rank of its servers when "
        "cluster.device_memory_gb is set, else 0",
    )
    cpus_per_node: Quantity | None = Field(None, description="CPUs that a pod requests; null: no request")
    memory: Quantity | None = Field(None, description="memory of a pod, as request and limit; null: neither")
    shared_memory: Quantity = Field("16Gi", description="size of /dev/shm, which counts as memory of the pod")
    node_selector: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict, description="labels that a machine must have to run the pods"
    )
    environment: Annotated[dict[str, str], BeforeValidator(_texts), AfterValidator(_named)] = Field(
        default_factory=dict, description="environment variables of the pods; put no credentials here"
    )
    resources: Annotated[dict[str, Quantity], BeforeValidator(_texts)] = Field(
        default_factory=dict, description="further resources of a pod, as request and limit, such as rdma/hca: 1"
    )
    annotations: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict, description="annotations of the pods"
    )
    pod: dict[str, Any] = Field(
        default_factory=dict,
        description="further fields of the pods' spec, such as tolerations, affinity, hostNetwork; `volumes` are "
        "added to megarl's",
    )
    container: dict[str, Any] = Field(
        default_factory=dict,
        description="further fields of the pods' container, such as securityContext; `volumeMounts` are added to "
        "megarl's",
    )
    secrets: Annotated[dict[str, str], AfterValidator(_named)] = Field(
        default_factory=dict,
        description="environment variables read from secrets of the namespace, such as HF_TOKEN: my-secret/token",
    )


class LaunchConfig(Section):
    """The way in which the run is started."""

    launcher: Literal["local", "torchrun", "ray"] = Field(
        "local", description="program that starts the workers; the option --launcher overrides it"
    )
    spares: NonNegativeInt = Field(
        0,
        description="nodes that a batch job requests and waits for in addition to cluster.nnodes; they replace nodes "
        "that fail",
    )
    preflight: bool = Field(
        True, description="a batch job tests its nodes before the run and leaves out nodes that fail"
    )
    preflight_disk_gb: NonNegativeFloat = Field(
        1.0, description="free GB that a node needs in the run folder and in the folder for temporary files"
    )
    preflight_clock_s: Seconds = Field(
        1.0, description="maximum seconds by which a node's clock may differ from the median of all nodes"
    )
    preflight_bandwidth: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5,
        description="a node fails the test when its all-reduce bandwidth with its best neighbour is below this "
        "share of the median",
    )
    cluster: str | None = Field(
        None,
        description="name of the cluster in the site file, ~/.config/megarl/clusters.yaml (or $MEGARL_CLUSTERS), that "
        "supplies keys of launch.slurm; null: the only cluster in the file",
    )
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="batch jobs")
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig, description="Kubernetes jobs")
