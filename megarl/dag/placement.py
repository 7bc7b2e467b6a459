"""Assignment of a graph's nodes to teams, and the transfers between teams.

    teams      train: actor, rollout        reference: reference
    nodes      rollout, reward, actor_train    ref_logp
    handovers  rollout -> {prompt_ids, response_ids} -> reference,   ref_logp -> {ref_logp} -> train

A node with a model belongs to the team of its role, which must also hold the other models that the node uses. Rewards
are computed in the team that generates samples; other nodes without a model run in the actor's team. A team runs its
nodes in the graph's order, and gets the fields that other teams wrote and it reads from these teams.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megarl.config.model import ParallelConfig
from megarl.config.placement import TeamConfig
from megarl.config.run import RunConfig
from megarl.dag.ahead import refuse_ahead
from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node, team_of
from megarl.dag.shares import settings_of_workers, share_out, workers_of_machine
from megarl.dag.stage import Role, role_named
from megarl.system.errors import ConfigError, close_matches, count

#: Built-in roles with a model, in the order in which `roles_of` returns them.
MODEL_ROLES = (Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.TEACHER, Role.REWARD_MODEL, Role.ROLLOUT)
ONLY_TEAM = "all"
_TRAINED = (Role.ACTOR, Role.CRITIC)
_KEPT = {*_TRAINED, Role.ROLLOUT}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class TeamPlan:
    """One team of a run."""

    name: str  # name in messages and metrics
    roles: tuple[Role, ...]  # roles whose models the team holds and the graph uses
    devices: int
    first: int  # number of the team's first worker, counted over all teams, team by team
    parallel: ParallelConfig
    nodes: tuple[str, ...]  # nodes that the team runs, in the graph's order
    # positions in a step's prompts at which mini-batches of the team's trained models begin, except the first
    cuts: tuple[int, ...] = ()

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.devices // self.parallel.model_parallel_size

    @property
    def may_restart(self) -> bool:
        """Whether the team only scores samples, so that it can lose its processes and start again.

        Other teams have state that no message carries: trained weights, and the state of generation.
        """
        return bool(self.roles) and not any(role in _KEPT or role.is_further for role in self.roles)


def begins_again(config: RunConfig, team: TeamPlan) -> bool:
    """Return whether the launcher restarts only this team when one of its processes dies."""
    return bool(config.placement.restarts) and team.may_restart


@dataclass(frozen=True)
class Handover:
    """The fields of one node that the same other teams read; a node has one handover per set of reading teams."""

    node: str  # node that wrote the fields; `giver` is its team
    giver: str
    fields: tuple[str, ...]  # fields that exactly the teams `takers` read
    takers: tuple[str, ...]
    samples: str  # node that made these samples by resampling

    @property
    def key(self) -> str:
        """Name of the handover in the buffer."""
        return f"{self.node}>{'+'.join(self.takers)}"


@dataclass(frozen=True)
class Placement:
    """The teams of a run, the actor's first, and the batch fields that they hand over to one another."""

    teams: tuple[TeamPlan, ...]
    handovers: tuple[Handover, ...] = ()

    def __getitem__(self, name: str) -> TeamPlan:
        return next(team for team in self.teams if team.name == name)

    @property
    def separate(self) -> bool:
        """Whether there are several teams."""
        return len(self.teams) > 1

    def of_worker(self, number: int) -> TeamPlan:
        """Return the team of worker `number` of the job."""
        return next(team for team in self.teams if team.first <= number < team.first + team.devices)

    def of_role(self, role: Role) -> TeamPlan | None:
        """Return the team that holds this model; None if the graph does not use it."""
        return next((team for team in self.teams if role in team.roles), None)

    def home(self, role: Role) -> TeamPlan:
        """Return the team that holds a role which the graph uses."""
        team = self.of_role(role)
        assert team is not None, f"no team holds the {role.value}"
        return team

    @property
    def request_workers(self) -> int:
        """Number of workers in teams with only the rollout; with servers they hold no model and send requests."""
        return sum(team.devices for team in self.teams if team.roles == (Role.ROLLOUT,))

    def of_node(self, id: str) -> TeamPlan:
        """Return the team that runs this node."""
        return next(team for team in self.teams if id in team.nodes)

    def given(self, id: str) -> list[Handover]:
        """Return the handovers of this node's fields to other teams."""
        return [handover for handover in self.handovers if handover.node == id]

    def given_by(self, team: str) -> list[Handover]:
        """Return the handovers from this team, in the order of the graph."""
        return [handover for handover in self.handovers if handover.giver == team]

    def taken(self, team: str) -> list[Handover]:
        """Return the transfers to this team, in the order of the graph."""
        return [handover for handover in self.handovers if team in handover.takers]


def devices_key(config: RunConfig, team: TeamPlan) -> str:
    """Return the key that sets the number of a team's workers."""
    return f"placement.teams.{team.name}.devices" if team.name in config.placement.teams else "cluster.nproc"


def roles_of(graph: TaskGraph) -> tuple[Role, ...]:
    """Return the roles whose models a run of this graph needs.

    There is always an actor, and a rollout unless the data have responses. Further models (`models`) come last.
    """
    needed = graph.roles | ({Role.ACTOR} if graph.has_responses else {Role.ACTOR, Role.ROLLOUT})
    further = sorted((role for role in needed if role.is_further), key=lambda role: role.value)
    return (*(role for role in MODEL_ROLES if role in needed), *further)


def together(config: RunConfig, roles: Sequence[Role] = (Role.ACTOR, Role.ROLLOUT)) -> Placement:
    """Return a placement with one team of all workers and the actor's layout, for commands that do not run a task
    graph."""
    return Placement((TeamPlan(ONLY_TEAM, tuple(roles), config.cluster.nproc, 0, config.actor.parallel, ()),))


def place(graph: TaskGraph, config: RunConfig) -> Placement:
    """Return the teams that `placement` sets, with their nodes and handovers."""
    roles = roles_of(graph)
    shares = _shares(config, graph, roles)
    teams, first = [], 0
    owner = {role: name for name, (team_roles, _) in shares.items() for role in team_roles}
    nodes = {node.id: team_of(node, owner) for node in graph}
    for name, (team_roles, devices) in shares.items():
        team_nodes = tuple(id for id in graph.order() if nodes[id] == name)
        layout, cuts = _layout(config, name, team_roles), _cuts(config, team_roles)
        teams.append(TeamPlan(name, team_roles, devices, first, layout, team_nodes, cuts))
        first += devices
    placement = Placement(tuple(teams), tuple(_handovers(graph, nodes, config)) if len(teams) > 1 else ())
    refuse_ahead(config, placement, graph)
    return placement


def settled(config: RunConfig, placement: Placement) -> RunConfig:
    """Return the recipe with the teams of `placement` written out if `placement.auto` chose them.

    A resumed run needs the same teams, and the folder or files from which they were chosen may change or disappear.
    """
    if config.placement.auto is None:
        return config
    teams = {
        team.name: TeamConfig.model_validate(
            {"roles": [role.value for role in team.roles if not role.is_further], "devices": team.devices}
        )
        for team in placement.teams
    }
    update = {"auto": None, "measured": None, "teams": teams}
    return config.model_copy(update={"placement": config.placement.model_copy(update=update)})


def _shares(config: RunConfig, graph: TaskGraph, roles: Sequence[Role]) -> dict[str, tuple[tuple[Role, ...], int]]:
    """Return the roles and workers of every team, the actor's first."""
    placement, nproc = config.placement, config.cluster.nproc
    if placement.auto is not None:
        return share_out(config, graph, roles)
    if not placement.teams:
        return {ONLY_TEAM: (tuple(roles), nproc)}
    _check_names(placement.teams)
    named = {name: tuple(Role(role) for role in team.roles) for name, team in placement.teams.items()}
    _check_further(named, config)
    apart = {role for team in named.values() for role in team}
    # Further models that the recipe assigns to no team go to the actor's team.
    further = tuple(role for role in roles if role.is_further and role not in apart)
    named = {name: (*team, *further) if Role.ACTOR in team else team for name, team in named.items()}
    _check_roles(named, roles)
    devices = sum(team.devices for team in placement.teams.values())
    if devices != nproc:
        table = "; ".join(f"{name} ({', '.join(team.roles)}) {team.devices}" for name, team in placement.teams.items())
        raise ConfigError(
            f"the teams need {count(devices, 'device')}, but the run has {count(nproc, 'worker')}: "
            f"{abs(devices - nproc)} too {'many' if devices > nproc else 'few'} in the teams",
            where="placement.teams",
            found=table,
            allowed=f"numbers that add up to cluster.nproc={nproc}",
            fix=_other_numbers(config, devices),
        )
    order = sorted(named, key=lambda name: Role.ACTOR not in named[name])
    return {
        name: (tuple(role for role in roles if role in named[name]), placement.teams[name].devices) for name in order
    }


def _other_numbers(config: RunConfig, devices: int) -> str:
    """Return the advice for numbers of workers that fill whole machines, as overrides of the recipe."""
    settings = settings_of_workers(config, devices)
    if settings is not None:
        return f"set {settings}, or other numbers of devices"
    most = workers_of_machine(config)
    whole = [number for number in (devices // most * most, devices // most * most + most) if number]
    sums = " or ".join(f"{number} ({settings_of_workers(config, number) or 'the run as it is'})" for number in whole)
    return f"set numbers of devices that add up to {sums}, so that they fill machines of {most} workers"


def _check_names(names: Iterable[str]) -> None:
    """Check the names of teams, which are used in files, metrics and transfers."""
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong:
        raise ConfigError(
            "the name of a team is invalid",
            where="placement.teams",
            found=", ".join(map(repr, wrong)),
            allowed="letters, digits, _ and -, beginning with a letter",
            fix="rename the team",
        )


def _check_further(named: dict[str, tuple[Role, ...]], config: RunConfig) -> None:
    """Check that each role that is not a built-in one is a model of the recipe."""
    for name, team_roles in named.items():
        if unknown := [role.value for role in team_roles if role.is_further and role.value not in config.models]:
            known = [*(role.value for role in MODEL_ROLES), *config.models]
            near = close_matches(unknown[0], known)
            raise ConfigError(
                f"there is no role {unknown[0]}, nor a model of this name in the section models",
                where=f"placement.teams.{name}.roles",
                found=unknown[0],
                allowed=known,
                fix=f"did you mean {near[0]}?" if near else f"add the model: models.{unknown[0]}.train=true",
            )


def _check_roles(named: dict[str, tuple[Role, ...]], roles: Sequence[Role]) -> None:
    """Check that every role of the graph is in exactly one team, and that every team has a role of the graph."""
    for role in (*MODEL_ROLES, *(role for role in roles if role.is_further)):
        holders = [name for name, team_roles in named.items() for team_role in team_roles if team_role is role]
        if len(holders) > 1:
            raise ConfigError(
                f"the role {role.value} is listed more than once",
                where="placement.teams",
                found=f"in {' and '.join(holders)}",
                fix="list it once, in one team",
            )
        if role in roles and not holders:
            raise ConfigError(
                f"no team has the role {role.value}, which this recipe's graph needs",
                where="placement.teams",
                found="; ".join(
                    f"{name}: {', '.join(r.value for r in team_roles)}" for name, team_roles in named.items()
                ),
                allowed=[role.value for role in roles],
                fix=f"add {role.value} to the roles of a team",
            )
    for name, team_roles in named.items():
        if not any(role in roles for role in team_roles):
            raise ConfigError(
                "this recipe's graph needs none of this team's roles",
                where=f"placement.teams.{name}.roles",
                found=", ".join(role.value for role in team_roles),
                allowed=[role.value for role in roles],
                fix="remove the team, or give it another role",
            )


def _layout(config: RunConfig, name: str, roles: tuple[Role, ...]) -> ParallelConfig:
    """Return the layout shared by all roles of a team."""
    if roles == (Role.ROLLOUT,) and not config.rollout.holds_model:
        # the team's workers have no model: they send requests to servers
        return config.rollout.parallel or ParallelConfig()
    layouts = {role.value: config.parallel_of(role.value) for role in roles}
    first, *_ = layouts.values()
    other = next((role for role, layout in layouts.items() if layout != first), None)
    if other is not None:
        raise ConfigError(
            f"the {other} and the {next(iter(layouts))} are in the team {name!r} with different layouts, but a team "
            "has one layout",
            where=f"{config.section_of(other)}.parallel",
            found=layouts[other].model_dump(exclude_defaults=True) or "one process per replica",
            allowed=first.model_dump(exclude_defaults=True) or "one process per replica",
            fix=f"put the {other} into a separate team (placement.teams), or use the same layout",
        )
    return first


def _cuts(config: RunConfig, roles: Iterable[Role]) -> tuple[int, ...]:
    """Return the sorted positions in a step's prompts, except 0, at which mini-batches begin: those of the actor and
    of the critic, if these are in `roles`.
    """
    batch = config.data.batch_size
    trained = [config.training_of(role.value) for role in roles if role in _TRAINED or role.is_further]
    sizes = [settings.mini_batch_size or batch for settings in trained]
    return tuple(sorted({number * size for size in sizes for number in range(1, batch // size)}))


def _handovers(graph: TaskGraph, nodes: dict[str, str], config: RunConfig) -> Iterable[Handover]:
    """Yield the handovers between teams, in the order of the graph."""
    readers: dict[str, dict[str, set[str]]] = {id: {} for id in graph.order()}  # writer -> field -> its readers
    known: dict[str, str | None] = {}  # team -> node that made the samples that the team has
    for id in graph.order():
        node, inputs = graph[id], graph.inputs(id)
        # With as_ready, dropped groups are replaced before they reach a node that refills. It then requests no more
        # samples, so it may be in any team.
        if not (node.declared.refills and not config.async_.in_order):
            _check_together(node, None if inputs.samples is None else graph[inputs.samples], graph, nodes)
        apart = inputs.samples is not None and nodes[inputs.samples] != nodes[id]
        for name, writer in inputs.sources.items():
            if node.declared.resamples and not node.declared.refills and apart and name not in node.declared.uses:
                continue  # `_check_together` has made sure that no later node reads the field
            if nodes[writer] != nodes[id]:
                readers[writer].setdefault(name, set()).add(nodes[id])
                _check_handle(node, name, graph[writer], nodes)
                known[nodes[id]] = inputs.samples
        if known.get(nodes[id]) != inputs.samples:
            raise _unknown_samples(node, graph[inputs.samples or id], nodes)
        if node.declared.resamples:
            known[nodes[id]] = id
    for writer, fields in readers.items():
        samples = writer if graph[writer].declared.resamples else graph.inputs(writer).samples
        for takers in dict.fromkeys(tuple(sorted(teams)) for teams in fields.values()):
            assert samples is not None, "the first node of a graph resamples, or all its readers are in its team"
            names = tuple(name for name, teams in fields.items() if teams == set(takers))
            yield Handover(writer, nodes[writer], names, takers, samples)


def _check_together(node: Node, samples: Node | None, graph: TaskGraph, nodes: dict[str, str]) -> None:
    """Check that a node which resamples, requests more prompts or reads prompts is in the team of the nodes before it.

    Args:
        samples: node that made the samples that `node` reads; None: it reads prompts.
    """
    first = next(iter(graph))
    if node.declared.refills:  # this node's team must also run all nodes before it, again and again
        again = [graph[id] for id in graph.order() if id in graph.upstream(node.id)]
        before = next((other for other in again if nodes[other.id] != nodes[node.id]), node)
        why = f"requests more samples from {before.id!r} until a step has enough"
    elif samples is None:
        before, why = first, "reads prompts, before samples are generated"
    elif node.declared.resamples and (lost := _lost(node, graph)):
        before, why = samples, f"changes the samples of {samples.id!r}, and only declares a part of the fields that "
        why += f"later nodes read ({', '.join(lost)} are missing)"
    else:
        return
    if nodes[node.id] != nodes[before.id]:
        raise ConfigError(
            f"node {node.id!r} {why}: it must be in the team of {before.id!r}",
            where="placement.teams",
            found=f"{before.id} in {nodes[before.id]}, {node.id} in {nodes[node.id]}",
            fix=_one_team(before, node),
        )


def _lost(node: Node, graph: TaskGraph) -> list[str]:
    """Return the fields that nodes after `node`, which resamples, use and that it neither uses nor writes.

    If the samples come from another team, its team does not get these fields.
    """
    lost: dict[str, None] = {}
    declared = {*node.declared.uses, *node.declared.changes}
    order = graph.order()
    for id in order[order.index(node.id) + 1 :]:
        sources = graph.inputs(id).sources
        lost |= {name: None for name, writer in sources.items() if writer == node.id and name not in declared}
    return list(lost)


def _one_team(*nodes: Node) -> str:
    """Return the advice for nodes that must be in one team, in terms of the roles that determine their teams."""
    roles_needed: list[str] = []
    for node in nodes:
        roles = [role.value for role in (node.role, *map(role_named, node.needs_roles)) if role in MODEL_ROLES]
        scores = node.role is Role.REWARD or "scorer" in node.needs_roles
        roles_needed += roles or [Role.ROLLOUT.value if scores else Role.ACTOR.value]
    return f"put {' and '.join(dict.fromkeys(roles_needed))} into one team; other roles may be in separate teams"


def _unknown_samples(node: Node, maker: Node, nodes: dict[str, str]) -> ConfigError:
    return ConfigError(
        f"node {node.id!r} uses the samples of {maker.id!r} but reads none of their fields, so its team does not get "
        "these samples",
        where="placement.teams",
        found=f"{maker.id} in {nodes[maker.id]}, {node.id} in {nodes[node.id]}",
        fix=f"make its stage read one of their fields, or {_one_team(maker, node)}",
    )


def _check_handle(node: Node, name: str, writer: Node, nodes: dict[str, str]) -> None:
    """Raise an error if teams would exchange a handle of pending work, which is only valid within its process."""
    if name in node.declared.consumes:
        raise ConfigError(
            f"node {node.id!r} waits for {name!r}, which only exists in the process of {writer.id!r}",
            where="placement.teams",
            found=f"{node.id} in {nodes[node.id]}, {writer.id} in {nodes[writer.id]}",
            fix=_one_team(writer, node),
        )
