"""Export of a finished run as Hugging Face models: the last step's, and the best step's if it is another step."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.artifacts.lock import refuse_if_taken
from megarl.artifacts.trained import BEST, LAST, Exported, exported, write_exported
from megarl.models.weights import export_weights
from megarl.models.weights.peft import export_adapter
from megarl.system.offload_schedule import ACTOR
from megarl.system.tracing import phase
from megarl.training import checkpoint
from megarl.training.shards import CheckpointError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.runtime.rank_state import RankState
    from megarl.runtime.roles import ModelRole

CRITIC = "hf_critic"
ADAPTER = "hf_adapter"


def export(c: RankState, checkpoints: Path) -> None:
    """Write the team's models to the run folder if `trainer.export_hf` is set. Collective over the team.

    The actor of the last step is written to RUN_DIR/hf, the critic to hf_critic, a further model that is trained to
    hf_NAME, and the actor of the best checkpoint by `trainer.best_metric` to hf_best if it is of another step. Adapters
    are merged; the adapters of the last step are also written to hf_adapter in PEFT's format. Call this last, because
    the actor may then hold the weights of the best step.
    """
    if not c.config.trainer.export_hf:
        return
    refuse_if_taken(c.run_dir)
    with phase("export"):
        if c.team.leads:
            _write(c, c.actor, LAST)
        if "critic" in c.models:
            _write(c, c.models["critic"], CRITIC)
        for name, settings in c.config.models.items():
            if settings.train and name in c.models:
                _write(c, c.models[name], f"{LAST}_{name}")
        if c.team.leads:
            chunks, model = c.actor.chunks, c.config.model
            if model.lora is not None and not chunks[0].has_value_head:
                with c.offload.phase("export", ACTOR):
                    export_adapter(chunks, c.run_dir / ADAPTER, model.lora, base=model.path, world=c.layout.world)
            _write_best(c, checkpoints)


def _write_best(c: RankState, checkpoints: Path) -> None:
    """Write the actor of the best checkpoint if that is not the last step, and record which models were exported."""
    written = [Exported(LAST, c.context.step, "last")]
    if c.layout.rank == 0:
        write_exported(c.run_dir, written)
    # Only rank 0 checks: on a shared file system two ranks may see different folders.
    source = c.layout.world.broadcast_json(str(checkpoint.best(checkpoints) or "") if c.layout.rank == 0 else None)
    other = source and Path(source).name != f"step_{c.context.step}"
    step = _load_best(c, Path(source)) if other else None
    if step is not None:
        _write(c, c.actor, BEST)
        if c.layout.rank == 0:
            write_exported(c.run_dir, [*written, Exported(BEST, step, "best")])
    elif c.layout.rank == 0:
        shutil.rmtree(c.run_dir / BEST, ignore_errors=True)  # an earlier end of this run may have written the folder


def _load_best(c: RankState, source: Path) -> int | None:
    """Load the actor of the best checkpoint and return its step; None if the checkpoint is damaged."""
    try:
        with c.offload.phase("restore", ACTOR):
            return checkpoint.load(source, {ACTOR: c.actor.engine})[0]
    except CheckpointError as error:  # all ranks get this error, so all of them return here
        if c.layout.rank == 0:
            print(f"WARNING: the best checkpoint cannot be read, so {BEST} is not written: {error}", flush=True)
        return None


def show_export(c: RankState) -> None:
    """Print the folders of the exported models, and a command that tries the run's model."""
    if c.config.trainer.export_hf and c.layout.rank == 0:
        for model in exported(c.run_dir):
            name = "model:  " if model.which == "last" else "better: "
            metric = "" if model.which == "last" else f" by {c.config.trainer.best_metric}"
            print(f"{name}{c.run_dir / model.folder} ({model.which}{metric}, step {model.step})")
        if not c.actor.chunks[0].has_value_head:
            print(f"  to try it: {trial_command(c.config, c.run_dir)}", flush=True)


def trial_command(config: RunConfig, run_dir: Path) -> str:
    """Return the command that tries a run's model: `megarl eval` if a task or environment plays held-out episodes,
    which may need more columns than a prompt, else `megarl generate`.
    """
    if not config.task.writes_text or (config.has_turns and config.data.val_files):
        return shlex.join(["megarl", "eval", str(run_dir)])
    return f"{shlex.join(['megarl', 'generate', str(run_dir)])} --prompt TEXT"


def _write(c: RankState, model: ModelRole, name: str) -> None:
    with c.offload.phase("export", model.name):
        further = c.config.models.get(model.name)
        folder, source = c.run_dir / name, (further and further.path) or c.config.model.path
        hf_config, world = model.engine.hf_config, c.layout.world
        classifies = c.config.trains_reward_model and further is None
        export_weights(
            model.chunks,
            folder,
            hf_config,
            c.tokenizer,
            world=world,
            source=source,
            keep_draft=True,
            classifies=classifies,
        )
