"""Plays episodes: turns of the policy by an engine, turns of the environment by its host, until all are over.

    reset --> first observations --> [ a turn of each that is in play --> answers --> observations appended ] --> ...
                                           (engine, all ranks)    (host, one rank, which tells the others)

All ranks of a replica walk through the same rounds with the same numbers: the first one runs the environments and
broadcasts what they said. Tokens that were drawn stay as they are; what the environment says is tokenised once. Samples
depend on nothing but their own seeds, so the same episodes come out in any order and on any number of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from megarl.config.rollout import SamplingConfig
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs.host import Host, Reply
from megarl.envs.protocol import Action
from megarl.errors import MegarlError, UserError
from megarl.rollout.engine import Completion, Generation, RolloutEngine

_SOON_S = 0.1  # most environments answer within; of the others the answers are taken when they come
#: What ends an episode whose environment is not done, by how its last turn ended.
_ENDED_BY = {"stop": "turns", "length": "tokens", "abort": "seconds"}


class EpisodeError(MegarlError):
    """An environment failed, and `env.on_error` is `fail`; the message names episode and turn."""


@dataclass(frozen=True)
class EpisodeLimits:
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
    limits: EpisodeLimits
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
        longest = self.limits.prompt_tokens + self.limits.tokens
        with closing(self.engine.open(sampling, eos_ids, len(starts), longest)) as generation:
            game = _Game(self, generation, starts, sampling, eos_ids[0], advance or (lambda count: None))
            game.reset()
            while generation.any_busy(game.live > 0):
                game.play_turns()
        return game.trajectories


class _Game:
    """The state of one call of `play`. `live`: episodes that are not over."""

    def __init__(
        self,
        driver: Driver,
        generation: Generation,
        starts: Sequence[Start],
        sampling: SamplingConfig,
        end_token: int,
        advance: Callable[[int], None],
    ) -> None:
        self._d, self._generation, self._starts, self._advance = driver, generation, starts, advance
        self._sampling, self._end_token = sampling, end_token
        self.trajectories = [Trajectory(start.prompt_ids) for start in starts]
        self.live = len(starts)
        self._under_way: set[int] = set()
        self._read: dict[int, tuple[int, int]] = {}  # tokens before its turns, and those of them that were cached
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
        self._go_on(range(len(self._starts)))

    def play_turns(self) -> None:
        """Wait until turns are over, let the environments answer them, and let those episodes go on."""
        finished = self._turns()
        for number, done in finished.items():
            self._count_cached(number, done)
            if done.token_ids:
                self.trajectories[number].add_turn(done.token_ids, done.logprobs, done.versions, done.finish_reason)
            else:
                self.trajectories[number].end_unsaid(self._end_token, self._d.engine.weight_version)
        said = [number for number, done in finished.items() if done.token_ids]
        unsaid = [number for number, done in finished.items() if not done.token_ids]
        replies = self._ask(lambda host: self._answers(host, said))
        told = self._tell({i: (reply, self._following(i, reply)) for i, reply in replies.items()})
        late = self._is_late()
        for number, (reply, ids) in told.items():
            self._take(number, reply, ids, late)
        self._go_on([*unsaid, *told])

    def _answers(self, host: Host, said: list[int]) -> Mapping[int, Reply]:
        """Answers to these turns; where other turns go on meanwhile, those that are there, also to earlier ones."""
        actions = self._actions(said) if said else {}
        if not self._generation.goes_on:
            return host.step(actions)
        host.begin(actions)
        return host.answers(_SOON_S)

    def _turns(self) -> dict[int, Completion]:
        """Turns that are over. When the time of the episodes is, all turns end with what there is of them."""
        goes_on, limited = self._generation.goes_on, self._d.limits.seconds is not None
        finished = self._generation.wait(self._is_due if goes_on else self._is_late if limited else None)
        self._under_way -= finished.keys()
        if self._under_way and self._is_late():
            for number in sorted(self._under_way):
                self._generation.abort(number)
            while self._under_way:
                finished |= self._generation.wait()
                self._under_way -= finished.keys()
        return finished

    def _count_cached(self, number: int, done: Completion) -> None:
        """Keep, where the engine says so, which share of what it had to read was in its prefix cache."""
        if done.cached is None:
            return
        trajectory, (tokens, cached) = self.trajectories[number], self._read.get(number, (0, 0))
        tokens, cached = tokens + len(trajectory.prompt_ids) + len(trajectory.token_ids), cached + done.cached
        self._read[number] = tokens, cached
        trajectory.info["cached"] = cached / tokens

    def _go_on(self, numbers: Iterable[int]) -> None:
        """Ask for the next turns of these episodes, or drop them where they are over."""
        over = []
        for number in numbers:
            trajectory = self.trajectories[number]
            if trajectory.ended_by:
                over.append(number)
                self._generation.forget(number)
                continue
            tokens = [*trajectory.prompt_ids, *trajectory.token_ids]
            room = min(self._sampling.max_new_tokens, self._d.limits.tokens - len(trajectory.token_ids))
            self._generation.submit(number, tokens, self._starts[number].turn_seed(trajectory.turns), room)
            self._under_way.add(number)
        self.live -= len(over)
        if self._d.host is not None:
            self._d.host.forget(over)
        self._advance(len(over))

    def _ask(self, call: Callable[[Host], Mapping[int, Reply]]) -> dict[int, Reply]:
        """What the environments answer, on the rank that has them."""
        return dict(call(self._d.host)) if self._d.host is not None and self.live else {}

    def _tell(self, told: dict[int, tuple[Reply, list[int] | None]]) -> dict[int, tuple[Reply, list[int] | None]]:
        """Answers and their tokens, on every rank."""
        plain = [[number, {**asdict(reply), "observation": None}, ids] for number, (reply, ids) in told.items()]
        return {number: (Reply(**reply), ids) for number, reply, ids in self._d.share(plain)}

    def _actions(self, numbers: list[int]) -> dict[int, Action]:
        said = [self.trajectories[number].last_turn for number in numbers]
        texts, raws = self._d.texts(said)
        return {
            number: Action(text, raw, ids, self.trajectories[number].finish_reason, self.trajectories[number].turns - 1)
            for number, text, raw, ids in zip(numbers, texts, raws, said, strict=True)
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
            trajectory.ended_by = _ENDED_BY[trajectory.finish_reason]
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
        self.trajectories[number].mark_failed(why, self._end_token, self._d.engine.weight_version)

    def _is_last_turn(self, trajectory: Trajectory) -> bool:
        return trajectory.turns >= self._d.limits.turns

    def _is_late(self) -> bool:
        """Whether the time of the episodes is over, by the clock of the replica's first rank. Collective over it."""
        return self._d.limits.seconds is not None and self._d.share(self._over_time())

    def _is_due(self) -> bool:
        """Whether the time is over or an environment has answered. Collective over the replica."""
        host = self._d.host
        return self._d.share(self._over_time() or (host is not None and host.any_answer()))

    def _over_time(self) -> bool:
        limit = self._d.limits.seconds
        return limit is not None and time.monotonic() - self._began > limit
