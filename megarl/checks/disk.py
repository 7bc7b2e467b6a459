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
    """Compare checkpoints and exported models with the free space, if the sizes of the policy are known."""
    checks = checks.of("disk")
    policy, trainer = sizes[Role.ACTOR], config.trainer
    if job not in ("train", "sft") or policy is None:
        return
    folder = Path(run_dir or config.tracking.dir).expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    trained = [policy] if Role.CRITIC not in (roles or ()) else [policy, sizes.get(Role.CRITIC) or policy]
    trained += [sizes.get(Role(name)) or policy for name, further in config.models.items() if further.train]
    checkpoint = sum(checkpoint_bytes(facts, config.model.dtype, config.model.lora) for facts in trained)
    steps = config.sft.steps if job == "sft" else trainer.steps
    written = -(-steps // trainer.save_every) if trainer.save_every else 1
    keeps_best = trainer.best_metric is not None and trainer.save_every > 0
    resumes = 0 < trainer.resume_every < steps and (
        not trainer.save_every or trainer.resume_every % trainer.save_every != 0
    )
    # The kept checkpoints, the best one, one that is being written, and one that serves only to resume.
    number = min(written, trainer.keep_last + keeps_best + 1) + resumes
    more = max(0, number - (0 if run_dir is None else len(steps_in(run_dir / "checkpoints"))))
    # The last model is exported, and so is the best one where it may be a different model.
    exported = trainer.export_hf * (1 + keeps_best) * policy.parameters * BYTES[config.model.dtype]
    needed, free = more * checkpoint + exported, shutil.disk_usage(folder).free
    files = (
        f"{count(number, 'checkpoint')} of {_gb(checkpoint)}{', one of them only to resume from' if resumes else ''}"
    )
    if needed <= free:
        checks.ok(f"{files}: {_gb(free)} are free in {folder}")
        return
    checks.warn(
        "tracking.dir" if run_dir is None else "--run-dir",
        f"the run needs up to {_gb(needed)} for {files} and its model, and there is less free space",
        found=f"{_gb(free)} free in {folder}",
        fix="name a folder on a larger disk, or keep fewer checkpoints (trainer.keep_last, trainer.best_metric=null)",
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
