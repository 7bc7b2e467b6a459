"""`async.order: as_ready`: group after group, by the buffer's own rules (`buffer.flow`, `call_batcher`)."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Generator
from typing import Any

import simpy

from megarl.disaggregated.buffer.core import GroupInfo
from megarl.disaggregated.buffer.flow import Flow
from megarl.disaggregated.call_batcher import CallBatcher
from megarl.simulation.engine import Simulation, Steps
from megarl.simulation.replica import ReplicaClock

_INFO = GroupInfo("", 0, (), 0)
_MOMENT = 1e-6  # smallest time step in seconds, so that time advances whatever the rounding


class Flowing:
    """Simulates async.order=as_ready: replicas generate independently, and weights are updated between segments."""

    def __init__(self, simulation: Simulation) -> None:
        self._s, system = simulation, simulation.system
        self._policy, self._partial = simulation.policy, system.partial
        self._flow = Flow(simulation.settings)
        self._flow.open(0, 0, {}, [])
        self._version = self._asked_for = self._finished = 0
        self._opened = 0  # number of replicas that are ready to receive the weights which the trainer waits to send
        self._updated, self._open = simulation.env.event(), simulation.env.event()
        self._wanted = False  # whether the trainer waits to send weights
        self._replicas: list[_Replica] = []
        rollout = system.rollout
        assert rollout is not None, "as_ready needs the rollout in a team of its own"
        # A team's seconds are per step, in which a server generates `share` groups; divided by it they are per group.
        share = max(1.0, system.groups / system.servers)
        seconds = [simulation.seconds.node(id, 0.0, rollout.replicas) for id in rollout.nodes]
        self._scoring_s = (sum(seconds) + simulation.seconds.other(rollout.name)) / share

    def start(self) -> None:
        """Start the replicas."""
        for server in self._s.servers:
            replica = _Replica(self, server)
            self._replicas.append(replica)
            replica.process = self._s.env.process(replica.run())

    # -- calls of the trainer (megarl.disaggregated.weight_updates) -------------------------------------

    def samples(self, step: int) -> Generator[simpy.Event, Any, list[int]]:
        """Wait until the groups of a step are formed, and return them."""
        self._asked_for = max(self._asked_for, step)
        self._form()
        groups = yield self._s.event("formed", step)
        return list(groups)

    def before_step(self, step: int) -> Steps:
        """Wait for samples; then publish the weights if no replica may generate further samples without them. With
        `async.partial` do nothing."""
        if self._partial:
            return
        yield from self.samples(step)
        if self._version < step - 1 and self._flow.drained(self._version):
            yield from self._push(step - 1)

    def after_step(self, step: int) -> Steps:
        """Publish the weights if they are due, or if no replica generates any more."""
        must = step == self._s.steps or self._policy.weights_must_go(self._version, step + 1)
        if must and not self._wanted:
            self._wanted = True
            for replica in self._replicas if self._partial else []:
                replica.wake()
        if must or self._flow.drained(self._version):
            yield from self._push(step)

    def _push(self, version: int) -> Steps:
        yield self._open
        yield from self._s.push()
        self._version, self._opened = version, 0
        updated, self._updated = self._updated, self._s.env.event()
        self._open, self._wanted = self._s.env.event(), False
        updated.succeed()

    def _form(self) -> None:
        size = self._s.system.groups
        while self._flow.step < self._asked_for and self._finished >= size:
            groups = self._flow.form()
            if groups is None:
                return
            self._finished -= size
            step = self._flow.step
            self._s.outcome.age.append(sum(step - 1 - group.version for group in groups) / size)
            self._s.event("formed", step).succeed([group.number for group in groups])

    # -- what replicas ask for ---------------------------------------------------------------------------------------

    def swap(self, done: list[int], most: int) -> Generator[simpy.Event, Any, list[int]]:
        """Hand over the groups that a replica has finished and return up to `most` new prompts for it."""
        version = self._version
        yield from self._s.call()
        for number in done:
            self._flow.finish(number, _INFO, {}, None)
        self._finished += len(done)
        numbers = self._flow.admit(version, most)
        self._form()
        return numbers

    def open_for_weights(self) -> simpy.Event:
        """Record that a replica is ready for new weights; return the event that they have arrived."""
        self._opened += 1
        if self._opened == len(self._s.servers):
            self._open.succeed()
        return self._updated


class _Replica:
    """A simulated replica; the real one is `megarl.disaggregated.as_ready_loop.AsReadyLoop`."""

    def __init__(self, rules: Flowing, replica: ReplicaClock) -> None:
        s = rules._s
        self._rules, self._replica, self._s, self._env = rules, replica, s, s.env
        self._samples = s.system.samples
        fair = -(-s.policy.capacity // s.system.servers)
        groups = min(max(1, s.system.slots // self._samples), fair)
        self._batcher = CallBatcher(groups, fair)
        self._most = groups * self._samples  # maximum number of samples decoded at the same time
        self._waiting: deque[int] = deque()  # prompts that the replica has taken and not begun
        self._scoring: list[tuple[float, int]] = []
        self._done: list[int] = []
        self._dry = self._sleeps = False
        self.process: simpy.Process | None = None
        self._failure = s.next_failure(s.system.server_devices)

    def wake(self) -> None:
        """Interrupt the replica's wait because a weight update is due."""
        if self._sleeps:
            assert self.process is not None, "it runs"
            self._sleeps = False
            self.process.interrupt()

    def run(self) -> Steps:
        """Generate until the weights of the last step have arrived."""
        rules = self._rules
        while rules._version < self._s.steps:
            self._batcher.begin(self._env.now)
            self._dry = False
            yield from self._segment()
            if self._done:
                yield from self._swap(0)
            yield rules.open_for_weights()
            self._replica.reread()

    def _segment(self) -> Steps:
        rules = self._rules
        while True:
            while self._scoring and self._scoring[0][0] <= self._env.now + _MOMENT:
                self._done.append(heapq.heappop(self._scoring)[1])
            wanted, missing, room = rules._wanted, 0, 0
            if not wanted:
                for _ in range(min(self._room, len(self._waiting))):
                    number = self._waiting.popleft()
                    self._replica.add(number, self._s.group(number))
                room = self._room
                missing = 0 if self._dry else self._batcher.missing(room, len(self._waiting))
            idle = not self._replica.busy and not self._scoring
            empty = idle or min(room, missing) > 0
            if self._batcher.is_due(self._env.now, missing, finished=bool(self._done), empty=empty):
                yield from self._swap(missing)
            elif (idle and not self._done) or (wanted and rules._partial):
                return
            else:
                yield from self._pass(missing)

    @property
    def _room(self) -> int:
        return max(0, self._most - self._replica.load) // self._samples

    def _swap(self, missing: int) -> Steps:
        began, done = self._env.now, self._done
        self._done = []
        numbers = yield from self._rules.swap(done, missing)
        self._batcher.called()
        self._dry = len(numbers) < missing or (self._dry and not missing)
        self._waiting.extend(numbers)
        self._advance(self._env.now - began)

    def _pass(self, missing: int) -> Steps:
        """Advance simulated time until a group ends, the rollout must call the buffer, its engine dies, or new weights
        are due.

        `missing`: number of groups for which the replica has room.
        """
        now = self._env.now
        over = self._replica.until_event(self._samples if not self._dry or self._waiting else 0)
        times = [] if over is None else [over]
        times += [self._scoring[0][0] - now] if self._scoring else []
        times += [self._batcher.left_s(now)] if missing or self._done else []
        seconds = max(_MOMENT, min([*times, self._failure - now]))
        # A weight update interrupts this sleep if `async.partial` is set. It is no second event to wait for, because
        # waiting for either of two simpy events would take most of the simulation's time.
        self._sleeps = True
        with contextlib.suppress(simpy.Interrupt):
            yield self._env.timeout(seconds)
        self._sleeps = False
        self._advance(self._env.now - now)
        if self._env.now >= self._failure:
            self._replica.fail(self._s.faults.server_s)
            self._s.server_died()
            self._failure = self._env.now + self._s.next_failure(self._s.system.server_devices)

    def _advance(self, seconds: float) -> None:
        for number in self._replica.advance(seconds):
            heapq.heappush(self._scoring, (self._env.now + self._rules._scoring_s, number))
