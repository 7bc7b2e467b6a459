"""One checkpoint of several teams: the part of a team that does not lead.

    team of the actor (`megarl.training.checkpoint.begin`)     every other team that has something to save
    `CheckpointTag`: this step is saved             -------->
    copy to host memory                                        copy to host memory
                                                    <--------  `PartCopied`: its workers, engines and bytes
    makes step_4.tmp-TAG, if all of it fits
    `CheckpointFolder`                              -------->
    rank_0.safetensors ... seal_0.json ...                     rank_2.safetensors ... seal_2.json ...
    waits for the checksums of all, meta.json, rename

Files are named by their worker's number among those of all teams, so that a checkpoint looks the same whoever wrote it,
and only meta.json names the team of each file. The folder is no checkpoint before the rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.messages import CheckpointFolder, PartCopied
from megarl.training.rng import rng_bytes
from megarl.training.saving import Saving
from megarl.training.sharded_state import snapshot
from megarl.training.shards import CheckpointError, Snapshot

if TYPE_CHECKING:
    from megarl.dag.messages import Mail
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout


def part_of(
    engines: Mapping[str, MegatronEngine], team: str, step: int, first: int, nbytes: int, layout: Layout
) -> PartCopied:
    """Return the description of a team's part of a checkpoint; `first`: the number of the team's first worker."""
    steps = {name: engine.step for name, engine in engines.items()}
    vocab_sizes = {name: engine.hf_config.vocab_size for name, engine in engines.items()}
    return PartCopied(team, step, [first, layout.world.size], layout.describe(), steps, vocab_sizes, nbytes)


@dataclass(frozen=True)
class Teams:
    """One team's information about the teams that write a checkpoint together."""

    name: str  # name of this team
    first: int  # number of the team's first worker; 0 in the team that leads
    mail: Mail  # mailbox for messages between teams
    deadline_s: float  # seconds without growth after which the leading team stops waiting for a team's files
    others: tuple[str, ...] = ()  # only in the leading team: the other teams that write a part


def begin_part(
    root: Path,
    step: int,
    tag: str,
    engines: Mapping[str, MegatronEngine],
    teams: Teams,
    layout: Layout,
    files: Mapping[str, bytes],
) -> Saving:
    """Start to write this team's part of a checkpoint that another team leads. Collective over the team.

    Returns when everything is copied to host memory and the folder exists.

    Args:
        root: folder of checkpoints, on a file system that all workers share.
        step: the completed training step.
        tag: the tag that the leading team announced.
        engines: trained engines of this team, by name.
        teams: this team's information about all teams.
        layout: layout of this team.
        files: contents by name of files that this rank adds to the folder; names must differ between ranks.

    Raises:
        CheckpointError: on every rank of every team: the disk is too full, or the folder cannot be created.
    """
    shard, contents = own_files(engines, tag, step, teams.first + layout.rank)
    contents |= files
    folder, total = folder_of(root, step, tag), sum(layout.world.all_gather_json(size_of(shard, contents)))
    if layout.rank == 0:
        part_of(engines, teams.name, step, teams.first, total, layout).post(teams.mail)
    answer = CheckpointFolder.read(teams.mail, step)
    refuse_folder(folder, answer.problem, answer.fix)
    return Saving(folder, shard, contents, None, answer.fix, layout.world, first=teams.first)


def folder_of(root: Path, step: int, tag: str) -> Path:
    """Return the temporary folder in which a checkpoint is written before its rename."""
    return root / f"step_{step}.tmp-{tag}"


def own_files(
    engines: Mapping[str, MegatronEngine], tag: str, step: int, number: int
) -> tuple[Snapshot, dict[str, bytes]]:
    """Return a snapshot of worker `number`'s part of the engines, and the file of its random states, by name."""
    return snapshot(engines, {"tag": tag, "step": step}), {rng_name(number): rng_bytes()}


def rng_name(number: int) -> str:
    """Return the file name of a worker's random states."""
    return f"rng_{number}.safetensors"


def size_of(shard: Snapshot, contents: Mapping[str, bytes]) -> int:
    """Return the bytes that a rank writes for a checkpoint: its snapshot and its small files."""
    return shard.nbytes + sum(map(len, contents.values()))


def refuse_folder(folder: Path, problem: str | None, fix: str) -> None:
    """Raise a CheckpointError with `problem` about a checkpoint's folder, unless `problem` is empty."""
    if problem:
        raise CheckpointError("cannot write the checkpoint", where=str(folder), found=problem, fix=fix)
