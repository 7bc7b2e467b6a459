"""Models that do not learn and are read again at every start: their files are those that the run began with.

    start     sizes and checksums of all files that are read   -> `frozen` in the state.json of every checkpoint
    resume    the same files, by these                         -> a run goes on with the same reference and teacher

A file is read once by the ranks of each machine together, before the model is loaded, so that it comes from memory
then. An older version's checkpoint notes nothing: what is there when the run resumes is recorded from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.checkpoint_files import INDEX, read_config, weight_files
from megarl.artifacts.robot_policy import ROBOT_POLICY, projector_file
from megarl.errors import ConfigError
from megarl.tracing import phase
from megarl.training.checksums import FileChecksum, checksums_of, faults, few

if TYPE_CHECKING:
    from megarl.comm import WorkerGroup
    from megarl.runtime.controller import Controller


@dataclass(frozen=True)
class Frozen:
    """A frozen model as a run began with it.

    Attributes:
        key: of the recipe that names it; empty: the run keeps it in its folder.
        path: what is named there; empty with `key`.
        files: checksums of all files that are read of it, by name.
    """

    key: str
    path: str
    files: Mapping[str, FileChecksum]


def frozen_in(checkpoint: Path | str | None) -> dict[str, Frozen]:
    """Those of the run that wrote a checkpoint, by their names; none where an older version wrote it."""
    from megarl.training.checkpoint import read_state

    told: Mapping[str, Any] = {} if checkpoint is None else read_state(Path(checkpoint)).get("frozen", {})
    return {name: Frozen(**model) for name, model in told.items()}


def record_frozen(c: Controller, name: str, key: str, source: str, checkpoint: str | None) -> None:
    """Note the files of a frozen model for the run's checkpoints (`Controller.frozen`). Collective over its team.

    Args:
        c: of its team.
        name: of the model.
        key: of the recipe that names it; empty: the run keeps it in its folder.
        source: a folder, or a name on the hub.
        checkpoint: that the run goes on from; None: it begins.

    Raises:
        ConfigError: that checkpoint's run began with other files of this place, or machines have different ones.
    """
    from megarl.models.weights.files import resolve_folder

    if name in c.frozen:  # read where it was found
        return
    path = source if key else ""
    with phase(f"verify_{name}"):
        folder = resolve_folder(source, key)
        before = frozen_in(checkpoint).get(name)
        if before is None or (before.key, before.path) != (key, path):
            model = Frozen(key, path, _checksums(folder, key, c.layout.world))
        elif lines := changed_files(folder, before.files, c.layout.world):
            raise _other_files(key or str(folder), folder, lines)
        else:
            model = before
    c.frozen[name] = asdict(model)


def changed_files(folder: Path, files: Mapping[str, FileChecksum], world: WorkerGroup) -> list[str]:
    """Differences of the model in `folder` from one with these `files`; equal on all ranks. Collective over `world`."""
    lines = faults(folder, files, world, per_machine=True)
    if lines:
        return lines
    more = [f"{name} is there now and was not read before" for name in _files_read(folder) if name not in files]
    return list(dict.fromkeys(line for part in world.all_gather_json(more) for line in part))


def _checksums(folder: Path, key: str, world: WorkerGroup) -> dict[str, FileChecksum]:
    found = checksums_of(folder, _files_read(folder), world)
    if other := [name for name, checksums in found.items() if len(checksums) > 1]:
        raise ConfigError(
            "the machines of this run have different files of one model",
            where=key or str(folder),
            found=f"{folder}: {few(other)}",
            allowed="the same files on every machine",
            fix="copy or download the model again on all machines, or name a folder that they share",
        )
    return {name: list(checksum) for name, (checksum,) in found.items()}


def _files_read(folder: Path) -> list[str]:
    """Names of all files of a model that decide what it computes."""
    raw = read_config(folder)
    files = weight_files(folder, raw)
    projector = projector_file(folder) if raw.get("model_type") == ROBOT_POLICY else None
    beside = [file for file in (folder / "config.json", folder / INDEX) if file.is_file()]
    return sorted({str(file.relative_to(folder)) for file in (*files, *beside, *([projector] if projector else ()))})


def _other_files(where: str, folder: Path, lines: list[str]) -> ConfigError:
    return ConfigError(
        "the files of this model are not those that the run began with",
        where=where,
        found=f"{folder}: {few(lines)}",
        allowed="the files whose checksums are in the checkpoint",
        fix="copy or download them again; to go on with another model on purpose, give it a folder of another name; "
        "trainer.resume=never begins again",
    )
