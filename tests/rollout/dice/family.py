"""A third engine, which throws dice: uniform tokens, by seeds that depend on the sample and on the weights.

Everything that megarl needs of an engine is in this folder; a recipe names it as `rollout.engine: FILE:DiceFamily`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from megarl.config.engines import EngineFacts
from megarl.config.rollout import SamplingConfig
from megarl.dag.messages import Message
from megarl.dag.stage import Role
from megarl.rollout.engine import Completion, Request, ignore_progress
from megarl.rollout.family import EngineFamily, EngineHost, WeightLink
from megarl.system.tracing import phase

FIRST, LAST = 3, 19
"""Tokens that are thrown; an end token is thrown as often as each of them."""


class Dice:
    """A `RolloutEngine`."""

    def __init__(self) -> None:
        self.weight_version, self.weights = 0, math.nan

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        rows = []
        for request in requests:
            turns = [Throws(self, seed, request.room or sampling.max_new_tokens) for seed in request.seeds]
            while any(turn.reason is None for turn in turns):
                for turn in turns:
                    turn.throw(eos_ids)
            rows.append([turn.completion() for turn in turns])
            advance(len(turns))
        return rows

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> DiceGeneration:
        return DiceGeneration(self, eos_ids)


class Throws:
    """One turn."""

    def __init__(self, engine: Dice, seed: int, room: int) -> None:
        self._random, self._room, self._version = random.Random(f"{seed} {engine.weights}"), room, engine.weight_version
        self.tokens: list[int] = []
        self.reason: Any = None

    def throw(self, eos_ids: Sequence[int]) -> None:
        """Throw one token, unless the turn is over."""
        if self.reason is None:
            self.tokens.append(self._random.choice([eos_ids[0], *range(FIRST, LAST + 1)]))
            self.reason = (
                "stop" if self.tokens[-1] == eos_ids[0] else "length" if len(self.tokens) == self._room else None
            )

    def completion(self) -> Completion:
        """Return the turn as it is."""
        count = len(self.tokens)
        logprob = -math.log(LAST - FIRST + 2)
        return Completion(self.tokens, [logprob] * count, self.reason, [[self._version, count]] if count else [])


class DiceGeneration:
    """A `Generation`: each `wait` throws a token of every turn, until one is over."""

    is_async: ClassVar[bool] = False
    is_batched: ClassVar[bool] = False

    def __init__(self, engine: Dice, eos_ids: Sequence[int]) -> None:
        self._engine, self._eos_ids = engine, eos_ids
        self._turns: dict[int, Throws] = {}

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: object = None, begun: int = 0
    ) -> None:
        self._turns[sequence] = Throws(self._engine, seed, room)

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        while self._turns and all(turn.reason is None for turn in self._turns.values()):
            for turn in self._turns.values():
                turn.throw(self._eos_ids)
            if enough is not None and enough():
                break
        over = {sequence: turn.completion() for sequence, turn in self._turns.items() if turn.reason is not None}
        self._turns = {sequence: turn for sequence, turn in self._turns.items() if sequence not in over}
        return over

    def abort(self, sequence: int) -> None:
        self._turns[sequence].reason = self._turns[sequence].reason or "abort"

    def forget(self, sequence: int) -> None: ...

    def any_busy(self, busy: bool) -> bool:
        return busy

    def close(self) -> None: ...


class Weighed(Message, topic="weighed", keys=1):
    """Actor's team to rollout's team: the sum of a version of the weights, which is all that dice take of them."""

    version: int
    weights: float


def weigh(host: EngineHost) -> float:
    """Return the sum of all parameters, the same on every rank of a team with one replica per rank."""
    return sum(float(parameter.double().sum()) for chunk in host.policy for parameter in chunk.parameters())


class DiceLink(WeightLink):
    """All ends: an engine takes the weights, and the host has them, or sends or reads their sum."""

    def __init__(self, host: EngineHost, engine: Dice | None, *, apart: bool) -> None:
        self._host, self._engine, self._apart = host, engine, apart

    def publish(self, version: int) -> None:
        if self._engine is None:
            if self._host.layout.rank == 0:
                Weighed(version, weigh(self._host)).post(self._host.mail)
            return
        if self._apart:
            with phase("await_weights", waits_for=self._host.team_of(Role.ACTOR)):
                weights = Weighed.read(self._host.mail, version).weights
        else:
            weights = weigh(self._host)
        self._engine.weights, self._engine.weight_version = weights, version


class DiceFamily(EngineFamily):
    facts = EngineFacts()

    def open(self, host: EngineHost, engine: object) -> tuple[Dice, DiceLink]:
        dice = Dice()
        return dice, DiceLink(host, dice, apart=False)

    def open_receiver(self, host: EngineHost, engine: object) -> tuple[Dice, DiceLink]:
        dice = Dice()
        return dice, DiceLink(host, dice, apart=True)

    def open_sender(self, host: EngineHost) -> DiceLink:
        return DiceLink(host, None, apart=True)
