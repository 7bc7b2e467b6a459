"""Plays episodes: turns of the policy by an engine, turns of the environment by its host, until all are over.

    reset --> first observations --> [ a turn of each that is in play --> answers --> observations appended ] --> ...
                                           (engine, all ranks)    (host, one rank, which tells the others)

All ranks of a replica walk through the same rounds with the same numbers: the first one runs the environments and
broadcasts what they said. Tokens that were drawn stay as they are; what the environment says is tokenised once. Samples
depend on nothing but their own seeds, so the same episodes come out in any order and on any number of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megarl.config.rollout import SamplingConfig
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs.host import Host, Reply
from megarl.envs.protocol import Action
from megarl.errors import MegarlError, UserError
from megarl.rollout.engine import Completion, Request, RolloutEngine


class EpisodeError(MegarlError):
    """An environment failed, and `env.on_error` is `fail`; the message names episode and turn."""


@dataclass(frozen=True)
class Limits:
    """How long an episode may become: turns, tokens of the first observation, tokens after it, seconds (None: any)."""

    turns: int
    prompt_tokens: int
    tokens: int
    seconds: float | None


@dataclass(frozen=True)
class Start:
    """How an episode begins.

    Attributes:
        sample_id: names it in messages.
        row: what the environment's `reset` is given.
        prompt_ids: the prompt of the data, for environments that leave it as it is.
        env_seed: of the environment.
        turn_seed: seed of the policy's turn k.
    """

    sample_id: str
    row: dict[str, Any]
    prompt_ids: list[int]
    env_seed: int
    turn_seed: Callable[[int], int]


@dataclass(frozen=True)
class Driver:
    """Plays episodes on one rank of a replica; all its ranks call `play` with the same arguments.

    Attributes:
        engine: draws the policy's turns.
        host: the environments; None on all ranks but the first of a replica.
        turns: tokens of what environments say.
        texts: of token ids, without and with special tokens.
        share: gives every rank of the replica the first one's JSON value; collective over the replica.
        limits: of every episode.
        on_error: `fail` ends the run when an environment fails, `mark` the episode.
    """

    engine: RolloutEngine
    host: Host | None
    turns: Turns
    texts: Callable[[list[list[int]]], tuple[list[str], list[str]]]
    share: Callable[[Any], Any]
    limits: Limits
    on_error: str

    def play(
        self,
        starts: Sequence[Start],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """One trajectory per start, in their order. No response is empty; that of a failed `reset` is an end token.

        `advance(k)` is called when k more episodes are over.

        Raises:
            EpisodeError: an environment failed, and `on_error` is `fail`.
        """
        round_ = _Round(self, starts, sampling, list(eos_ids), advance or (lambda count: None))
        round_.reset()
        while self.engine.any_busy(bool(round_.live)):
            round_.play_turn()
        return round_.trajectories


class _Round:
    """The state of one call of `play`."""

    def __init__(
        self,
        driver: Driver,
        starts: Sequence[Start],
        sampling: SamplingConfig,
        eos_ids: list[int],
        advance: Callable[[int], None],
    ) -> None:
        self._d, self._starts, self._sampling, self._eos_ids, self._advance = driver, starts, sampling, eos_ids, advance
        self.trajectories = [Trajectory(start.prompt_ids) for start in starts]
        self.live = list(range(len(starts)))
        self._began = time.monotonic()

    def reset(self) -> None:
        """First observations of all episodes."""
        replies = self._ask(lambda host: host.reset({i: (s.row, s.env_seed) for i, s in enumerate(self._starts)}))
        told = self._tell({i: (reply, self._first(reply)) for i, reply in replies.items()})
        for number, (reply, ids) in told.items():
            if reply.error:
                self._fail(number, "reset", reply.error)
            elif ids is not None:
                self.trajectories[number].prompt_ids = ids
        self._drop_ended()

    def play_turn(self) -> None:
        """One turn of the policy and the answer to it, for every live episode."""
        for number, completion in zip(self.live, self._generate(), strict=True):
            self.trajectories[number].add_turn(
                completion.token_ids, completion.logprobs, completion.weight_version, completion.finish_reason
            )
        replies = self._ask(lambda host: host.step(self._actions()))
        told = self._tell({i: (reply, self._following(i, reply)) for i, reply in replies.items()})
        late = self._d.share(self._is_late())
        for number, (reply, ids) in told.items():
            self._take(number, reply, ids, late)
        self._drop_ended()

    def _generate(self) -> list[Completion]:
        """The next turn of every live episode; those with the same tokens so far share one prefill."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in self.live:
            trajectory = self.trajectories[number]
            groups.setdefault((*trajectory.prompt_ids, -1, *trajectory.token_ids), []).append(number)
        requests = []
        for members in groups.values():
            trajectory = self.trajectories[members[0]]
            seeds = [self._starts[number].turn_seed(trajectory.turns) for number in members]
            room = min(self._sampling.max_new_tokens, self._d.limits.tokens - len(trajectory.token_ids))
            requests.append(Request([*trajectory.prompt_ids, *trajectory.token_ids], seeds, room))
        done = self._d.engine.generate(requests, self._sampling, self._eos_ids)
        by_number = {
            number: completion
            for members, completions in zip(groups.values(), done, strict=True)
            for number, completion in zip(members, completions, strict=True)
        }
        return [by_number[number] for number in self.live]

    def _ask(self, call: Callable[[Host], Mapping[int, Reply]]) -> dict[int, Reply]:
        """What the environments answer, on the rank that has them."""
        return dict(call(self._d.host)) if self._d.host is not None and self.live else {}

    def _tell(self, told: dict[int, tuple[Reply, list[int] | None]]) -> dict[int, tuple[Reply, list[int] | None]]:
        """Answers and their tokens, on every rank."""
        plain = [[number, {**asdict(reply), "observation": None}, ids] for number, (reply, ids) in told.items()]
        return {number: (Reply(**reply), ids) for number, reply, ids in self._d.share(plain)}

    def _actions(self) -> dict[int, Action]:
        said = [self.trajectories[number].last_turn for number in self.live]
        texts, raws = self._d.texts(said)
        return {
            number: Action(text, raw, ids, self.trajectories[number].finish_reason, self.trajectories[number].turns - 1)
            for number, text, raw, ids in zip(self.live, texts, raws, said, strict=True)
        }

    def _first(self, reply: Reply) -> list[int] | None:
        """Tokens of a first observation, None for the prompt of the data; notes an error in `reply`."""
        if reply.error or reply.observation is None:
            return None
        ids = self._tokens(reply, lambda: self._d.turns.first(reply.observation))
        if not reply.error and not 0 < len(ids) <= self._d.limits.prompt_tokens:
            reply.error = f"reset returned {len(ids)} tokens; data.max_prompt_tokens is {self._d.limits.prompt_tokens}"
        return ids

    def _following(self, number: int, reply: Reply) -> list[int] | None:
        """Tokens of an answer, None when nothing follows; notes an error in `reply`."""
        trajectory = self.trajectories[number]
        if reply.error or reply.done or trajectory.finish_reason != "stop" or self._is_last_turn(trajectory):
            return None
        return self._tokens(reply, lambda: self._d.turns.following(reply.observation, ended=True))

    def _tokens(self, reply: Reply, tokenise: Callable[[], list[int]]) -> list[int]:
        try:
            return tokenise()
        except UserError as error:
            reply.error = str(error)
            return []

    def _take(self, number: int, reply: Reply, ids: list[int] | None, late: bool) -> None:
        """What an answer means for its episode."""
        trajectory, limits = self.trajectories[number], self._d.limits
        if reply.error:
            self._fail(number, f"turn {trajectory.turns - 1}", reply.error)
            return
        trajectory.turn_rewards[-1] = reply.reward
        for name, value in reply.info.items():
            trajectory.info[name] = trajectory.info.get(name, 0.0) + value
        if reply.done:
            trajectory.ended_by = "done"
        elif ids is None:
            trajectory.ended_by = "tokens" if trajectory.finish_reason != "stop" else "turns"
        elif len(trajectory.token_ids) + len(ids) >= limits.tokens:
            trajectory.ended_by = "tokens"
        elif late:
            trajectory.ended_by = "seconds"
        else:
            trajectory.add_observation(ids)

    def _fail(self, number: int, when: str, why: str) -> None:
        start = self._starts[number]
        if self._d.on_error == "fail":
            raise EpisodeError(
                f"the environment of sample {start.sample_id} failed at {when}: {why}\n"
                "  fix:     correct the environment, or set env.on_error=mark to leave such episodes out"
            )
        self.trajectories[number].mark_failed(why, self._eos_ids[0], self._d.engine.weight_version)

    def _drop_ended(self) -> None:
        over = [number for number in self.live if self.trajectories[number].ended_by]
        self.live = [number for number in self.live if not self.trajectories[number].ended_by]
        if self._d.host is not None:
            self._d.host.forget(over)
        self._advance(len(over))

    def _is_last_turn(self, trajectory: Trajectory) -> bool:
        return trajectory.turns >= self._d.limits.turns

    def _is_late(self) -> bool:
        limit = self._d.limits.seconds
        return limit is not None and time.monotonic() - self._began > limit
