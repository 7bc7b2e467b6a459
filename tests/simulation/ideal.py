"""The ends of the steps of a run, in seconds from its start, if nothing took time but samples and training.

    synchronous   generate t with the weights t - 1, train t                        every G(t) + T
    in order      generate up to k steps ahead of training                          k = 1: every max(G(t + 1), T)
    flowing       groups come and go by the rules of `megarl.disaggregated.buffer.flow`        simulated

T is a step of training, and G(t) what the samples of step t take on the slots that there are. A simulation jumps from
one end (of a sample, of a step of training) to the next, and lets both teams do in no time what they can do then.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

from megarl.dag.staleness import InOrder, StalenessSettings, make_policy
from megarl.disaggregated.buffer.core import GroupInfo
from megarl.disaggregated.buffer.flow import Flow
from megarl.rollout.seeds import Seeds

SEED = 0  # of the run
TOKEN_S = 0.05


@dataclass(frozen=True)
class Work:
    """The seconds of a run. Those of a sample are log-normal, in whole tokens, and follow from its seed.

    Attributes:
        groups: groups of a step.
        samples: samples of a group.
        slots: samples that are sampled side by side, at most.
        mean_s: mean seconds of a sample, if none were cut off.
        sigma: standard deviation of the logarithm of a sample's seconds.
        longest: tokens of a sample, at most.
        training_s: seconds of training of a step.
        thinks: an environment takes these seconds, to answer a turn of one token; else decoding does.
    """

    groups: int
    samples: int
    slots: int
    mean_s: float
    sigma: float
    longest: int
    training_s: float
    thinks: bool = False

    def tokens(self, seed: int) -> int:
        """Return the tokens of the sample with this seed; each takes `TOKEN_S`."""
        normal = NormalDist().inv_cdf(random.Random(seed).uniform(1e-9, 1 - 1e-9))
        seconds = self.mean_s * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return max(1, min(self.longest, round(seconds / TOKEN_S)))

    def seconds(self, number: int) -> list[float]:
        """Return the seconds of the samples of prompt `number` of the run, the row with this number of its data."""
        uid = f"train-0-{number}"
        if self.thinks:
            return [self.answer_s(Seeds(SEED).env(uid), sample) + TOKEN_S for sample in range(self.samples)]
        return [TOKEN_S * self.tokens(Seeds(SEED).sample(uid, sample)) for sample in range(self.samples)]

    def answer_s(self, seed: int, sample: int) -> float:
        """Return the seconds of the environment with this seed, for a sample of its group."""
        return TOKEN_S * self.tokens(seed + sample)

    def step_seconds(self, step: int) -> list[float]:
        """Return the seconds of all samples of a step (from 1) that generates its own prompts, in order."""
        return [s for number in range((step - 1) * self.groups, step * self.groups) for s in self.seconds(number)]


#: `balanced`: training takes 3 s, and so do the samples of a step, side by side, on average. `tails`: training takes
#: 2 s, and a sample 0.9 s on average; because of a few of them the samples of a step take 5 s. `drawing`: training
#: takes 1.5 s and the samples of a step 2.7 s, so that training in order waits, however far ahead it runs.
#: `environments`: as `tails`, and it is the environment that takes the time, up to 4 s.
CASES = {
    "balanced": Work(groups=8, samples=4, slots=32, mean_s=1.0, sigma=0.6, longest=160, training_s=3.0),
    "tails": Work(groups=8, samples=4, slots=32, mean_s=0.9, sigma=1.0, longest=160, training_s=2.0),
    "drawing": Work(groups=8, samples=4, slots=32, mean_s=0.7, sigma=0.7, longest=160, training_s=1.5),
    "environments": Work(groups=8, samples=4, slots=32, mean_s=0.9, sigma=1.0, longest=80, training_s=2.0, thinks=True),
}


def makespan(seconds: Iterable[float], slots: int) -> float:
    """Return the seconds of samples that are generated in this order, each in the slot that is free first."""
    ends = [0.0] * slots
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def synchronous(work: Work, steps: int) -> list[float]:
    """Return the ends of steps under `async.max_staleness` 0."""
    return list(accumulate(_generation(work, step) + work.training_s for step in range(1, steps + 1)))


def in_order(work: Work, steps: int, lag: int = 1) -> list[float]:
    """Return the ends of steps under `async.max_staleness` k from 1: step t is generated with the weights t - 1 - k;
    see `weight_updates.InOrderUpdates`.

    Weights go between two steps of training: v, when step v + k is sampled, and at the latest before step v + k is
    trained. With k = 1 training waits for that after every step.
    """
    generated: list[float] = []  # ends, by step; what is sampled waits only for weights that have gone
    pushed: list[float] = []  # the moments at which weights 1, 2, ... go
    ends: list[float] = []
    now, policy = 0.0, InOrder(lag, work.groups, steps)
    for step in range(1, steps + 1):
        while _is_there(policy, pushed, step - 1) and policy.weights_must_go(len(pushed), step):
            now = _push(work, policy, generated, pushed, now)
        while len(generated) < step:
            _generate(work, policy, generated, pushed)
        now = max(now, generated[step - 1]) + work.training_s
        must = policy.weights_must_go(step - 1, step + 1)
        while _is_there(policy, pushed, step) and (must or _last_generated(work, policy, generated, pushed) <= now):
            now = _push(work, policy, generated, pushed, now)
        ends.append(now)
    return ends


def _is_there(policy: InOrder, pushed: list[float], trained: int) -> bool:
    """Tell whether the next weights are trained, and a step is sampled with them."""
    version = len(pushed) + 1
    return version <= trained and version < policy.steps and policy.samples_with(version)


def _generate(work: Work, policy: InOrder, generated: list[float], pushed: list[float]) -> None:
    """Generate the next step, as soon as the one before it is generated and its weights are there."""
    step = len(generated) + 1
    version = policy.oldest(step)
    begin = max(generated[-1] if generated else 0.0, pushed[version - 1] if version else 0.0)
    generated.append(begin + _generation(work, step))


def _last_generated(work: Work, policy: InOrder, generated: list[float], pushed: list[float]) -> float:
    """Return the end of the last step that is sampled with the weights which the next ones replace."""
    step = policy.last_step(len(pushed))
    while len(generated) < step:
        _generate(work, policy, generated, pushed)
    return generated[step - 1]


def _push(work: Work, policy: InOrder, generated: list[float], pushed: list[float], now: float) -> float:
    """Push the next weights when they may go; the moment."""
    pushed.append(max(now, _last_generated(work, policy, generated, pushed)))
    return pushed[-1]


def flowing(work: Work, steps: int, max_staleness: int, *, partial: bool) -> list[float]:
    """Return the ends of steps under `async.order` as_ready, with one replica that generates."""
    return _Flowing(work, steps, max_staleness, partial).run()


def _generation(work: Work, step: int) -> float:
    return makespan(work.step_seconds(step), work.slots)


class _Flowing:
    """One replica that generates, and a trainer; see megarl.disaggregated.as_ready_loop for what they do."""

    def __init__(self, work: Work, steps: int, max_staleness: int, partial: bool) -> None:
        settings = StalenessSettings("as_ready", max_staleness, work.groups, steps, partial)
        self._work, self._steps, self._partial, self._policy = work, steps, partial, make_policy(settings)
        self._flow = Flow(settings)
        self._flow.open(0, 0, {}, [])
        self._now = 0.0
        self._under_way: list[tuple[float, int]] = []  # a heap: end of a sample, its group
        self._left: dict[int, int] = {}  # samples of a group that are not over
        self._version = 0  # of the weights that are sampled with
        self._is_open = False  # for new weights
        self._is_asked = False  # to take weights
        self._training: float | None = None  # when the step that is trained ends
        self._trained = 0  # steps
        self._ends: list[float] = []  # of steps that are over, with what the trainer waits for after them

    def run(self) -> list[float]:
        """Return the ends of all steps."""
        while len(self._ends) < self._steps:
            while self._generate() or self._train():
                pass
            if len(self._ends) < self._steps:
                self._advance()
        return self._ends

    def _generate(self) -> bool:
        """Advance the replica; True: it was ready for new weights, so that the trainer may have something to do."""
        if self._is_open:
            return False
        if not self._is_asked:
            room = (self._work.slots - len(self._under_way)) // self._work.samples
            for number in self._flow.admit(self._version, room):
                self._left[number] = self._work.samples
                for seconds in self._work.seconds(number):
                    heapq.heappush(self._under_way, (self._now + seconds, number))
        self._is_open = not self._under_way or (self._is_asked and self._partial)
        return self._is_open

    def _train(self) -> bool:
        """Advance the trainer; True: the replica may have something to do."""
        if self._training is not None:
            return False
        if len(self._ends) < self._trained:
            return self._end_step()
        if self._flow.form() is None:
            return False
        if self._version < self._trained and self._is_open:
            self._push()
        self._training = self._now + self._work.training_s
        return True

    def _end_step(self) -> bool:
        if self._policy.weights_must_go(self._version, self._trained + 1) and not self._is_open:
            changed, self._is_asked = not self._is_asked, True
            return changed
        if self._is_open:
            self._push()
        self._ends.append(self._now)
        return True

    def _push(self) -> None:
        self._version, self._is_open, self._is_asked = self._trained, False, False

    def _advance(self) -> None:
        """Go on to the next end of something; all that ends then is over."""
        ends = [self._under_way[0][0]] if self._under_way else []
        self._now = min(ends if self._training is None else [*ends, self._training])
        while self._under_way and self._under_way[0][0] <= self._now:
            _, number = heapq.heappop(self._under_way)
            self._left[number] -= 1
            if not self._left[number]:
                self._flow.finish(number, GroupInfo(str(number), 0, (), 0), {}, None)
        if self._training is not None and self._training <= self._now:
            self._training, self._trained = None, self._trained + 1
