"""Files of models that do not learn: kept, read again at every start, and the same after every resume.

    start     sizes and checksums of all files that are read   -> `frozen` in the state.json of every checkpoint
    resume    the same files, by these                         -> a run goes on with the same reference and teacher

A file is read once by the ranks of each machine together, before the model is loaded, so that it comes from memory
then. An older version's checkpoint notes nothing: what is there when the run resumes is recorded from then on.

The reference is made once, where RL starts. Where the run keeps it itself and its files are damaged or gone, it is made
again from the policy's initial weights, and is used if its files then have the same checksums.
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
_ORIGIN = "origin.json"  # in the place of a model: where it is
_NAMED, _INITIAL = "reference.path", "model.path"  # keys that name a reference that the run does not keep
SHARED_BASE = "model.lora"  # the reference is the actor without its adapters


class ReferencePlace(NamedTuple):
    """Where the weights of a reference are: a folder or a name on the hub, and the key of the recipe that names it
    (empty: the run keeps them)."""

    path: str
    key: str


def keep_reference(c: RankState, *, resumed_from: Path | None, begun: bool) -> ReferencePlace:
    """Find the weights of the reference, keep them for later resumes, and return where they are now.

    Collective over the actor's team.

    They are `reference.path`, else the actor's at the start of RL: with adapters that change nothing yet, its own with
    adapters off. Others are kept in the run folder, because a resumed run starts from a later actor; where they are
    those of `model.path`, that path is kept instead. A run that resumes from a checkpoint of another one takes that
    one's. What is kept lies in a place of its own until `take_up_reference`: the start may still be refused.

    Args:
        resumed_from: RUN_DIR/checkpoints/step_N; None: no resume.
        begun: it is of a step of RL; the actor of step 0 is where RL starts.

    Raises:
        ConfigError: the run of `resumed_from` has kept none, or what it has kept is damaged and cannot be made again.
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
    """Tell whether the reference is the actor without its adapters. Collective over the actor's team.

    That is so where RL starts with adapters that change nothing, in the team that has both. A run that goes on has it
    as it had it before.

    Raises:
        ConfigError: it had it so, and has the reference in another team now.
    """
    if c.config.model.lora is None:  # which is fixed in a run
        return False
    together = c.team.placement.of_role(Role.REFERENCE) == c.team.plan
    if resumed_from is not None:
        recorded = frozen_in(resumed_from).get("reference")
        if recorded is None or recorded.key != SHARED_BASE:
            return False
        if together:
            return True
        raise ConfigError(
            "the reference of this run is the actor without its adapters, which another team does not have",
            where="placement",
            found="the reference in a team of its own",
            allowed="the reference in the actor's team",
            fix=f"place it there, or set {_NAMED}={c.config.model.path or 'the folder of the base model'}",
        )
    if not together:
        return False
    largest = max(c.layout.world.all_gather_json(largest_up(c.actor.chunks)))
    return not largest


def _note_origin(c: RankState, origin: str) -> None:
    if c.layout.rank == 0:
        folder = c.run_dir / NEXT_REFERENCE
        folder.mkdir()
        write_atomically(folder / _ORIGIN, json.dumps({"path": origin}))


def _kept(c: RankState, checkpoint: Path) -> ReferencePlace:
    """Keep the reference of the run that wrote `checkpoint` for this one, too; errors as in `keep_reference`."""
    recorded = frozen_in(checkpoint).get("reference")
    if recorded is not None and recorded.key == _INITIAL:  # the checkpoint tells all that the folder does
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
            return _made_again(c, checkpoint, folder, recorded, lines)
    kept = kept_reference(checkpoint)
    # A run that goes on has it in its place.
    if checkpoint.resolve().parent != (c.run_dir / "checkpoints").resolve() and c.layout.rank == 0:
        with phase("keep_reference"), keep_beating():
            shutil.copytree(kept, c.run_dir / NEXT_REFERENCE)
    origin = _origin(kept)
    return ReferencePlace(str(kept), "") if origin is None else ReferencePlace(origin, _INITIAL)


def _made_again(c: RankState, checkpoint: Path, folder: Path, recorded: Frozen, lines: list[str]) -> ReferencePlace:
    """Make the reference again in place of the damaged one in `folder`, from the actor, which is not trained yet.

    Collective over the actor's team.

    Raises:
        ConfigError: RL began with other weights: after a cold start, or the recipe names another model now.
    """
    following, why = c.run_dir / NEXT_REFERENCE, "RL began after a cold start"
    if not c.config.sft.steps:
        if c.layout.rank == 0:
            print(
                f"WARNING: the reference in {folder} is damaged: {few(lines)}; it is made again from the policy's "
                "initial weights",
                flush=True,
            )
        _export_actor(c, following)
        others = changed_files(following, recorded.files, c.layout.world)
        if not others:
            return ReferencePlace(str(following), "")
        why = f"the policy's initial weights are other ones now ({few(others)})"
    first = f"trainer.resume={checkpoint.with_name('step_0')} begins RL again, "
    raise ConfigError(
        f"the reference model of this run is damaged, and cannot be made again: {why}",
        where=str(folder),
        found=few(lines),
        allowed="the files that were written when RL began; their checksums are in the checkpoint",
        fix=f"copy it from a backup, or set {_NAMED} to the model that RL began with; "
        f"{first if 0 in steps_in(checkpoint.parent) else ''}trainer.resume=never "
        "begins with the whole run again",
    )


def keep_start(c: RankState) -> str:
    """Write what RL starts from, for a model of another team that begins with it. Collective over the actor's team."""
    folder = c.run_dir / NEXT_REFERENCE
    # One rank looks for all: on a shared file system two ranks may see different folders.
    there = (folder / "config.json").is_file() if c.layout.rank == 0 else None
    if not c.layout.world.broadcast_json(there):  # else the reference is the same model
        folder = c.run_dir / START_WEIGHTS
        _export_actor(c, folder)
    return str(folder)


def _export_actor(c: RankState, folder: Path) -> None:
    with phase("keep_reference"), c.offload.phase("load"):
        world, source = c.layout.world, c.config.model.path
        export_weights(c.actor.chunks, folder, c.hf_config, c.tokenizer, world=world, source=source)


def now_at(run_dir: Path, source: str) -> str:
    """Return where the weights at `source` (`keep_reference`) are by now: an accepted start has taken them up."""
    taken_up = Path(source) == run_dir / NEXT_REFERENCE and not _is_model(Path(source))
    return str(run_dir / FOLDER) if taken_up else source


def drop_refused_start(c: RankState) -> None:
    """Forget what a start that was refused has made. Not collective: of a start that fails, some ranks may be gone.

    Rank 0 does it, as it also takes it up: no rank removes what another one has accepted.
    """
    if c.layout.rank == 0 and c.team.leads:
        drop_start(c.run_dir)


def take_up_reference(run_dir: Path) -> None:
    """Make the reference of an accepted start that of the run from now on. One rank calls this."""
    shutil.rmtree(run_dir / START_WEIGHTS, ignore_errors=True)
    if _is_model(run_dir / NEXT_REFERENCE):
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
        (run_dir / NEXT_REFERENCE).rename(run_dir / FOLDER)


def unchanged_model(config: RunConfig) -> str | None:
    """Return the model that RL starts from, where that is `model.path` as it is on disk; None after a cold start, for a
    fresh model, with keys of its configuration changed, and with adapters to start from."""
    model = config.model
    if model.lora is not None and model.lora.path is not None:
        return None
    if model.path is None or model.hf_config is not None or config.sft.steps:
        return None
    return str(Path(model.path).resolve()) if Path(model.path).is_dir() else model.path


def _origin(folder: Path) -> str | None:
    """Return where the model is that a reference folder stands for; None where the folder holds it."""
    file = folder / _ORIGIN
    return str(json.loads(file.read_text())["path"]) if file.is_file() else None


def find_kept(checkpoint: Path) -> Path | None:
    """Find the folder of the reference that the run of a checkpoint (RUN_DIR/checkpoints/step_N) has kept."""
    checkpoints = checkpoint.resolve().parent
    places = [*_set_aside_since(checkpoints), checkpoints.parent]
    return next((f for place in places if _is_model(f := place / FOLDER)), None)


def kept_reference(checkpoint: Path) -> Path:
    """Find it as `find_kept` does, where there has to be one.

    Raises:
        ConfigError: there is none.
    """
    folder = find_kept(checkpoint)
    if folder is None:
        raise ConfigError(
            "the run of this checkpoint has kept no reference model, and a KL term needs one",
            where="trainer.resume",
            found=str(checkpoint),
            allowed=f"a checkpoint of a run that has {FOLDER}/ beside checkpoints/",
            fix=f"set {_NAMED} to the Hugging Face folder of the model that RL started from",
        )
    return folder


def put_aside(run_dir: Path, aside: Path) -> None:
    """Move the reference of a run that starts again to the checkpoints moved to `aside`: they belong to it."""
    if _is_model(run_dir / FOLDER):
        (run_dir / FOLDER).rename(aside / FOLDER)


def _set_aside_since(checkpoints: Path) -> list[Path]:
    """`checkpoints` and, when it is a folder NAME.old-K, those that the run set aside after it, in order.

    A run that only goes back to an earlier step keeps its reference, and moves it with the checkpoints it leaves later.
    """
    name, _, number = checkpoints.name.rpartition(".old-")
    later = range(int(number) + 1, len(list(checkpoints.parent.glob(f"{name}.old-*"))) + 1) if name else ()
    return [checkpoints, *(checkpoints.with_name(f"{name}.old-{k}") for k in later)]


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", _ORIGIN))


def keep_run_start(c: RankState, resumed_at: int | None, source: Path | None) -> RunStart:
    """Keep what RL starts from for the models that begin with it. Collective over the actor's team.

    Args:
        c: this rank's state, whose actor is where RL starts, unless the run resumes later.
        resumed_at: step of the checkpoint that it resumes from.
        source: that checkpoint.

    Raises:
        ConfigError: as `keep_reference`.
    """
    drop_refused_start(c)  # of a process that was killed
    c.layout.world.barrier()
    placement, begun = c.team.placement, bool(resumed_at)
    reference, key, critic = None, "", None
    if placement.of_role(Role.REFERENCE) is not None:
        reference, key = keep_reference(c, resumed_from=source, begun=begun)
    home = placement.of_role(Role.CRITIC)
    if home is not None and home != c.team.plan and c.config.critic.path is None and not begun:
        critic = (unchanged_model(c.config) if source is None else None) or keep_start(c)
    return RunStart(resumed_at, None if source is None else str(source), reference, critic, key)


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
    told: Mapping[str, Any] = {} if checkpoint is None else read_state(Path(checkpoint)).get("frozen", {})
    return {name: Frozen(**model) for name, model in told.items()}


def record_frozen(c: RankState, name: str, key: str, source: str, checkpoint: str | None) -> None:
    """Note the files of a frozen model for the run's checkpoints (`RankState.frozen`). Collective over its team.

    Args:
        key: of the recipe that names it; empty: the run keeps it in its folder.
        source: a folder, or a name on the hub.
        checkpoint: that the run goes on from; None: it begins.

    Raises:
        ConfigError: that checkpoint's run began with other files of this place, or machines have different ones.
    """
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


def record_base(c: RankState, role: str, checkpoint: Path | str | None) -> None:
    """Note the files of the base model that a role's adapters are for, as `record_frozen` does those of other models;
    nothing without adapters, or for a base model that is drawn from `model.init_seed`. Collective over its team.

    Wherever they lie now, the files must be those that the run began with.

    Raises:
        ConfigError: they are others.
    """
    own = c.config.critic.path if role == CRITIC else None
    key, path = ("model.path", c.config.model.path) if own is None else ("critic.path", own)
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
    """Check that the actor's adapters in a checkpoint are for the model at `path` as its files are now.

    Raises:
        ConfigError: they are for other files.
    """
    before = frozen_in(checkpoint).get(f"{ACTOR} base")
    if before is not None and path is not None:
        _refuse_other_base(before, path, "model.path", world)


def _refuse_other_base(before: Frozen, path: str, key: str, world: WorkerGroup) -> None:
    folder = resolve_folder(path, key)
    if lines := changed_files(folder, before.files, world):
        raise _other_files(key, folder, lines)


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
    projector = projector_file(folder) if raw.get("model_type") == VLA_TYPE else None
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
