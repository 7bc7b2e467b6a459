"""The environments' side of episodes: sends the policy's turns to environments and tokenises their answers.

All ranks of a replica make the same calls. The first rank runs the environments, tokenises each answer once, and
broadcasts it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megarl.data.image_prompts import ImagePrompts
from megarl.data.image_set import ImageSet
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs.host import Host, HostSession, Reply
from megarl.envs.protocol import Action, Continuation, Ending
from megarl.rollout.stop_strings import StopStrings
from megarl.system.errors import UserError, count

#: Finish reason of a turn -> why its episode ends, although the environment is not done.
_ENDED_BY = {"length": "tokens", "abort": "seconds"}


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode.

    Attributes:
        turns: maximum number of turns.
        prompt_tokens: maximum number of tokens of the first observation.
        tokens: maximum number of tokens after the first observation.
        seconds: maximum duration in seconds; None: no limit.
        images: maximum number of images; None: no limit.
        image_token: the token that stands for an image feature; None: a text model. An episode ends after a turn that
            contains this token, because a server would look for another image.
    """

    turns: int
    prompt_tokens: int
    tokens: int
    seconds: float | None
    images: int | None = None
    image_token: int | None = None

    def end_after(self, trajectory: Trajectory) -> str:
        """Return which limit ends the episode after its last turn, whatever the environment answers; empty: none."""
        if trajectory.finish_reason != "stop":
            return _ENDED_BY[trajectory.finish_reason]
        if trajectory.turns >= self.turns:
            return "turns"
        return "image_token" if self.image_token in trajectory.last_turn else ""

    def too_many(self, before: int, images: ImageSet | None) -> bool:
        """Return whether `images` would take an episode that has `before` images over its limit."""
        return self.images is not None and images is not None and before + _number(images) > self.images


@dataclass(frozen=True)
class EpisodeRules:
    """The common rules of a run's episodes, on one rank of a replica.

    Attributes:
        host: the environments; None on all ranks but the first of a replica.
        turns: tokenises observations.
        texts: decodes turns; returns their texts without and with special tokens.
        share: broadcasts a JSON value from the replica's first rank; collective over the replica.
        on_error: when an environment fails, `fail` ends the run and `mark` ends only the episode.
        limits: limits of an episode.
        replayable, may_drop_turns, has_simultaneous_turns: the attributes of the run's `Environment` class.
        images: inserts the images of observations; None: observations are text only.
    """

    host: Host | None
    turns: Turns
    texts: Callable[[list[list[int]]], tuple[list[str], list[str]]]
    share: Callable[[Any], Any]
    limits: EpisodeLimits
    on_error: str
    replayable: bool = False
    images: ImagePrompts | None = None
    bodies: bool = False  # whether to record which tokens of an observation are its own text
    # makes the finder of given stop strings, for turns that have stop strings of their own
    stops: Callable[[Sequence[str]], StopStrings] | None = None
    may_drop_turns: bool = False
    has_simultaneous_turns: bool = False


class Answer(NamedTuple):
    """The answer of an environment.

    Attributes:
        reply: the environment's reply, without its observation.
        token_ids: tokens of the observation; None: `reset` kept the data's prompt, or the episode has no next turn.
        images: images of the observation, by their positions in its tokens.
        differs: whether the environment answered replayed turns differently than recorded, or with an error.
        bodies: [start, stop] in `token_ids` of the observation's own text; empty unless `EpisodeRules.bodies` is set.
        branch: where the next turn belongs, if the environment keeps a tree of turns; else None.
        beside: the other turns that are sampled at the same time as the next turn, each with tokens, images and branch.
    """

    reply: Reply
    token_ids: list[int] | None
    images: ImageSet | None = None
    differs: bool = False
    bodies: Sequence[Sequence[int]] = ()
    branch: Branch | None = None
    beside: Sequence[Answer] = ()


class Branch(NamedTuple):
    """Where the next turn of an episode with a tree of turns belongs: fields as in `Continuation`; and after the last
    turn, those of `Ending`.
    """

    after: int | None = None
    room: int | None = None
    stop: Sequence[str] = ()
    untrained: Sequence[int] = ()
    answer: int | None = None
    output: str = ""
    policy: str = ""
    rewards: Mapping[str, float | list[float]] = {}
    shares: Sequence[tuple[int, float]] = ()


class Answers:
    """The environments of episodes and their answers, by episode number.

    Attributes:
        rules: the environments and settings that all episodes of the run share.
        awaited: episodes whose environment has not answered.
    """

    def __init__(self, rules: EpisodeRules) -> None:
        self.rules = rules
        self._session: HostSession | None = None if rules.host is None else rules.host.session()
        self.awaited: dict[int, Trajectory] = {}
        self._begun: set[int] = set()  # awaited episodes whose environment has not returned its first observation

    def begin(self, number: int, row: dict[str, Any], seed: int, trajectory: Trajectory) -> None:
        """Start an environment for an episode and replay the turns that `trajectory` already has."""
        self.awaited[number] = trajectory
        self._begun.add(number)
        if self._session is not None:
            actions = self._actions([(trajectory, turn) for turn in range(trajectory.turns)])
            # All samples of a prompt have the same row object, which an environment may change: copy it.
            self._session.begin(number, copy.deepcopy(row), seed, actions)

    def ask(self, episodes: Mapping[int, Sequence[Trajectory]]) -> None:
        """Send the last turns of episodes to their environments.

        Args:
            episodes: by episode number, the sequences whose last turns are sent together: one, or several if an
                environment has simultaneous turns. The last sequence is the one in which the episode continues.
        """
        self.awaited.update({number: lanes[-1] for number, lanes in episodes.items()})
        if self._session is not None and episodes:
            turns = [(lane, lane.turns - 1) for lanes in episodes.values() for lane in lanes]
            actions = iter(self._actions(turns))
            for number, lanes in episodes.items():
                first, *others = itertools.islice(actions, len(lanes))
                self._session.step(number, replace(first, beside=tuple(others)))

    def any_answer(self) -> bool:
        """Return whether any environment of this rank has replied."""
        return self._session is not None and self._session.any_answer()

    def dropped(self, turns: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return which of the given turns in flight an environment on this rank no longer needs.

        Args:
            turns: (episode, index of the turn among the turns of this episode that are sampled at the same time).
        """
        return [] if self._session is None or not self.rules.may_drop_turns else self._session.dropped(turns)

    def take(self, wait_s: float | None, to: Iterable[int]) -> dict[int, Answer]:
        """Take the answers that have arrived and return them on all ranks of the replica. Collective over the replica.

        Args:
            wait_s: seconds to wait for the answers to the episodes `to`, or for any answer if `to` is empty; None:
                wait for all answers.
            to: episodes whose turns were just sent.
        """
        if not self.awaited:
            return {}
        read: dict[int, Answer] = {}
        if self._session is not None:
            replies = self._session.all_answers() if wait_s is None else self._session.answers(wait_s, to)
            read = {number: self._read(number, reply) for number, reply in replies.items()}
        plain = [[number, _plain(answer)] for number, answer in read.items()]
        answers = {number: _from_plain(fields) for number, fields in self.rules.share(plain)}
        for number in answers:
            del self.awaited[number]
        self._begun -= answers.keys()
        return answers

    def forget(self, number: int) -> None:
        """Drop the environment of a finished episode."""
        self.awaited.pop(number, None)
        self._begun.discard(number)
        if self._session is not None:
            self._session.forget(number)

    def close(self) -> None:
        """Drop all environments."""
        self.awaited, self._begun = {}, set()
        if self._session is not None:
            self._session.close()

    def _actions(self, turns: Sequence[tuple[Trajectory, int]]) -> list[Action]:
        """Return the `Action` of each (trajectory, turn number). Only an episode's last turn may have been cut."""
        ids = [trajectory.turn(turn) for trajectory, turn in turns]
        texts, raws = self.rules.texts(ids) if ids else ([], [])
        return [
            Action(
                text,
                raw,
                tokens,
                trajectory.finish_reason if turn + 1 == trajectory.turns else "stop",
                turn,
                trajectory.logprobs[trajectory.turn_starts[turn] : trajectory.turn_ends[turn]],
            )
            for text, raw, tokens, (trajectory, turn) in zip(texts, raws, ids, turns, strict=True)
        ]

    def _read(self, number: int, reply: Reply) -> Answer:
        """Tokenise a reply into an `Answer`; an unusable observation sets the reply's error."""
        trajectory = self.awaited[number]
        if isinstance(reply.observation, Continuation):
            return _continued(reply, reply.observation)
        if isinstance(reply.observation, Ending):
            ending = vars(reply.observation) | {"shares": list(reply.observation.shares.items())}
            return Answer(reply, None, branch=Branch(**ending))
        if number in self._begun and not reply.done:
            first, *replayed = [*reply.before, reply]
            observation = self._first(first)
            if not trajectory.segments:
                return Answer(reply, *observation)
            if first.error or not self._is_repeated(trajectory, observation, replayed):
                return Answer(reply, None, differs=True)
        ids, images = self._following(trajectory, reply) if trajectory.is_unanswered else _NO_OBSERVATION
        if not ids or not self.rules.bodies:
            return Answer(reply, ids, images)
        ended = self.rules.turns.is_ended(trajectory.last_turn)
        return Answer(reply, ids, images, bodies=self.rules.turns.bodies(reply.observation, ids, ended=ended))

    def _is_repeated(self, trajectory: Trajectory, first: _Observation, replayed: Sequence[Reply]) -> bool:
        """Return whether the replayed turns got their recorded answers again.

        An error counts as a different answer, except in a turn without a recorded answer.
        """
        ids, images = first
        if ids is not None and (ids, _digests(images)) != (trajectory.prompt_ids, _digests(trajectory.images_of(-1))):
            return False
        for turn, (reply, reward) in enumerate(zip(replayed, trajectory.turn_rewards, strict=False)):
            ids, images = ([], None) if reply.error or reply.done else self._answer(reply, trajectory.turn(turn))
            before = trajectory.observation(turn), _digests(trajectory.images_of(turn))
            if reply.error or reply.done or reply.reward != reward or (ids, _digests(images)) != before:
                return False
        return True

    def _first(self, reply: Reply) -> _Observation:
        """Return the tokens and images of a first observation; tokens are None if `reset` kept the data's prompt.

        Sets the reply's error if the observation cannot be used.
        """
        if reply.error or reply.observation is None:
            return _NO_OBSERVATION
        (ids, images), most = self._tokens(reply, self.rules.turns.first), self.rules.limits.prompt_tokens
        if not reply.error and not 0 < len(ids) <= most:
            reply.refuse(f"reset returned {len(ids)} tokens; data.max_prompt_tokens allows 1 to {most}")
        if not reply.error and self.rules.limits.too_many(0, images):
            images_count = count(_number(images), "image")
            reply.refuse(f"reset returned {images_count}; data.limit_images is {self.rules.limits.images}")
        return ids, images

    def _following(self, trajectory: Trajectory, reply: Reply) -> _Observation:
        """Return the tokens and images of an answer; tokens are None if the episode has no next turn."""
        if reply.error or reply.done or self.rules.limits.end_after(trajectory):
            return _NO_OBSERVATION
        return self._answer(reply, trajectory.last_turn)

    def _answer(self, reply: Reply, turn: list[int]) -> tuple[list[int], ImageSet | None]:
        """Return the tokens and images of the answer to `turn`; sets the reply's error if they cannot be used."""
        ended = self.rules.turns.is_ended(turn)
        return self._tokens(reply, lambda observation: self.rules.turns.following(observation, ended=ended))

    def _tokens(self, reply: Reply, tokenise: Callable[[Any], list[int]]) -> tuple[list[int], ImageSet | None]:
        try:
            ids = tokenise(reply.observation)
            return (ids, None) if self.rules.images is None else self.rules.images.placed(ids, reply.images)
        except UserError as error:
            reply.refuse(str(error))
            return [], None


#: Tokens of an observation, and its images by their places in it; None for the tokens: no observation.
_Observation = tuple[list[int] | None, ImageSet | None]
_NO_OBSERVATION: _Observation = None, None


def _number(images: ImageSet | None) -> int:
    return 0 if images is None else len(images.places)


def _digests(images: ImageSet | None) -> tuple[int, ...]:
    return () if images is None else images.digests


def _continued(reply: Reply, now: Continuation) -> Answer:
    beside = [_continued(Reply(), other) for other in now.beside]
    branch = Branch(now.after, now.room, now.stop, policy=now.policy)
    return Answer(reply, now.token_ids, now.images, branch=branch, beside=beside)


def _plain(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON values; of the observation they contain only token ids and images."""
    reply, ids, images, differs, bodies, branch, beside = answer
    numbers = {name: getattr(reply, name) for name in ("reward", "done", "info", "error", "repeats")}
    return {
        **numbers,
        "ids": ids,
        "images": None if images is None else images.to_json(),
        "differs": differs,
        "bodies": bodies,
        "branch": branch,
        "beside": [_plain(other) for other in beside],
    }


def _from_plain(fields: dict[str, Any]) -> Answer:
    names = ("ids", "images", "differs", "bodies", "branch", "beside")
    ids, images, differs, bodies, branch, beside = (fields.pop(name) for name in names)
    images = None if images is None else ImageSet.from_json(images)
    others = [_from_plain(other) for other in beside]
    return Answer(Reply(**fields), ids, images, differs, bodies, None if branch is None else Branch(*branch), others)


def apply_answer(trajectory: Trajectory, answer: Answer, limits: EpisodeLimits, *, late: bool) -> None:
    """Add an answer without an error to its episode, which ends if the answer or a limit ends it.

    Args:
        late: the episode is over its time limit.
    """
    reply, ids, images, bodies = answer.reply, answer.token_ids, answer.images, answer.bodies
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
            trajectory.add_observation(ids, images, bodies)
    elif not trajectory.segments and ids is not None:
        trajectory.prompt_ids, trajectory.images = ids, images


def end_without_turn(trajectory: Trajectory, answer: Answer, end_token: int, version: int) -> None:
    """End an episode whose environment ended it before the first turn; it becomes one end token."""
    trajectory.end_without_turn(end_token, version, answer.reply.reward)
    trajectory.info |= answer.reply.info
    if answer.branch is not None:
        trajectory.output, trajectory.rewards = answer.branch.output, dict(answer.branch.rewards)


def apply_branch(trajectory: Trajectory, answer: Answer, branch: Branch, prompt: int, version: int) -> list[Trajectory]:
    """Add an answer of an environment that keeps a tree of turns, and return the sequences whose next turns are sampled
    at the same time, in the order of the turns. The episode continues in the last sequence.

    The environment itself enforces the episode's limits.

    Args:
        prompt: maximum tokens of a prompt; tokens after these count as an observation.
        version: weight version to record for tokens before the first sampled token.
    """
    reply, ids, images = answer.reply, answer.token_ids or [], answer.images
    # The reward belongs to the last turn; turns of other sequences that were sampled at the same time get none.
    for lane in trajectory.lanes:
        lane.turn_rewards += [0.0] * (lane.turns - len(lane.turn_rewards))
    if trajectory.is_unanswered:
        trajectory.turn_rewards.append(reply.reward)
    for name, value in reply.info.items():
        trajectory.info[name] = trajectory.info.get(name, 0.0) + value
    if reply.done:
        trajectory.leave_out(branch.untrained)
        trajectory.answer, trajectory.output = branch.answer, branch.output
        trajectory.rewards = dict(branch.rewards)
        trajectory.set_shares(dict(branch.shares))
        trajectory.end("done")
        return [trajectory]
    if not trajectory.turns:
        trajectory.prompt_ids, trajectory.policy, trajectory.images = list(ids[:prompt]), branch.policy, images
        trajectory.add_unsampled(ids[prompt:], version)
    elif branch.after == trajectory.turn_numbers[-1]:
        trajectory.add_observation(ids, images)
    else:
        trajectory = trajectory.switched(branch.after, ids, prompt, branch.policy, images)
    trajectory.turn_room, trajectory.turn_stop = branch.room, list(branch.stop)
    return _beside(trajectory, answer.beside, prompt, version)


def _beside(trajectory: Trajectory, others: Sequence[Answer], prompt: int, version: int) -> list[Trajectory]:
    """Return the sequences of the next turn and of the turns `others`, all of which are sampled at the same time.

    They are added to the episode as if their turns were sampled one after the other, so that each has the seed, which
    depends on the turn's number in the episode, that it would have had in this order.
    """
    segments = trajectory.segments
    for other in others:
        trajectory.number_turn()
        branch = other.branch or Branch()
        trajectory = trajectory.switched(
            branch.after, other.token_ids or [], prompt, branch.policy, other.images, version
        )
        trajectory.turn_room, trajectory.turn_stop = branch.room, list(branch.stop)
    if not others:
        return [trajectory]
    trajectory.number_turn()
    lanes = [*trajectory.lanes[: len(others)][::-1], trajectory]
    for place, lane in enumerate(lanes):
        lane.segments = segments + place
    return lanes
