"""Environments in which several policies play, each in conversations of its own.

    class Debate(SeveralPolicies):
        def begin(self, row, seed):
            return Ask("author", row["prompt"])
        def reply(self, policy, action):
            if policy == "author":
                return Ask("judge", f"{action.text}\\nRight or wrong?\\n")
            return EpisodeRewards({"author": ..., "judge": ...})

A policy goes on with its last conversation, whose tokens are never tokenised again; with `fresh` it begins another one.
It reads what `Ask` has for it, not the turns of the others.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megarl.config.policies import AgentPolicyConfig
from megarl.envs.protocol import Action, Continuation, Ending, Environment, EpisodeFailure, Observation, Step
from megarl.system.errors import ConfigError, UserError


class RewardsError(Exception):
    """Rewards that do not fit the episode."""


@dataclass(frozen=True)
class Ask:
    """The next turn: which policy takes it, and what the policy reads before it.

    Attributes:
        fresh: begin another conversation of this policy.
    """

    policy: str
    observation: Observation
    fresh: bool = False


@dataclass(frozen=True)
class EpisodeRewards:
    """The return value that ends an episode of several policies.

    Attributes:
        rewards: by policy, its reward, or a list with a reward for each of its conversations; ignored if the
            environment's class sets `scores = False`.
        info: numbers by name; their means over episodes are the metrics `env/<name>`.
    """

    rewards: Mapping[str, float | list[float]] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)


def check_rewards(
    name_of_all: str,
    rewards: Mapping[str, float | list[float]],
    policies: Mapping[str, AgentPolicyConfig],
    begun: Mapping[str, int],
) -> None:
    """Check the rewards of an episode of several policies.

    Args:
        name_of_all: the name of `rewards` in messages.
        rewards: by policy, its reward, or a list with a reward for each of its conversations.
        begun: number of conversations of each policy in the episode.

    Raises:
        RewardsError: a policy that took a turn and is trained has no reward, a reward is no number, a name is no
            policy's, a list has another length than the policy has conversations, or there is a number where `compare`
            needs a list.
    """
    if unknown := [name for name in rewards if name not in policies]:
        raise RewardsError(
            f"{name_of_all} names {unknown[0]!r}, which is no policy of the run; allowed: {', '.join(policies)}"
        )
    for name, value in rewards.items():
        if not all(isinstance(x, int | float) for x in (value if isinstance(value, list) else [value])):
            raise RewardsError(
                f"{name_of_all} has {value!r:.80} for {name!r}; allowed: an int or float, or a list of them"
            )
    for name, settings in policies.items():
        number, given = begun.get(name, 0), rewards.get(name)
        if number and settings.train and given is None:
            raise RewardsError(f"{name_of_all} lacks the policy {name!r}, which has taken a turn")
        if number and settings.train and settings.compare == "episode" and not isinstance(given, list):
            raise RewardsError(
                f"{name_of_all} has one number for the policy {name!r}, whose conversations are compared with one "
                f"another (policies.{name}.compare is episode); allowed: a list of {number} numbers, one for each of "
                "its conversations"
            )
        if isinstance(given, list) and len(given) != number:
            single = "" if number and settings.train and settings.compare == "episode" else "one number, or "
            raise RewardsError(
                f"{name_of_all} has {len(given)} numbers for the policy {name!r}; allowed: {single}{number} in a list, "
                "one for each of its conversations"
            )


@dataclass
class _Conversation:
    """A sequence of one policy.

    Attributes:
        tokens: number of tokens after the prompt.
        last: number of its last turn, among the turns of the episode; None: it has none yet.
        ended: whether the last turn ends with an end token.
    """

    policy: str
    tokens: int = 0
    last: int | None = None
    ended: bool = True


class SeveralPolicies(Environment):
    """The base class of environments with several policies (the section `policies`). Both methods may be coroutines."""

    plays_policies: ClassVar[bool] = True
    needs_policies: ClassVar[bool] = True

    def __init__(self, settings: Any, shared: Any) -> None:
        """Create the environment of one episode; arguments as those of `Environment`."""
        super().__init__(settings, shared)
        self._talks: list[_Conversation] = []
        self._now = _Conversation("")
        self._turns = 0
        self._untrained: list[int] = []

    def begin(self, row: dict[str, Any], seed: int) -> Ask | Awaitable[Ask]:
        """Begin the episode; arguments as those of `Environment.reset`."""
        raise NotImplementedError

    def reply(self, policy: str, action: Action) -> Ask | EpisodeRewards | Awaitable[Ask | EpisodeRewards]:
        """Reply to a turn of `policy`."""
        raise NotImplementedError

    def cut(self) -> EpisodeRewards:
        """Return the rewards of an episode that a limit of turns, tokens or seconds ends: 0 for every conversation."""
        return EpisodeRewards({name: [0.0] * number for name, number in self._begun().items()})

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise a ConfigError if the class lacks a method, or for settings that cannot work."""
        super().check(settings)
        for method in ("begin", "reply"):
            if getattr(cls, method) is getattr(SeveralPolicies, method):
                raise ConfigError(
                    f"the environment {cls.__qualname__} has no method {method}",
                    where="env.name",
                    found=f"{cls.__module__}:{cls.__qualname__}",
                    allowed="begin(self, row, seed) and reply(self, policy, action)",
                    fix="define both",
                )

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        """Return the first policy's input."""
        return self._settled(self.begin(row, seed))

    def step(self, action: Action) -> Any:
        """Return the next policy's input, or the end."""
        now, turns = self._now, self.services.turns
        now.last, self._turns = self._turns, self._turns + 1
        ids = action.token_ids  # empty if the time was up before the turn's first token
        now.tokens, now.ended = now.tokens + len(ids), bool(ids) and turns.is_ended(ids)
        if not self.services.policies[now.policy].train:
            self._untrained.append(now.last)
        if action.finish_reason == "abort":  # the episode's time is up
            return self._end(self.cut(), limited=True)
        return self._settled(self.reply(now.policy, action))

    def _settled(self, answer: Any) -> Any:
        """Return the step of an answer, or a coroutine that returns it if the answer has to be awaited."""

        async def later() -> Any:
            return self._step_of(await answer)

        return later() if inspect.isawaitable(answer) else self._step_of(answer)

    def _step_of(self, answer: Any) -> Continuation | Step:
        if isinstance(answer, EpisodeRewards):
            return self._end(answer)
        if not isinstance(answer, Ask):
            raise EpisodeFailure(
                f"the environment returned {answer!r:.80}; allowed: Ask(policy, observation) or EpisodeRewards(rewards)"
            )
        if answer.policy not in self.services.policies:
            names = ", ".join(self.services.policies)
            raise EpisodeFailure(f"the environment asks the policy {answer.policy!r:.80}; allowed: {names}")
        following = None if self._turns >= self.services.turns_limit else self._following(answer)
        if following is None:
            return self._end(self.cut(), limited=True)
        return Step(following) if self._turns else following

    def _following(self, ask: Ask) -> Continuation | None:
        """Return the input of the next turn; None: the sequence has no room for it."""
        services, sampling = self.services, self.services.policies[ask.policy].sampling
        earlier = [] if ask.fresh else [talk for talk in self._talks if talk.policy == ask.policy]
        talk = earlier[-1] if earlier else _Conversation(ask.policy)
        try:
            if talk.last is None:
                ids = services.turns.first(ask.observation)
            else:
                ids = services.turns.following(ask.observation, ended=talk.ended)
        except UserError as error:
            raise EpisodeFailure(f"the observation for {ask.policy!r} cannot be read: {error}") from error
        if talk.last is None:
            if not 0 < len(ids) <= services.prompt_tokens:
                raise EpisodeFailure(
                    f"a conversation of {ask.policy!r} begins with {len(ids)} tokens; data.max_prompt_tokens allows 1 "
                    f"to {services.prompt_tokens}"
                )
            self._talks.append(talk)
        else:
            talk.tokens += len(ids)
        room = services.tokens - talk.tokens
        if room <= 0:
            return None
        self._now = talk
        room = min(room, sampling.max_new_tokens or room)
        return Continuation(list(ids), talk.last, room, tuple(sampling.stop), ask.policy)

    def _begun(self) -> dict[str, int]:
        """Return how many conversations with a turn each policy has."""
        return dict(Counter(talk.policy for talk in self._talks if talk.last is not None))

    def _end(self, end: EpisodeRewards, *, limited: bool = False) -> Step:
        begun, rewards = self._begun(), dict(end.rewards)
        if not self.scores:
            rewards = {name: [0.0] * number for name, number in begun.items()}
        try:
            check_rewards("`EpisodeRewards`", rewards, self.services.policies, begun)
        except RewardsError as error:
            raise EpisodeFailure(str(error)) from error
        numbers = [x for value in rewards.values() for x in (value if isinstance(value, list) else [value])]
        if not all(map(math.isfinite, numbers)):
            raise EpisodeFailure(f"the episode has the rewards {rewards}; allowed: finite numbers")
        info = {"limited": float(limited), **end.info}
        return Step(Ending(tuple(self._untrained), rewards=rewards), 0.0, True, info)
