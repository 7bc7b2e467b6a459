"""Checks of model layouts against Megatron-Core's rules, the number of processes and the model's sizes."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.layout import (
    dispatch_problem,
    divisors,
    expert_problems,
    interleaving_problem,
    makes_replicas,
    pipeline_problem,
    sequence_problem,
    tensor_problem,
    tensor_sizes,
    tensor_widths,
)
from megarl.checks.checklist import Checklist
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, TeamPlan, devices_key
from megarl.dag.shares import USUAL_GPUS, settings_of_workers
from megarl.dag.stage import Role
from megarl.planning.shards import Sizes, layout_key
from megarl.system.errors import ConfigError, count


def divides_devices(team: TeamPlan) -> bool:
    """Return whether a team's workers divide into whole replicas, including whole replicas of the experts."""
    return makes_replicas(team.devices, team.parallel)


def check_cluster(config: RunConfig, checks: Checklist, launcher: str | None) -> None:
    """Check the number of processes against the machines."""
    cluster = config.cluster
    if cluster.nnodes > cluster.nproc:
        checks.of("machines").fail(
            "cluster.nnodes",
            f"{count(cluster.nproc, 'process')} cannot be spread over {cluster.nnodes} machines",
            found=cluster.nnodes,
            allowed=divisors(cluster.nproc),
            fix="lower cluster.nnodes, or raise cluster.nproc, which counts the processes of all machines together",
        )
    # The Slurm launcher checks teams that have nodes of their own (launch.slurm.teams).
    elif not config.launch.slurm.teams:
        _check_even(config, checks.of("machines"))
    too_many = cluster.device_memory_gb is not None and cluster.nproc > USUAL_GPUS
    if launcher == "local" and cluster.nnodes > 1:
        checks.of("launcher").fail(
            "cluster.nnodes",
            "the local launcher starts processes on this machine only",
            found=cluster.nnodes,
            allowed="1",
            fix=f"use {'' if config.placement.has_several_teams else '--launcher torchrun or '}--launcher ray"
            + ("" if too_many else ", or set cluster.nnodes=1"),
        )
    _check_restarts(config, checks.of("restarts"), launcher)


def _check_even(config: RunConfig, checks: Checklist) -> None:
    """Check that every machine has equally many workers; with several teams the fix also changes the teams."""
    nproc, nnodes, teams = config.cluster.nproc, config.cluster.nnodes, config.placement.teams
    if nproc % nnodes == 0 or not teams:
        checks.divides("cluster.nproc", nproc, nnodes, "cluster.nproc", "cluster.nnodes")
        return
    settings = settings_of_workers(config, sum(team.devices for team in teams.values()))
    other = "change placement.teams, cluster.nproc and cluster.nnodes together"
    checks.fail(
        "cluster.nnodes",
        f"cluster.nproc {nproc} is not divisible by {nnodes} (cluster.nnodes)",
        found=nnodes,
        allowed=f"a divisor of {nproc}",
        fix=other if settings is None else f"set {settings}, or {other}",
    )


def _check_restarts(config: RunConfig, checks: Checklist, launcher: str | None) -> None:
    cluster = config.cluster
    if not cluster.max_restarts:
        return
    if launcher == "torchrun" and cluster.nnodes > 1:
        checks.fail(
            "cluster.max_restarts",
            "torchrun's launchers on several machines cannot restart a run together",
            found=cluster.max_restarts,
            allowed="0 with torchrun on several machines",
            fix="use --launcher ray, or let the batch system repeat the command with the same --run-dir",
        )
    elif not (config.trainer.save_every or config.trainer.resume_every):
        checks.warn(
            "trainer.save_every",
            "a restarted run continues from its newest checkpoint, but this run saves none before its end",
            found=config.trainer.save_every,
            fix="set trainer.save_every to the number of steps that may be lost",
        )


def check_layouts(config: RunConfig, placement: Placement, sizes: Sizes, checks: Checklist) -> None:
    """Check the layout of every team against its workers and each of its models."""
    for team in placement.teams:
        _check_devices(config, team, placement, sizes.get(team.roles[0]), checks)
        checked: list[ModelFacts | None] = []
        _check_dispatch(config, team, sizes, checks)
        for role in team.roles:
            facts = sizes.get(role)
            if facts not in checked:  # models of equal sizes have the same problems
                checked.append(facts)
                _check_model(layout_key(config, role, team), role.value, team.parallel, facts, checks)


def _check_devices(
    config: RunConfig, team: TeamPlan, placement: Placement, facts: ModelFacts | None, checks: Checklist
) -> None:
    """Check that a team's workers are whole replicas. `facts` are the sizes of its first role's model."""
    parallel, key, lead = team.parallel, devices_key(config, team), team.roles[0]
    name = team.name if placement.separate else lead.value
    split = f"tp {parallel.tp} * pp {parallel.pp} * cp {parallel.cp}"
    layout, size, workers = layout_key(config, lead, team), parallel.model_parallel_size, count(team.devices, "process")
    fit = _tensor_sizes(team, facts)
    smaller = max((tp for tp in fit if tp < parallel.tp), default=None)
    problem = None if facts is None else tensor_problem(layout, parallel, facts)
    if team.devices % size and facts is not None and problem is not None and smaller is not None:
        # This tp is also invalid for the model: report both in one message, with a size that fits both.
        larger = next((tp for tp in tensor_sizes(facts) if tp > parallel.tp), None)
        replica = (larger or 0) * parallel.pp * parallel.cp
        more = f", or to {larger} with {key}={-(-team.devices // replica) * replica}" if larger else ""
        checks.of(f"{name} tensor split").fail(
            f"{layout}.tp",
            f"{problem.what}; nor do {workers} make whole replicas of {size} ({split})",
            found=parallel.tp,
            allowed=fit,
            fix=f"set {layout}.tp to {smaller}{more}",
        )
    else:
        other = None if smaller is None else f"{layout}.tp to {smaller}"
        if checks.of(f"{name} replicas").divides(key, team.devices, size, key, f"{layout}: {split}", other):
            checks.of(f"{name} data parallel").ok(f"{workers} = {split} * dp {team.replicas}")
    checks.of(f"{name} interleaving").from_error(interleaving_problem(layout, parallel))
    checks.of(f"{name} sequence parallel").from_error(sequence_problem(layout, parallel))
    _check_experts_layout(team.devices, layout, name, parallel, checks)


def _check_dispatch(config: RunConfig, team: TeamPlan, sizes: Sizes, checks: Checklist) -> None:
    """Check that DeepEP can be used, as far as the recipe shows; dense and frozen models use all-to-alls."""
    if team.parallel.dispatch != "deepep":
        return
    known = {role: facts for role in team.roles if (facts := sizes.get(role)) is not None}
    models = {role: facts for role, facts in known.items() if facts.is_moe}
    if not models:
        models = {role: facts for role, facts in known.items() if role in (Role.ACTOR, Role.CRITIC)}
    here = min(team.devices, max(1, config.cluster.nproc // config.cluster.nnodes))
    for role, facts in models.items():
        problem = dispatch_problem(layout_key(config, role, team), team.parallel, facts, config.model.dtype, here)
        if problem is not None:
            checks.of("dispatch").from_error(problem)
            return


def _tensor_sizes(team: TeamPlan, facts: ModelFacts | None) -> list[int]:
    """Return tensor parallel sizes that divide a team's workers, and its model if that is known."""
    parallel = team.parallel
    known = divisors(team.devices) if facts is None else tensor_sizes(facts)
    rest = parallel.pp * parallel.cp
    return [tp for tp in known if team.devices % (tp * rest) == 0 and (tp > 1 or not parallel.sp)]


def _check_model(key: str, role: str, parallel: ParallelConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check one model against a layout. `key` is the layout's dotted key, such as `actor.parallel`."""
    if facts is None:
        checks.of(f"{role} model split").skip(
            "the model's sizes are not known here: heads, layers and widths are unchecked"
        )
        return
    widths = ", ".join(f"{name} {width}" for name, width in tensor_widths(facts).items())
    tensor, chunks = tensor_problem(key, parallel, facts), parallel.chunk_layers(facts.layers)
    if tensor is None or not checks.failed(f"{key}.tp"):
        _report([tensor], f"tp {parallel.tp} divides {widths}", checks.of(f"{role} tensor split"))
    sizes = chunks[:1] if len(set(chunks)) == 1 else chunks
    text = f"{facts.layers} layers = {len(chunks)} chunks of {', '.join(map(str, sizes))}"
    _report([pipeline_problem(key, parallel, facts)], text, checks.of(f"{role} pipeline split"))
    problems = expert_problems(key, parallel, facts)
    if facts.is_moe or problems:
        text = f"{facts.experts} experts = ep {parallel.ep} * {facts.experts // parallel.ep}"
        text += f", width {facts.ffn} over etp {parallel.expert_tp}"
        _report(problems, text, checks.of(f"{role} experts"))


def _report(problems: Sequence[ConfigError | None], text: str, checks: Checklist) -> None:
    """Record the problems, or `text` if there are none."""
    for problem in problems:
        checks.from_error(problem)
    if not any(problems):
        checks.ok(text)


def _check_experts_layout(nproc: int, key: str, role: str, parallel: ParallelConfig, checks: Checklist) -> None:
    """Check the layout of experts: Megatron places them on etp * ep * pp processes; remaining processes are data
    parallel.
    """
    if parallel.ep == 1 and parallel.etp is None:
        return
    etp = parallel.expert_tp
    split, size = f"etp {etp} * ep {parallel.ep} * pp {parallel.pp}", etp * parallel.ep * parallel.pp
    if nproc % size == 0:
        checks.of(f"{role} expert data parallel").ok(f"{count(nproc, 'process')} = {split} * expert dp {nproc // size}")
        return
    fit = [ep for ep in divisors(nproc) if nproc % (etp * ep * parallel.pp) == 0]
    checks.of(f"{role} expert data parallel").fail(
        f"{key}.ep",
        f"{count(nproc, 'process')} cannot be divided by {size} ({split})",
        found=parallel.ep,
        allowed=fit or "none with this etp and pp",
        fix=f"set {key}.ep to {max((ep for ep in fit if ep <= parallel.ep), default=1)}" if fit else "lower etp or pp",
    )
