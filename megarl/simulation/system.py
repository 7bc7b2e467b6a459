"""The simulated system: teams, their nodes, generating replicas, and how samples travel between teams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.dag.placement import place
from megarl.dag.stage import Role
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


@dataclass(frozen=True)
class SimTeam:
    """One team in a simulated run."""

    name: str
    devices: int  # number of workers, one per device
    replicas: int  # data-parallel size
    nodes: tuple[str, ...]  # nodes that the team runs, in order, except generation
    takes: int = 0  # number of handovers that the team receives per step
    gives: int = 0  # number of handovers that the team sends per step


@dataclass(frozen=True)
class System:
    """The properties of a run on which its time depends."""

    groups: int  # prompt groups per step, B
    samples: int  # samples per group
    prompt_tokens: int  # tokens per prompt
    max_staleness: int  # largest number of off-policy steps, `async.max_staleness` (k)
    order: str  # order in which groups are trained on, `async.order`
    partial: bool  # whether samples are interrupted for a weight update, `async.partial`
    balances: bool  # whether replicas exchange samples for equal work (`actor.engine.balance_replicas`)
    shares_tokens: bool  # whether `placement.share` is tokens
    servers: int  # number of generating replicas: engines or servers
    server_devices: int  # devices per replica
    slots: int  # maximum number of samples that a replica decodes at the same time
    train: SimTeam  # the actor's team
    rollout: SimTeam | None  # the team that generates; None: the actor's team does
    others: tuple[SimTeam, ...]  # all other teams, such as those of references, critics and teachers
    waits: Mapping[str, tuple[str, ...]]  # nodes of other teams that a node waits for, by the node's id
    rollout_node: str = "rollout"

    @property
    def teams(self) -> tuple[SimTeam, ...]:
        """All teams, the actor's first."""
        return (self.train, *([] if self.rollout is None else [self.rollout]), *self.others)

    @property
    def in_order(self) -> bool:
        """Whether whole steps are generated one after the other."""
        return self.order == "in_order"

    @property
    def devices(self) -> int:
        """Number of devices of all teams."""
        return sum(team.devices for team in self.teams)

    def scaled(self, devices: int, *, grow: bool) -> System:
        """Return the same run on more `devices`: every team and the servers grow in proportion, and with `grow` the
        prompts per step; layouts do not change. Raise ConfigError unless `devices` is a multiple of the current number.
        """
        factor, rest = divmod(devices, self.devices)
        if rest or not factor:
            raise ConfigError(
                "this number of devices is not a multiple of the recipe's, and teams keep their layouts",
                where="--gpus",
                found=devices,
                allowed=f"multiples of {self.devices}, the recipe's devices",
                fix=f"use --gpus {max(1, factor) * self.devices} or {(max(1, factor) + 1) * self.devices}",
            )

        def bigger(team: SimTeam) -> SimTeam:
            return replace(team, devices=team.devices * factor, replicas=team.replicas * factor)

        return replace(
            self,
            groups=self.groups * (factor if grow else 1),
            servers=self.servers * factor,
            train=bigger(self.train),
            rollout=None if self.rollout is None else bigger(self.rollout),
            others=tuple(map(bigger, self.others)),
        )


def read_system(config: RunConfig, graph: TaskGraph) -> System:
    """Return the parts of a recipe that the simulation needs: teams, devices, servers and batch sizes. Raise
    ConfigError for an invalid placement, or a run with environment episodes.
    """
    if config.has_turns:
        raise ConfigError(
            "the simulation supports only samples of one turn",
            where="env.name",
            found=config.env["name"],
            allowed="recipes without an environment",
            fix="remove the environment, or measure the run itself",
        )
    placement = place(graph, config)
    home = {id: team.name for team in placement.teams for id in team.nodes}
    first = next(id for id in graph.order() if graph[id].declared.resamples)
    teams = {
        team.name: SimTeam(
            team.name,
            team.devices,
            team.replicas,
            tuple(id for id in team.nodes if id != first),
            len(placement.taken(team.name)),
            len(placement.given_by(team.name)),
        )
        for team in placement.teams
    }
    actor, rollout = placement.home(Role.ACTOR), placement.home(Role.ROLLOUT)
    apart = rollout.name != actor.name
    servers = config.rollout.servers
    at_once = config.data.batch_size * config.rollout.sampling.n * (1 + config.async_.max_staleness)
    return System(
        groups=config.data.batch_size,
        samples=config.rollout.sampling.n,
        prompt_tokens=config.data.max_prompt_tokens // 2,
        max_staleness=config.async_.max_staleness,
        order=config.async_.order,
        partial=config.async_.partial,
        balances=config.actor.engine.balance_replicas,
        shares_tokens=config.placement.share == "tokens",
        servers=rollout.replicas if servers is None else servers.count,
        server_devices=rollout.parallel.model_parallel_size if servers is None else servers.tp_size,
        slots=config.rollout.max_running
        if servers is None
        else (servers.max_concurrency or -(-at_once // servers.count)),
        train=teams[actor.name],
        rollout=teams[rollout.name] if apart else None,
        others=tuple(team for name, team in teams.items() if name not in (actor.name, rollout.name)),
        waits={id: tuple(up for up in graph.upstream(id) if home[up] != home[id]) for id in graph.order()},
        rollout_node=first,
    )
