"""A `Generation` in plain Python: token k of a turn follows from its tokens so far, its seed, k, and the weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from megarl.config.rollout import SamplingConfig
from megarl.rollout.engine import Completion, FinishReason

VOCABULARY = 40


def rule(before: Sequence[int], seed: int, place: int, version: int) -> tuple[int, float]:
    """Token `place` of the turn that follows the tokens `before`, and its log-prob."""
    drawn = random.Random(repr((list(before), seed, place, version)))
    return drawn.randrange(VOCABULARY), -drawn.random()


@dataclass
class Turn:
    before: list[int]
    seed: int
    room: int
    begun: int = 0
    sampled: list[tuple[int, float]] = field(default_factory=list)
    aborted: bool = False


class ScriptedGeneration:
    """`steps(sequence)` says how many tokens of a turn are drawn until the next look."""

    is_async: ClassVar[bool] = False
    is_batched: ClassVar[bool] = False

    def __init__(self, engine: ScriptedEngine, stop_ids: list[int], sequences: int, longest: int) -> None:
        self.engine, self.stop_ids, self.sequences, self.longest = engine, stop_ids, sequences, longest
        self.version = engine.weight_version
        self.turns: dict[int, Turn] = {}
        self.over: dict[int, list[int]] = {}  # tokens of those not forgotten of which no next turn has begun
        self.closed = False

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: object = None, begun: int = 0
    ) -> None:
        assert not self.closed
        assert 0 <= sequence < self.sequences
        assert sequence not in self.turns
        before = self.over.pop(sequence, [])
        assert tokens[: len(before)] == before, "the sequence's cache is of other tokens"
        assert room >= 1
        assert len(tokens) + room <= self.longest
        self.turns[sequence] = Turn(list(tokens), seed, room, begun)
        self.engine.submitted.append((sequence, list(tokens), seed, room))

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        assert not self.closed
        over = {s: self._completion(t, "abort") for s, t in self.turns.items() if t.aborted}
        while not over and self.turns:
            for sequence, turn in self.turns.items():
                for _ in range(self.engine.steps(sequence)):
                    turn.sampled.append(rule(turn.before, turn.seed, len(turn.sampled), self.version))
                    if (reason := self._reason(turn)) is not None:
                        over[sequence] = self._completion(turn, reason)
                        break
            if enough is not None and enough():
                break
        for sequence in over:
            self.over[sequence] = [*self.turns.pop(sequence).before, *over[sequence].token_ids]
        return over

    def _reason(self, turn: Turn) -> FinishReason | None:
        if turn.sampled[-1][0] in self.stop_ids:
            return "stop"
        return "length" if len(turn.sampled) == turn.room else None

    def _completion(self, turn: Turn, reason: FinishReason) -> Completion:
        tokens, logprobs = [token for token, _ in turn.sampled], [logprob for _, logprob in turn.sampled]
        return Completion(tokens, logprobs, reason, [[self.version, len(tokens)]])

    def abort(self, sequence: int) -> None:
        turn = self.turns[sequence]
        turn.aborted = True
        for _ in range(self.engine.late(sequence)):
            if turn.sampled and self._reason(turn) is not None:
                break
            turn.sampled.append(rule(turn.before, turn.seed, len(turn.sampled), self.version))

    def forget(self, sequence: int) -> None:
        del self.over[sequence]

    def any_busy(self, busy: bool) -> bool:
        return busy

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class ScriptedEngine:
    """Opens `ScriptedGeneration`s, one at a time; `submitted` is what all of them were asked for.

    `late(sequence)` says how many tokens of a turn are drawn after it was aborted, at most.
    """

    def __init__(
        self, steps: Callable[[int], int] = lambda sequence: 1, late: Callable[[int], int] = lambda sequence: 0
    ) -> None:
        self.weight_version, self.steps, self.late = 0, steps, late
        self.submitted: list[tuple[int, list[int], int, int]] = []
        self.opened: list[ScriptedGeneration] = []

    def open(
        self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int
    ) -> ScriptedGeneration:
        assert all(generation.closed for generation in self.opened)
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        self.opened.append(ScriptedGeneration(self, stop_ids, sequences, longest))
        return self.opened[-1]
