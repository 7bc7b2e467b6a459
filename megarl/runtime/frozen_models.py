"""Checksums of the files of frozen models, so that a resumed run uses the same reference, teacher and reward model.

    start     record sizes and checksums of all files read     -> `frozen` in the state.json of every checkpoint
    resume    compare the files with the recorded checksums    -> same model, or an error

The ranks of each machine read a file together before the model is loaded, which then finds it in the page cache. A
checkpoint of an older version has no checksums: the files present at the resume are recorded.

The reference is written once, where RL starts. If the run keeps it in its own folder and the files are damaged or gone,
it is written again from the policy's initial weights, and used if the new files have the recorded checksums.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.artifacts.checkpoint_files import INDEX, read_config, weight_files
from megarl.artifacts.run_folder import NEXT_REFERENCE, START_WEIGHTS, drop_start
from megarl.artifacts.trained import steps_in
from megarl.artifacts.vla_folder import VLA_TYPE, projector_file
from megarl.dag.messages import RunStart
from megarl.dag.stage import Role
from megarl.models.lora import largest_up
from megarl.models.weights import export_weights
from megarl.models.weights.files import resolve_folder
from megarl.system.errors import ConfigError
from megarl.system.offload_schedule import ACTOR, CRITIC
from megarl.system.processes import write_atomically
from megarl.system.tracing import keep_beating, phase
from megarl.training.checkpoint import read_state
from megarl.training.checksums import FileChecksum, checksums_of, faults, few

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.runtime.rank_state import RankState
    from megarl.system.comm import WorkerGroup


FOLDER = "reference"
_ORIGIN = "origin.json"  # file with the path of the reference's model, if the model is not in the reference's folder
_NAMED, _INITIAL = "reference.path", "model.path"  # recipe keys that may name a reference outside the run folder
SHARED_BASE = "model.lora"  # the reference is the actor without its adapters


class ReferencePlace(NamedTuple):
    """The folder or hub name of the reference's weights, and the recipe key that names it (empty: the run wrote it)."""

    path: str
    key: str


def keep_reference(c: RankState, *, resumed_from: Path | None, begun: bool) -> ReferencePlace:
    """Find the reference's weights, keep them for later resumes, and return their place.

    Collective over the actor's team. The reference is `reference.path`, else the actor at the start of RL. In this
    case it is the actor with adapters off if the adapters change nothing yet, `model.path` if its weights are
    unchanged, else a copy in the run folder, because a resumed run starts from a later actor. A run that resumes from
    another run's checkpoint uses that run's reference. The copy lies in a temporary folder until `install_reference`,
    because later checks may still reject the start.

    Args:
        resumed_from: RUN_DIR/checkpoints/step_N; None: no resume.
        begun: whether the checkpoint is of step 1 or later; at step 0 its actor is still the start of RL.

    Raises:
        ConfigError: the run of `resumed_from` has no reference, or its reference is damaged and cannot be rebuilt.
    """
    if c.config.reference.path is not None:
        return ReferencePlace(c.config.reference.path, _NAMED)
    if _is_base(c, resumed_from if begun else None):
        return ReferencePlace("", SHARED_BASE)
    if resumed_from is not None and begun:
        return _kept(c, resumed_from)
    origin = unchanged_model(c.config) if resumed_from is None else None
    if origin is None:
        following = c.run_dir / NEXT_REFERENCE
        _export_actor(c, following)
        return ReferencePlace(str(following), "")
    _note_origin(c, origin)
    return ReferencePlace(origin, _INITIAL)


def _is_base(c: RankState, resumed_from: Path | None) -> bool:
    """Return whether the reference is the actor with adapters off. Collective over the actor's team.

    This is so if RL starts with adapters that change nothing and one team holds both. A resumed run keeps the choice
    of its first start.

    Raises:
        ConfigError: the checkpoint's reference is the actor with adapters off, but now another team holds it.
    """
    if c.config.model.lora is None:  # no need to read the checkpoint: a resumed run cannot change model.lora
        return False
    together = c.team.placement.of_role(Role.REFERENCE) == c.team.plan
    if resumed_from is not None:
        recorded = frozen_in(resumed_from).get("reference")
        if recorded is None or recorded.key != SHARED_BASE:
            return False
        if together:
            return True
        raise ConfigError(
            "this run's reference is the actor without its adapters, so it cannot be in another team",
            where="placement",
            found="the reference in a team of its own",
            allowed="the reference in the actor's team",
            fix="move the reference to the actor's team, or set "
            f"{_NAMED}={c.config.model.path or 'the folder of the base model'}",
        )
    if not together:
        return False
    return not max(c.layout.world.all_gather_json(largest_up(c.actor.chunks)))


def _note_origin(c: RankState, origin: str) -> None:
    if c.layout.rank == 0:
        folder = c.run_dir / NEXT_REFERENCE
        folder.mkdir()
        write_atomically(folder / _ORIGIN, json.dumps({"path": origin}))


def _kept(c: RankState, checkpoint: Path) -> ReferencePlace:
    """Return the reference of the run that wrote `checkpoint`; another run's weights are copied into this run's folder.

    Raises the errors of `keep_reference`.
    """
    recorded = frozen_in(checkpoint).get("reference")
    if recorded is not None and recorded.key == _INITIAL:  # model.path is the reference: nothing to copy
        _note_origin(c, recorded.path)
        return ReferencePlace(recorded.path, _INITIAL)
    folder = find_kept(checkpoint)
    if recorded is not None and not recorded.key:
        missing = None if folder is not None else [f"there is no {FOLDER}/ with a model"]
        folder = folder or checkpoint.resolve().parents[1] / FOLDER
        with phase("verify_reference"):
            lines = missing or changed_files(folder, recorded.files, c.layout.world)
        c.frozen["reference"] = asdict(recorded)
        if lines:
            return _rewritten(c, checkpoint, folder, recorded, lines)
    folder = kept_reference(checkpoint)
    # This run's folder holds its own reference, so that of another run is copied.
    if checkpoint.resolve().parent != (c.run_dir / "checkpoints").resolve() and c.layout.rank == 0:
        with phase("keep_reference"), keep_beating():
            shutil.copytree(folder, c.run_dir / NEXT_REFERENCE)
    if not (folder / _ORIGIN).is_file():
        return ReferencePlace(str(folder), "")
    return ReferencePlace(str(json.loads((folder / _ORIGIN).read_text())["path"]), _INITIAL)


def _rewritten(c: RankState, checkpoint: Path, folder: Path, recorded: Frozen, lines: list[str]) -> ReferencePlace:
    """Write the reference again, which is damaged in `folder`, from the actor's initial weights, and return its place.

    Call this before loading the checkpoint.

    Collective over the actor's team.

    Raises:
        ConfigError: RL began with other weights, because there was a cold start or the recipe now names another model.
    """
    following, why = c.run_dir / NEXT_REFERENCE, "RL began after a cold start"
    if not c.config.sft.steps:
        if c.layout.rank == 0:
            print(
                f"WARNING: the reference in {folder} is damaged: {few(lines)}; it is written again from the "
                "policy's initial weights",
                flush=True,
            )
        _export_actor(c, following)
        others = changed_files(following, recorded.files, c.layout.world)
        if not others:
            return ReferencePlace(str(following), "")
        why = f"the policy's initial weights have changed ({few(others)})"
    first = f"trainer.resume={checkpoint.with_name('step_0')} restarts RL, "
    raise ConfigError(
        f"the reference model of this run is damaged, and cannot be written again: {why}",
        where=str(folder),
        found=few(lines),
        allowed="the files written when RL began; the checkpoint has their checksums",
        fix=f"copy it from a backup, or set {_NAMED} to the model that RL began with; "
        f"{first if 0 in steps_in(checkpoint.parent) else ''}trainer.resume=never "
        "starts the whole run from the beginning",
    )


def keep_start(c: RankState) -> str:
    """Write the actor at the start of RL for another team's critic, and return the folder. Collective over the team."""
    folder = c.run_dir / NEXT_REFERENCE
    # Only rank 0 checks: on a shared file system two ranks may see different folders.
    exists = (folder / "config.json").is_file() if c.layout.rank == 0 else None
    # If `keep_reference` has just exported a reference model, it has the same weights: the actor's at the start of RL.
    if not c.layout.world.broadcast_json(exists):
        folder = c.run_dir / START_WEIGHTS
        _export_actor(c, folder)
    return str(folder)


def _export_actor(c: RankState, folder: Path) -> None:
    with phase("keep_reference"), c.offload.phase("load"):
        world, source = c.layout.world, c.config.model.path
        export_weights(c.actor.chunks, folder, c.hf_config, c.tokenizer, world=world, source=source)


def now_at(run_dir: Path, source: str) -> str:
    """Return where the weights are that `keep_reference` wrote to `source`; `install_reference` may have moved them."""
    taken_up = Path(source) == run_dir / NEXT_REFERENCE and not _is_model(Path(source))
    return str(run_dir / FOLDER) if taken_up else source


def drop_refused_start(c: RankState) -> None:
    """Remove the files that a run has written whose checks failed at its start. Not collective: ranks may be gone.

    Only rank 0 removes them, because rank 0 also moves them to their final folder after the last check.
    """
    if c.layout.rank == 0 and c.team.leads:
        drop_start(c.run_dir)


def install_reference(run_dir: Path) -> None:
    """Move the reference model that `keep_reference` has written to its final folder in the run folder.

    One rank calls this, after all checks that may reject the start of the run.
    """
    shutil.rmtree(run_dir / START_WEIGHTS, ignore_errors=True)
    if _is_model(run_dir / NEXT_REFERENCE):
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
        (run_dir / NEXT_REFERENCE).rename(run_dir / FOLDER)


def unchanged_model(config: RunConfig) -> str | None:
    """Return the absolute `model.path` if RL starts from exactly this model; None after a cold start, for a randomly
    initialized model, with `model.hf_config` overrides, and with adapters from `model.lora.path`."""
    model = config.model
    if model.lora is not None and model.lora.path is not None:
        return None
    if model.path is None or model.hf_config is not None or config.sft.steps:
        return None
    return str(Path(model.path).resolve()) if Path(model.path).is_dir() else model.path


def find_kept(checkpoint: Path) -> Path | None:
    """Return the reference folder of the run that wrote a checkpoint (RUN_DIR/checkpoints/step_N); None if it has none.

    A run that continues from an earlier step keeps its reference in its folder. So the reference of checkpoints in
    NAME.old-K may be in a folder that was renamed later: NAME.old-(K+1), ...
    """
    checkpoints = checkpoint.resolve().parent
    name, _, number = checkpoints.name.rpartition(".old-")
    later = range(int(number) + 1, len(list(checkpoints.parent.glob(f"{name}.old-*"))) + 1) if name else ()
    places = [checkpoints, *(checkpoints.with_name(f"{name}.old-{k}") for k in later), checkpoints.parent]
    return next((f for place in places if _is_model(f := place / FOLDER)), None)


def kept_reference(checkpoint: Path) -> Path:
    """Return the reference folder of the run that wrote a checkpoint.

    Raises:
        ConfigError: the run has no reference.
    """
    folder = find_kept(checkpoint)
    if folder is None:
        raise ConfigError(
            "the run of this checkpoint has no reference model, which this recipe needs",
            where="trainer.resume",
            found=str(checkpoint),
            allowed=f"a checkpoint of a run that has {FOLDER}/ beside checkpoints/",
            fix=f"set {_NAMED} to the Hugging Face folder of the model that RL started from",
        )
    return folder


def set_aside_reference(run_dir: Path, aside: Path) -> None:
    """Move the reference model's weights of a run that starts over into the folder `aside` of its old checkpoints."""
    if _is_model(run_dir / FOLDER):
        (run_dir / FOLDER).rename(aside / FOLDER)


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", _ORIGIN))


def keep_run_start(c: RankState, resumed_at: int | None, source: Path | None) -> RunStart:
    """Keep the weights from which the reference and models of other teams start, and return their places. Collective
    over the team.

    Args:
        c: this rank's state; without `resumed_at` its actor has the weights from which RL starts.
        resumed_at: step of the checkpoint that the run resumes from; None: no resume.
        source: folder of that checkpoint.

    Raises:
        ConfigError: the run of `source` has no reference, or its reference is damaged and cannot be rebuilt.
    """
    drop_refused_start(c)  # a killed process may have left files
    c.layout.world.barrier()
    placement, begun = c.team.placement, bool(resumed_at)
    reference, key, initial = None, "", None
    if placement.of_role(Role.REFERENCE) is not None:
        reference, key = keep_reference(c, resumed_from=source, begun=begun)
    others = {Role.CRITIC: c.config.critic} | {Role(name): model for name, model in c.config.models.items()}
    homes = [placement.of_role(role) for role, section in others.items() if section.path is None]
    if any(home not in (None, c.team.plan) for home in homes) and not begun:
        initial = (unchanged_model(c.config) if source is None else None) or keep_start(c)
    return RunStart(resumed_at, None if source is None else str(source), reference, initial, key)


@dataclass(frozen=True)
class Frozen:
    """The path and checksums of a frozen model at the start of the run."""

    key: str  # recipe key that names the model; empty: it is in the run folder
    path: str  # value of the recipe key; empty if `key` is empty
    files: Mapping[str, FileChecksum]  # checksums of all files of the model that are read, by name


def frozen_in(checkpoint: Path | str | None) -> dict[str, Frozen]:
    """Return the frozen models recorded in a checkpoint, by name; empty if an older version wrote it."""
    models: Mapping[str, Any] = {} if checkpoint is None else read_state(Path(checkpoint)).get("frozen", {})
    return {name: Frozen(**model) for name, model in models.items()}


def record_frozen(c: RankState, name: str, key: str, source: str, checkpoint: str | None) -> None:
    """Record the checksums of a frozen model for the run's checkpoints (`RankState.frozen`). Collective over its team.

    Args:
        name: name under which the checksums are recorded.
        key: recipe key that names the model; empty: it is in the run folder.
        source: a folder, or a name on the hub.
        checkpoint: the checkpoint to resume from; None: the run starts from the beginning.

    Raises:
        ConfigError: the files differ from those recorded in the checkpoint, or between machines.
    """
    if name in c.frozen:  # already checked by keep_reference
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


def record_base(c: RankState, role: str, checkpoint: Path | str | None) -> None:
    """Record the checksums of the base model of a role's adapters for the run's checkpoints. Collective over its team.

    Without adapters, or with a base model initialized from `model.init_seed`, nothing is recorded. The base model may
    have moved to another path, but its files must have the same content as at the start of the run.

    Raises:
        ConfigError: the files differ from those recorded in the checkpoint.
    """
    critic = c.config.critic.path if role == CRITIC else None
    key, path = ("model.path", c.config.model.path) if critic is None else ("critic.path", critic)
    if c.config.model.lora is None or path is None:
        return
    name = f"{role} base"
    before = frozen_in(checkpoint).get(name)
    if before is None:
        record_frozen(c, name, key, path, None)
        return
    with phase("verify_base"):
        _refuse_other_base(before, path, key, c.layout.world)
    c.frozen[name] = asdict(before)


def check_base(checkpoint: Path, path: str | None, world: WorkerGroup) -> None:
    """Check that the model at `path` is the base model of the actor's adapters in a checkpoint.

    Raises:
        ConfigError: the checksums of its files differ from those in the checkpoint.
    """
    before = frozen_in(checkpoint).get(f"{ACTOR} base")
    if before is not None and path is not None:
        _refuse_other_base(before, path, "model.path", world)


def _refuse_other_base(before: Frozen, path: str, key: str, world: WorkerGroup) -> None:
    folder = resolve_folder(path, key)
    if lines := changed_files(folder, before.files, world):
        raise _other_files(key, folder, lines)


def changed_files(folder: Path, files: Mapping[str, FileChecksum], world: WorkerGroup) -> list[str]:
    """List how the model in `folder` differs from the recorded checksums `files`, one line per file, on all ranks.

    Collective over `world`.
    """
    lines = faults(folder, files, world, per_machine=True)
    if lines:
        return lines
    more = [f"{name} is new" for name in _files_read(folder) if name not in files]
    return list(dict.fromkeys(line for part in world.all_gather_json(more) for line in part))


def _checksums(folder: Path, key: str, world: WorkerGroup) -> dict[str, FileChecksum]:
    by_file = checksums_of(folder, _files_read(folder), world)
    if differing := [name for name, checksums in by_file.items() if len(checksums) > 1]:
        raise ConfigError(
            "a model's files differ between the machines of this run",
            where=key or str(folder),
            found=f"{folder}: {few(differing)}",
            allowed="the same files on every machine",
            fix="copy or download the model again on all machines, or name a folder that they share",
        )
    return {name: list(checksum) for name, (checksum,) in by_file.items()}


def _files_read(folder: Path) -> list[str]:
    """Return the names of all files of a model that determine its output."""
    raw = read_config(folder)
    files = weight_files(folder, raw)
    projector = projector_file(folder) if raw.get("model_type") == VLA_TYPE else None
    beside = [file for file in (folder / "config.json", folder / INDEX) if file.is_file()]
    return sorted({str(file.relative_to(folder)) for file in (*files, *beside, *([projector] if projector else ()))})


def _other_files(where: str, folder: Path, lines: list[str]) -> ConfigError:
    return ConfigError(
        "the model's files have changed since the run began",
        where=where,
        found=f"{folder}: {few(lines)}",
        allowed="the files whose checksums are in the checkpoint",
        fix="copy or download them again; to use another model on purpose, give it a folder of another name; "
        "trainer.resume=never starts from the beginning",
    )
