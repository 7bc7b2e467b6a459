"""Checkpoints: each is either complete or absent, and a run can resume from the newest one.

    ROOT/step_120.tmp-4f2a/
        rank_K.safetensors      every worker's own part of parameters and optimizer state
        rng_K.safetensors       every worker's random states
        ...                     files that a worker adds (samples for the next step)
        state.json              the trainer's state (loader, controllers), plain JSON
        meta.json               written last, by rank 0: step, layout, version, configuration, checksums, and with
                                several teams which workers wrote which engines
    ROOT/step_120/              the same folder after fsync and rename
    ROOT/best.json              the step that is kept as the best
    ROOT.old-K/                 checkpoints of steps that a run trains again, see `set_aside`

A folder without its final name is never read, and the next save removes it. meta.json lists every other file with its
size and checksum; `verify` finds lost or changed files, with the same result on all ranks. Training continues while a
checkpoint is written (`megarl.training.saving`); several teams write one together
(`megarl.training.multi_team_commit`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import shutil
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megarl
from megarl.artifacts.lock import refuse_if_taken
from megarl.artifacts.trained import best_step, steps_in, steps_of
from megarl.dag.messages import CheckpointFolder, CheckpointTag, PartCopied
from megarl.system.comm import WorkerGroup
from megarl.training.checksums import FileChecksum, faults, few, size_at, text_checksum
from megarl.training.multi_team_commit import Teams, folder_of, own_files, part_of, refuse_folder, rng_name, size_of
from megarl.training.rng import load_rng
from megarl.training.saving import Saving, drop_checksums, shard_name
from megarl.training.sharded_state import load_engines, refuse_foreign, weight_slices, world_of
from megarl.training.shards import CheckpointError, FormatError, Index, label_of, read_index

if TYPE_CHECKING:
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

log = logging.getLogger(__name__)

FORMAT = 4
_META, _STATE, _BEST = "meta.json", "state.json", "best.json"
_SPARE = 64 << 20  # bytes of the disk that a checkpoint leaves free, for logs and metrics


def save(root: Path, step: int, engines: dict[str, MegatronEngine], extra: dict[str, Any], **options: Any) -> Path:
    """Write a checkpoint: call `begin`, wait until it is complete, and return its folder."""
    begin(root, step, engines, extra, **options).wait()
    return root / f"step_{step}"


def begin(
    root: Path,
    step: int,
    engines: dict[str, MegatronEngine],
    extra: dict[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    config: Mapping[str, Any] | None = None,
    keep_last: int = 2,
    best: bool = False,
    kept: bool = True,
    teams: Teams | None = None,
) -> Saving:
    """Start to write `ROOT/step_<step>` with all engines and `extra`; old checkpoints are removed when it is complete.

    Collective over all ranks of this team, which leads the other teams. Returns as soon as everything is copied to
    host memory. The previous checkpoint must be complete.

    Args:
        root: folder of checkpoints, on a file system that all ranks share.
        step: the completed training step.
        engines: engines by name; frozen engines are stored without optimizer.
        extra: JSON values that rank 0 stores and `load` returns.
        files: contents by name of files that this rank adds to the folder; names must differ between ranks.
        config: resolved configuration as plain data, to find what a resumed run changes.
        keep_last: number of newest checkpoints to keep, in addition to the best; only those with `kept` count.
        best: whether this checkpoint is the best so far.
        kept: False for a temporary checkpoint, which is removed when a newer one is complete.
        teams: the other teams that write a part (`multi_team_commit.begin_part`); None: no other team.

    Raises:
        FolderTaken: another attempt uses the run folder that contains `root`.
        CheckpointError: on every rank of every team: the disk is too full, or the folder cannot be created.
    """
    world = (layout := next(iter(engines.values())).layout).world
    refuse_if_taken(root.parent)  # the code below removes half-written checkpoints in this folder
    tag = world.broadcast_json(uuid.uuid4().hex[:8])
    folder = folder_of(root, step, tag)
    if teams is not None and world.rank == 0:
        CheckpointTag(step, tag).post(teams.mail)
    shard, contents = own_files(engines, tag, step, world.rank)
    contents |= files or {}
    if world.rank == 0:
        contents[_STATE] = json.dumps(extra).encode()
    own = sum(world.all_gather_json(size_of(shard, contents)))
    parts = [part_of(engines, "" if teams is None else teams.name, step, 0, own, layout)]
    if teams is not None:
        parts += [PartCopied.read(teams.mail, team, step) for team in teams.others]
    fix = _make_room(root, step)
    total = sum(part.nbytes for part in parts)
    problem = world.broadcast_json(_make_folder(folder, total) if world.rank == 0 else None)
    if teams is not None and world.rank == 0:
        CheckpointFolder(step, problem, fix).post(teams.mail)
    refuse_folder(folder, problem, fix)
    meta = {"format": FORMAT, "megarl": megarl.__version__, "tag": tag, "step": step, "kept": kept}
    meta["config"] = config or {}
    commit = functools.partial(_commit, folder, meta | _facts_of(parts), keep_last, best)
    others = {part.team: range(part.workers[0], sum(part.workers)) for part in parts[1:]}
    deadline_s = 0.0 if teams is None else teams.deadline_s
    return Saving(folder, shard, contents, commit, fix, world, others=others, deadline_s=deadline_s)


def _commit(folder: Path, meta: dict[str, Any], keep_last: int, best: bool, checksums: dict[str, FileChecksum]) -> None:
    """Give the folder its final name after all files are on disk, and remove old checkpoints."""
    root, step = folder.parent, meta["step"]
    # Other machines may have written some of the files: check that this machine sees them whole.
    for name, (size, _) in checksums.items():
        if size_at(folder / name) != size:
            problem = f"the file's size differs from the {size:,} bytes that were written"
            raise OSError(errno.EIO, problem, str(folder / name))
    refuse_if_taken(root.parent)
    whole = {**meta, "files": checksums}
    (folder / _META).write_text(json.dumps({**whole, "checksum": _meta_checksum(whole)}, indent=1))
    _publish(folder, root / f"step_{step}", meta["tag"])
    with contextlib.suppress(OSError):  # files with the ranks' checksums, which are in meta.json now, may stay
        drop_checksums(root / f"step_{step}")
    if best:
        _note_best(root, step)
    try:
        _prune(root, keep_last)
    except OSError as error:  # the new checkpoint is complete anyway
        log.warning("old checkpoints in %s cannot be removed: %s", root, error)


def _facts_of(parts: Sequence[PartCopied]) -> dict[str, Any]:
    """Return the entries of meta.json for the engines and, with several teams, for the team that wrote each engine."""
    facts: dict[str, Any] = {
        "layout": parts[0].layout,
        "optimizer_steps": {name: step for part in parts for name, step in part.optimizer_steps.items()},
        "vocab_sizes": {name: size for part in parts for name, size in part.vocab_sizes.items()},
    }
    if len(parts) == 1:
        return facts
    wrote = {p.team: {"workers": p.workers, "layout": p.layout, "engines": list(p.optimizer_steps)} for p in parts}
    return facts | {"teams": wrote}


def _make_folder(folder: Path, nbytes: int) -> str | None:
    """Create the empty `folder` for a checkpoint of `nbytes`; return the problem, if any."""
    try:
        clean(folder.parent)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if free >= nbytes + _SPARE:
            return None
        folder.rmdir()
        size, spare, room = (f"{count / 1e9:.3g} GB" for count in (nbytes, _SPARE, free))
        return f"the checkpoint needs {size} and {spare} must stay free for logs, but {room} are free"
    except OSError as error:
        return f"{error.strerror or error} ({error.filename})"


def _make_room(root: Path, step: int) -> str:
    steps = [saved for saved in steps_in(root) if saved != step]
    start = f"the checkpoint of step {steps[-1]}" if steps else "the beginning: there is no checkpoint yet"
    return (
        "free space there (trainer.keep_last sets how many checkpoints are kept, tracking.dir where runs are), then "
        f"run the same command with --run-dir {root.parent}: it continues from {start}"
    )


def load(
    folder: Path, engines: dict[str, MegatronEngine], meta: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """Load `engines` from a checkpoint of any layout; RNG states are restored if the layout is the same. Collective.

    Args:
        folder: the checkpoint.
        engines: engines by the names under which they were saved.
        meta: the result of `verify`; None: verify now.

    Returns:
        The training step and the `extra` that were saved.

    Raises:
        CheckpointError: the checkpoint is damaged, has another format, or lacks one of the engines.
    """
    world = world_of(engines)
    meta = verify(folder, world) if meta is None else meta
    index = check_model(folder, meta, engines, world)
    load_engines(engines, folder, index, meta["optimizer_steps"])
    first_engine = next(iter(engines))
    _load_random_states(folder, meta, engines[first_engine].layout, [first_engine])
    return meta["step"], read_state(folder)


def load_random_states(folder: Path, layout: Layout) -> None:
    """Load the random states of a team without engines, if the checkpoint has them for this layout. Collective.

    Raises:
        CheckpointError: the files are damaged.
    """
    _load_random_states(folder, verify(folder, layout.world, ()), layout, ())


def _load_random_states(folder: Path, meta: dict[str, Any], layout: Layout, engines: Collection[str]) -> None:
    """Load the random states that the team with `engines` wrote, if it had this layout. Collective."""
    same = (team for team in _teams_in(meta) if _wrote(team, engines) and team["layout"] == layout.describe())
    if (team := next(same, None)) is not None:
        load_rng(folder / rng_name(team["workers"][0] + layout.world.rank))
    layout.world.barrier()


def _teams_in(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return workers, layout and engines of each team that wrote a part of the checkpoint, from meta.json."""
    if "teams" in meta:
        return list(meta["teams"].values())
    size = sum(name.startswith("rank_") for name in meta["files"])
    return [{"workers": [0, size], "layout": meta["layout"], "engines": list(meta["optimizer_steps"])}]


def _wrote(team: dict[str, Any], engines: Collection[str]) -> bool:
    """Return whether the team wrote any of `engines` into the checkpoint. With empty `engines`, return whether it wrote
    none at all."""
    return bool({*engines} & {*team["engines"]}) if engines else not team["engines"]


def _files_for(meta: dict[str, Any], engines: Collection[str]) -> dict[str, FileChecksum]:
    """Return the checkpoint's files, without the files of teams that wrote none of `engines`."""
    other = [team["workers"] for team in _teams_in(meta) if not _wrote(team, engines)]
    numbers = [first + rank for first, size in other for rank in range(size)]
    left_out = {name for number in numbers for name in (shard_name(number), rng_name(number))}
    return {name: checksum for name, checksum in meta["files"].items() if name not in left_out}


def read_state(folder: Path) -> dict[str, Any]:
    """Return the run's state in a checkpoint that `verify` has found intact."""
    return json.loads((folder / _STATE).read_text())


def check_model(folder: Path, meta: dict[str, Any], engines: dict[str, MegatronEngine], world: WorkerGroup) -> Index:
    """Check that a checkpoint holds the same models as `engines`, without optimizer state. Collective over `world`.

    Raises:
        CheckpointError: on every rank: an engine is missing; parameters differ in name or shape; a vocabulary differs;
            or the checkpoint has parameters that the engine lacks.
    """
    missing = engines.keys() - meta["optimizer_steps"].keys()
    if missing:
        raise CheckpointError(
            f"the checkpoint has no model {', '.join(sorted(missing))}, only "
            f"{', '.join(sorted(meta['optimizer_steps']))}",
            where=str(folder),
            fix="resume a run with the same models, or start from the beginning with trainer.resume=never",
        )
    index, wrong = world.broadcast_json(_index_or_fault(folder, meta, engines) if world.rank == 0 else None)
    if wrong:
        raise _damaged(folder, wrong)
    slices = [part for name, engine in engines.items() for part in weight_slices(name, engine)]
    more = _surplus(meta, engines, index, {part.key for part in slices}, world)
    refuse_foreign(slices, index, folder, world, more)
    return index


def stored_names(folder: Path, meta: dict[str, Any]) -> frozenset[str]:
    """Return the names of a checkpoint's tensors, such as `actor.decoder...`; `meta` is the result of `verify`."""
    return frozenset(_index(folder, meta, meta["optimizer_steps"]))


def _surplus(
    meta: dict[str, Any], engines: dict[str, MegatronEngine], index: Index, local_keys: set[str], world: WorkerGroup
) -> list[str]:
    """List the checkpoint's tensors of `engines` that no rank holds, and vocabularies of different size. Collective."""
    keys_held = {key for keys in world.all_gather_json(sorted(local_keys)) for key in keys}
    prefixes = tuple(f"{name}." for name in engines)
    lines = [f"{key} is in the checkpoint only" for key in index if key.startswith(prefixes) and key not in keys_held]
    for name, engine in engines.items():
        here = engine.hf_config.vocab_size
        saved = meta.get("vocab_sizes", {}).get(name, here)  # older checkpoints lack this entry
        # Padded embeddings may have equal shapes, so the tensors do not show that the vocabularies differ.
        if saved != here:
            lines.append(f"{name} has a vocabulary of {saved} tokens, expected {here}")
    return lines


def _index_or_fault(folder: Path, meta: dict[str, Any], engines: Collection[str]) -> tuple[Index | None, str | None]:
    try:
        return _index(folder, meta, engines), None
    except CheckpointError as error:
        return None, error.what


def _index(folder: Path, meta: dict[str, Any], engines: Collection[str]) -> Index:
    return read_index(folder, [name for name in _files_for(meta, engines) if name.startswith("rank_")])


def verify(folder: Path, world: WorkerGroup, engines: Collection[str] | None = None) -> dict[str, Any]:
    """Read every file that meta.json lists, check it, and return the contents of meta.json. Collective over `world`.

    With `engines`, read only files of teams that wrote one of these engines; if `engines` is empty, only files of teams
    without engines.

    Raises:
        CheckpointError: on every rank; the message names damaged files, and another checkpoint if there is one.
        FormatError: on every rank: another version of megarl wrote the checkpoint.
    """
    meta, wrong, other = world.broadcast_json(_meta_or_fault(folder) if world.rank == 0 else None)
    if other is not None:
        raise FormatError(**other)
    lines = [wrong]
    if not wrong:
        checksums = meta["files"] if engines is None else _files_for(meta, engines)
        lines = faults(folder, checksums, world, foreign_reason=lambda path: _foreign_reason(path, meta["tag"]))
    if lines:
        raise _damaged(folder, few(lines))
    return meta


def _damaged(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        "this checkpoint is damaged or incomplete", where=str(folder), found=fault, fix=_way_out(folder)
    )


def _foreign_reason(path: Path, tag: str) -> str | None:
    """Return a message if a rank's file belongs to another checkpoint, else None."""
    if not path.name.startswith("rank_"):
        return None
    with contextlib.suppress(CheckpointError, KeyError):  # a damaged file; the checksum check reports it
        label = label_of(path)
        if label["tag"] != tag:
            return f"belongs to another checkpoint (step {label['step']})"
    return None


def _meta_or_fault(folder: Path) -> tuple[dict[str, Any] | None, str | None, dict[str, Any] | None]:
    """Return (contents of meta.json, description of damage, arguments of a `FormatError`); two of these are None."""
    try:
        return read_meta(folder), None, None
    except FormatError as error:
        return None, None, {name: getattr(error, name) for name in ("what", "where", "found", "allowed", "fix")}
    except CheckpointError as error:
        return None, error.what, None


def _way_out(folder: Path) -> str:
    others = [step for step in steps_in(folder.parent) if folder.name != f"step_{step}"]
    other = f"trainer.resume={folder.parent / f'step_{others[-1]}'} continues from another one, " if others else ""
    return f"{other}trainer.resume=never starts from the beginning and keeps the old files"


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the contents of meta.json.

    Raises:
        CheckpointError: the file is missing, so the checkpoint is incomplete, or it is damaged.
        FormatError: the checkpoint has another format.
    """
    way = _way_out(folder)
    try:
        meta = json.loads((folder / _META).read_text())
        known, checksum = meta.get("format"), meta.pop("checksum", None)
    except FileNotFoundError:
        raise CheckpointError(f"{_META} is missing", where=str(folder), fix=way) from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{_META} cannot be read: {error}", where=str(folder), fix=way) from error
    if known != FORMAT:
        raise FormatError(
            "this checkpoint was written by another version of megarl, in a format that this version does not read",
            where=str(folder),
            found=f"format {known}",
            allowed=f"format {FORMAT}",
            fix=f"use that version of megarl, or export the model with its `megarl convert {folder} MODEL_DIR` "
            "and begin a run with model.path=MODEL_DIR",
        )
    if checksum != _meta_checksum(meta):
        raise CheckpointError(
            f"{_META} was changed after it was written (checksum differs)", where=str(folder), fix=way
        )
    return meta


def _meta_checksum(meta: dict[str, Any]) -> str:
    return text_checksum(json.dumps(meta, sort_keys=True))


def named_steps(root: Path) -> list[int]:
    """Return the steps of all folders named like checkpoints, in rising order, even if meta.json is missing."""
    return steps_of(root.glob("step_*"))


def best(root: Path) -> Path | None:
    """Return the checkpoint that best.json names, or None if it no longer exists."""
    folder = root / f"step_{best_step(root)}"
    return folder if (folder / _META).is_file() else None


def keep_best(root: Path, step: int) -> bool:
    """Record the checkpoint of `step` in best.json; return False if it does not exist. One rank calls this."""
    if step not in steps_in(root):
        return False
    if best_step(root) != step:
        _note_best(root, step)
    return True


def set_aside(root: Path, after: int | None) -> Path | None:
    """Move checkpoints of later steps than `after` (None: all) to another folder, because these steps are repeated.

    Otherwise they would count as the run's newest checkpoints, so new checkpoints would be pruned and the next resume
    would use the old ones. One rank calls this.

    Returns:
        The new folder ROOT.old-K, with best.json if it names a moved checkpoint; None if nothing was moved.
    """
    steps = [step for step in named_steps(root) if after is None or step > after]
    if not steps:
        return None
    target = next(path for k in itertools.count(1) if not (path := root.with_name(f"{root.name}.old-{k}")).exists())
    target.mkdir()
    if best_step(root) in steps:
        (root / _BEST).rename(target / _BEST)
    for step in reversed(steps):
        (root / f"step_{step}").rename(target / f"step_{step}")
    return target


def clean(root: Path) -> None:
    """Remove the folders that interrupted saves left."""
    for path in [*root.glob("step_*.tmp-*"), *root.glob("step_*.old-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _publish(folder: Path, final: Path, tag: str) -> None:
    """Flush a fully written folder and give it its final name; from then on it survives a power failure."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    old = final.with_name(f"{final.name}.old-{tag}")
    if final.exists():
        final.rename(old)
    folder.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _note_best(root: Path, step: int) -> None:
    path = root / _BEST
    try:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": step}))
        _sync(temporary)
        temporary.rename(path)
        _sync(root)
    except OSError as error:  # the checkpoint is complete anyway
        log.warning("%s cannot be written, so the checkpoint of step %d is not kept as the best: %s", path, step, error)


def _prune(root: Path, keep_last: int) -> None:
    """Remove complete checkpoints except the newest, the best, and the newest `keep_last` that are not temporary."""
    steps, best_folder = steps_in(root), best(root)
    stay = {*[step for step in steps if _is_kept(root / f"step_{step}")][-keep_last:], *steps[-1:]}
    for step in steps:
        folder = root / f"step_{step}"
        if folder != best_folder and step not in stay:
            gone = folder.with_name(f"{folder.name}.old-pruned")  # rename first, so that step_N is never half removed
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _is_kept(folder: Path) -> bool:
    """Return whether a checkpoint is not temporary; an unreadable checkpoint counts as not temporary."""
    try:
        return bool(json.loads((folder / _META).read_text()).get("kept", True))
    except (OSError, ValueError, AttributeError):
        return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
