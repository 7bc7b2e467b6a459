"""Checks of matrix products in FP8 (`engine.fp8`)."""

from __future__ import annotations

from megarl.checks.checklist import Checklist, Roles
from megarl.config.run import RunConfig
from megarl.dag.stage import Role


def check_fp8(config: RunConfig, roles: Roles, checks: Checklist) -> None:
    """Warn of trained models whose FP8 scales come from earlier steps, because checkpoints do not hold these scales."""
    engines = {"actor": config.actor.engine}
    if Role.CRITIC in (roles or ()):
        engines["critic"] = config.critic.engine
    engines |= {f"models.{name}": settings.engine for name, settings in config.models.items() if settings.train}
    for name, engine in engines.items():
        if engine.fp8 == "delayed":
            checks.warn(
                f"{name}.engine.fp8",
                "checkpoints do not hold the scales of this format, which come from the maxima of earlier steps: a run "
                "that resumes begins with scales of 1, and its metrics are not those of an undisturbed run",
                found=engine.fp8,
                fix=f"set {name}.engine.fp8 to blockwise or mxfp8, which keep nothing between steps, if the GPUs "
                "compute in it",
            )
