"""Generates prompt groups: samples trajectories from an engine and, for episodes, environments.

    add(group) --> slots 0 ... --> wait: return groups whose samples are all finished    finish: wait for all groups
                     ^       |
                     |       '-- interrupt: keep partial trajectories
                     '---------- open: continue them, with the current weights

    engine         turn of a sample --> end ----.        .-> turn of a sample --> ...
    environment    reset --------'              '--> step'                        (megarl/rollout/answers.py)

A sample is a `Trajectory` of one turn, or of many turns if it has an environment. A turn is sampled in one segment, and
in one more after each interruption; the next segment has all tokens so far as its context. Every token keeps the
log-prob and the weight version that it was sampled with. A sample depends only on its own seeds, not on the order of
samples or the number of replicas.

A synchronous step calls `add` for all groups and then `finish`. Samples without an environment are then one call of
`RolloutEngine.generate`, which shares the prefill of a prompt and spreads over threads and ranks. Otherwise a sample
keeps its slot from beginning to end, even while its environment works, and other samples are generated in the meantime.
Robots' episodes have a player of their own (megarl/robots/rollout/play.py), because their turns are chunks
of actions that one batched pass per step decodes from pictures, not tokens that follow a growing prompt.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import SamplingConfig
from megarl.data.trajectory import PLAIN, Trajectory
from megarl.data.versions import first_runs
from megarl.rollout.answers import Answer, Answers, Branch, EpisodeRules, apply_answer, apply_branch, end_without_turn
from megarl.rollout.engine import Completion, Generation, Request, RolloutEngine, ignore_progress
from megarl.rollout.policies import PolicyGenerations
from megarl.rollout.rounds import TurnRound
from megarl.rollout.stop_strings import StopStrings
from megarl.system.errors import MegarlError, UserError

if TYPE_CHECKING:
    from megarl.data.image_set import ImageSet

_SOON_S = 0.1  # seconds to wait for environments, within which most answer; later answers are taken when they arrive
# seconds to wait for environments while turns are in flight in an engine that decodes only inside `wait`
_QUICK_S = 0.01


class EpisodeError(MegarlError):
    """An environment failed, and `env.on_error` is `fail`; the message names episode and turn."""


class EnvironmentDefect(UserError, EpisodeError):
    """An environment's own code failed, and would fail in the same way if the run were started again."""


@dataclass(frozen=True)
class Group:
    """A prompt group to generate.

    Attributes:
        number: unique among the groups in flight.
        prompt_ids: the prompt's tokens, which an environment may replace by its first observation.
        seeds: `seeds[i](k)` is the seed of segment k of sample i, in [0, 2**63).
        row: the data row that the environment's `reset` receives.
    """

    number: int
    prompt_ids: list[int]
    seeds: Sequence[Callable[[int], int]]
    uid: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    env_seed: int = 0
    images: ImageSet | None = None


@dataclass
class _InFlightGroup:
    """A group that `wait` has not returned.

    Attributes:
        spent_s: seconds in which the group was generated before `since`.
        since: `time.monotonic()` when the generator was opened or the group was added; None: the generator is closed.
    """

    group: Group
    trajectories: list[Trajectory]
    spent_s: float = 0.0
    since: float | None = None

    def unfinished(self) -> Iterator[int]:
        """Return the indices of the group's unfinished samples."""
        return (sample for sample, trajectory in enumerate(self.trajectories) if not trajectory.ended_by)

    @property
    def is_over(self) -> bool:
        return next(self.unfinished(), None) is None

    def is_late(self, seconds: float, now: float) -> bool:
        return self.spent_s + (0.0 if self.since is None else now - self.since) > seconds


@dataclass
class _Sample:
    """An unfinished sample.

    Attributes:
        place: index of the sample in its group.
        slot: the sample's slot (its place in the engine). If several of its turns are sampled at the same time, the
            others have slots of their own.
        round: the turns that are being sampled at the same time; None: there is only one.
        read: number of input tokens of all turns.
        cached: how many of the `read` tokens were in the prefix cache.
    """

    in_flight: _InFlightGroup
    place: int
    slot: int
    round: TurnRound | None = None
    read: int = 0
    cached: int = 0

    @property
    def trajectory(self) -> Trajectory:
        return self.in_flight.trajectories[self.place]

    def lane(self, slot: int) -> Trajectory:
        """Return the sequence of the episode whose turn is sampled in the engine's `slot`."""
        return self.trajectory if self.round is None else self.round.running[slot]

    def turn(self, slot: int) -> tuple[int, int]:
        """Return the slot in which the episode began, and the index of the turn in `slot`.

        The index counts the episode's turns that are sampled at the same time, each in a slot of its own.
        """
        return self.slot, 0 if self.round is None else self.round.place(slot)


class GroupGenerator:
    """Generates groups of samples. Every rank of a model replica makes the same calls in the same order.

    Replicas that generate in batches (`Generation.is_batched`) also call `open`, `wait`, `interrupt` and `finish`
    equally often and in the same order; they `add` different groups. A replica without groups in flight joins these
    calls too. No replica may do long work between two calls, because the others wait for it. Replicas on servers
    (`Generation.is_async`) share only the calls of `open`, `interrupt` and `finish`, in which they wait for each other.

    A sample (of an episode: each turn) that is never interrupted equals the result of `RolloutEngine.generate` with the
    seed of its segment.

    Args:
        engine: generates with the `weight_version` at the time of `open` until `interrupt`.
        sampling: `n` is not read. `min_new_tokens` counts from the start of each segment, so callers that interrupt
            must reject it.
        eos_ids: end tokens in addition to those of `sampling`, the tokenizer's own first.
        slots: maximum number of samples in flight, each of which has a slot in the engine. If episodes may have several
            turns in flight, there are as many additional slots for these turns.
        longest: maximum number of tokens of a prompt and its sample together.
        rules: rules of episodes; None: samples have no environment.
        strings: the stop strings of `sampling`; None: no stop strings.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        slots: int,
        longest: int,
        rules: EpisodeRules | None = None,
        strings: StopStrings | None = None,
    ) -> None:
        self._engine, self._sampling, self._eos_ids, self._strings = engine, sampling, list(eos_ids), strings
        self._slots, self._longest, self._rules = slots, longest, rules
        self._tokens = sampling.max_new_tokens if rules is None else rules.limits.tokens
        self._seconds = None if rules is None else rules.limits.seconds
        self._stop_ids = frozenset() if sampling.ignore_eos else frozenset([*eos_ids, *sampling.stop_token_ids])
        self._groups: dict[int, _InFlightGroup] = {}
        self._samples: dict[int, _Sample] = {}  # by slot; an episode with several turns in flight has several
        self._free = list(range(slots))  # the free slots, as a heap
        sides = slots if rules is not None and rules.has_simultaneous_turns else 0
        self._all_slots = slots + sides
        self._free_sides = list(range(slots, self._all_slots))  # heap of free slots for an episode's simultaneous turns
        self._answers = None if rules is None else Answers(rules)
        self._generation: Generation | None = None
        self._submitted: set[int] = set()  # slots whose turns were submitted to the generation
        self._in_turn: set[int] = set()  # slots whose turn is in flight
        self._cut: set[int] = set()  # slots whose turn in flight was aborted, and will not be continued
        self._late: set[int] = set()  # numbers of groups over their time limit
        self._dropped: set[int] = set()  # slots whose environment needs no more of the turn in flight
        # whether turns in flight may be cut, so that ranks must agree on it while they generate
        self._may_cut = self._seconds is not None or (rules is not None and rules.may_drop_turns)

    @property
    def busy(self) -> bool:
        """Whether any added group has not been returned by `wait`."""
        return bool(self._groups)

    @property
    def is_async(self) -> bool:
        """Whether the open engine also generates between two calls of `wait`."""
        return self._generation is not None and self._generation.is_async

    @property
    def is_batched(self) -> bool:
        """Whether each `wait` of the open engine finishes all turns in flight, as one batch."""
        return self._generation is not None and self._generation.is_batched

    @property
    def free(self) -> int:
        """Number of samples that can be added to those in flight now."""
        return len(self._free)

    def add(self, group: Group, partial: Sequence[Trajectory] | None = None) -> int:
        """Add a group of `len(group.seeds)` samples; generation starts now or, if the generator is not open, at `open`.

        Returns the number of samples of `partial` that restart, because they exceed the current limits or because the
        recipe now has an environment and had none before (or the reverse). Unfinished episodes that restart because
        their environment is not `replayable` do not count.

        Args:
            group: the group to generate.
            partial: the partial trajectory of each sample; None: no samples yet. An unfinished episode continues after
                its turns were replayed in a new environment, or restarts if the environment is not `replayable`. The
                group keeps the seconds that it has spent.

        Raises:
            ValueError: not enough `free` slots, a group number that is in flight, or not one trajectory per sample.
        """
        number, count = group.number, len(group.seeds)
        if number in self._groups:
            raise ValueError(f"group {number} is already in flight")
        if partial is not None and len(partial) != count:
            raise ValueError(
                f"group {number} has {count} samples and {len(partial)} partial trajectories; pass one for each sample"
            )
        parts = [None] * count if partial is None else partial
        usable = [part is not None and self._is_usable(group, part) for part in parts]
        resumed = [self._resume_partial(group, part if use else None) for part, use in zip(parts, usable, strict=True)]
        spent_s = max((part.spent_s for part, use in zip(parts, usable, strict=True) if part and use), default=0.0)
        in_flight = _InFlightGroup(group, resumed, spent_s)
        needed = list(in_flight.unfinished())
        if len(needed) > self.free:
            raise ValueError(
                f"group {number} needs {len(needed)} slots, but only {self.free} of {self._slots} are free; wait until "
                "enough groups are finished"
            )
        self._groups[number] = in_flight
        if self._generation is not None:
            in_flight.since = time.monotonic()
        for place in needed:
            slot = heapq.heappop(self._free)
            self._samples[slot] = sample = _Sample(in_flight, place, slot)
            if self._answers is not None:
                self._answers.begin(slot, group.row, group.env_seed, sample.trajectory)
            else:
                self._submit(slot)
        replayable = self._rules is None or self._rules.replayable
        return sum(
            part is not None and part.segments > 0 and not use and (replayable or bool(part.ended_by))
            for part, use in zip(parts, usable, strict=True)
        )

    def open(self, *, whole: bool = False) -> None:
        """Start to generate with the current weights, and continue interrupted samples.

        Args:
            whole: whether an engine that decodes only inside `wait` first waits for all environments, see `wait`.

        Raises:
            RuntimeError: the generator is open already.
        """
        if self._generation is not None:
            raise RuntimeError("the generator is open already; call interrupt() or close() first")
        generation = self._engine.open(self._sampling, self._eos_ids, self._all_slots, self._longest)
        while whole and not generation.is_async and self._answers is not None and self._answers.awaited:
            self._take_answers(None, self._samples)  # submits no turns, as `_generation` is not set
        self._generation = generation
        now = time.monotonic()
        for in_flight in self._groups.values():
            in_flight.since = now
        awaited = () if self._answers is None else self._answers.awaited
        order = sorted((self._samples[slot].in_flight.group.number, slot) for slot in self._samples)
        for _, slot in order:
            turns = self._samples[slot].round
            if slot in turns.running if turns is not None else slot not in awaited:
                self._submit(slot)

    def wait(
        self, enough: Callable[[], bool] | None = None, *, whole: bool = False
    ) -> list[tuple[int, list[Trajectory]]]:
        """Return the completed groups by number, each group once.

        Waits until a group is complete or nothing is in flight. On servers it returns within a few tenths of a second,
        perhaps without a group; in batched generation all replicas return together after each batch. While the
        generator is not open, complete groups are returned at once.

        Args:
            enough: called repeatedly; this method returns when the result is True. `enough` is collective over the
                replica, and returns the same on all its ranks. Not called on servers and in batched generation.
            whole: whether an engine that decodes only inside `wait` waits for all environments after every round of
                turns, so that the result does not depend on the environments' speed.

        Raises:
            EpisodeError: an environment failed, and `on_error` is `fail`.
        """
        generation = self._generation
        if generation is None:
            return self._take_complete()
        if generation.is_async:
            # Servers generate meanwhile, so wait only briefly. All ranks call `wait`, even without turns in flight.
            self._continue(generation, lambda: True)
        elif generation.is_batched:
            if generation.any_busy(bool(self._in_turn)):
                self._continue(generation, None)
            else:
                self._take_answers(_SOON_S, ())
        else:
            self._decode(generation, enough or (lambda: False), whole=whole)
        return self._take_complete()

    def finish(self, advance: Callable[[int], None] = ignore_progress) -> list[list[Trajectory]]:
        """Generate all added groups to the end and return their samples, in the order of group numbers.

        The generator must not be open.

        No response is empty; after a failed `reset` it is one end token. `advance(k)` is called when k more samples
        finish.

        Raises:
            EpisodeError: an environment failed, and `on_error` is `fail`.
        """
        if self._rules is None:
            self._generate(advance)
        else:
            self._play(advance)
        return [trajectories for _, trajectories in self._take_complete()]

    def interrupt(self) -> None:
        """Abort all in-flight turns, keep their partial tokens, and stop generating.

        A turn that ended by itself goes to its environment. A turn without tokens keeps its segment number and seed,
        and starts with the next `open`. In batched generation only groups added after the last `wait` are in flight.

        Raises:
            RuntimeError: the generator is not open.
        """
        generation = self._generation
        if generation is None:
            raise RuntimeError("the generator is not open, so there is nothing to interrupt; call open() first")
        for slot in sorted(self._in_turn - self._cut):
            generation.abort(slot)
        ended: list[int] = []
        while generation.any_busy(bool(self._in_turn)):
            ended += self._collect(generation.wait())
        self._close_generation()
        self._send_turns_to_environments(ended)
        now = time.monotonic()
        for in_flight in self._groups.values():
            assert in_flight.since is not None, "it is open"
            in_flight.spent_s, in_flight.since = in_flight.spent_s + now - in_flight.since, None

    def drop(self, number: int) -> list[Trajectory]:
        """Remove a group that `wait` has not returned, and return its partial trajectories.

        The generator must not be open.
        """
        in_flight = self._groups.pop(number)
        for slot in [slot for slot, sample in self._samples.items() if sample.in_flight is in_flight]:
            if slot == self._samples[slot].slot:
                self._release(slot)
            else:
                del self._samples[slot]
                heapq.heappush(self._free_sides, slot)
        self._late.discard(number)
        return in_flight.trajectories

    def partial(self) -> dict[int, list[Trajectory]]:
        """Return copies of the trajectories of every group that `wait` has not returned, to `add` in another process.

        Raises:
            RuntimeError: the generator is open; partial tokens are complete only after `interrupt`.
        """
        if self._generation is not None:
            raise RuntimeError(
                "the generator is open, so tokens of in-flight turns would be missing; call interrupt() first"
            )
        return {
            number: [replace(trajectory.copy(), spent_s=group.spent_s) for trajectory in group.trajectories]
            for number, group in sorted(self._groups.items())
        }

    def close(self) -> None:
        """Drop all groups, in-flight turns and environments. Not collective."""
        self._groups, self._samples, self._free = {}, {}, list(range(self._slots))
        self._free_sides = list(range(self._slots, self._all_slots))
        self._late = set()
        self._close_generation()
        if self._answers is not None:
            self._answers.close()

    # -- all groups of a step ----------------------------------------------------------------------------------------

    def _generate(self, advance: Callable[[int], None]) -> None:
        """Sample all groups, which have no environment, in one call of the engine."""
        groups = [in_flight for _, in_flight in sorted(self._groups.items())]
        requests = [
            Request(entry.group.prompt_ids, [seed(0) for seed in entry.group.seeds], images=entry.group.images)
            for entry in groups
        ]
        results = self._engine.generate(requests, self._sampling, self._eos_ids, advance)
        for in_flight, completions in zip(groups, results, strict=True):
            for trajectory, done in zip(in_flight.trajectories, completions, strict=True):
                trajectory.add_segment(done.token_ids, done.logprobs, done.versions, done.routes, done.kept_tokens)
                trajectory.end_turn(done.finish_reason)
                trajectory.end(PLAIN)
        for slot in list(self._samples):
            self._release(slot)

    def _play(self, advance: Callable[[int], None]) -> None:
        """Play all episodes with their environments until they end.

        If the engine decodes only inside `wait`, each round waits for all environments, so that the batches of turns
        do not depend on the environments' speed and a second run repeats them.
        """
        self.open()
        generation = self._generation
        assert generation is not None, "the generator is open"
        whole = not generation.is_async
        enough = None if whole and not self._may_cut else self._is_overdue if whole else self._is_due
        try:
            advance(self._take_answers(None if whole else _SOON_S, self._samples))
            while generation.any_busy(bool(self._samples)):
                advance(self._continue(generation, enough, whole=whole))
        finally:
            self._close_generation()

    # -- turns -------------------------------------------------------------------------------------------------------

    def _decode(self, generation: Generation, enough: Callable[[], bool], *, whole: bool) -> None:
        """Generate turns until some group of samples is complete, nothing is in flight, or `enough()` returns True."""
        stopped = False

        def should_return() -> bool:
            nonlocal stopped
            stopped = stopped or enough()
            return stopped or (self._is_overdue() if whole else self._is_due())

        while self._samples and not stopped and not any(group.is_over for group in self._groups.values()):
            idle = not self._in_turn
            self._continue(generation, should_return, whole=whole)
            stopped = stopped or (idle and enough())

    def _continue(self, generation: Generation, enough: Callable[[], bool] | None, *, whole: bool = False) -> int:
        """Wait for turns or `enough()`, exchange turns with environments, and return how many samples finished.

        Args:
            enough: passed to `Generation.wait`.
            whole: whether to wait until all environments have answered.
        """
        before = len(self._free)
        ended = self._collect(generation.wait(enough))
        for slot in self._overdue():  # the next `generation.wait` returns the tokens of this turn
            generation.abort(slot)
            self._cut.add(slot)
        sent = self._send_turns_to_environments(ended)
        if whole:
            wait_s = None
        elif self._in_turn and not sent:
            wait_s = 0.0
        else:
            wait_s = _SOON_S if generation.is_async or not self._in_turn else _QUICK_S
        self._take_answers(wait_s, sent)
        return len(self._free) - before

    def _submit(self, slot: int) -> None:
        """Submit the next turn of the sample in `slot`, or the rest of a turn, to the engine. Do nothing if closed."""
        if self._generation is None:
            return
        sample = self._samples[slot]
        trajectory, group = sample.lane(slot), sample.in_flight.group
        tokens = [*trajectory.prompt_ids, *trajectory.token_ids]
        seed = group.seeds[sample.place](trajectory.segments)
        begun = len(trajectory.begun_turn)
        if isinstance(self._generation, PolicyGenerations):
            self._generation.choose(slot, trajectory.policy)
        self._generation.submit(slot, tokens, seed, self._room(trajectory), trajectory.images, begun)
        self._submitted.add(slot)
        self._in_turn.add(slot)

    def _room(self, trajectory: Trajectory) -> int:
        """Return how many more tokens the current turn may have."""
        begun = len(trajectory.begun_turn)
        room = self._sampling.max_new_tokens if trajectory.turn_room is None else trajectory.turn_room
        return min(room - begun, self._sampling.max_new_tokens - begun, self._tokens - len(trajectory.token_ids))

    def _collect(self, over: Mapping[int, Completion]) -> list[int]:
        """Add finished segments, by slot, to their trajectories and return the slots whose turns have ended."""
        ended = []
        for slot, done in over.items():
            self._in_turn.discard(slot)
            sample = self._samples[slot]
            trajectory = sample.lane(slot)
            if self._answers is not None:
                _count_cached(sample, trajectory, done)
            if trajectory.turn_stop:
                done = self._cut_at_stop(slot, trajectory, done)
            trajectory.add_segment(done.token_ids, done.logprobs, done.versions, done.routes, done.kept_tokens)
            if done.finish_reason != "abort":
                trajectory.end_turn(done.finish_reason)
            elif slot not in self._cut:
                self._end_if_full(trajectory)
                if sample.round is not None and done.token_ids and trajectory.in_turn:
                    sample.round.interrupted(trajectory)
            elif trajectory.in_turn:
                trajectory.end_turn("abort")
            elif trajectory.turn_room is not None:  # an environment with a tree of turns ends its episodes itself
                trajectory.end_empty_turn(self._eos_ids[0], self._engine.weight_version)
            else:
                trajectory.end_before_turn(self._eos_ids[0], self._engine.weight_version)
            self._cut.discard(slot)
            self._dropped.discard(slot)
            if trajectory.ended_by or trajectory.is_unanswered:
                ended.append(slot)
        return ended

    def _cut_at_stop(self, slot: int, trajectory: Trajectory, done: Completion) -> Completion:
        """Return a segment without the tokens after the turn's own stop string, which the engine does not look for."""
        stops = None if self._rules is None else self._rules.stops
        begun = trajectory.begun_turn
        end = None if stops is None else stops(trajectory.turn_stop).end([*begun, *done.token_ids], len(begun))
        if end is None:
            return done
        length = end - len(begun)
        if length < len(done.token_ids):
            self._forget(slot)  # the slot's cache has tokens that the sequence lacks
        total = len(trajectory.prompt_ids) + len(trajectory.token_ids) + length
        return replace(
            done,
            token_ids=done.token_ids[:length],
            logprobs=done.logprobs[:length],
            finish_reason="stop",
            versions=first_runs(done.versions, length),
            routes=None if done.routes is None else done.routes[: total - 1],
            kept_tokens=None if done.kept_tokens is None else done.kept_tokens.first(length),
        )

    def _end_if_full(self, trajectory: Trajectory) -> None:
        """End an interrupted turn that had just reached an end token, a stop string or the token limit."""
        if trajectory.in_turn:
            turn = trajectory.begun_turn
            if turn[-1] in self._stop_ids or (self._strings is not None and self._strings.end(turn) is not None):
                trajectory.end_turn("stop")
            elif self._room(trajectory) <= 0:
                trajectory.end_turn("length")

    def _release(self, slot: int) -> None:
        """Free the slot of a finished sample for another one."""
        del self._samples[slot]
        heapq.heappush(self._free, slot)
        self._forget(slot)
        if self._answers is not None:
            self._answers.forget(slot)

    def _close_generation(self) -> None:
        """Close the engine's generation and drop its in-flight turns."""
        generation, self._generation = self._generation, None
        self._submitted, self._in_turn, self._cut, self._dropped = set(), set(), set(), set()
        if generation is not None:
            generation.close()

    def _take_complete(self) -> list[tuple[int, list[Trajectory]]]:
        """Remove the complete groups from the generator and return them by number."""
        complete = sorted(number for number, in_flight in self._groups.items() if in_flight.is_over)
        self._late.difference_update(complete)
        return [(number, self._groups.pop(number).trajectories) for number in complete]

    def _resume_partial(self, group: Group, partial: Trajectory | None) -> Trajectory:
        """Return a copy of the partial trajectory if it is usable, else a new trajectory."""
        if partial is None:
            return Trajectory([*group.prompt_ids], images=group.images)
        trajectory = partial.copy()
        if trajectory.images is None and trajectory.prompt_ids == group.prompt_ids:
            trajectory.images = group.images  # checkpoints of older versions do not store images
        if not trajectory.ended_by:
            self._end_if_full(trajectory)
            if self._rules is None and trajectory.turns:
                trajectory.end(PLAIN)
        return trajectory

    def _is_usable(self, group: Group, partial: Trajectory) -> bool:
        """Return whether a partial trajectory can be used under the current environment and limits, which may have
        changed."""
        plain = partial.prompt_ids == group.prompt_ids and len(partial.turn_starts) == 1 and all(partial.sampled)
        if self._rules is None and not plain:  # the sample began with an environment, which this recipe does not have
            return False
        if partial.ended_by:
            # a sample that ended without an environment is of no use if an environment must answer it now
            return self._rules is None or partial.ended_by != PLAIN
        room, turns = self._room(partial), partial.turns + (not partial.is_unanswered)
        between_turns = not (partial.in_turn or partial.is_unanswered)
        if not partial.segments or room < 0 or (room == 0 and between_turns):
            return False
        return self._rules is None or (self._rules.replayable and turns <= self._rules.limits.turns)

    # -- environments ------------------------------------------------------------------------------------------------

    def _send_turns_to_environments(self, ended: Iterable[int]) -> list[int]:
        """Send finished turns to their environments and return their slots; without environments end their samples."""
        turns: dict[int, Sequence[Trajectory]] = {}
        for slot in ended:
            sample = self._samples[slot]
            if sample.round is not None:
                if self._is_last_of_round(sample.round, sample, slot):
                    turns[sample.slot], sample.round = sample.round.lanes, None
                continue
            trajectory = sample.trajectory
            if self._answers is None:
                trajectory.end(PLAIN)
            if trajectory.ended_by:
                self._release(slot)
            else:
                turns[slot] = [trajectory]
        if self._answers is not None:
            self._answers.ask(turns)
        return list(turns)

    def _take_answers(self, wait_s: float | None, to: Iterable[int]) -> int:
        """Resume episodes whose environment has replied; return how many finished."""
        if self._answers is None:
            return 0
        answers, over, rules = self._answers.take(wait_s, to), 0, self._answers.rules
        self._sync_cuts()
        for slot, answer in answers.items():
            sample = self._samples[slot]
            if answer.differs:
                self._restart(self._answers, slot, answer.reply.error)
                continue
            if answer.reply.error:
                self._fail(rules, sample, answer)
            elif answer.reply.done and not sample.trajectory.turns:
                end_without_turn(sample.trajectory, answer, self._eos_ids[0], self._engine.weight_version)
            elif answer.branch is not None:
                self._apply_branch(slot, answer, answer.branch, rules.limits.prompt_tokens)
            else:
                late = sample.in_flight.group.number in self._late
                apply_answer(sample.trajectory, answer, rules.limits, late=late)
            if sample.trajectory.ended_by:
                self._release(slot)
                over += 1
            elif sample.round is None:
                self._submit(slot)
            else:
                self._begin_round(sample.round, sample)
        return over

    def _apply_branch(self, slot: int, answer: Answer, branch: Branch, prompt: int) -> None:
        """Add an answer of an environment whose turns form a tree: the next turn may continue another sequence.

        Args:
            slot: number of the place, of the samples generated at once, in which the episode runs.
            branch: where in the tree the turn was added.
            prompt: number of prompt tokens.
        """
        sample = self._samples[slot]
        before = sample.trajectory.turn_numbers[-1:]
        lanes = apply_branch(sample.trajectory, answer, branch, prompt, self._engine.weight_version)
        sample.in_flight.trajectories[sample.place] = lanes[-1]
        sample.round = TurnRound(lanes) if len(lanes) > 1 else None
        last = (answer.beside[-1].branch if answer.beside else None) or branch
        if not answer.reply.done and [last.after] != before:
            self._forget(slot)  # the slot's cache belongs to another sequence of the episode

    def _begin_round(self, turns: TurnRound, sample: _Sample) -> None:
        """Submit the next turns of an episode, which are sampled at the same time if there are enough free slots.

        The sequence in which the episode continues keeps the episode's own slot, and so its KV cache.
        """
        turns.start(sample.slot, last=True)
        self._submit(sample.slot)
        while turns.waiting and self._free_sides:
            slot = heapq.heappop(self._free_sides)
            self._samples[slot] = sample
            turns.start(slot)
            self._submit(slot)

    def _is_last_of_round(self, turns: TurnRound, sample: _Sample, slot: int) -> bool:
        """Give the slot of a turn that has ended to a waiting turn, or free the slot; return whether all turns of the
        round have ended."""
        lane = turns.running.pop(slot)
        if turns.waiting or lane is not turns.lanes[-1]:
            self._forget(slot)
        if turns.waiting:
            turns.start(slot)
            self._submit(slot)
        elif slot != sample.slot:
            del self._samples[slot]
            heapq.heappush(self._free_sides, slot)
        if turns.is_over:
            turns.end()
        return turns.is_over

    def _forget(self, slot: int) -> None:
        """Free what the engine has cached for the sample in `slot`."""
        if slot in self._submitted and self._generation is not None:
            self._generation.forget(slot)
            self._submitted.discard(slot)

    def _restart(self, answers: Answers, slot: int, error: str) -> None:
        """Restart an episode from its prompt, because replayed turns got answers that differ from the recorded ones."""
        sample = self._samples[slot]
        group, place = sample.in_flight.group, sample.place
        if answers.rules.host is not None:
            why = f"its environment now answers its recorded turns differently{': ' * bool(error)}{error}"
            print(f"sample {group.uid}#{place} begins again: {why}")
        sample.in_flight.trajectories[place] = fresh = Trajectory([*group.prompt_ids], images=group.images)
        answers.begin(slot, group.row, group.env_seed, fresh)

    def _fail(self, rules: EpisodeRules, sample: _Sample, answer: Answer) -> None:
        """End an episode whose environment failed; with `env.on_error=fail` end the run."""
        trajectory, error = sample.trajectory, answer.reply.error
        if rules.on_error == "fail":
            when = f"turn {trajectory.turns - 1}" if trajectory.turns else "reset"
            problem = f"the environment of sample {sample.in_flight.group.uid}#{sample.place} failed at {when}: {error}"
            leave_out = "set env.on_error=mark to leave such episodes out"
            if "\n  fix: " in error:  # an error about an invalid reply already contains a fix
                problem += f"; or {leave_out}"
            else:
                problem += f"\n  fix:     correct the environment, or {leave_out}"
            raise EnvironmentDefect(problem) if answer.reply.repeats else EpisodeError(problem)
        trajectory.mark_failed(error, self._eos_ids[0], self._engine.weight_version)

    # -- time --------------------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Return whether an environment has replied or a turn must be cut. Collective over the replica."""
        if self._answers is None:
            return False
        any_answer, *cuts = self._answers.rules.share([self._answers.any_answer(), *self._cuts_now()])
        self._note_cuts(*cuts)
        return bool(any_answer) or bool(self._overdue())

    def _is_overdue(self) -> bool:
        """Return whether a turn must be cut. Collective over the replica."""
        self._sync_cuts()
        return bool(self._overdue())

    def _sync_cuts(self) -> None:
        """Take from the replica's first rank which turns must be cut. Collective over the replica."""
        if self._may_cut and self._rules is not None:
            self._note_cuts(*self._rules.share(self._cuts_now()))

    def _note_cuts(self, late: Iterable[int], dropped: Iterable[int]) -> None:
        self._late.update(late)
        self._dropped = set(dropped)

    def _cuts_now(self) -> tuple[list[int], list[int]]:
        """Return the numbers of groups over their time limit, by this rank's clock, and the slots whose environment, on
        this rank, needs no more of the turn in flight."""
        now, late = time.monotonic(), list[int]()
        if (seconds := self._seconds) is not None:
            late = [number for number, in_flight in self._groups.items() if in_flight.is_late(seconds, now)]
        if self._answers is None:
            return late, []
        slots = {self._samples[slot].turn(slot): slot for slot in sorted(self._in_turn - self._cut)}
        return late, [slots[turn] for turn in self._answers.dropped(slots)]

    def _overdue(self) -> list[int]:
        """Return the slots whose turn in flight must be cut: by its group's time limit, or by its environment."""
        if not self._late and not self._dropped:
            return []
        slots = sorted(self._in_turn - self._cut)
        return [s for s in slots if s in self._dropped or self._samples[s].in_flight.group.number in self._late]


def _count_cached(sample: _Sample, lane: Trajectory, done: Completion) -> None:
    """Record the share of input tokens that were in the engine's prefix cache, if the engine reports it."""
    if done.cached is None:
        return
    sample.read += len(lane.prompt_ids) + len(lane.token_ids)
    sample.cached += done.cached
    sample.trajectory.info["cached"] = sample.cached / sample.read
