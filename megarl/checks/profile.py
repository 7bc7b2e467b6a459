"""Checks of `trainer.profile`: steps and workers that the run has, and a tool that works where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.checks.checklist import Checklist

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement
    from megarl.system.machine import Machine


def check_profile(
    config: RunConfig,
    placement: Placement | None,
    machine: Machine | None,
    checks: Checklist,
    *,
    launcher: str | None,
    job: str,
    starts: bool,
) -> None:
    """Refuse steps, workers and a tool that would record nothing."""
    profile, section = config.trainer.profile, "sft" if job == "sft" else "trainer"
    if profile is None:
        return
    checks = checks.of("profile")
    last = getattr(config, section).steps
    if section not in config.uncounted and max(profile.steps) > last:
        checks.fail(
            "trainer.profile.steps",
            f"the run has no step {max(profile.steps)} to record",
            found=profile.steps,
            allowed=f"1 to {section}.steps={last}",
            fix="choose earlier steps",
        )
    workers = config.cluster.nproc if placement is None else sum(team.devices for team in placement.teams)
    if max(profile.ranks) >= workers:
        checks.fail(
            "trainer.profile.ranks",
            f"the run has no worker {max(profile.ranks)} to record",
            found=profile.ranks,
            allowed=f"0 to {workers - 1}",
            fix="choose among the run's workers",
        )
    if profile.tool == "torch":
        return
    if launcher == "ray":
        checks.fail(
            "trainer.profile.tool",
            "nsys does not see workers that Ray starts",
            found="nsys",
            allowed="torch, or nsys with another launcher",
            fix="set trainer.profile.tool=torch, or start the run with --launcher local",
        )
    elif starts and machine is not None and not machine.has_gpu:
        checks.fail(
            "trainer.profile.tool",
            "nsys records GPUs only, and this machine has none",
            found="nsys",
            allowed="torch",
            fix="set trainer.profile.tool=torch, which also records on CPUs",
        )
