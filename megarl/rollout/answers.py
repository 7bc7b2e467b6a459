"""The environments' side of episodes: what the policy said goes to them, what they answer becomes tokens.

All ranks of a replica make the same calls. The first one has the environments and broadcasts what they said; an answer
is tokenised once, there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs.host import Host, HostSession, Reply
from megarl.envs.protocol import Action
from megarl.errors import UserError

#: What ends an episode whose environment is not done, by how its last turn ended.
_ENDED_BY = {"stop": "turns", "length": "tokens", "abort": "seconds"}


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode: turns, tokens of the first observation, tokens after it, seconds (None: any)."""

    turns: int
    prompt_tokens: int
    tokens: int
    seconds: float | None


@dataclass(frozen=True)
class EpisodeRules:
    """The common rules of a run's episodes, on one rank of a replica.

    Attributes:
        host: the environments; None on all ranks but the first of a replica.
        turns: tokens of what environments say.
        texts: of token ids, without and with special tokens.
        share: gives every rank of the replica the first one's JSON value; collective over the replica.
        limits: of every episode.
        on_error: `fail` ends the run when an environment fails, `mark` the episode.
        replayable: `Environment.replayable`.
    """

    host: Host | None
    turns: Turns
    texts: Callable[[list[list[int]]], tuple[list[str], list[str]]]
    share: Callable[[Any], Any]
    limits: EpisodeLimits
    on_error: str
    replayable: bool = False


class Answer(NamedTuple):
    """The answer of an environment.

    Attributes:
        reply: without the observation.
        token_ids: of the observation; None: the prompt of the data, or nothing follows.
        differs: turns that were played again were answered otherwise than before, or not at all.
    """

    reply: Reply
    token_ids: list[int] | None
    differs: bool = False


class Answers:
    """The answers of the environments to episodes that are told apart by numbers.

    Attributes:
        awaited: episodes whose environment has not answered.
    """

    def __init__(self, rules: EpisodeRules) -> None:
        self._rules = rules
        self._session: HostSession | None = None if rules.host is None else rules.host.session()
        self.awaited: dict[int, Trajectory] = {}
        self._begun: set[int] = set()  # of these, those that have no first observation yet in this process

    def begin(self, number: int, row: dict[str, Any], seed: int, trajectory: Trajectory) -> None:
        """Start an environment for an episode; the turns that it has are played again."""
        self.awaited[number] = trajectory
        self._begun.add(number)
        if self._session is not None:
            said = self._actions([(trajectory, turn) for turn in range(trajectory.turns)])
            self._session.begin(number, copy.deepcopy(row), seed, said)  # samples of a prompt have the same row

    def ask(self, said: Mapping[int, Trajectory]) -> None:
        """Give the last turns of these episodes to their environments."""
        self.awaited.update(said)
        if self._session is not None and said:
            actions = self._actions([(trajectory, trajectory.turns - 1) for trajectory in said.values()])
            for number, action in zip(said, actions, strict=True):
                self._session.step(number, action)

    def any_answer(self) -> bool:
        """Tell whether an environment of this rank has answered."""
        return self._session is not None and self._session.any_answer()

    def take(self, wait_s: float | None, to: Iterable[int]) -> dict[int, Answer]:
        """Return the answers that are there, on all ranks of the replica. Collective over it.

        Args:
            wait_s: seconds to wait for those `to` these episodes, or, without one, for any; None: until all have come.
            to: episodes that were asked just now.
        """
        if not self.awaited:
            return {}
        told: dict[int, Answer] = {}
        if self._session is not None:
            there = self._session.all_answers() if wait_s is None else self._session.answers(wait_s, to)
            told = {number: self._read(number, reply) for number, reply in there.items()}
        plain = [
            [number, asdict(Reply(None, reply.reward, reply.done, reply.info, reply.error)), ids, differs]
            for number, (reply, ids, differs) in told.items()
        ]
        found = {number: Answer(Reply(**reply), *rest) for number, reply, *rest in self._rules.share(plain)}
        for number in found:
            del self.awaited[number]
        self._begun -= found.keys()
        return found

    def forget(self, number: int) -> None:
        """Drop the environment of an episode that is over."""
        self.awaited.pop(number, None)
        self._begun.discard(number)
        if self._session is not None:
            self._session.forget(number)

    def close(self) -> None:
        """Drop all environments."""
        self.awaited, self._begun = {}, set()
        if self._session is not None:
            self._session.close()

    def _actions(self, said: Sequence[tuple[Trajectory, int]]) -> list[Action]:
        """Return the turns of episodes, as their environments get them. Only the last one may have been cut."""
        ids = [trajectory.turn(turn) for trajectory, turn in said]
        texts, raws = self._rules.texts(ids) if ids else ([], [])
        return [
            Action(text, raw, own, trajectory.finish_reason if turn + 1 == trajectory.turns else "stop", turn)
            for text, raw, own, (trajectory, turn) in zip(texts, raws, ids, said, strict=True)
        ]

    def _read(self, number: int, reply: Reply) -> Answer:
        """Return an answer with its tokens. One that cannot be used has an error."""
        trajectory = self.awaited[number]
        if number in self._begun:
            first, *again = [*reply.before, reply]
            ids = self._first(first)
            if not trajectory.segments:
                return Answer(reply, ids)
            if first.error or not self._is_repeated(trajectory, ids, again):
                return Answer(reply, None, differs=True)
        return Answer(reply, self._following(trajectory, reply) if trajectory.is_unanswered else None)

    def _is_repeated(self, trajectory: Trajectory, first: list[int] | None, again: Sequence[Reply]) -> bool:
        """Tell whether turns that were played again were answered as before, as far as they had been.

        An error is another answer; one in the turn that had not been answered is the answer to it.
        """
        if (trajectory.prompt_ids if first is None else first) != trajectory.prompt_ids:
            return False
        for turn, (reply, reward) in enumerate(zip(again, trajectory.turn_rewards, strict=False)):
            ids = [] if reply.error or reply.done else self._ids(reply)
            if reply.error or reply.done or reply.reward != reward or ids != trajectory.observation(turn):
                return False
        return True

    def _first(self, reply: Reply) -> list[int] | None:
        """Return the tokens of a first observation, None for the prompt of the data; notes an error in `reply`."""
        if reply.error or reply.observation is None:
            return None
        ids, most = self._tokens(reply, self._rules.turns.first), self._rules.limits.prompt_tokens
        if not reply.error and not 0 < len(ids) <= most:
            reply.error = f"reset returned {len(ids)} tokens; data.max_prompt_tokens is {most}"
        return ids

    def _following(self, trajectory: Trajectory, reply: Reply) -> list[int] | None:
        """Return the tokens of an answer, None when nothing follows; notes an error in `reply`."""
        last = trajectory.turns >= self._rules.limits.turns
        return None if reply.error or reply.done or trajectory.finish_reason != "stop" or last else self._ids(reply)

    def _ids(self, reply: Reply) -> list[int]:
        return self._tokens(reply, lambda said: self._rules.turns.following(said, ended=True))

    def _tokens(self, reply: Reply, tokenise: Callable[[Any], list[int]]) -> list[int]:
        try:
            return tokenise(reply.observation)
        except UserError as error:
            reply.error = str(error)
            return []


def apply_answer(trajectory: Trajectory, answer: Answer, limits: EpisodeLimits, *, late: bool) -> None:
    """Apply an answer without an error to its episode: it ends, or goes on.

    Args:
        late: the time of the episode is over.
    """
    reply, ids = answer.reply, answer.token_ids
    if trajectory.is_unanswered:
        trajectory.turn_rewards.append(reply.reward)
        for name, value in reply.info.items():
            trajectory.info[name] = trajectory.info.get(name, 0.0) + value
        if reply.done:
            trajectory.end("done")
        elif ids is None:
            trajectory.end(_ENDED_BY[trajectory.finish_reason])
        elif len(trajectory.token_ids) + len(ids) >= limits.tokens:
            trajectory.end("tokens")
        elif late:
            trajectory.end("seconds")
        else:
            trajectory.add_observation(ids)
    elif not trajectory.segments and ids is not None:
        trajectory.prompt_ids = ids
