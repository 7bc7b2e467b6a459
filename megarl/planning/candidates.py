"""The choices of `megarl plan --search`: placements, layouts, and how engines use their memory.

Spread      which teams have which devices, and what generates     one team | servers apart | a team that generates
Choice      a spread, the actor's layout, micro-batches, recomputation, offloading

Everything else in a recipe stays: the batch, the algorithm, the engine, and how far generation runs ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.layout import divisors, layout_problems, makes_replicas, tensor_sizes
from megarl.config.base import Section
from megarl.config.model import ParallelConfig
from megarl.config.placement import TeamConfig
from megarl.config.run import RunConfig
from megarl.dag.shares import batch_sizes
from megarl.dag.stage import Role
from megarl.planning.flops import FlopCounter
from megarl.planning.hardware import Hardware
from megarl.planning.step import server_devices
from megarl.system.errors import ConfigError, count
from megarl.system.offload_schedule import GRADIENTS, OPTIMIZER

_MICRO_BATCHES = (0.5, 1, 2, 4)
"""Factors on the recipe's micro-batch tokens."""
RECOMPUTE = ("none", "selective", "full")
"""Forms of recomputation, from the fastest to the slowest."""
_CONTEXT = 1024
"""Number of tokens of the longest sequence that each context-parallel rank must get at least."""
_EIGHTHS = 8


@dataclass(frozen=True)
class Spread:
    """The assignment of devices to teams and servers."""

    workers: int
    servers: int = 0  # servers that the run starts; 0: it has none, or those of the recipe are kept
    tp_size: int = 1  # ranks per server
    colocated: bool = False  # whether servers share the trainer's devices
    teams: tuple[tuple[str, tuple[str, ...], int], ...] = ()  # (name, roles, devices) of each team; empty: one team
    rollout: ParallelConfig | None = None  # layout of a team that only generates, with an embedded engine

    def trainers(self) -> int:
        """Return the number of workers in the actor's team."""
        return next((devices for _, roles, devices in self.teams if Role.ACTOR.value in roles), self.workers)

    def describe(self) -> str:
        """Describe the devices of each team and the servers in a few words."""
        text = " + ".join(f"{name} {devices}" for name, _, devices in self.teams) or f"{self.workers} together"
        if self.rollout is not None and self.rollout.tp > 1:
            text += f" tp{self.rollout.tp}"
        if self.servers:
            text += f", {count(self.servers, 'server')} tp{self.tp_size}, {'shared' if self.colocated else 'apart'}"
        return text


#: A value of `actor.engine.offload`: true (offload everything), false (nothing), or the names of the offloaded parts.
Offload = bool | tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """One variant of a recipe that the search compares with others."""

    spread: Spread
    parallel: ParallelConfig
    micro_batch_tokens: int  # tokens per micro-batch of the training engines
    recompute: str  # recomputation in the training engines
    offload: Offload  # what the training engines move to host memory
    # memory fraction of servers on the trainer's devices; None: as in the recipe
    memory_fraction: float | None = field(default=None, compare=False)

    def apply(self, config: RunConfig, hardware: Hardware, trains: Sequence[str]) -> RunConfig:
        """Return the recipe `config` with the placement, layout and memory settings of this choice. `trains` holds the
        roles that train."""
        spread = self.spread
        actor = _with(config.actor, parallel=self.parallel)
        rollout = config.rollout
        if spread.servers:
            servers = _with(
                rollout.sglang,
                servers=spread.servers,
                tp_size=spread.tp_size,
                ep_size=math.gcd(rollout.sglang.ep_size, spread.tp_size),
                attention_dp=math.gcd(rollout.sglang.attention_dp, spread.tp_size),
                nnodes=1,
                colocated=spread.colocated,
                memory_fraction=rollout.sglang.memory_fraction if spread.colocated else None,
                gpus=None,
            )
            rollout = _with(rollout, sglang=servers)
        if spread.rollout is not None:
            rollout = _with(rollout, parallel=spread.rollout)
        teams = {
            name: TeamConfig.model_validate({"roles": roles, "devices": devices})
            for name, roles, devices in spread.teams
        }
        placement = _with(config.placement, teams=teams, auto=None, measured=None)
        cluster: dict[str, Any] = {"nproc": spread.workers, "nnodes": hardware.nodes}
        # the default of max_restarts depends on the teams
        if config.cluster.max_restarts == config.placement.default_max_restarts:
            cluster["max_restarts"] = placement.default_max_restarts
        if hardware.gpu:
            cluster["device_memory_gb"] = hardware.memory_gb
        placed = {"actor": actor, "rollout": rollout, "placement": placement}
        # the local launcher starts processes on one machine only
        if hardware.nodes > 1 and config.launch.launcher == "local":
            restarts = cluster.get("max_restarts", config.cluster.max_restarts)
            launcher = "ray" if spread.teams or restarts else "torchrun"
            placed["launch"] = _with(config.launch, launcher=launcher)
        return self.apply_engine(_with(config, **placed, cluster=_with(config.cluster, **cluster)), trains)

    def apply_engine(self, config: RunConfig, trains: Sequence[str]) -> RunConfig:
        """Return `config`, which already has this choice's placement and layout, with the choice's memory of servers,
        micro-batches, recomputation and offload."""
        changed: dict[str, Any] = {}
        for role in trains:
            section = getattr(config, role)
            engine = _with(
                section.engine,
                micro_batch_tokens=self.micro_batch_tokens,
                recompute=self.recompute,
                offload=self.offload if isinstance(self.offload, bool) else list(self.offload),
            )
            changed[role] = _with(section, engine=engine)
        if self.memory_fraction is not None:
            servers = _with(config.rollout.sglang, memory_fraction=self.memory_fraction)
            changed["rollout"] = _with(config.rollout, sglang=servers)
        return _with(config, **changed)


def _with(section: Any, **values: Any) -> Any:
    assert isinstance(section, Section)
    return section.model_copy(update=values)


@dataclass(frozen=True)
class Space:
    """All variants of a recipe that the search compares on some hardware."""

    config: RunConfig
    roles: tuple[Role, ...]  # roles whose models the graph uses
    facts: ModelFacts  # sizes of the policy
    hardware: Hardware  # hardware whose devices are all used

    @property
    def trains(self) -> tuple[str, ...]:
        """The roles of the recipe that are trained."""
        return tuple(role.value for role in (Role.ACTOR, Role.CRITIC) if role in self.roles)

    # -- spreads -------------------------------------------------------------------------------------------------

    def spreads(self) -> list[Spread]:
        """Return the possible assignments of devices to teams and servers. Raise ConfigError if servers that already
        run take all devices."""
        config, hardware = self.config, self.hardware
        ahead = config.async_.max_staleness > 0
        servers = config.rollout.servers
        if servers is not None:
            spreads = self._running() if servers.urls else self._servers(ahead=ahead)
        else:
            spreads = self._rollout_teams() if ahead else [Spread(hardware.devices)]
        if not ahead and config.placement.teams and config.launch.launcher != "torchrun":
            spreads += self._as_given()
        return [spread for spread in spreads if spread.workers % hardware.nodes == 0]

    def _servers(self, *, ahead: bool) -> list[Spread]:
        """Return assignments in which the run starts servers: on the trainer's devices or on others, or only on others
        if generation runs `ahead`."""
        hardware, nodes, each = self.hardware, self.hardware.nodes, self.hardware.per_node
        sizes = [tp for tp in divisors(each) if self.facts.heads % tp == 0]
        if not ahead:
            together = [Spread(each * nodes, each // tp * nodes, tp, colocated=True) for tp in sizes]
            apart = [
                Spread((each - tp * many) * nodes, many * nodes, tp)
                for tp in sizes
                for many in range(1, each // tp + 1)
                if each - tp * many > 0
            ]
            return together + apart
        # on several machines servers run only on devices of workers that only send requests
        if nodes > 1:
            return [
                Spread(hardware.devices, devices // tp, tp, teams=self._two_teams(hardware.devices - devices, devices))
                for devices in self._rollout_devices()
                for tp in sizes
                if devices % tp == 0
            ]
        spreads = []
        for tp in sizes:
            for many in range(1, -(-each // tp)):
                # workers of the rollout team, on whose GPUs the servers run
                lending = min(self.config.placement.request_workers or 1, tp * many)
                teams = self._two_teams(each - tp * many, lending)
                spreads.append(Spread(each - tp * many + lending, many, tp, teams=teams))
        return spreads

    def _running(self) -> list[Spread]:
        """Return assignments in which servers that already run keep their devices. Raise ConfigError if they have all
        devices."""
        used = server_devices(self.config)
        left = self.hardware.devices - used
        if left < 1:
            raise ConfigError(
                "servers that already run take all devices",
                where="--hardware",
                found=f"{self.hardware.describe()}, of which servers have {used}",
                allowed="hardware with further devices for training",
                fix="count the devices of servers and training in --hardware",
            )
        if self.config.async_.max_staleness:
            request_workers = self.config.placement.request_workers or 1
            return [Spread(left + request_workers, teams=self._two_teams(left, request_workers))]
        return [Spread(left)]

    def _rollout_teams(self) -> list[Spread]:
        """Return assignments with one team that generates with embedded engines, and one that trains."""
        total = self.hardware.devices
        return [
            Spread(total, teams=self._two_teams(total - devices, devices), rollout=ParallelConfig(tp=tp))
            for devices in self._rollout_devices()
            for tp in tensor_sizes(self.facts)
            if tp <= self.hardware.per_node and devices % tp == 0
        ]

    def _rollout_devices(self) -> list[int]:
        """Return the device counts that the planner tries for a team that generates.

        They are multiples of an eighth of all devices (or of 1), whole machines, and the recipe's own number.
        """
        hardware, given = self.hardware, self.config.placement.request_workers
        step, machines = max(1, hardware.devices // _EIGHTHS), max(1, hardware.nodes // (2 * _EIGHTHS))
        whole = range(machines * hardware.per_node, hardware.devices, machines * hardware.per_node)
        return sorted(
            {*range(step, hardware.devices, step), *whole, *([given] if 0 < given < hardware.devices else [])}
        )

    def _two_teams(self, trains: int, generates: int) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """Return (name, roles, devices) of a team that trains and of one that generates; the recipe may name them."""
        teams = self.config.placement.teams
        names = {role: name for name, team in teams.items() for role in team.roles}
        rest = tuple(role.value for role in self.roles if role is not Role.ROLLOUT)
        train, draw = names.get("actor", "train"), names.get("rollout", "draw")
        return ((train, rest, trains), (draw if draw != train else "draw", (Role.ROLLOUT.value,), generates))

    def _as_given(self) -> list[Spread]:
        """Return assignments of devices to the recipe's teams, in steps of an eighth of all (at least one)."""
        teams = [(name, tuple(team.roles)) for name, team in self.config.placement.teams.items()]
        if len(teams) < 2 or self.config.rollout.servers is not None:
            return []
        step = max(1, self.hardware.devices // _EIGHTHS)
        return [
            Spread(
                self.hardware.devices, teams=tuple((*team, share) for team, share in zip(teams, shares, strict=True))
            )
            for shares in _shares(self.hardware.devices, len(teams), step)
        ]

    # -- layouts -------------------------------------------------------------------------------------------------

    def layouts(self, spread: Spread) -> list[ParallelConfig]:
        """Return the actor's layouts that divide its model, workers and batches, and with which the other teams hold
        whole replicas."""
        facts, devices = self.facts, spread.trainers()
        longest = self.config.data.max_prompt_tokens + self.config.response_tokens(self.config.rollout.sampling)
        contexts = [cp for cp in _powers(devices) if cp == 1 or longest // cp >= _CONTEXT]
        roles = next((roles for _, roles, _ in spread.teams if Role.ACTOR.value in roles), self.roles)
        layouts = []
        for tp in tensor_sizes(facts):
            for pp in (pp for pp in divisors(devices) if _is_even(facts.layers, pp)):
                for cp in contexts:
                    if tp * pp * cp > devices or devices % (tp * pp * cp) or tp > self.hardware.joined:
                        continue
                    if not self._divides_batches(roles, devices // (tp * pp * cp)):
                        continue
                    for experts in self._experts(tp, devices // pp):
                        for stages in self._stages(pp):
                            # With experts, tensor-parallel ranks always split sequences, whatever `sp` is, so the
                            # candidate keeps the recipe's value.
                            sp = tp > 1 and (not facts.is_moe or self.config.actor.parallel.sp)
                            layout = ParallelConfig(tp=tp, pp=pp, cp=cp, sp=sp, **stages, **experts)
                            if makes_replicas(devices, layout) and not layout_problems("actor.parallel", layout, facts):
                                layouts.append(layout)
        actor, critic = self.config.actor, self.config.critic
        share = actor.engine.share_prefixes or (critic.engine.share_prefixes and critic.parallel is None)
        whole = [layout for layout in layouts if not (share and layout.cp > 1)]
        return [layout for layout in whole if self._fits_others(layout, spread)]

    def _stages(self, pp: int) -> list[Mapping[str, Any]]:
        """Return the layout settings to try for `pp` pipeline stages: an even division of the layers, interleaved
        stages (`vpp`), and fewer layers in the last stage, which also computes the head (`last_stage_layers`)."""
        if pp == 1:
            return [{}]
        layers, counter = self.facts.layers, FlopCounter.of(self.facts)
        ways: list[Mapping[str, Any]] = [{}, *({"vpp": vpp} for vpp in (2, 4) if layers % (pp * vpp) == 0)]
        head = counter.per_head_token / (counter.per_token / layers)  # the head's work, as a number of layers
        even = -(-layers // pp)
        longest = {last: max(last + head, -(-(layers - last) // (pp - 1))) for last in range(even, 0, -1)}
        last = min(longest, key=lambda number: longest[number])
        return ways if last == even else [*ways, {"last_stage_layers": last}]

    def _experts(self, tp: int, ranks: int) -> list[Mapping[str, Any]]:
        """Return the ways to divide experts over the ranks of a stage: by number, or also by their width."""
        if not self.facts.is_moe:
            return [{}]
        sizes = [ep for ep in _powers(ranks) if self.facts.experts % ep == 0]
        by_number: list[Mapping[str, Any]] = [{"ep": ep} for ep in sizes]
        return by_number + [{"ep": ep, "etp": tp} for ep in sizes if tp > 1 and ep > 1 and ranks % (ep * tp) == 0]

    def _divides_batches(self, roles: Sequence[Role | str], replicas: int) -> bool:
        """Return whether `replicas` get equal shares of all batches of a team with `roles`, as the checks require."""
        return all(
            size % replicas == 0
            for size in batch_sizes(
                self.config, [role if isinstance(role, Role) else Role(role) for role in roles]
            ).values()
        )

    def _fits_others(self, parallel: ParallelConfig, spread: Spread) -> bool:
        """Return whether every other team holds whole replicas of its layout, and their number divides its batches."""
        for _, roles, devices in spread.teams:
            if Role.ACTOR.value in roles:
                continue
            layout = getattr(self.config, roles[0]).parallel or parallel
            if tuple(roles) == (Role.ROLLOUT.value,):
                layout = spread.rollout or layout
                if not self.config.rollout.holds_model:
                    layout = self.config.rollout.parallel or ParallelConfig()
            if not makes_replicas(devices, layout):
                return False
            if not self._divides_batches(roles, devices // layout.model_parallel_size):
                return False
        return True

    # -- engines -------------------------------------------------------------------------------------------------

    def budgets(self, spread: Spread) -> list[tuple[int, Offload]]:
        """Return the pairs (tokens per micro-batch, what the training engines offload) to try with a placement."""
        given = self.config.actor.engine
        tokens = sorted({max(1, int(given.micro_batch_tokens * times)) for times in _MICRO_BATCHES})
        # Offloading helps only models that take turns on a GPU, so not an actor in a team of its own. On a CPU the
        # recipe's value stays.
        by_itself = bool(spread.teams) and spread.teams[0][1] == (Role.ACTOR.value,)
        written = given.offload if isinstance(given.offload, bool) else tuple(given.offload)
        offloads: list[Offload] = [False] if by_itself else [False, True]
        if spread.colocated and len(offloads) > 1:  # if samples are short, the parameters may stay on the device
            offloads.append((GRADIENTS, OPTIMIZER))
        # A streamed optimizer needs offloading, so no other value would pass the checks.
        if any(getattr(self.config, role).engine.stream_optimizer for role in self.trains):
            offloads = [True]
        offloads = offloads if self.hardware.gpu else [written]
        return [(number, offload) for number in tokens for offload in offloads]


def _is_even(layers: int, pp: int) -> bool:
    """Return whether the fullest of `pp` pipeline stages has at most a tenth more layers than the mean."""
    return pp <= layers and -(-layers // pp) * pp <= 1.1 * layers


def _powers(most: int) -> list[int]:
    return [1 << place for place in range(most.bit_length()) if 1 << place <= most]


def _shares(devices: int, teams: int, step: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to share out devices among teams: multiples of `step`, and for the last team the rest."""
    if teams == 1:
        if devices >= step:
            yield (devices,)
        return
    for first in range(step, devices, step):
        for rest in _shares(devices - first, teams - 1, step):
            yield (first, *rest)
