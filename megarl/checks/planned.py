"""Checks of recipes that are only planned or simulated: this machine and files do not matter."""

from __future__ import annotations

from megarl.artifacts.draft_training import draft_problem
from megarl.artifacts.shared_prefixes import prefix_problem
from megarl.checks.checklist import Checklist
from megarl.checks.layout import check_cluster, check_layouts
from megarl.checks.lent import check_lent
from megarl.checks.placement import check_placement
from megarl.checks.settings import check_batches, check_sampling
from megarl.config.base import raise_problems
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import place
from megarl.dag.stage import Role
from megarl.launchers.bundles import lends
from megarl.planning.shards import known_sizes
from megarl.planning.step import model_sizes
from megarl.rollout.families import family_of
from megarl.system.errors import ConfigError


def refuse_plan(config: RunConfig, graph: TaskGraph) -> None:
    """Check what a plan needs, except memory, which the plan itself reports; raise ConfigError if any check fails."""
    _refuse_pairs(config, graph)
    checks, sizes = Checklist(), model_sizes(config, graph)
    facts = known_sizes(sizes, Role.ACTOR)
    checks.of("actor").from_error(draft_problem(config, facts))
    for role in ("actor", "critic", *config.models):
        checks.of(role).from_error(prefix_problem(config, facts, role))
    check_cluster(config, checks, None)
    placement = check_placement(config, graph, "train", None, checks)
    if placement is not None:
        check_layouts(config, placement, sizes, checks)
    check_batches(config, placement, checks)
    check_sampling(config, sizes[Role.ACTOR], checks)
    family_of(config).check(config, placement, sizes[Role.ACTOR], checks, None, here=False)
    _raise(checks)


def refuse_lengths(config: RunConfig, graph: TaskGraph) -> None:
    """Check what does not depend on the layout: the lengths of samples, and whether the model's draft head can be
    trained if the recipe trains it. Raise ConfigError if a check fails.
    """
    _refuse_pairs(config, graph)
    checks, facts = Checklist(), known_sizes(model_sizes(config, graph), Role.ACTOR)
    checks.of("actor").from_error(draft_problem(config, facts))
    check_sampling(config, facts, checks)
    _raise(checks)


def refuse_simulated(config: RunConfig, graph: TaskGraph) -> None:
    """Check layouts, batches, lengths and servers of a run that is to be simulated, for any launcher; raise ConfigError
    if a check fails.
    """
    _refuse_pairs(config, graph)
    checks, sizes, placement = Checklist(), model_sizes(config, graph), place(graph, config)
    facts = known_sizes(sizes, Role.ACTOR)
    checks.of("actor").from_error(draft_problem(config, facts))
    for role in ("actor", "critic", *config.models):
        checks.of(role).from_error(prefix_problem(config, facts, role))
    check_cluster(config, checks, None)
    check_layouts(config, placement, sizes, checks)
    check_batches(config, placement, checks)
    check_sampling(config, sizes[Role.ACTOR], checks)
    team = placement.of_role(Role.ROLLOUT)
    if config.rollout.servers is not None and not config.rollout.servers.urls:
        family_of(config).check(config, placement, sizes[Role.ACTOR], checks, None, here=False)
        if team is not None and lends(config, team) and config.cluster.nnodes > 1:
            check_lent(config, placement, team, checks)
    _raise(checks, but="validation.")


def _refuse_pairs(config: RunConfig, graph: TaskGraph) -> None:
    if graph.has_responses:
        raise ConfigError(
            "the formulas do not cover runs that generate nothing",
            where="algorithm.pipeline",
            found=config.algorithm.pipeline_name,
            allowed="a pipeline that generates its responses",
            fix="megarl train RECIPE --dry-run estimates the memory of this recipe",
        )


def _raise(checks: Checklist, but: str = "-") -> None:
    """Raise the failed checks, except checks of keys that begin with `but`."""
    failed = (check for check in checks.items if check.status == "fail" and not (check.key or "").startswith(but))
    raise_problems([check.problem() for check in failed])
