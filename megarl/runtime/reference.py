"""The frozen reference policy: made once at the start of RL, the same again after every resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.artifacts import start
from megarl.errors import ConfigError
from megarl.phase import keep_beating, phase
from megarl.processes import write_atomically
from megarl.runtime.roles import ReferenceRole
from megarl.runtime.setup import build_engine, check_embeddings

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.runtime.controller import Controller

FOLDER = "reference"
_ORIGIN = "origin.json"  # in the place of a model: where it is


def keep_reference(c: Controller, *, resumed_from: Path | None, begun: bool) -> str:
    """Find the weights of the reference, and keep them for later resumes. Collective over the actor's team.

    They are `reference.path`, else the actor's at the start of RL. Those are kept in the run folder, because a resumed
    run starts from a later actor; where they are those of `model.path`, that path is kept instead. A run that resumes
    from a checkpoint of another one takes that one's. What is kept lies in a place of its own until
    `take_up_reference`: the start may still be refused.

    Args:
        c: the controller.
        resumed_from: RUN_DIR/checkpoints/step_N; None: no resume.
        begun: it is of a step of RL; the actor of step 0 is where RL starts.

    Returns:
        Where they are now: a Hugging Face folder, or a name on the hub.

    Raises:
        ConfigError: the run of `resumed_from` has kept none.
    """
    if c.config.reference.path is not None:
        return c.config.reference.path
    following = c.run_dir / start.REFERENCE
    if resumed_from is not None and begun:
        kept = kept_reference(resumed_from)
        # A run that goes on has it in its place.
        if resumed_from.resolve().parent != (c.run_dir / "checkpoints").resolve() and c.layout.rank == 0:
            with phase("keep_reference"), keep_beating():
                shutil.copytree(kept, following)
        return _origin(kept) or str(kept)
    origin = unchanged_model(c.config) if resumed_from is None else None
    if origin is None:
        _export_actor(c, following)
        return str(following)
    if c.layout.rank == 0:
        following.mkdir()
        write_atomically(following / _ORIGIN, json.dumps({"path": origin}))
    return origin


def keep_start(c: Controller) -> str:
    """Write what RL starts from, for a model of another team that begins with it. Collective over the actor's team."""
    folder = c.run_dir / start.REFERENCE
    # One rank looks for all: on a shared file system two ranks may see different folders.
    there = (folder / "config.json").is_file() if c.layout.rank == 0 else None
    if not c.layout.world.broadcast_json(there):  # else the reference is the same model
        folder = c.run_dir / start.PASSING
        _export_actor(c, folder)
    return str(folder)


def _export_actor(c: Controller, folder: Path) -> None:
    from megarl.models.weights import export_weights

    with phase("keep_reference"), c.residency.phase("load"):
        world, source = c.layout.world, c.config.model.path
        export_weights(c.actor.chunks, folder, c.hf_config, c.tokenizer, world=world, source=source)


def now_at(run_dir: Path, source: str) -> str:
    """Where the weights at `source` (`keep_reference`) are by now: a start that was accepted has taken them up."""
    taken_up = Path(source) == run_dir / start.REFERENCE and not _is_model(Path(source))
    return str(run_dir / FOLDER) if taken_up else source


def make_reference(c: Controller, source: str) -> ReferenceRole:
    """The reference of this run, with the weights at `source` (`keep_reference`). Collective over its team."""
    from megarl.models.config import load_hf_config
    from megarl.models.weights import load_weights

    with phase("load_reference"), c.residency.phase("load"):
        # Not the policy's configuration: RoPE or windows may differ.
        hf_config = load_hf_config(
            c.config.model.model_copy(update={"path": source, "hf_config": None}), "reference.path"
        )
        check_embeddings(hf_config, c.hf_config, "reference.path")
        engine = build_engine(
            c.config,
            hf_config,
            c.layout,
            lambda chunks: load_weights(chunks, source),
            trainable=False,
            name="reference",
        )
        return ReferenceRole(engine, c.context, offloads=c.config.actor.engine.offload)


def drop_refused_start(c: Controller) -> None:
    """Forget what a start that was refused has made. Not collective: of a start that fails, some ranks may be gone.

    Rank 0 does it, as it also takes it up: no rank removes what another one has accepted.
    """
    if c.layout.rank == 0 and c.team.leads:
        start.drop(c.run_dir)


def take_up_reference(run_dir: Path) -> None:
    """The start is accepted: the reference that it has made is that of the run from now on. One rank calls this."""
    shutil.rmtree(run_dir / start.PASSING, ignore_errors=True)
    if _is_model(run_dir / start.REFERENCE):
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
        (run_dir / start.REFERENCE).rename(run_dir / FOLDER)


def unchanged_model(config: RunConfig) -> str | None:
    """The model that RL starts from, where that is `model.path` as it is on disk; None after a cold start, for a fresh
    model, and with keys of its configuration changed."""
    model = config.model
    if model.path is None or model.hf_config is not None or config.sft.steps:
        return None
    return str(Path(model.path).resolve()) if Path(model.path).is_dir() else model.path


def _origin(folder: Path) -> str | None:
    """Where the model is that a reference folder stands for; None where the folder holds it."""
    file = folder / _ORIGIN
    return str(json.loads(file.read_text())["path"]) if file.is_file() else None


def kept_reference(checkpoint: Path) -> Path:
    """The reference that the run of a checkpoint (RUN_DIR/checkpoints/step_N) has kept.

    Raises:
        ConfigError: there is none.
    """
    checkpoints = checkpoint.resolve().parent
    places = [*_set_aside_since(checkpoints), checkpoints.parent]
    folder = next((f for place in places if _is_model(f := place / FOLDER)), checkpoints.parent / FOLDER)
    if not _is_model(folder):
        raise ConfigError(
            "the run of this checkpoint has kept no reference model, and a KL term needs one",
            where="trainer.resume",
            found=str(checkpoint),
            allowed=f"a checkpoint of a run that has {folder.name}/ beside checkpoints/",
            fix="set reference.path to the Hugging Face folder of the model that RL started from",
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
