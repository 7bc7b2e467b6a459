"""Checks of recipes that use the embedded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.artifacts.facts import ModelFacts
from megarl.config.run import RunConfig
from megarl.dag.ahead import KEY, ORDER
from megarl.dag.placement import TeamPlan, devices_key
from megarl.dag.stage import Role
from megarl.planning.shards import layout_key
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.checks.checklist import Checklist

_OVERSAMPLE = "rollout.oversample"


def check_as_ready(config: RunConfig, team: TeamPlan, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that groups can finish one by one: not with context parallelism or experts, which generate in batches."""
    if team.parallel.cp > 1:
        key = f"{layout_key(config, Role.ROLLOUT, team)}.cp"
        checks.fail(
            key,
            "context-parallel ranks of an embedded engine share the prompts of a step and finish them together, so no "
            "group is ready before the others",
            found=team.parallel.cp,
            allowed=f"1 with {ORDER}=as_ready",
            fix="give the rollout a layout with cp 1 (rollout.parallel), or set "
            f"{ORDER}=in_order {KEY}=1, or rollout.engine=sglang",
        )
    if facts is not None and facts.is_moe:
        for problem in experts_problems(config):
            checks.from_error(problem)


def check_oversample(config: RunConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that a round of generation can end before all of its groups are complete, as `rollout.oversample` needs. It
    cannot with context parallelism or a mixture of experts."""
    checks, cp = checks.of("rollout"), config.parallel_of(Role.ROLLOUT.value).cp
    if config.rollout.oversamples and facts is not None and facts.is_moe:
        for problem in experts_problems(config):
            checks.from_error(problem)
    if config.rollout.oversamples and cp > 1:
        checks.fail(
            _OVERSAMPLE,
            "context-parallel ranks of an embedded engine share the prompts of a step and finish them together, so a "
            "step would wait for all groups anyway",
            found=f"{config.rollout.oversample:g} with cp {cp}",
            allowed="1, or a layout with cp 1",
            fix=f"set {_OVERSAMPLE}=1, or rollout.engine=sglang",
        )


def experts_problems(config: RunConfig) -> list[ConfigError]:
    """Return an error if a setting needs groups to finish one by one (`rollout.oversample`, `async.order=as_ready`),
    which a policy with a mixture of experts cannot do; call this only for such a policy."""
    if config.rollout.oversamples:
        problem = ConfigError(
            "a mixture of experts decodes in rounds in an embedded engine, because ranks that share experts wait for "
            "each other, so a step would wait for all groups anyway",
            where=_OVERSAMPLE,
            found=f"{config.rollout.oversample:g} with a mixture of experts",
            allowed="1 with an embedded engine and experts",
            fix=f"set {_OVERSAMPLE}=1, or rollout.engine=sglang",
        )
        return [problem]
    if config.async_.in_order:
        return []
    problem = ConfigError(
        "a mixture of experts decodes in rounds in an embedded engine, because ranks that share experts wait for each "
        "other, so that no group is ready before the others",
        where=ORDER,
        found=f"{config.async_.order} with a mixture of experts",
        allowed="in_order with an embedded engine and experts",
        fix=f"set {ORDER}=in_order {KEY}=1, or rollout.engine=sglang",
    )
    return [problem]


def check_receiver(config: RunConfig, team: TeamPlan, checks: Checklist) -> None:
    """Check that the embedded engine of a separate rollout team can receive the actor's weights."""
    if config.sync.transport == "shards":
        checks.fail(
            "sync.transport",
            f"the team {team.name} decodes with an embedded engine, which takes whole tensors",
            found="shards",
            allowed="auto, tensor, distributed, disk or delta, or shards with rollout.engine=sglang",
            fix="set sync.transport=auto",
        )
    if config.sync.fp8 and config.sync.transport in ("disk", "delta"):
        checks.fail(
            "sync.transport",
            f"the team {team.name} decodes with an embedded engine, which takes FP8 values by other transports only",
            found=config.sync.transport,
            allowed="auto, tensor or distributed with sync.fp8",
            fix="set sync.transport=auto, or sync.fp8=false",
        )
    if config.sync.fp8 and config.sync.verify != "off":
        checks.warn(
            "sync.verify",
            "with sync.fp8 no checksums are compared, and an embedded engine has no other verification",
            found=config.sync.verify,
            fix="set sync.verify=off",
        )
    dtype = config.model.dtype
    if config.sync.dtype not in ("model", dtype):
        checks.fail(
            "sync.dtype",
            f"the team {team.name} decodes with an embedded engine, whose weights are {dtype} (model.dtype): sending "
            f"{config.sync.dtype} would round them, or send more bytes for the same values",
            found=config.sync.dtype,
            allowed=f"model or {dtype}, or another with rollout.engine=sglang",
            fix="set sync.dtype=model",
        )
    here, parallel = config.cluster.nproc // config.cluster.nnodes, team.parallel
    spread = parallel.ep > 1 or parallel.pp > 1 or parallel.model_parallel_size > here
    if team.devices > here and spread:
        checks.fail(
            devices_key(config, team),
            f"an embedded engine can receive weights only if each replica, and replicas that share experts, are on one "
            f"machine, but team {team.name} spreads them over several machines of {here} workers each",
            found=team.devices,
            allowed=f"at most {here}, or a layout with pp 1, ep 1 and tp * cp of at most {here}",
            fix=f"set {devices_key(config, team)}={here}, or rollout.parallel={{pp: 1, ep: 1}}",
        )
