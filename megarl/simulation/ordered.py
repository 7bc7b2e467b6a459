"""`async.order: in_order`: step t is generated with exactly the weights after step t - 1 - async.max_staleness."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import simpy

from megarl.simulation.engine import Simulation, Steps


class Ordered:
    """Simulates async.order=in_order: when the samples of each step are ready and when weights are published."""

    def __init__(self, simulation: Simulation) -> None:
        self._s, self._policy = simulation, simulation.policy
        self._waiting: deque[int] = deque()  # weight versions that are ready and not published

    def start(self) -> None:
        """Start generation if a separate team generates."""
        if self._s.system.rollout is not None:
            self._s.env.process(self._generate_all())

    def samples(self, step: int) -> Generator[simpy.Event, Any, range]:
        """Wait until the groups of a step are generated and return them; without a rollout team, generate them now."""
        s = self._s
        if s.system.rollout is None and not s.event("generated", step).triggered:
            yield from self._generate(step)
            s.event("generated", step).succeed()
        else:
            yield s.event("generated", step)
        return self._numbers(step)

    def before_step(self, step: int) -> Steps:
        """Push the waiting versions that must be sent before `step`, or that the rollout team can accept."""
        yield from self._push_waiting(lambda version: self._policy.weights_must_go(version - 1, step))

    def after_step(self, step: int) -> Steps:
        """Push the weights of `step` if they are due or the rollout team can accept them; otherwise they wait."""
        s, policy = self._s, self._policy
        s.outcome.age.append(float(step - 1 - policy.oldest(step)))
        now = step == s.steps or policy.weights_must_go(step - 1, step + 1)
        yield from self._push_waiting(lambda _: now)
        if not policy.samples_with(step):
            return
        if not self._waiting and (now or self._generated_before(step).triggered):
            yield from self._push(step)
        else:
            self._waiting.append(step)

    def _generated_before(self, version: int) -> simpy.Event:
        """Return the event that all samples of the weights before `version` are generated."""
        return self._s.event("generated", self._policy.last_step(version - 1))

    def _push_waiting(self, must_go: Callable[[int], bool]) -> Steps:
        while self._waiting:
            version = self._waiting[0]
            if not must_go(version) and not self._generated_before(version).triggered:
                return
            yield from self._push(version)
            self._waiting.popleft()

    def _push(self, version: int) -> Steps:
        s = self._s
        if s.system.rollout is not None and self._policy.max_staleness:
            yield self._generated_before(version)
        yield from s.push()
        s.event("pushed", version).succeed()

    def _numbers(self, step: int) -> range:
        groups = self._s.system.groups
        return range((step - 1) * groups, step * groups)

    def _generate_all(self) -> Steps:
        s = self._s
        for step in range(1, s.steps + 1):
            yield from self._generate(step)
            team = s.system.rollout
            assert team is not None, "only a rollout team of its own is started"
            yield from s.walk(team, self._numbers(step), step)
            yield from s.call(team.replicas)
            s.event("generated", step).succeed()
            version = self._policy.oldest(step + 1)
            if version >= 1 and self._policy.samples_with(version):
                yield s.event("pushed", version)

    def _generate(self, step: int) -> Steps:
        """Simulate the generation of a step: assign the groups to servers and wait until all are generated."""
        s = self._s
        for place, number in enumerate(self._numbers(step)):
            s.servers[place % len(s.servers)].add(number, s.group(number))
        longest = 0.0
        for server in s.servers:
            seconds, failure = server.finish(), s.next_failure(s.system.server_devices)
            if failure < seconds:  # the server fails before it is done: it repeats all its work of this step
                s.server_died()
                seconds += failure + s.faults.server_s
            longest = max(longest, seconds)
        yield s.env.timeout(longest)
