"""One checkpoint of several teams: the messages between them, and the part of a team that does not lead.

    team of the actor, which leads                       every other team that has something to save
    checkpoint/4         {"tag": "4f2a81c0"}  -------->  the step is saved; null: it is not
    copy to host memory                                  copy to host memory
    checkpoint/critic/4                       <--------  its workers, engines and bytes
    makes step_4.tmp-4f2a81c0, if all of it fits
    checkpoint_folder/4  {"problem": null}    -------->
    rank_0.safetensors ... seal_0.json ...               rank_2.safetensors ... seal_2.json ...
    waits for the checksums of all, meta.json, rename

The left column is `megarl.training.checkpoint.begin`. The first rank of a team posts, and every rank reads by itself:
a team may rightly wait for another one longer than a collective does. Files are named by their worker's number among
those of all teams, so that a checkpoint looks the same whoever wrote it, and only meta.json says which team's they are.
Nothing of it is a checkpoint before the rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megarl.training.rng import rng_bytes
from megarl.training.saving import Saving
from megarl.training.sharded_state import snapshot
from megarl.training.shards import CheckpointError, Snapshot

if TYPE_CHECKING:
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout


class Mail(Protocol):
    """The mailbox between the teams of a run: JSON values by name."""

    def post(self, name: str, value: Any) -> None:
        """Leave a value, once."""

    def read(self, name: str) -> Any:
        """Return the value as soon as somebody has left it; fails after a deadline, with the name."""


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that one team writes.

    Attributes:
        workers: number of its first worker, and how many there are.
        layout: sizes of the layout of its engines.
        optimizer_steps, vocab_sizes: optimizer steps and vocab sizes of its engines, by their names.
        nbytes: bytes of all its files.
    """

    workers: tuple[int, int]
    layout: dict[str, int]
    optimizer_steps: dict[str, int]
    vocab_sizes: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, engines: Mapping[str, MegatronEngine], first: int, nbytes: int, layout: Layout) -> Part:
        """Return the part of a team with this layout and these engines, whose first worker is `first`."""
        steps = {name: engine.step for name, engine in engines.items()}
        vocab_sizes = {name: engine.hf_config.vocab_size for name, engine in engines.items()}
        return cls((first, layout.world.size), layout.describe(), steps, vocab_sizes, nbytes)

    def describe(self) -> dict[str, Any]:
        """Return the entries for meta.json."""
        return {"workers": list(self.workers), "layout": self.layout, "engines": list(self.optimizer_steps)}


@dataclass(frozen=True)
class Teams:
    """The teams that write one checkpoint, as one of them sees them.

    Attributes:
        name: name of this team.
        first: number of its first worker; 0 in the team that leads.
        mail: between the teams.
        deadline_s: seconds that the leading team waits for another one's files that do not grow.
        others: in the leading team, the other teams with a part.
    """

    name: str
    first: int
    mail: Mail
    deadline_s: float
    others: tuple[str, ...] = ()

    def announce(self, step: int, tag: str | None) -> None:
        """Announce that the checkpoint of `step` is written under `tag`; None: there is none. One rank calls this."""
        self.mail.post(f"checkpoint/{step}", None if tag is None else {"tag": tag})

    def announced(self, step: int) -> str | None:
        """Return the tag that the leading team announced; None: there is no checkpoint."""
        found = self.mail.read(f"checkpoint/{step}")
        return None if found is None else found["tag"]

    def parts(self, step: int) -> dict[str, Part]:
        """Return the parts of the other teams, by team, once all of them have their copies."""
        return {team: Part(**self.mail.read(f"checkpoint/{team}/{step}")) for team in self.others}

    def give_folder(self, step: int, problem: str | None, fix: str) -> None:
        """Say that the folder is ready to be written into, or cannot be. One rank calls this."""
        self.mail.post(f"checkpoint_folder/{step}", {"problem": problem, "fix": fix})

    def give_part(self, step: int, part: Part) -> None:
        """Say that all of this team's part is copied. One rank calls this."""
        self.mail.post(f"checkpoint/{self.name}/{step}", asdict(part))

    def folder_given(self, step: int) -> dict[str, Any]:
        """Return the leading team's message about the folder."""
        return self.mail.read(f"checkpoint_folder/{step}")


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

    Returns as soon as everything is copied to host memory, and the folder is there.

    Args:
        root: folder of checkpoints, on a file system that all workers share.
        step: training step that is complete.
        tag: the announced tag.
        engines: those that learn here, by name.
        teams: all teams, as this team sees them.
        layout: layout of this team.
        files: contents by name of what this rank adds to the folder; no other rank gives the same name.

    Raises:
        CheckpointError: on every rank of every team alike: the disk is too full, or the folder cannot be made.
    """
    shard, contents = own_files(engines, tag, step, teams.first + layout.rank)
    contents |= files
    folder, total = folder_of(root, step, tag), sum(layout.world.all_gather_json(size_of(shard, contents)))
    if layout.rank == 0:
        teams.give_part(step, Part.of(engines, teams.first, total, layout))
    answer = teams.folder_given(step)
    refuse_folder(folder, answer["problem"], answer["fix"])
    return Saving(folder, shard, contents, None, answer["fix"], layout.world, first=teams.first)


def folder_of(root: Path, step: int, tag: str) -> Path:
    """Return the folder in which a checkpoint is written before its rename."""
    return root / f"step_{step}.tmp-{tag}"


def own_files(
    engines: Mapping[str, MegatronEngine], tag: str, step: int, number: int
) -> tuple[Snapshot, dict[str, bytes]]:
    """Return the snapshot of the engines of worker `number`, and its random states."""
    return snapshot(engines, {"tag": tag, "step": step}), {rng_name(number): rng_bytes()}


def rng_name(number: int) -> str:
    """Return the file of a worker's random states."""
    return f"rng_{number}.safetensors"


def size_of(shard: Snapshot, contents: Mapping[str, bytes]) -> int:
    """Return the bytes that a rank writes."""
    return shard.nbytes + sum(map(len, contents.values()))


def refuse_folder(folder: Path, problem: str | None, fix: str) -> None:
    """Raise CheckpointError when there is a problem."""
    if problem:
        raise CheckpointError("the checkpoint cannot be written", where=str(folder), found=problem, fix=fix)
