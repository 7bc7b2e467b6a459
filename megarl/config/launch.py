"""How a run is started on a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from megarl.config.base import Section


def _one_word(text: str) -> str:
    if not text or text != "".join(text.split()) or any(sign in text for sign in "\"'\\"):
        raise ValueError("one word without quotes")
    return text


def _one_line(text: str) -> str:
    if not text or len(text.splitlines()) != 1 or any(sign in text for sign in '"\\'):
        raise ValueError('one line without " and \\')
    return text


def _named(values: dict[str, str]) -> dict[str, str]:
    wrong = [name for name in values if not (name.isidentifier() and name.isascii())]
    if wrong or any("\0" in value for value in values.values()):
        raise ValueError(f"names of letters, digits and _, not {wrong[0]!r}" if wrong else "values without NUL")
    return values


#: What stands in a `#SBATCH` line by itself.
Word = Annotated[str, AfterValidator(_one_word)]
#: What stands between quotes there.
Line = Annotated[str, AfterValidator(_one_line)]


class SlurmConfig(Section):
    """What a Slurm cluster asks for. What is null or empty here is taken from the site's file (`launch.cluster`)."""

    partition: Word | None = Field(None, description="sbatch --partition")
    account: Word | None = Field(None, description="sbatch --account")
    qos: Word | None = Field(None, description="sbatch --qos")
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = Field(
        None, description='sbatch --time: minutes, "HH:MM:SS" or "D-HH:MM:SS" in quotes; null: the partition\'s'
    )
    constraint: Line | None = Field(None, description="sbatch --constraint")
    gpus_per_node: NonNegativeInt | None = Field(
        None,
        description="sbatch --gpus-per-node; null: one for each process of a node where cluster.device_memory_gb is "
        "set, else none. Servers that a node starts need theirs in addition",
    )
    gres: Line | None = Field(None, description="sbatch --gres in place of --gpus-per-node, as `gpu:h100:8`")
    cpus_per_node: PositiveInt | None = Field(None, description="sbatch --cpus-per-task; a node has one task")
    options: list[Line] = Field(default_factory=list, description="further options of sbatch, as `--exclusive`")
    modules: list[Word] = Field(default_factory=list, description="`module load` on every node")
    setup: list[str] = Field(
        default_factory=list,
        description="lines of bash on every node before megarl starts, as `source /shared/venv/bin/activate`",
    )
    environment: Annotated[dict[str, str], AfterValidator(_named)] = Field(
        default_factory=dict, description="variables that are set on every node; no credentials, the file is plain text"
    )
    python: str | None = Field(
        None, description="interpreter on the nodes; null: the one that submits, in a container `python`"
    )
    interface: Word | None = Field(
        None, description="network that processes meet in, as `ib0`; null: the one of Slurm's addresses of the nodes"
    )
    image: str | None = Field(None, description="container image that megarl runs in; null: none")
    container: Literal["pyxis", "apptainer"] | None = Field(None, description="what starts the image; null: pyxis")
    mounts: list[str] = Field(
        default_factory=list, description="FROM:TO of the container, in addition to the run folder and the folder "
        "that was submitted from"
    )  # fmt: skip


class LaunchConfig(Section):
    """How the run is started."""

    launcher: Literal["local", "torchrun", "ray"] = Field(
        "local", description="what starts the workers, unless --launcher says another"
    )
    cluster: str | None = Field(
        None,
        description="name in the site's file of clusters, ~/.config/megarl/clusters.yaml (or MEGARL_CLUSTERS): keys of "
        "launch.slurm by cluster. null: the only one, if there is one",
    )
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="batch jobs")
