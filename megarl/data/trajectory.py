"""A sample of one or more turns, and the fields that a batch has of it.

`prompt_ids` are the tokens of the first observation, `response_ids` all tokens after it:

    response_ids     turn 0 of the policy | environment's observation | turn 1 of the policy
    response_mask     1 1 1 1 1 1 1 1 1 1 | 0 0 0 0 0 0 0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1 1 1
    rollout_logp      log-prob per token    | 0                         | log-prob per token
    turn_starts          ^                                            ^
    turn_ends                                ^                                                 ^
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged
from megarl.data.fields import KEPT_COUNTS, KEPT_IDS, ROUTES
from megarl.data.image_set import ImageSet, fields_of_sets, place_of
from megarl.data.kept_tokens import KeptTokens
from megarl.data.routes import RouteForm, continued
from megarl.data.tensor_text import from_text, to_text
from megarl.data.versions import VersionRuns, append_runs, first_runs, version_values
from megarl.system.errors import MegarlError

PLAIN = "answer"
"""`Trajectory.ended_by` of a sample without an environment."""


@dataclass
class Trajectory:
    """A sample: an episode of any number of turns, or a plain answer, which has one turn.

    It is partial while `ended_by` is empty. All fields except `images`, `routes` and `kept_tokens` are JSON values. A
    turn is sampled in one segment, or in several if generation is interrupted.

    Attributes:
        token_ids, sampled, logprobs: one entry per token after the prompt: its id, whether the policy sampled it (False
            for all tokens of an episode that failed), and its log-prob (0 for the environment's).
        turn_starts, turn_ends: positions in `token_ids` where each turn of the policy begins and ends (exclusive); a
            turn that is being sampled has no end yet.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # weight versions that sampled `token_ids`, as runs; tokens of the environment have the version of the token before
    # them
    versions: VersionRuns = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)  # one reward per turn that the environment has answered
    finish_reason: str = "stop"  # why the last finished turn ended: `stop`, `length` or `abort`
    # why the episode ended: done, turns, tokens, images, seconds, image_token, error or `PLAIN`; empty before its end
    ended_by: str = ""
    error: str = ""  # the failure's text, when `ended_by` is error
    output: str = ""  # the end of what the environment has written, for the report
    # metrics of the environment, summed over turns; with servers also `cached`, the fraction of the tokens before the
    # policy's turns that was in the prefix cache
    info: dict[str, float] = field(default_factory=dict)
    # [start, stop] in `token_ids` of the observations' own tokens, without the chat template's; recorded for ECHO only
    bodies: list[list[int]] = field(default_factory=list)
    segments: int = 0  # segments of all turns that sampled at least one token
    # number of each turn, counted over all sequences of the episode. The turn that is being sampled is included only if
    # other turns of the episode are sampled at the same time.
    turn_numbers: list[int] = field(default_factory=list, compare=False)
    # factor of the advantages of each turn; empty: 1
    turn_shares: list[float] = field(default_factory=list)
    answer: int | None = None  # number of the turn that reward functions score; None: the last one
    policy: str = ""  # name of the policy that samples the turns; empty: there is only one
    # by policy, in a finished episode of several policies: its reward, or one reward for all sequences with the same
    # first turn, in the order of these turns
    rewards: dict[str, float | list[float]] = field(default_factory=dict)
    lanes: list[Trajectory] = field(default_factory=list)  # the episode's other sequences
    turn_room: int | None = None  # maximum tokens of the next turn or the one being sampled; None: no limit of its own
    turn_stop: list[str] = field(default_factory=list)  # strings that end the next turn or the one being sampled
    spent_s: float = field(default=0.0, compare=False)  # seconds that an interrupted sample's group has been in flight
    images: ImageSet | None = field(default=None, compare=False)  # images of the prompt and of observations
    # routes of the first tokens of prompt and response (`megarl.data.routes`); None: not recorded
    routes: Tensor | None = field(default=None, compare=False)
    # kept tokens of each token after the prompt (`megarl.data.kept_tokens`); None: not recorded
    kept_tokens: KeptTokens | None = field(default=None, compare=False)

    def add_segment(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: VersionRuns,
        routes: Tensor | None = None,
        kept: KeptTokens | None = None,
    ) -> None:
        """Append a segment of sampled tokens; the first one begins a turn. A segment without tokens is ignored.

        `routes` are those of the whole sequence so far, `kept` those of the segment.
        """
        if not token_ids:
            return
        if not self.in_turn:
            self.turn_starts.append(len(self.token_ids))
        if kept is not None:
            before = KeptTokens.from_lists([]) if self.kept_tokens is None else self.kept_tokens
            self.kept_tokens = KeptTokens.joined([before.extended(len(self.token_ids)), kept])
        self._append(token_ids, sampled=True, logprobs=logprobs, versions=versions)
        if routes is not None:
            self.routes = continued(self.routes, routes)
        self.segments += 1

    def end_turn(self, finish_reason: str) -> None:
        """End the turn that is being sampled; the environment has not answered it yet."""
        self.turn_ends.append(len(self.token_ids))
        if len(self.turn_numbers) < len(self.turn_ends):
            self.number_turn()
        self.finish_reason = finish_reason

    def number_turn(self) -> None:
        """Number the turn that begins now; a turn that is not numbered when it begins gets the next number at its end.
        Turns that are sampled at the same time are numbered when they begin."""
        self.turn_numbers.append(self._next_number())

    def add_observation(
        self, token_ids: Sequence[int], images: ImageSet | None = None, bodies: Sequence[Sequence[int]] = ()
    ) -> None:
        """Append the tokens and images of the observation that follows a turn.

        `bodies`: [start, stop] in `token_ids` of the observation's own text, if they are recorded.
        """
        self.bodies += [[len(self.token_ids) + place for place in run] for run in bodies]
        self._add_images(images)
        versions = [[self.versions[-1][0], len(token_ids)]]
        self._append(token_ids, sampled=False, logprobs=[0.0] * len(token_ids), versions=versions)

    def _add_images(self, images: ImageSet | None) -> None:
        """Add the images of tokens that follow, by their places in these tokens."""
        if images is not None:
            shift, earlier = len(self.prompt_ids) + len(self.token_ids), self.images
            self.images = images.shifted(shift) if earlier is None else ImageSet.joined([earlier, images], [0, shift])

    def switched(
        self,
        after: int | None,
        token_ids: Sequence[int],
        most: int,
        policy: str = "",
        images: ImageSet | None = None,
        version: int = 0,
    ) -> Trajectory:
        """Return the trajectory of the sequence in which the episode continues after the turn `after`. This trajectory
        becomes one of its `lanes` (the episode's other sequences).

        A sequence that ends with the turn `after` is continued. If there is none, the turns up to `after` are copied
        into a new sequence.

        Args:
            after: number of a turn; None: `token_ids` begin a new sequence.
            token_ids: tokens that follow the turn, not sampled by the policy.
            most: maximum tokens of a new sequence's prompt; the tokens after them become its first observation.
            policy: name of the policy that samples the next turn.
            images: the images of `token_ids`, with their positions in `token_ids`; None: there are none.
            version: weight version to record for `token_ids` if this sequence has no token after its prompt.
        """
        version = self.versions[-1][0] if self.versions else version
        others = [replace(self, lanes=[]), *self.lanes]
        if after is None:
            lane = Trajectory(list(token_ids[:most]), policy=policy, images=images)
            lane.add_unsampled(token_ids[most:], version)
        else:
            holder = next(lane for lane in others if after in lane.turn_numbers)
            ending = next((lane for lane in others if lane.turn_numbers and lane.turn_numbers[-1] == after), None)
            lane = holder.up_to(after) if ending is None else ending
            others = [other for other in others if other is not ending]
            lane._add_images(images)
            lane.add_unsampled(token_ids, version)
        lane.lanes, lane.segments, lane.info, lane.spent_s = others, self.segments, self.info, self.spent_s
        return lane

    def up_to(self, number: int) -> Trajectory:
        """Return a copy of the sequence up to the end of the turn `number`."""
        lane = replace(self.copy(), lanes=[])
        turns = lane.turn_numbers.index(number) + 1
        end = lane.turn_ends[turns - 1]
        for per_turn in (lane.turn_numbers, lane.turn_starts, lane.turn_ends, lane.turn_rewards, lane.turn_shares):
            del per_turn[turns:]
        lane.turn_rewards += [0.0] * (turns - len(lane.turn_rewards))
        for per_token in (lane.token_ids, lane.sampled, lane.logprobs):
            del per_token[end:]
        lane.versions = first_runs(lane.versions, end)
        lane.kept_tokens = None if lane.kept_tokens is None else lane.kept_tokens.first(end)
        lane.routes = None if lane.routes is None else lane.routes[: len(lane.prompt_ids) + end - 1]
        lane.bodies = [run for run in lane.bodies if run[1] <= end]
        lane.images = None if lane.images is None else lane.images.between(0, len(lane.prompt_ids) + end)
        lane.finish_reason = "stop"
        return lane

    def add_unsampled(self, token_ids: Sequence[int], version: int) -> None:
        """Append tokens that the policy did not sample; `version` is recorded as the weight version of these tokens."""
        if token_ids:
            self._append(
                token_ids, sampled=False, logprobs=[0.0] * len(token_ids), versions=[[version, len(token_ids)]]
            )

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Exclude the turns with these numbers from training, in all sequences of the episode."""
        for lane in self.all_lanes:
            for start, end, number in zip(lane.turn_starts, lane.turn_ends, lane.turn_numbers, strict=True):
                if number in numbers:
                    lane.sampled[start:end] = [False] * (end - start)

    def set_shares(self, shares: Mapping[int, float]) -> None:
        """Set the factors of the advantages of turns, by number, in all sequences of the episode; no factor is 1."""
        for lane in self.all_lanes if shares else ():
            lane.turn_shares = [shares.get(number, 1.0) for number in lane.turn_numbers]

    def end_without_turn(self, end_token: int, version: int, reward: float) -> None:
        """End the episode before its first turn, with a reward; it becomes one end token that is not trained on."""
        self._need_token(end_token, version)
        self.turn_rewards = [reward]
        self.end("done")

    def end(self, by: str) -> None:
        """End the episode for the reason `by`; turns that the environment has not answered get reward 0."""
        self.ended_by = by
        self.turn_rewards += [0.0] * (self.turns - len(self.turn_rewards))

    def mark_failed(self, error: str, end_token: int, version: int) -> None:
        """End the episode with an error, so that none of its tokens is trained on.

        An episode without tokens gets `end_token`, with the weight version `version`.
        """
        if self.in_turn:
            self.end_turn("abort")
        self.error = error
        self.sampled, self.bodies, self.lanes = [False] * len(self.sampled), [], []
        self._need_token(end_token, version)
        self.end("error")

    def end_before_turn(self, end_token: int, version: int) -> None:
        """End the episode because its time limit passed before the first token of a turn; drop the last observation.

        An episode without a finished turn becomes one end token that is not trained on.
        """
        self.finish_reason = "abort"
        end = self.turn_ends[-1] if self.turn_ends else 0
        self.versions = first_runs(self.versions, end)
        for per_token in (self.token_ids, self.sampled, self.logprobs):
            del per_token[end:]
        self.kept_tokens = None if self.kept_tokens is None else self.kept_tokens.first(end)
        self.bodies = [run for run in self.bodies if run[1] <= end]
        if self.images is not None:
            self.images = self.images.between(0, len(self.prompt_ids) + end)
        self._need_token(end_token, version)
        self.end("seconds")

    def end_empty_turn(self, end_token: int, version: int) -> None:
        """End a turn whose time limit passed before its first token; the environment has not answered it yet.

        A sequence without tokens gets `end_token`, which is not trained on.
        """
        self._need_token(end_token, version)
        if not self.is_unanswered:
            self.turn_starts.append(len(self.token_ids))
            self.end_turn("abort")
        self.finish_reason = "abort"

    def _need_token(self, end_token: int, version: int) -> None:
        if not self.token_ids:
            self._append([end_token], sampled=False, logprobs=[0.0], versions=[[version, 1]])
            self.turn_starts, self.turn_ends = [1], [1]  # an empty turn
            if not self.turn_numbers:
                self.number_turn()

    def _next_number(self) -> int:
        return 1 + max((number for lane in self.all_lanes for number in lane.turn_numbers), default=-1)

    def _append(
        self, token_ids: Sequence[int], *, sampled: bool, logprobs: Sequence[float], versions: VersionRuns
    ) -> None:
        self.token_ids += token_ids
        self.sampled += [sampled] * len(token_ids)
        self.logprobs += logprobs
        append_runs(self.versions, versions)

    @property
    def all_lanes(self) -> list[Trajectory]:
        """All sequences of the episode, this one first."""
        return [self, *self.lanes]

    @property
    def turns(self) -> int:
        """Number of the policy's finished turns."""
        return len(self.turn_ends)

    @property
    def in_turn(self) -> bool:
        """Whether a turn is being sampled and has at least one token."""
        return len(self.turn_starts) > len(self.turn_ends)

    @property
    def begun_turn(self) -> list[int]:
        """Tokens of the turn that is being sampled; empty when none is."""
        return self.token_ids[self.turn_starts[-1] :] if self.in_turn else []

    @property
    def is_unanswered(self) -> bool:
        """Whether the last turn is finished and the environment has not answered it yet."""
        return len(self.turn_ends) > len(self.turn_rewards)

    @property
    def last_sampled(self) -> int:
        """Position in `token_ids` of the last token that the policy sampled; -1 if there is none."""
        return max((place for place, sampled in enumerate(self.sampled) if sampled), default=-1)

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the policy's last finished turn; empty if there is none."""
        return self.turn(self.turns - 1) if self.turn_ends else []

    def turn(self, number: int) -> list[int]:
        """Return the tokens of the policy's finished turn `number`."""
        return self.token_ids[self.turn_starts[number] : self.turn_ends[number]]

    def observation(self, turn: int) -> list[int]:
        """Return the tokens of the observation after a turn; empty if nothing followed."""
        begins = [*self.turn_starts[turn + 1 : turn + 2], len(self.token_ids)]
        return self.token_ids[self.turn_ends[turn] : begins[0]]

    def images_of(self, turn: int) -> ImageSet | None:
        """Return the images of the observation after a turn, with positions in its tokens; turn -1: of the prompt."""
        if self.images is None:
            return None
        if turn < 0:
            return self.images.between(0, len(self.prompt_ids))
        first = len(self.prompt_ids) + self.turn_ends[turn]
        return self.images.between(first, first + len(self.observation(turn)))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; images are stored without their patches."""
        images = self.images
        layout = None if images is None else {n: getattr(images, n) for n in ("places", "sizes", "digests")}
        record = None if self.kept_tokens is None else self.kept_tokens.to_text()
        lanes = [lane.to_json() for lane in self.lanes]
        return {**vars(self), "images": layout, "routes": to_text(self.routes), "kept_tokens": record, "lanes": lanes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], patches: Mapping[int, Tensor]) -> Trajectory:
        """Restore a trajectory from `to_json`; `patches`: image digest -> the image's patches."""
        layout, images = fields.get("images"), None
        if layout is not None:
            places = tuple(map(place_of, layout["places"]))
            whole = torch.cat([patches[digest] for digest in layout["digests"]])
            images = ImageSet(whole, places, tuple(layout["sizes"]), tuple(layout["digests"]))
        record = None if fields.get("kept_tokens") is None else KeptTokens.from_text(fields["kept_tokens"])
        values = {**fields, "images": images, "routes": from_text(fields.get("routes")), "kept_tokens": record}
        values["lanes"] = [cls.from_json(lane, patches) for lane in fields.get("lanes", [])]
        # checkpoints of older versions do not number the turns
        values.setdefault("turn_numbers", list(range(len(fields.get("turn_ends", [])))))
        if "drawn" in values:  # the name of `sampled` in checkpoints of older versions
            values["sampled"] = values.pop("drawn")
        return cls(**values)

    def copy(self) -> Trajectory:
        """Return a copy whose lists can be extended and cut without a change to this one."""
        copies: dict[str, Any] = {
            name: value.copy() for name, value in vars(self).items() if isinstance(value, list | dict)
        }
        copies["versions"] = [[*run] for run in self.versions]
        copies["lanes"] = [lane.copy() for lane in self.lanes]
        return replace(self, **copies)


def trajectory_values(
    trajectories: Sequence[Trajectory],
    *,
    by_turn: bool = True,
    patch_values: int | None = None,
    clips: bool = False,
    bodies: bool = False,
    routes: RouteForm | None = None,
    kept: bool = False,
) -> dict[str, Tensor | Jagged | list]:
    """Return the batch fields and columns of trajectories, one entry per sample.

    Args:
        trajectories: finished trajectories.
        by_turn: True for episodes, which also get fields per turn and their own prompts; False for plain answers.
        patch_values: numbers per image patch, for episodes with images; None: there are no images.
        clips: whether the run reads videos.
        bodies: whether episodes get the mask of the observations' own tokens.
        routes: form of the routes that samples must have; None: the samples get none.
        kept: whether samples get the kept tokens of each token.
    """

    def jagged(rows: list[list[Any]]) -> Jagged:
        return Jagged.from_list(rows, dtype=torch.int64)

    responses = jagged([t.token_ids for t in trajectories])
    sampled = (
        _flat([t.sampled for t in trajectories], torch.bool) if by_turn else torch.ones_like(responses.values).bool()
    )
    values: dict[str, Tensor | Jagged | list] = {
        "response_ids": responses,
        "response_mask": responses.like(sampled),
        "rollout_logp": responses.like(_flat([t.logprobs for t in trajectories], torch.float32)),
        **version_values([t.versions for t in trajectories]),
        "finish_reason": [t.finish_reason for t in trajectories],
    }
    if routes is not None:
        values[ROUTES] = _route_field(trajectories, routes)
    if kept:
        values |= _kept_fields(trajectories, responses)
    if not by_turn:
        return values
    ends = jagged([t.turn_ends for t in trajectories])
    sets = [t.images for t in trajectories]
    images = {} if patch_values is None else fields_of_sets(sets, patch_values, clips=clips)
    marked = {"observation_mask": responses.like(_body_mask(trajectories, responses))} if bodies else {}
    return {
        **values,
        **images,
        **marked,
        "prompt_ids": jagged([t.prompt_ids for t in trajectories]),
        "turn_starts": ends.like(_flat([t.turn_starts for t in trajectories], torch.int64)),
        "turn_ends": ends,
        "turn_rewards": ends.like(_flat([t.turn_rewards for t in trajectories], torch.float32)),
        "ended_by": [t.ended_by for t in trajectories],
        "env_info": [t.info for t in trajectories],
        "env_error": [t.error for t in trajectories],
        "env_output": [t.output for t in trajectories],
    }


def _route_field(trajectories: Sequence[Trajectory], form: RouteForm) -> Jagged:
    return form.field(
        [t.routes for t in trajectories],
        [len(t.prompt_ids) + len(t.token_ids) - 1 for t in trajectories],
        [len(t.prompt_ids) + t.last_sampled if t.last_sampled >= 0 else 0 for t in trajectories],
    )


def _kept_fields(trajectories: Sequence[Trajectory], responses: Jagged) -> dict[str, Jagged]:
    """Return the batch's fields of kept tokens: those from which the sampling filters let each response token be drawn.

    Raises:
        MegarlError: the record lacks a token that the policy sampled.
    """
    none = KeptTokens.from_lists([])
    records = [(t.kept_tokens or none).extended(len(t.token_ids)) for t in trajectories]
    for number, (trajectory, record) in enumerate(zip(trajectories, records, strict=True)):
        if bool((record.counts[torch.tensor(trajectory.sampled, dtype=torch.bool)] == 0).any()):
            raise MegarlError(
                f"the generation engine returned tokens of sample {number} without the tokens that the filters kept\n"
                "  where:   rollout.replay_kept_tokens\n"
                "  fix:     set rollout.replay_kept_tokens=false, or use an engine that returns them"
            )
    counts = torch.cat([none.counts, *(record.counts for record in records)])
    return {
        KEPT_COUNTS: responses.like(counts),
        KEPT_IDS: Jagged.from_list([none.ids, *(record.ids for record in records)]).slice(1, len(records) + 1),
    }


def _body_mask(trajectories: Sequence[Trajectory], responses: Jagged) -> Tensor:
    mask = torch.zeros_like(responses.values, dtype=torch.bool)
    for first, trajectory in zip(responses.offsets.tolist(), trajectories, strict=False):
        for start, stop in trajectory.bodies:
            mask[first + start : first + stop] = True
    return mask


def token_shares(trajectories: Sequence[Trajectory], responses: Jagged) -> Jagged:
    """Return the factor of the advantage of each token of `responses`, float32; 1 for tokens of the environment."""
    shares = torch.ones_like(responses.values, dtype=torch.float32)
    for first, trajectory in zip(responses.offsets.tolist(), trajectories, strict=False):
        turns = zip(trajectory.turn_starts, trajectory.turn_ends, trajectory.turn_shares, strict=False)
        for start, stop, share in turns:
            shares[first + start : first + stop] = share
    return responses.like(shares)


def policy_tokens(samples: Batch, *, by_turn: bool) -> Tensor:
    """Count each sample's response tokens that the policy sampled, failed episodes included: int64 [B].

    Args:
        by_turn: True for episodes, which need the fields per turn; False if the policy sampled whole responses.
    """
    if not by_turn:
        return samples["response_ids"].lengths
    ends = samples["turn_ends"]
    return ends.like(ends.values - samples["turn_starts"].values).sum()


def _flat(rows: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
