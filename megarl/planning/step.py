"""One step of a recipe in closed form: seconds by phase, tokens per second, memory, weight updates.

`megarl plan` shows the result of `plan_step`, and its search ranks by it. Formulas such as S1 are those of
docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from megarl.artifacts.draft_training import facts_with_draft
from megarl.artifacts.facts import ModelFacts, known_facts, model_facts
from megarl.artifacts.layout import makes_replicas
from megarl.artifacts.shared_prefixes import shares_prefixes
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.training import TrainingConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node
from megarl.dag.placement import Placement, TeamPlan, place
from megarl.dag.stage import Kind, Role
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.decoding import Decoder
from megarl.planning.flops import FlopCounter
from megarl.planning.hardware import Hardware
from megarl.planning.links import Links
from megarl.planning.memory import SERVER_CACHE, GpuRoom, Memory, device_memory, server_bytes
from megarl.planning.outcome import Filled, PlannedPhase, ServerRoom, StepPlan
from megarl.planning.oversampling import OversampledRound
from megarl.planning.passes import Cost, ModelPass, total
from megarl.planning.schedule import Schedule
from megarl.planning.shard_sync import ShardUpdateSize, fullest_stage, shard_update_seconds
from megarl.planning.shards import BYTES, Sizes, checkpoint_bytes, known_sizes, parameter_bytes, state_bytes
from megarl.planning.terms import held
from megarl.planning.vision import image_flops
from megarl.planning.weight_sync import adapter_bytes
from megarl.planning.workload import Share, Workload, token_bytes
from megarl.system.errors import ConfigError
from megarl.system.offload_schedule import OPTIMIZER, PARAMETERS, PARTS

#: Cached properties of `StepFormulas` that are the same for every choice of memory settings, and may be reused.
_KEPT = (
    *("work", "policy", "schedule", "decoder", "server_weights", "handed", "keys", "weights"),
    *("_moved", "_home", "_links", "_spread"),
)


def model_sizes(config: RunConfig, graph: TaskGraph) -> dict[Role, ModelFacts | None]:
    """Return the sizes of the models in a graph, by role; None: they are not known on this machine. Of several teachers
    they are the largest teacher's.

    Raises:
        ConfigError: the policy's sizes are not known.
    """
    facts = known_facts(config.model, "download the model first, or describe it by model.hf_config")
    sizes: dict[Role, ModelFacts | None] = {Role.ACTOR: facts_with_draft(config, facts), Role.ROLLOUT: facts}
    for role in (Role.CRITIC, Role.REFERENCE, Role.TEACHER, Role.REWARD_MODEL):
        if role in graph.roles:
            path = getattr(config, role.value).path
            paths = list(config.teacher.paths.values()) if role is Role.TEACHER else [path] if path else []
            known = [model_facts(ModelConfig(path=path, freeze=config.model.freeze)) for path in paths]
            sizes[role] = max(filter(None, known or [facts]), key=lambda facts: facts.parameters, default=None)
    for name, further in config.models.items():
        sizes[Role(name)] = facts if further.path is None else model_facts(ModelConfig(path=further.path))
    return sizes


def server_devices(config: RunConfig) -> int:
    """Return the number of servers' own devices, including servers that already run."""
    servers = config.rollout.servers
    return 0 if servers is None or servers.colocated else servers.count * servers.ranks


def occupied(config: RunConfig, placement: Placement) -> int:
    """Return the number of devices of a run: the workers', and those of servers that share no worker's device."""
    workers, servers = sum(team.devices for team in placement.teams), config.rollout.servers
    if servers is None:
        return workers
    return (
        workers
        - placement.request_workers
        + max(0 if servers.urls else placement.request_workers, server_devices(config))
    )


@dataclass(frozen=True)
class StepFormulas:
    """The formulas for the seconds and the memory of one recipe's step."""

    config: RunConfig
    graph: TaskGraph
    placement: Placement  # the teams; each layout divides the workers of its team
    sizes: Sizes
    hardware: Hardware
    given: PlanAssumptions
    # costs of passes and generation computed before, for the same recipe in other layouts
    memo: dict[tuple[object, ...], list[Cost]] = field(default_factory=dict)
    caches: dict[tuple[object, ...], float] = field(default_factory=dict)  # bytes of servers' caches computed before

    def again(self, config: RunConfig) -> StepFormulas:
        """Return the formulas for `config`, which differs from this recipe only in how engines and servers use memory;
        results that do not depend on this are kept."""
        other = replace(self, config=config)
        other.__dict__.update({name: self.__dict__[name] for name in _KEPT if name in self.__dict__})
        return other

    @cached_property
    def work(self) -> Workload:
        """The number and lengths of a step's prompts and samples."""
        return Workload.of(self.config, self.given, self.policy.encoder)

    @cached_property
    def policy(self) -> ModelFacts:
        """The sizes of the policy."""
        return known_sizes(self.sizes, Role.ACTOR)

    @property
    def served(self) -> ModelFacts:
        """The sizes of the model that generates, which has no draft head."""
        return known_sizes(self.sizes, Role.ROLLOUT)

    @cached_property
    def _links(self) -> Links:
        return Links(self.hardware, self.given)

    @cached_property
    def schedule(self) -> Schedule:
        """The assignment of nodes to workers, and their dependencies."""
        return Schedule.of(self.config, self.graph, self.placement)

    @cached_property
    def _home(self) -> dict[str, TeamPlan]:
        return {id: team for team in self.placement.teams for id in team.nodes}

    def model(self, role: Role) -> ModelPass:
        """Return a `ModelPass` for the seconds of a role's passes."""
        team, engine = self.placement.home(role), self._section(role).engine
        facts = known_sizes(self.sizes, role)
        shares = shares_prefixes(self.config, facts, role.value)
        return ModelPass(
            facts,
            team.parallel,
            team.devices,
            engine.model_copy(update={"share_prefixes": shares}),
            self.config.model.dtype,
            self.hardware,
            self.given,
            value_head=role in (Role.CRITIC, Role.REWARD_MODEL),
            lora=self.config.model.lora if role in (Role.ACTOR, Role.CRITIC) else None,
        )

    # -- generation ----------------------------------------------------------------------------------------------

    @cached_property
    def decoder(self) -> Decoder:
        """The engine that generates responses."""
        config, facts = self.config, self.served
        servers = config.rollout.servers
        if servers is not None:
            sizes, groups = (config.rollout_dtype, servers.tp_size, 1, servers.ep_size), servers.attention_dp
            cache = config.cache_dtype
            return Decoder(facts, *sizes, self.hardware, self.given, cache_dtype=cache, attention_dp=groups)
        parallel = self.placement.home(Role.ROLLOUT).parallel
        tp, pp, ep, etp = parallel.tp, parallel.pp, parallel.ep, parallel.expert_tp
        hardware = self.hardware.while_others_wait(pp)
        return Decoder(facts, config.rollout_dtype, tp, pp, ep, hardware, self.given, etp, parallel.vpp or 1)

    @cached_property
    def room(self) -> ServerRoom:
        """The memory of an engine or a server for keys and values (formula K1 of docs/planning.md)."""
        decoder, work = self.decoder, self.work
        # In a model whose layers are all recurrent, tokens have no keys; they count as 1 byte, to avoid division by 0.
        token, servers = max(decoder.key_bytes, 1.0), self.config.rollout.servers
        if servers is None:
            layers = decoder.facts.layers
            most = self.placement.home(Role.ROLLOUT).parallel.most_layers(layers)
            return self._embedded_room(token * most / layers)
        tokens = min(self._server_cache() / token, servers.max_total_tokens or float("inf"))
        sample, groups = work.prompt + work.lengths.expected, servers.attention_dp
        fitting = int(tokens / sample) * groups
        slots = float(max(1, min(servers.max_concurrency or fitting, fitting)))
        sure = servers.memory_fraction is not None and not servers.extra_args
        size = tokens * token
        # the tokens of one group, because a sample's keys and values lie in one
        return ServerRoom(servers.count, servers.ranks, self.server_weights, size, tokens, slots, self._longest, sure)

    @cached_property
    def _spread(self) -> tuple[object, ...]:
        servers = self.config.rollout.sglang
        teams = ((team.name, repr(team.parallel), team.devices) for team in self.placement.teams)
        return (servers.tp_size, servers.ep_size, servers.attention_dp, servers.colocated, *teams)

    def _server_cache(self) -> float:
        """Return a server device's bytes for keys and values. Plans that differ only in an update share the result.

        The memory plan has these bytes for servers that the run starts, but not for servers that already run on other
        devices.
        """
        fraction = self.config.rollout.sglang.memory_fraction
        engines = self.config.actor.engine, self.config.critic.engine
        key = (*self._spread, *(engine.offloaded for engine in engines), fraction)
        if key not in self.caches:
            moments = [moment for team in self.placement.teams for moment in self.memory[team.name].moments]
            planned = [part.bytes for moment in moments for part in moment.terms if part.what == SERVER_CACHE]
            size = (fraction or self.given.server_memory) * self.hardware.memory_gb * 1e9 - self.server_weights
            self.caches[key] = max(planned) if planned else max(0.0, size)
        return self.caches[key]

    @property
    def _longest(self) -> float:
        return self.config.data.max_prompt_tokens + self.work.lengths.longest

    @cached_property
    def server_weights(self) -> float:
        """Bytes of weights on a device of a server."""
        return server_bytes(self.config, self.served)

    def _embedded_room(self, token: float) -> ServerRoom:
        """Return the key/value memory of embedded engines, whose cache rows have the maximum length; `token`: bytes of
        a token's keys and values on a rank."""
        config, decoder, team = self.config, self.decoder, self.placement.home(Role.ROLLOUT)
        engines = team.replicas * team.parallel.cp
        row = self._longest * token
        samples = config.rollout.in_flight(config.round_prompts) * self.work.samples
        slots = min(config.rollout.max_running, math.ceil(samples / engines))
        if self.hardware.gpu:
            generation = next(moment for moment in self.memory[team.name].moments if moment.name == "generation")
            left = self.given.usable_memory * self.hardware.memory_gb * 1e9 - (held(generation.terms) - row)
            slots = max(1, min(slots, int(left / row)))
        weights = parameter_bytes(self.served, team.parallel, config.rollout_dtype)
        tokens = slots * self._longest
        ranks = decoder.tp * decoder.pp
        return ServerRoom(engines, ranks, weights, slots * row, tokens, float(slots), self._longest)

    def rounds(self) -> float:
        """Return how many batches of groups a step generates on average until enough groups pass the filters of dynamic
        sampling (formula G4); 1 without dynamic sampling."""
        filters = any(node.declared.refills for node in self.graph)
        return 1 / self.given.kept_groups if filters and self.config.algorithm.dynamic_sampling.enabled else 1.0

    def _generation(self, node: Node) -> list[Cost]:
        # a generating node without `resamples` adds one greedy response to every prompt
        room, all_of_them = self.room, node.declared.resamples
        decoder = self.decoder
        layout = (decoder.tp, decoder.pp, decoder.ep, decoder.etp, decoder.vpp, decoder.attention_dp)
        key = ("generate", all_of_them, layout, room.engines, room.slots)
        if key not in self.memo:
            work, times = replace(self.work, samples=1), 1.0
            if all_of_them:
                work = replace(self.work, groups=self.config.round_prompts)
                times = self.rounds() * self.work.groups / work.groups
            rollout = self.config.rollout
            if rollout.oversamples and all_of_them:
                round_ = OversampledRound(work, rollout.oversample, rollout.carry_steps)
                parts = decoder.generate_first(round_, room.engines, room.slots)
            else:
                parts = decoder.generate(work, room.engines, room.slots, flows=not self.config.async_.in_order)
            self.memo[key] = [part.times(times) for part in parts]
        return self.memo[key]

    # -- nodes ---------------------------------------------------------------------------------------------------

    @cached_property
    def keys(self) -> dict[str, tuple[object, ...]]:
        """For each node that trains or scores with a model: its kind, role, layout and number of devices. Nodes of
        equal keys have equal costs."""
        keys: dict[str, tuple[object, ...]] = {}
        for node in self.graph:
            kind = node.declared.kind
            if kind is Kind.MODEL_TRAIN or (kind is Kind.MODEL_INFERENCE and node.role is not Role.ROLLOUT):
                team = self.placement.home(node.role)
                keys[node.id] = (kind, node.role, repr(team.parallel), team.devices)
        return keys

    def node(self, id: str) -> list[Cost]:
        """Return the costs of a node; empty if no model runs in it."""
        node = self.graph[id]
        kind, role = node.declared.kind, node.role
        if kind is Kind.MODEL_INFERENCE and role is Role.ROLLOUT:
            return self._generation(node)
        if id not in self.keys:
            return []
        section = self._section(role)
        key = (
            *self.keys[id],
            section.engine.micro_batch_tokens,
            kind is Kind.MODEL_TRAIN and str(section.engine.recompute),
        )
        if key not in self.memo:
            model, groups = self.model(role), self.work.groups
            mini = section.mini_batch_size or groups
            trained = mini * self.work.trained  # a mini-batch's fresh prompts and its part of the replayed ones
            self.memo[key] = (
                model.update(self.work.share(model.replicas, trained), section.ppo_epochs, max(1, groups // mini))
                if kind is Kind.MODEL_TRAIN
                else model.forward(self.work.share(model.replicas))
            )
        return self.memo[key]

    def pass_seconds(self, team: TeamPlan) -> float:
        """Return the seconds of the passes of a team's models in a step, without generation."""
        return sum(total(self.node(id)) for id in self.keys if self._home[id] is team)

    def _section(self, role: Role) -> TrainingConfig:
        """Return the section with the settings of a role's passes; frozen models of built-in roles use the actor's."""
        return self.config.training_of(role.value)

    def _trains(self, role: Role) -> bool:
        """Return whether the model of a role is trained."""
        return role in (Role.ACTOR, Role.CRITIC) or (role.is_further and self.config.models[role.value].train)

    @cached_property
    def weights(self) -> list[Cost]:
        """Return the costs of publishing weights to other processes that generate (formulas W1 to W3 of
        docs/planning.md)."""
        config, given, room = self.config, self.given, self.room
        actor, team = self.placement.home(Role.ACTOR), self.placement.home(Role.ROLLOUT)
        servers = config.rollout.servers
        if servers is None and team.name == actor.name:
            return []
        if config.sync.adapters == "separate" and servers is not None:
            # formula W3: every rank of a server reads the file with all adapters
            size = adapter_bytes(config, self.served)
            calls = Cost("W3", "calls", given.push_fixed_s + room.engines * given.server_push_ms / 1e3)
            return [Cost("W3", "adapters to every engine", size / self._links.rate(inside=False), size), calls]
        if config.sends_shards:
            return self._shard_update(actor, room.engines, room.ranks)
        size = self.served.parameters * BYTES[config.rollout_dtype] / room.ranks
        # If a trainer replica and the servers are in one domain of fast links, all weights are sent over these links.
        near = config.rollout.colocated or self.hardware.nodes == 1
        inside = near and self._links.inside(actor.parallel.model_parallel_size)
        fixed = given.push_fixed_s + (0.0 if servers is None else room.engines * given.server_push_ms / 1e3)
        return [
            Cost("W1", "weights to every engine", size / self._links.rate(inside=inside), size),
            Cost("W1", "calls", fixed),
        ]

    def _shard_update(self, actor: TeamPlan, servers: int, ranks: int) -> list[Cost]:
        """Return the costs of a weight update in which trainer ranks send their shards directly to the server ranks
        that store them (formula W2 of docs/planning.md)."""
        size: float = self.served.parameters * BYTES[self.config.rollout_dtype]
        groups = self.config.rollout.sglang.attention_dp
        fullest = fullest_stage(self.served, actor.parallel)
        experts = actor.parallel.expert_tp * actor.parallel.ep * actor.parallel.pp if self.served.is_moe else 0
        # Whether a server rank finds all that it stores on its own machine. The pipeline stages of a replica are as far
        # apart as those of the whole team.
        replica = max(actor.parallel.model_parallel_size, experts) if actor.parallel.pp == 1 else actor.devices
        whole = self._links.inside(replica)
        near = (self.config.rollout.colocated and whole) or self.hardware.nodes == 1
        if groups > 1:  # each group of a server's ranks stores all heads; they cross the network once for each machine
            copies = groups if near else min(groups, -(-ranks // self.hardware.per_node))
            size += (self.server_weights * ranks - size) / (groups - 1) * (copies - 1)
        update = ShardUpdateSize(size, actor.devices, fullest, servers, ranks, near)
        fixed, seconds = shard_update_seconds(update, self._links)
        received = update.received(self.hardware.per_node)
        return [Cost("W2", "weights from shard to shard", seconds, received), Cost("W2", "calls", fixed)]

    def moves(self) -> list[Cost]:
        """Return the cost, for each offloaded role, of a step's copies between device and host memory (formula T11)."""
        rate, costs = self.hardware.host_gb_s * 1e9 * self.given.host_share, list[Cost]()
        for role, size in self._moved.items():
            section, groups = self._section(role), self.work.groups
            updates = section.ppo_epochs * max(1, groups // (section.mini_batch_size or groups))
            nbytes = size * updates if section.engine.stream_optimizer and self._trains(role) else size
            if self.hardware.gpu and (OPTIMIZER if self._trains(role) else PARAMETERS) in section.engine.offloaded:
                costs.append(Cost("T11", f"{role.value} to host memory and back", nbytes / rate, nbytes))
        if self.hardware.gpu and self.config.rollout.colocated and self.config.actor.engine.offloaded.issuperset(PARTS):
            team = self.placement.home(Role.ACTOR)
            facts = known_sizes(self.sizes, Role.ACTOR)
            nbytes = 2 * parameter_bytes(facts, team.parallel, self.config.model.dtype)
            costs.append(Cost("T11", "the actor's parameters to host memory and back", nbytes / rate, nbytes))
        if self.hardware.gpu and self.config.rollout.colocated and self.config.sync.adapters == "separate":
            nbytes = 2 * self.server_weights
            costs.append(Cost("T11", "servers' base model to host memory and back", nbytes / rate, nbytes))
        return costs

    @cached_property
    def _moved(self) -> dict[Role, float]:
        """Bytes that offloading copies between device and host memory per step, by role: optimizer state in both
        directions, frozen parameters only to the device."""
        moved: dict[Role, float] = {}
        dtype = self.config.model.dtype
        for team in self.placement.teams:
            for role in team.roles:
                facts = known_sizes(self.sizes, role)
                if self._trains(role):
                    engine = self._section(role).engine
                    lora = self.config.model.lora
                    state = state_bytes(facts, team.parallel, engine, dtype, team.replicas, lora=lora)
                    moved[role] = 2 * state["optimizer"]
                elif role is not Role.ROLLOUT and not (role is Role.REFERENCE and self.config.reference_is_base):
                    head = role is Role.REWARD_MODEL
                    moved[role] = parameter_bytes(facts, team.parallel, dtype, value_head=head)
        return moved

    @cached_property
    def handed(self) -> dict[str, list[Cost]]:
        """The costs of fetching samples that other teams wrote, by the node that reads them (formula H1 of
        docs/planning.md)."""
        rate = self._links.rate(inside=self.hardware.nodes == 1)
        costs: dict[str, list[Cost]] = {id: [] for id in self.graph.order()}
        for id in costs if self.placement.separate else ():
            team = self._home[id]
            per_token = sum(
                token_bytes(self.config, name)
                for up in self.graph.parents(id)
                for handover in self.placement.given(up)
                if team.name in handover.takers and self._home[up].name != team.name
                for name in handover.fields
            )
            if per_token:
                size = self.work.tokens / team.replicas * per_token
                costs[id].append(Cost("H1", "samples of other teams", size / rate, size))
        return costs

    # -- the step ------------------------------------------------------------------------------------------------

    def between(self) -> dict[str, list[Cost]]:
        """Return the costs between steps, by phase name."""
        other = [Cost("S1", "metrics, files, Python", self.given.step_s)]
        return {"moves": self.moves(), "weights": self.weights, "other": other}

    def phases(self) -> tuple[list[PlannedPhase], float]:
        """Return the phases in the order of a step, and the seconds of a step (formula S1 of docs/planning.md)."""
        parts = {id: [*self.handed[id], *self.node(id)] for id in self.graph.order()}
        between = self.between()
        seconds = {id: total(costs) for id, costs in parts.items()}
        tail = sum(map(total, between.values()))
        begins, step = self.schedule.run(seconds, tail, total(between["weights"]))
        phases = [
            PlannedPhase(id, self._home[id].name, tuple(costs), begins[id]) for id, costs in parts.items() if costs
        ]
        at = max(begins[id] + seconds[id] for id in parts)
        for name, costs in between.items():
            if costs:
                phases.append(PlannedPhase(name, self.schedule.actor, tuple(costs), at))
                at += total(costs)
        return phases, step

    def step_seconds(self) -> float:
        """Return only the seconds of a step."""
        between = self.between()
        seconds = {id: total(self.handed[id]) + total(self.node(id)) for id in self.graph.order()}
        tail = sum(map(total, between.values()))
        return self.schedule.run(seconds, tail, total(between["weights"]))[1]

    def flops(self) -> float:
        """Return the FLOPs of a step as `perf/flops` counts them: of policy, critic and reference (formula F2)."""
        counter, work = FlopCounter.of(self.policy), self.work
        mean = work.lengths.expected
        uneven = counter.unevenness(work.prompt + mean, work.lengths.variance)
        decoding = counter.generate([work.prompt], [[mean] * work.samples]) + work.samples * uneven
        decoding *= work.groups * self.rounds()
        passes = {True: 0.0, False: 0.0}  # passes of models with a vocabulary (True), and with a value head (False)
        seen = self.rounds()  # passes of the vision encoder over a step's images, first those of generation
        for node in self.graph:
            if node.role in (Role.ACTOR, Role.CRITIC, Role.REFERENCE):
                times = {
                    Kind.MODEL_TRAIN: 3.0 * self._section(node.role).ppo_epochs * work.trained,
                    Kind.MODEL_INFERENCE: 1.0,
                }.get(node.declared.kind, 0.0)
                passes[node.role is not Role.CRITIC] += times
                seen += times / 3 if times >= 3 and "tower" in self.policy.frozen else times
        each = {
            head: counter.forward([work.prompt + mean], head_tokens=mean if head else 0) + uneven for head in passes
        }
        flops = decoding + work.number * sum(times * each[head] for head, times in passes.items())
        if counter.draft is not None:
            of_sample = counter.train_draft([work.prompt + mean], mean)
            of_sample += 3 * counter.draft.unevenness(work.prompt + mean, work.lengths.variance)
            flops += work.number * work.trained * self.config.actor.ppo_epochs * of_sample
        if self.policy.encoder is not None and work.patches:
            flops += work.seen * seen * image_flops(self.policy.encoder, [work.patches])
        return flops

    def checkpoint(self) -> tuple[float, float, float]:
        """Return a checkpoint's bytes, the seconds to write it, and the seconds that training waits (formula C1)."""
        config = self.config
        size = still = 0.0
        writers: dict[str, int] = {}
        for role in filter(self._trains, (role for team in self.placement.teams for role in team.roles)):
            team = self.placement.home(role)
            writers[team.name] = team.devices
            of_role = checkpoint_bytes(known_sizes(self.sizes, role), config.model.dtype, config.model.lora)
            size += of_role
            still += of_role / team.devices / (self.hardware.host_gb_s * 1e9 * self.given.host_share)
        machines = min(self.hardware.nodes, config.cluster.nnodes, -(-sum(writers.values()) // self.hardware.per_node))
        return size, size / (self.given.disk_gb_s * 1e9 * machines), still

    @cached_property
    def memory(self) -> dict[str, Memory]:
        """The memory of the fullest rank of each team (formula M1 of docs/planning.md)."""
        gpu, room = self.hardware.gpu, GpuRoom(self.hardware.memory_gb * 1e9, self.given.server_memory)
        return {
            team.name: device_memory(self.config, self.sizes, team, gpu=gpu, room=room) for team in self.placement.teams
        }

    def filled(self) -> list[Filled]:
        """Return the memory of each team's fullest device in each moment of a step (formula M1 of docs/planning.md)."""
        gpu, teams = self.hardware.gpu, self.placement.teams
        return [Filled(team.name, moment, gpu) for team in teams for moment in self.memory[team.name].moments]

    def plan(self) -> StepPlan:
        """Return the whole plan."""
        phases, step = self.phases()
        work = self.work
        return StepPlan(
            self.hardware,
            occupied(self.config, self.placement),
            self.placement,
            tuple(phases),
            step,
            work.tokens,
            work.number * work.lengths.expected,
            self.flops(),
            self.config.model.dtype,
            tuple(self.filled()),
            self.room,
            self.checkpoint(),
            tuple(supervised_costs(self.config, self.model(Role.ACTOR), self.work) if self.config.sft.steps else ()),
            self.given,
        )


def supervised_costs(config: RunConfig, model: ModelPass, work: Workload) -> list[Cost]:
    """Return the costs of one step of supervised fine-tuning, whose examples are taken to be as long as samples."""
    lengths = work.lengths
    share = Share(config.sft.batch_size / model.replicas, work.prompt, lengths.expected, lengths.variance, work.patches)
    return model.update(share, 1, 1)


def plan_supervised_step(config: RunConfig, placement: Placement, facts: ModelFacts, hardware: Hardware) -> float:
    """Return the seconds of one step of `megarl sft`."""
    team, given = placement.home(Role.ACTOR), PlanAssumptions.of(gpu=hardware.gpu)
    refuse_uneven(team.devices, team.parallel, team.name)
    engine, model = config.actor.engine, config.model
    pass_ = ModelPass(facts, team.parallel, team.devices, engine, model.dtype, hardware, given, lora=model.lora)
    return total(supervised_costs(config, pass_, Workload.of(config, given, facts.encoder)))


def plan_step(
    config: RunConfig,
    graph: TaskGraph,
    sizes: Sizes,
    hardware: Hardware,
    given: PlanAssumptions | None = None,
) -> StepPlan:
    """Plan a step of a recipe on some hardware.

    Raises:
        ConfigError: no formula covers the task, the teams are invalid, or a layout does not divide its team.
    """
    if (problem := config.task.plan_problem()) is not None:
        raise problem
    placement = place(graph, config)
    for team in placement.teams:
        refuse_uneven(team.devices, team.parallel, team.name)
    return StepFormulas(config, graph, placement, sizes, hardware, given or PlanAssumptions.of(gpu=hardware.gpu)).plan()


def refuse_uneven(devices: int, parallel: ParallelConfig, team: str) -> None:
    """Raise ConfigError if the workers of a team are not whole replicas."""
    if not makes_replicas(devices, parallel):
        experts = parallel.expert_tp * parallel.ep * parallel.pp
        raise ConfigError(
            "the layout does not divide the workers",
            where=f"team {team}",
            found=f"{devices} workers",
            allowed=f"a multiple of tp * pp * cp = {parallel.model_parallel_size} and of etp * ep * pp = {experts}",
            fix="megarl train RECIPE --dry-run names the keys to change",
        )
