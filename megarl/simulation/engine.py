"""Discrete-event simulation: the teams of a run as processes that wait for each other as real teams do.

rollout's team     generates by `buffer.flow` (as_ready, with the buffer's own rules) or step by step (in_order)
actor's team       waits for samples and other teams' nodes, computes, publishes weights by the rules of
                   `disaggregated.weight_updates`
other teams        walk their nodes of every step
coordinator        replies to one call at a time
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import simpy

from megarl.dag.staleness import StalenessSettings, make_policy
from megarl.planning.lengths import Lengths
from megarl.simulation.outcome import Simulated
from megarl.simulation.replica import make_replicas
from megarl.simulation.seconds import Seconds
from megarl.simulation.system import SimTeam, System

Steps: TypeAlias = Generator[simpy.Event, Any, None]
_BLOCK = 256  # number of groups whose lengths are sampled at once
# assumed ratio of the fullest replica's tokens to the mean, if groups or samples are divided by their tokens
_BALANCED = 1.02


@dataclass(frozen=True)
class Faults:
    """How often devices fail, and how long each failure lasts."""

    device_hours: float | None = None  # mean hours that a device runs until it fails; None: no failures
    server_s: float = 120.0  # seconds until a server is back; its in-flight samples begin again
    train_s: float = 300.0  # seconds until the actor's team is back; it continues from its newest checkpoint
    save_every: int = 20  # steps between checkpoints


class Simulation:
    """Simulates a training run of `steps` steps.

    Args:
        seed: seed of lengths and failures.
        faults: failures to simulate.
    """

    def __init__(
        self, system: System, seconds: Seconds, lengths: Lengths, steps: int, *, seed: int = 0, faults: Faults
    ) -> None:
        self.system, self.seconds, self.lengths, self.steps, self.faults = system, seconds, lengths, steps, faults
        self.settings = StalenessSettings(system.order, system.max_staleness, system.groups, steps, system.partial)
        self.policy = make_policy(self.settings)
        self.env = simpy.Environment()
        self.outcome = Simulated()
        self.servers = make_replicas(seconds, system.slots, system.prompt_tokens, system.servers)
        self._rng, self._seed = random.Random(seed), seed
        self._answered = 0.0  # time at which the coordinator will have replied to all calls made so far
        self._tokens: dict[int, int] = {}  # tokens of each group that has begun: all samples, prompts included
        # response lengths in tokens, drawn for blocks of _BLOCK groups: by block, the samples' lengths of each group
        self._blocks: dict[int, list[list[int]]] = {}
        self._events: dict[tuple[Any, ...], simpy.Event] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._nodes: defaultdict[str, float] = defaultdict(float)
        self._dead = [0, 0]

    def run(self) -> Simulated:
        """Simulate all steps."""
        from megarl.simulation.flowing import Flowing
        from megarl.simulation.ordered import Ordered

        rules = Ordered(self) if self.system.in_order else Flowing(self)
        rules.start()
        for team in self.system.others:
            self.env.process(self._scores(team, rules))
        self.env.run(self.env.process(self._train(rules)))
        generating = sum(server.busy_s for server in self.servers) / len(self.servers)
        self.outcome.spent = {**self._spent, "generating": generating}
        self.outcome.nodes, self.outcome.failures = dict(self._nodes), (self._dead[0], self._dead[1])
        return self.outcome

    # -- what rules and teams ask for --------------------------------------------------------------------------------

    def event(self, *name: Any) -> simpy.Event:
        """Return the simulated event `name`, such as ("node", id, step) for a node's end; the first call creates it."""
        if name not in self._events:
            self._events[name] = self.env.event()
        return self._events[name]

    def group(self, number: int) -> list[int]:
        """Return the response tokens of each sample of a group, which are determined by the group's number."""
        block, place = divmod(number, _BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self.lengths.sample((self._seed, block), _BLOCK, self.system.samples)
        tokens = self._blocks[block][place]
        self._tokens[number] = sum(tokens) + len(tokens) * self.system.prompt_tokens
        return tokens

    def call(self, calls: int = 1) -> Steps:
        """Simulate `calls` calls of the buffer's process, and the wait for its last reply; a single team makes none."""
        if self.system.rollout is None and not self.system.others:
            return
        seconds = calls * self.seconds.call()
        self.outcome.calls += calls
        self._spent["coordinator"] += seconds
        # Calls are served one at a time in order: this call ends after all earlier ones.
        self._answered = max(self._answered, self.env.now) + seconds
        yield self.env.timeout(self._answered - self.env.now)

    def push(self) -> Steps:
        """Simulate a weight update of all replicas that generate."""
        seconds = self.seconds.push(self.system.servers)
        self._spent["push"] += seconds
        yield self.env.timeout(seconds)

    def next_failure(self, devices: int) -> float:
        """Return a random number of seconds until the next failure of any of `devices` devices."""
        hours = self.faults.device_hours
        return float("inf") if hours is None else self._rng.expovariate(devices / (hours * 3600))

    def server_died(self) -> None:
        """Count a server failure."""
        self._dead[0] += 1

    def fullest(self, groups: Sequence[int], replicas: int) -> float:
        """Return the tokens of the fullest replica when `groups` are shared among replicas."""
        shares = [0] * replicas
        for place, number in enumerate(groups):
            shares[place % replicas] += self._tokens[number]
        if self.system.balances and replicas > 1:
            return _BALANCED * sum(shares) / replicas
        longest = max(self._tokens[number] for number in groups)
        return max(_BALANCED * sum(shares) / replicas, longest) if self.system.shares_tokens else max(shares)

    def walk(self, team: SimTeam, groups: Sequence[int], step: int) -> Steps:
        """Simulate a step of a team's nodes, one after the other; each also waits for the end of the nodes of other
        teams that it depends on."""
        tokens = self.fullest(groups, team.replicas)
        # The wait for a step's samples includes the rollout team's nodes, so no node below waits for these.
        generating = () if self.system.rollout is None else self.system.rollout.nodes
        if team.takes:
            yield from self.call(team.replicas * (1 + team.takes))
            yield self.env.timeout(self.seconds.handover(tokens))
        for id in team.nodes:
            for other in self.system.waits[id]:
                if other != self.system.rollout_node and other not in generating:
                    yield self.event("node", other, step)
            seconds = self.seconds.node(id, tokens, team.replicas)
            if team is self.system.train:
                self._nodes[id] += seconds
                self._spent["training"] += seconds
            yield self.env.timeout(seconds)
            self.event("node", id, step).succeed()
        if team.gives:
            yield from self.call(team.replicas * team.gives)
        yield self.env.timeout(self.seconds.other(team.name))

    # -- teams -------------------------------------------------------------------------------------------------------

    def _train(self, rules: Any) -> Steps:
        failure, saved = self.next_failure(self.system.train.devices), 0.0
        for step in range(1, self.steps + 1):
            began = self._without_pushes()
            yield from rules.before_step(step)
            groups = yield from rules.samples(step)
            self._spent["samples"] += self._without_pushes() - began
            yield from self.walk(self.system.train, groups, step)
            if self.env.now > failure:
                self._dead[1] += 1
                yield self.env.timeout(self.env.now - saved + self.faults.train_s)
                failure = self.env.now + self.next_failure(self.system.train.devices)
            if step % self.faults.save_every == 0:
                saved = self.env.now
            began = self._without_pushes()
            # With async.order=in_order, new weights are not sent until all samples of the previous weights are
            # generated.
            yield from rules.after_step(step)
            self._spent["samples"] += self._without_pushes() - began
            self.outcome.ends.append(self.env.now)
            self.outcome.tokens.append(sum(self._tokens.pop(number) for number in groups))
            if self.system.others:
                yield self.env.all_of([self.event("over", team.name, step) for team in self.system.others])

    def _without_pushes(self) -> float:
        """Return the simulated time so far, less the time spent in weight updates."""
        return float(self.env.now - self._spent["push"])

    def _scores(self, team: SimTeam, rules: Any) -> Steps:
        for step in range(1, self.steps + 1):
            groups = yield from rules.samples(step)
            yield from self.walk(team, groups, step)
            self.event("over", team.name, step).succeed()
