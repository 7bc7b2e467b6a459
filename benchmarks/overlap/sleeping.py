"""Runs `megarl train` with sleeps in the places of decoding, of environments' answers and of optimizer steps."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pydantic import Field

from megarl.benchmarks.overlap.work import CASES, TOKEN_S, Work
from megarl.envs import Action, Environment, EnvSettings, Step
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.engine import Completion, Generation, Request
from megarl.runtime.roles import ActorRole

if TYPE_CHECKING:
    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.data.image_prompts import ImageSet
    from megarl.metrics import Metrics
    from megarl.training.engine import Divisor, LossFn, Taught

DRAWN_TOKENS = (5, 15)  # a digit and a sign, whatever the weights: samples get different rewards
LOGPROB = -2.0
_LOOK_EVERY_S = 0.01


@dataclass
class Sample:
    """A sample that is sampled.

    Attributes:
        tokens: in all.
        drawn: those of them in earlier turns.
        slept: seconds of earlier turns; what is more than the drawn tokens take is part of the next one.
        text: the prompt and what was sampled.
        began: the turn; None: it has no slot yet.
    """

    tokens: int
    drawn: int = 0
    slept: float = 0.0
    text: tuple[int, ...] = ()
    began: float | None = None

    @property
    def token(self) -> int:
        """The token that is generated."""
        return DRAWN_TOKENS[self.tokens % 2]

    @property
    def end(self) -> float:
        """The second at which its last token is there."""
        assert self.began is not None, "only of one that has a slot"
        return self.began + TOKEN_S * self.tokens - self.slept


@dataclass
class Sleeping:
    """A `Generation` whose turns take their time on slots of their own, also between two calls of `wait`.

    Attributes:
        work: says how long a sample is.
        slots: turns side by side, at most; the others begin in their order.
        version: version of the weights.
        eos_id: last token of a sample that came to its end.
        interrupted: samples by their texts, of this generation and of earlier ones: a turn that goes on with one of
            them has the rest of its tokens.
    """

    work: Work
    slots: int
    version: int
    eos_id: int
    interrupted: dict[tuple[int, ...], list[Sample]]
    _samples: dict[int, Sample] = field(default_factory=dict)
    _rooms: dict[int, int] = field(default_factory=dict)
    _queue: deque[int] = field(default_factory=deque)
    _over: dict[int, Completion] = field(default_factory=dict)
    goes_on: ClassVar[bool] = False
    in_rounds: ClassVar[bool] = False

    def submit(self, sequence: int, tokens: list[int], seed: int, room: int, images: ImageSet | None = None) -> None:
        """See `Generation`."""
        self._pass_time()
        text = tuple(tokens)
        known = self.interrupted.get(text)
        length = 1 if self.work.thinks else self.work.tokens(seed)
        self._samples[sequence] = known.pop(0) if known else Sample(length, text=text)
        self._rooms[sequence] = room
        self._queue.append(sequence)
        self._fill(time.monotonic())

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """See `Generation`."""
        self._pass_time()
        while self._samples and not self._over and not (enough is not None and enough()):
            nap = min(sample.end for sample in self._samples.values() if sample.began is not None) - time.monotonic()
            time.sleep(max(0.0, nap if enough is None else min(nap, _LOOK_EVERY_S)))
            self._pass_time()
        over, self._over = self._over, {}
        return over

    def abort(self, sequence: int) -> None:
        """See `Generation`."""
        self._pass_time()
        sample = self._samples.pop(sequence, None)
        if sample is None:  # it has come to its own end
            return
        before, now = sample.drawn, time.monotonic()
        if sample.began is None:
            self._queue.remove(sequence)
        else:
            sample.slept, sample.began = sample.slept + now - sample.began, None
            sample.drawn = min(int(sample.slept / TOKEN_S), sample.tokens - 1)
        drawn = [sample.token] * (sample.drawn - before)
        sample.text += tuple(drawn)
        self.interrupted.setdefault(sample.text, []).append(sample)
        self._over[sequence] = self._completion(drawn, "abort")
        self._fill(now)

    def forget(self, sequence: int) -> None:
        """See `Generation`."""

    def any_busy(self, busy: bool) -> bool:
        """See `Generation`: a replica by itself."""
        return busy

    def close(self) -> None:
        """See `Generation`."""

    def _pass_time(self) -> None:
        """End what is over by now; a slot goes on with the next turn when it becomes free."""
        now = time.monotonic()
        while running := [(s.end, number) for number, s in self._samples.items() if s.began is not None]:
            end, number = min(running)
            if end > now:
                return
            self._finish(number)
            self._fill(end)

    def _finish(self, sequence: int) -> None:
        sample, room = self._samples.pop(sequence), self._rooms[sequence]
        left = sample.tokens - sample.drawn
        drawn = [sample.token] * min(left, room)
        if left > room:
            self._over[sequence] = self._completion(drawn, "length")
        else:
            self._over[sequence] = self._completion([*drawn[1:], self.eos_id], "stop")

    def _completion(self, tokens: list[int], reason: Any) -> Completion:
        return Completion(tokens, [LOGPROB] * len(tokens), reason, [[self.version, len(tokens)]] if tokens else [])

    def _fill(self, now: float) -> None:
        """Give free slots to turns that have none."""
        busy = sum(sample.began is not None for sample in self._samples.values())
        while self._queue and busy < self.slots:
            self._samples[self._queue.popleft()].began = now
            busy += 1


class SleepingEngine(EmbeddedEngine):
    """An engine that holds the weights of an embedded engine and does not use them."""

    def __init__(self, work: Work, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._work = work
        self._interrupted: dict[tuple[int, ...], list[Sample]] = {}

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """See `RolloutEngine`."""
        asked = [(request, seed) for request in requests for seed in request.seeds]
        turns = self.open(sampling, eos_ids, len(asked), 0)
        for sequence, (request, seed) in enumerate(asked):
            turns.submit(sequence, request.prompt_ids, seed, request.room or sampling.max_new_tokens)
        done: dict[int, Completion] = {}
        while len(done) < len(asked):
            done |= turns.wait()
        samples = iter([done[sequence] for sequence in range(len(asked))])
        return [[next(samples) for _ in request.seeds] for request in requests]

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """See `RolloutEngine`."""
        return Sleeping(self._work, self._work.slots, self.weight_version, eos_ids[0], self._interrupted)


class ThinkingSettings(EnvSettings):
    """Keys of the section `env`."""

    case: str = Field("environments", description="of megarl.benchmarks.overlap")


class Thinking(Environment):
    """Ends an episode after its first turn, and takes its time for that."""

    Settings = ThinkingSettings
    scores: ClassVar[bool] = False

    @classmethod
    def open(cls, settings: ThinkingSettings) -> Counter[int]:
        """How many samples of each seed have begun."""
        return Counter()

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        """Keep the prompt as it is."""
        self.answer_s = CASES[self.settings.case].answer_s(seed, self.shared[seed])
        self.shared[seed] += 1

    async def step(self, action: Action) -> Step:
        """End the episode."""
        await asyncio.sleep(self.answer_s)
        return Step(done=True)


class SleepingActor(ActorRole):
    """An optimizer step takes as long as the work says: the small model's own, and a sleep."""

    def __init__(self, work: Work, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._work = work

    def train_step(
        self,
        mini: Batch,
        loss: LossFn,
        divisor: Divisor | None = None,
        taught: Taught | None = None,
        unit: int = 1,
    ) -> Metrics:
        """See `ActorRole`."""
        end = time.monotonic() + self._work.training_s
        metrics = super().train_step(mini, loss, divisor, taught, unit)
        time.sleep(max(0.0, end - time.monotonic()))
        return metrics


def train(config: RunConfig, run_dir: Path) -> None:
    """Run `megarl train` with the seconds of the work in the run folder. Runs in a worker."""
    from megarl.recipes import entry
    from megarl.runtime import setup

    work = Work.read(run_dir)
    with (
        mock.patch.object(setup, "EmbeddedEngine", partial(SleepingEngine, work)),
        mock.patch.object(setup, "ActorRole", partial(SleepingActor, work)),
    ):
        entry.train(config, run_dir)
