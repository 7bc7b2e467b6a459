"""Plays robots' episodes: the policy gets an observation, its chunk of actions is executed, and so on.

    slots of one half      physics, pictures | policy            | physics, pictures | ...
    slots of the other     policy            | physics, pictures | policy            | ...

Each slot is a simulator's process, or an environment of one process, and plays one episode after another. The halves
take turns, so that one simulates while the policy acts for the other; environments of one process are a single half. A
half waits for all of its slots, so the episodes of a policy batch do not depend on which process answers first or is
replaced, and a run is repeatable.

All ranks of a replica make the same calls; the first rank has the simulators and broadcasts their answers.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.artifacts.action_statistics import ActionStatistics
from megarl.robots.data.pictures import PicturePipeline
from megarl.robots.envs import Answer, Failure, Pool
from megarl.robots.rollout.episode import Episode
from megarl.robots.rollout.policy import ActingPolicy, PolicyCall
from megarl.robots.simulators.protocol import Observation, Outcome, Recording, TaskSpec
from megarl.robots.simulators.wire import Inbox, pack, plain_spec, spec_of
from megarl.system.errors import ConfigError, MegarlError, choose

if TYPE_CHECKING:
    from megarl.system.comm import WorkerGroup

_LOOK_S = 1.0  # seconds per wait for answers; the pool has its own deadlines
_OF_CLIP = "#"  # separates slot and camera in the names of clips; `/` does so in the names of pictures


class PlayError(MegarlError):
    """A simulator failed, and `robot.on_error` is `fail`; the message names the episode."""


@dataclass(frozen=True)
class View:
    """Converts a simulator's observations for the policy once, as they arrive; batches hold the converted ones."""

    cameras: Sequence[str]  # names of the cameras, in the policy's order
    pictures: PicturePipeline  # converts a camera's frame to the policy's picture
    states: ActionStatistics | None = None  # scales the robot's state; None: it is not scaled

    def __call__(self, seen: Observation) -> Observation:
        """Convert a simulator's observation for the policy."""
        frames = {name: self.pictures(torch.from_numpy(seen.frames[name])).numpy() for name in self.cameras}
        state = seen.state if self.states is None else self.states.normalise(seen.state)
        return replace(seen, frames=frames, state=state)

    def of_answer(self, answer: Answer) -> Answer:
        """Return a simulator's answer with its observation converted for the policy."""
        if isinstance(answer, Observation):
            return self(answer)
        if isinstance(answer, Outcome):
            clip = {camera: self.upright(frames) for camera, frames in answer.clip.items()}
            return replace(answer, observation=self(answer.observation), clip=clip)
        return answer

    def upright(self, frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Turn frames [..., H, W, 3] by 180 degrees, if the simulator renders upside down."""
        return np.ascontiguousarray(frames[..., ::-1, ::-1, :]) if self.pictures.rotate else frames

    def of_task(self, spec: TaskSpec) -> TaskSpec:
        """Return the task with the policy's cameras and picture size."""
        for camera in self.cameras:
            choose(spec.cameras, camera, "unknown camera", where="robot.cameras")
        if self.states is not None and self.states.dim != spec.state_dim:
            raise ConfigError(
                "the statistics are for a robot state of a different size",
                where="robot.unnorm_key",
                found=f"{self.states.dim} numbers, and {spec.name} has {spec.state_dim}",
                fix="set robot.unnorm_key to the data set of this robot, or use a policy of this robot",
            )
        size = self.pictures.size
        return replace(spec, cameras=dict.fromkeys(self.cameras, (size, size)))


@dataclass(frozen=True)
class EpisodeStart:
    """The start of an episode."""

    sample_id: str  # the sample's name in messages
    task: str
    trial: int
    prompt_ids: list[int]
    seed: Callable[[int], int]  # seed of policy call k


@dataclass
class PlayCounts:
    """Counts of policy calls, environment steps and failures in one call of `play`, and its times."""

    wait_s: float = 0.0  # seconds in which the policy waited for simulators
    act_s: float = 0.0  # seconds in which the policy computed actions
    calls: int = 0
    steps: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # episodes that cannot be scored, by kind


class Player:
    """Plays episodes with the policy of one model replica, on all of its ranks. Collective over the replica.

    Args:
        pool: the simulators, on the first rank of the replica; None on all other ranks.
        prompt_ids: returns the prompt's tokens for an instruction, for episodes with an instruction of their own.
        halves: simulate one half of the slots while the policy acts for the other half, if the simulator's slots are
            independent.
        on_error: what to do when a simulator fails: `fail` ends the run, `mark` only marks the episode as failed.
    """

    def __init__(
        self,
        pool: Pool | None,
        policy: ActingPolicy,
        group: WorkerGroup,
        view: View,
        prompt_ids: Callable[[str], list[int]],
        *,
        halves: bool,
        on_error: str,
    ) -> None:
        self.pool, self.policy, self.group, self.view, self.on_error = pool, policy, group, view, on_error
        self.prompt_ids = prompt_ids
        simulators = None
        if pool is not None:
            simulators = [len(pool.slots), pool.together, [plain_spec(task) for task in pool.tasks.values()]]
        count, together, plain = group.broadcast_json(simulators)
        self.rendered: dict[str, TaskSpec] = {task_facts["name"]: spec_of(task_facts) for task_facts in plain}
        self.tasks: dict[str, TaskSpec] = {name: view.of_task(spec) for name, spec in self.rendered.items()}
        slots = list(range(count))
        self.halves = [slots[0::2], slots[1::2]] if halves and count > 1 and not together else [slots]

    def play(
        self,
        starts: Sequence[EpisodeStart],
        advance: Callable[[int], None] = lambda count: None,
        record: Recording | None = None,
    ) -> tuple[list[Episode], PlayCounts]:
        """Play one episode per start; return the episodes in this order, and times and counts of the call.

        Args:
            advance: `advance(k)` is called when k more episodes are over.
            record: the clips to record in `Episode.clip`; None: no clips.
        """
        game = _Game(self, starts, advance, record)
        game.play()
        return game.episodes, game.counts


class _Game:
    """The state of one call of `play`. It is the same on all ranks of the replica, except that only the first rank has
    received answers (`_received`)."""

    def __init__(
        self, player: Player, starts: Sequence[EpisodeStart], advance: Callable[[int], None], record: Recording | None
    ) -> None:
        self._p, self._starts, self._advance, self._record = player, starts, advance, record
        self.episodes = [
            Episode(player.tasks[start.task], start.trial, prompt_ids=start.prompt_ids) for start in starts
        ]
        self.counts = PlayCounts()
        self._waiting = deque(range(len(starts)))
        self._playing: dict[int, int] = {}  # slot -> number of its episode
        self._begun_tasks: dict[int, set[str]] = {}  # slot -> tasks of the episodes that it has begun
        self._received: dict[int, Answer] = {}  # received answers that are not used yet; only on the first rank

    def play(self) -> None:
        """Play until all episodes are over."""
        for slot in sorted(slot for half in self._p.halves for slot in half):
            self._begin(slot)
        while self._playing:
            for half in self._p.halves:
                self._turn([slot for slot in half if slot in self._playing])

    def _turn(self, slots: list[int]) -> None:
        """Wait for the answers of these slots, and let the policy act in the episodes that are not over."""
        if not slots:
            return
        answers = self._answers(slots)
        ready = [slot for slot in slots if self._take(slot, answers[slot])]
        if not ready:
            return
        calls = []
        for slot in ready:
            number = self._playing[slot]
            start, episode = self._starts[number], self.episodes[number]
            calls.append(PolicyCall(episode.prompt_ids, episode.seen[-1], start.seed(len(episode.chunks))))
        began = time.monotonic()
        chunks = self._p.policy.act(calls)
        self.counts.act_s += time.monotonic() - began
        self.counts.calls += len(chunks)
        for slot, chunk in zip(ready, chunks, strict=True):
            self.episodes[self._playing[slot]].chunks.append(chunk)
            if self._p.pool is not None:
                self._p.pool.act(slot, chunk.actions)

    def _begin(self, slot: int) -> None:
        """Begin the slot's next episode, preferably of a task that it has a simulator of."""
        if not self._waiting:
            return
        played = self._begun_tasks.setdefault(slot, set())
        number = next((n for n in self._waiting if self._starts[n].task in played), self._waiting[0])
        self._waiting.remove(number)
        start = self._starts[number]
        played.add(start.task)
        self._playing[slot] = number
        if self._p.pool is not None:
            self._p.pool.begin(slot, start.task, start.trial, self._record)

    def _take(self, slot: int, answer: Answer) -> bool:
        """Add an answer to the slot's episode; return whether the episode continues."""
        number = self._playing[slot]
        episode, over = self.episodes[number], True
        if isinstance(answer, Failure):
            self._fail(number, answer)
        elif isinstance(answer, Observation):
            episode.seen.append(answer)
            if answer.instruction:
                episode.instruction, episode.prompt_ids = answer.instruction, self._p.prompt_ids(answer.instruction)
            over = False
        else:
            assert isinstance(answer, Outcome), "the player requests no expert's action"
            episode.executed.append(answer.executed)
            episode.progresses.append(math.nan if answer.progress is None else answer.progress)
            self.counts.steps += answer.executed
            over = answer.over
            if over:
                episode.end = answer.observation
                episode.clip = dict(answer.clip)
                episode.success = answer.success
                episode.progress = episode.progresses[-1]
            else:
                episode.seen.append(answer.observation)
        if over:
            del self._playing[slot]
            self._advance(1)
            self._begin(slot)
        return not over

    def _fail(self, number: int, failure: Failure) -> None:
        start = self._starts[number]
        if self._p.on_error == "fail":
            raise PlayError(
                f"the simulator of sample {start.sample_id} failed: {failure.text}\n"
                f"  episode: {failure.task}, trial {failure.trial}, after {failure.chunks} policy calls\n"
                + "".join(f"    {line}\n" for line in failure.output.splitlines())
                + "  fix:     fix the simulator, or set robot.on_error=mark to leave such episodes out"
            )
        self.counts.failures[failure.kind] = self.counts.failures.get(failure.kind, 0) + 1
        episode, cameras = self.episodes[number], self._p.rendered[start.task].cameras
        episode.fail(failure.kind, failure.text, self._p.policy.blank)
        recorded = () if self._record is None else self._record.cameras
        episode.clip = {camera: np.zeros((0, *cameras[camera], 3), np.uint8) for camera in recorded}

    def _answers(self, slots: list[int]) -> Mapping[int, Answer]:
        """Return the answers of these slots, on every rank."""
        began = time.monotonic()
        pool = self._p.pool
        if pool is not None:
            while missing := [slot for slot in slots if slot not in self._received]:
                assert set(missing) <= set(pool.busy), "every slot without an answer is working on a call"
                arrived = pool.answers(_LOOK_S)
                self._received |= {slot: self._p.view.of_answer(answer) for slot, answer in arrived.items()}
        answers = {slot: self._received.pop(slot) for slot in slots if slot in self._received}
        if self._p.group.size > 1:
            data = self._p.group.broadcast_bytes(None if pool is None else _packed(answers))
            answers = _unpacked(data) if pool is None else answers
        self.counts.wait_s += time.monotonic() - began
        return answers


def _packed(answers: Mapping[int, Answer]) -> bytes:
    header: dict[str, Any] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for slot, answer in answers.items():
        seen: Observation | None = None
        if isinstance(answer, Failure):
            header[str(slot)] = ["failure", vars(answer)]
        elif isinstance(answer, Outcome):
            facts = {"executed": answer.executed, "success": answer.success, "over": answer.over}
            header[str(slot)] = ["outcome", facts | {"progress": answer.progress}]
            seen = answer.observation
            arrays |= {f"{slot}{_OF_CLIP}{camera}": frames for camera, frames in answer.clip.items()}
        elif isinstance(answer, Observation):
            header[str(slot)] = ["observation", {"instruction": answer.instruction}]
            seen = answer
        if seen is not None:
            arrays[f"{slot}/"] = seen.state
            arrays |= {f"{slot}/{camera}": frame for camera, frame in seen.frames.items()}
    return pack({"answers": header}, arrays)


def _unpacked(data: bytes) -> dict[int, Answer]:
    inbox = Inbox(trusted=True)
    inbox.feed(data)
    message = inbox.take()
    assert message is not None, "it came as a whole"
    header, arrays = message
    answers: dict[int, Answer] = {}
    for slot, (kind, facts) in header["answers"].items():
        if kind == "failure":
            answers[int(slot)] = Failure(**facts)
            continue
        prefix = f"{slot}/"
        frames = _beginning(arrays, prefix)
        seen = Observation(frames, arrays[prefix], facts.pop("instruction", ""))
        clip = _beginning(arrays, f"{slot}{_OF_CLIP}")
        answers[int(slot)] = seen if kind == "observation" else Outcome(seen, **facts, clip=clip)
    return answers


def _beginning(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names start with `prefix`, by the rest of the name."""
    return {
        name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix) and name != prefix
    }
