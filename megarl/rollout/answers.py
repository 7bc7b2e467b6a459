"""The environments' side of episodes: what the policy said goes to them, what they answer becomes tokens.

All ranks of a replica make the same calls. The first one has the environments and broadcasts what they said; an answer
is tokenised once, there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.data.image_prompts import ImagePrompts
from megarl.data.image_set import ImageSet
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs.host import Host, HostSession, Reply
from megarl.envs.protocol import Action
from megarl.system.errors import UserError, count

#: What ends an episode whose environment is not done, by how its last turn was cut.
_ENDED_BY = {"length": "tokens", "abort": "seconds"}


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode: turns, tokens of the first observation, tokens after it, seconds and images (None:
    any).

    `image_token` stands for a feature of an image, in a model that sees: a turn that holds it is the last one, because
    a server would look for another image. None: the model sees none.
    """

    turns: int
    prompt_tokens: int
    tokens: int
    seconds: float | None
    images: int | None = None
    image_token: int | None = None

    def end_after(self, trajectory: Trajectory) -> str:
        """Return what ends an episode after its last turn whatever its environment says; empty: nothing does."""
        if trajectory.finish_reason != "stop":
            return _ENDED_BY[trajectory.finish_reason]
        if trajectory.turns >= self.turns:
            return "turns"
        return "image_token" if self.image_token in trajectory.last_turn else ""

    def too_many(self, before: int, images: ImageSet | None) -> bool:
        """Tell whether an episode with `before` images has no room for these."""
        return self.images is not None and images is not None and before + _number(images) > self.images


@dataclass(frozen=True)
class EpisodeRules:
    """The common rules of a run's episodes, on one rank of a replica.

    Attributes:
        host: the environments; None on all ranks but the first of a replica.
        turns: tokens of what environments say.
        texts: of token ids, without and with special tokens.
        share: gives every rank of the replica the first one's JSON value; collective over the replica.
        on_error: `fail` ends the run when an environment fails, `mark` the episode.
        replayable: `Environment.replayable`.
        images: the way to images; None: environments say text.
    """

    host: Host | None
    turns: Turns
    texts: Callable[[list[list[int]]], tuple[list[str], list[str]]]
    share: Callable[[Any], Any]
    limits: EpisodeLimits
    on_error: str
    replayable: bool = False
    images: ImagePrompts | None = None


class Answer(NamedTuple):
    """The answer of an environment.

    Attributes:
        reply: without the observation.
        token_ids: of the observation; None: the prompt of the data, or nothing follows.
        images: of the observation, by their places in it.
        differs: turns that were played again were answered otherwise than before, or not at all.
    """

    reply: Reply
    token_ids: list[int] | None
    images: ImageSet | None = None
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
        plain = [[number, _plain(answer)] for number, answer in told.items()]
        found = {number: _from_plain(answer) for number, answer in self._rules.share(plain)}
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
            said = self._first(first)
            if not trajectory.segments:
                return Answer(reply, *said)
            if first.error or not self._is_repeated(trajectory, said, again):
                return Answer(reply, None, differs=True)
        return Answer(reply, *(self._following(trajectory, reply) if trajectory.is_unanswered else _NOTHING))

    def _is_repeated(self, trajectory: Trajectory, first: _Said, again: Sequence[Reply]) -> bool:
        """Tell whether turns that were played again were answered as before, as far as they had been.

        An error is another answer; one in the turn that had not been answered is the answer to it.
        """
        ids, images = first
        if ids is not None and (ids, _digests(images)) != (trajectory.prompt_ids, _digests(trajectory.images_of(-1))):
            return False
        for turn, (reply, reward) in enumerate(zip(again, trajectory.turn_rewards, strict=False)):
            ids, images = ([], None) if reply.error or reply.done else self._answer(reply, trajectory.turn(turn))
            before = trajectory.observation(turn), _digests(trajectory.images_of(turn))
            if reply.error or reply.done or reply.reward != reward or (ids, _digests(images)) != before:
                return False
        return True

    def _first(self, reply: Reply) -> _Said:
        """Return the tokens and images of a first observation, no tokens for the prompt of the data; notes an error in
        `reply`."""
        if reply.error or reply.observation is None:
            return _NOTHING
        (ids, images), most = self._tokens(reply, self._rules.turns.first), self._rules.limits.prompt_tokens
        if not reply.error and not 0 < len(ids) <= most:
            reply.refuse(f"reset returned {len(ids)} tokens; data.max_prompt_tokens is {most}")
        if not reply.error and self._rules.limits.too_many(0, images):
            found = count(_number(images), "image")
            reply.refuse(f"reset returned {found}; data.limit_images is {self._rules.limits.images}")
        return ids, images

    def _following(self, trajectory: Trajectory, reply: Reply) -> _Said:
        """Return the tokens and images of an answer, no tokens when nothing follows; notes an error in `reply`."""
        if reply.error or reply.done or self._rules.limits.end_after(trajectory):
            return _NOTHING
        return self._answer(reply, trajectory.last_turn)

    def _answer(self, reply: Reply, turn: list[int]) -> tuple[list[int], ImageSet | None]:
        """Return the tokens and images of the answer to `turn`; notes an error in `reply`."""
        ended = self._rules.turns.is_ended(turn)
        return self._tokens(reply, lambda said: self._rules.turns.following(said, ended=ended))

    def _tokens(self, reply: Reply, tokenise: Callable[[Any], list[int]]) -> tuple[list[int], ImageSet | None]:
        try:
            ids = tokenise(reply.observation)
            return (ids, None) if self._rules.images is None else self._rules.images.placed(ids, reply.images)
        except UserError as error:
            reply.refuse(str(error))
            return [], None


#: Tokens of an observation and its images, by their places in it; no tokens: nothing was said.
_Said = tuple[list[int] | None, ImageSet | None]
_NOTHING: _Said = None, None


def _number(images: ImageSet | None) -> int:
    return 0 if images is None else len(images.places)


def _digests(images: ImageSet | None) -> tuple[int, ...]:
    return () if images is None else images.digests


def _plain(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain data, without the observation itself."""
    reply, ids, images, differs = answer
    numbers = {name: getattr(reply, name) for name in ("reward", "done", "info", "error", "repeats")}
    return {**numbers, "ids": ids, "images": None if images is None else images.to_json(), "differs": differs}


def _from_plain(told: dict[str, Any]) -> Answer:
    ids, images, differs = (told.pop(name) for name in ("ids", "images", "differs"))
    return Answer(Reply(**told), ids, None if images is None else ImageSet.from_json(images), differs)


def apply_answer(trajectory: Trajectory, answer: Answer, limits: EpisodeLimits, *, late: bool) -> None:
    """Apply an answer without an error to its episode: it ends, or goes on.

    Args:
        late: the time of the episode is over.
    """
    reply, ids, images, _ = answer
    if trajectory.is_unanswered:
        trajectory.turn_rewards.append(reply.reward)
        for name, value in reply.info.items():
            trajectory.info[name] = trajectory.info.get(name, 0.0) + value
        if reply.done:
            trajectory.end("done")
        elif ids is None:
            trajectory.end(limits.end_after(trajectory))
        elif len(trajectory.token_ids) + len(ids) >= limits.tokens:
            trajectory.end("tokens")
        elif limits.too_many(_number(trajectory.images), images):
            trajectory.end("images")
        elif late:
            trajectory.end("seconds")
        else:
            trajectory.add_observation(ids, images)
    elif not trajectory.segments and ids is not None:
        trajectory.prompt_ids, trajectory.images = ids, images
