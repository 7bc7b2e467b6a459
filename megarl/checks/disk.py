"""Checks that the disk of the run folder has room for the run's files."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.artifacts.trained import steps_in
from megarl.checks.checklist import Checklist, Roles
from megarl.config.run import RunConfig
from megarl.dag.stage import Role
from megarl.planning.shards import BYTES, Sizes, checkpoint_bytes
from megarl.system.errors import count


def check_disk(
    config: RunConfig, sizes: Sizes, roles: Roles, job: str, run_dir: Path | None, checks: Checklist
) -> None:
    """Compare the size of checkpoints and exported models with the free space. Nothing is checked if the sizes of the
    policy are unknown.
    """
    checks = checks.of("disk")
    if job not in ("train", "sft") or sizes[Role.ACTOR] is None:
        return
    folder = Path(run_dir or config.tracking.dir).expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    checkpoint = _checkpoint_bytes(config, sizes, roles)
    number = _checkpoints(config, job)
    more = max(0, number - (0 if run_dir is None else len(steps_in(run_dir / "checkpoints"))))
    needed, free = more * checkpoint + _model_bytes(config, sizes), shutil.disk_usage(folder).free
    passing = ", one of them only to go on from" if _passing(config, job) else ""
    files = f"{count(number, 'checkpoint')} of {_gb(checkpoint)}{passing}"
    if needed <= free:
        checks.ok(f"{files}: {_gb(free)} are free in {folder}")
        return
    checks.warn(
        "tracking.dir" if run_dir is None else "--run-dir",
        f"the run needs up to {_gb(needed)} for {files} and its model, and there is less free space",
        found=f"{_gb(free)} free in {folder}",
        fix="name a folder on a larger disk, or keep fewer checkpoints (trainer.keep_last, trainer.best_metric=null)",
    )


def _checkpoint_bytes(config: RunConfig, sizes: Sizes, roles: Roles) -> float:
    """Return the bytes of one checkpoint: the state of all trained models."""
    policy = sizes[Role.ACTOR]
    assert policy is not None
    learning = [policy] if Role.CRITIC not in (roles or ()) else [policy, sizes.get(Role.CRITIC) or policy]
    return sum(checkpoint_bytes(facts, config.model.dtype, config.model.lora) for facts in learning)


def _checkpoints(config: RunConfig, job: str) -> int:
    """Return how many checkpoints are on disk at once: those kept, the best, one for resuming, one being written."""
    trainer, steps = config.trainer, config.sft.steps if job == "sft" else config.trainer.steps
    written = 1 if not trainer.save_every else -(-steps // trainer.save_every)
    best = trainer.best_metric is not None and trainer.save_every > 0
    return min(written, trainer.keep_last + best + 1) + _passing(config, job)


def _passing(config: RunConfig, job: str) -> bool:
    """Return whether some checkpoints serve only to resume."""
    every, steps = config.trainer.resume_every, config.sft.steps if job == "sft" else config.trainer.steps
    return 0 < every < steps and (not config.trainer.save_every or every % config.trainer.save_every != 0)


def _model_bytes(config: RunConfig, sizes: Sizes) -> float:
    """Return the bytes of the models exported at the end: the last one, and the best where it may be another one."""
    policy, trainer = sizes[Role.ACTOR], config.trainer
    assert policy is not None
    models = trainer.export_hf * (1 + (trainer.best_metric is not None and trainer.save_every > 0))
    return float(models * policy.parameters * BYTES[config.model.dtype])


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
