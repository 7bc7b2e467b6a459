"""Training examples for behaviour cloning: policy calls made from demonstrations.

    demonstration    step 0 | 1 | 2 | ...                       | T - 1
    example t        input: the observation before step t; target: the actions of steps t to t + K - 1

A demonstration of T environment steps has T examples. Near its end, where fewer than K actions are left, the last
action is repeated, and the repeated actions have no loss.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.artifacts.action_statistics import Bounds, DatasetStatistics, StatisticsCollector
from megarl.data.batch import Batch, Jagged
from megarl.robots.config import FRAMES
from megarl.robots.data.demonstrations import OpenDemonstration
from megarl.robots.data.pictures import PicturePipeline
from megarl.robots.models.vla.actions import ActionCodec, GripperRule, NumberCodec
from megarl.system.errors import DataError, choose, count


def cloning_statistics(
    demonstrations: Sequence[OpenDemonstration], gripper: GripperRule, bounds: Bounds = "q99"
) -> DatasetStatistics:
    """Return the statistics of the demonstrations, which normalise the policy's actions and states."""
    collector, wide = StatisticsCollector(), 0
    for shown in demonstrations:
        if len(shown):
            wide = shown.actions.shape[1]
            collector.add(gripper.to_policy(shown.actions), shown.states if shown.states.shape[1] else None)
    statistics = collector.finish(gripper.mask(wide), bounds)
    low, high = statistics.action.range
    flat = statistics.action.mask & (low == high) & (statistics.action.min != statistics.action.max)
    if flat.any():
        number = int(np.flatnonzero(flat)[0])
        raise DataError(
            f"dimension {number} of the actions is {low[number]:g} in nearly all environment steps: its quantiles are "
            "equal",
            where="demonstrations",
            found=f"{statistics.action.min[number]:g} to {statistics.action.max[number]:g}",
            fix="set robot.bounds=minmax, or remove steps in which nothing happens",
        )
    return statistics


class CloningExamples:
    """The demonstrations as examples for behaviour cloning, one policy call for each environment step; a data set for a
    `PromptLoader`.

    States and actions are in memory. The pictures of an example are processed when it is first used, and kept as long
    as all kept pictures take at most `keep` bytes; pictures of other examples are processed each time.

    Args:
        demonstrations: demonstrations with at least one environment step in total.
        prompts: tokens of the instruction, by task.
        codec: converts recorded actions to tokens, or in a subclass to normalised numbers, for the policy to learn.
        pictures: turns frames into the policy's pictures, [size, size, 3] each.
        cameras: names of the cameras, in the policy's order.
        chunk: number of actions per policy call, K.
        states: converts recorded states [N, S] to the policy's, float32 [N, S].
        keep: maximum number of bytes of pictures in memory.

    Attributes:
        fingerprint: hash of actions, states, prompts and settings; frames do not count, so they need not be read.
    """

    def __init__(
        self,
        demonstrations: Sequence[OpenDemonstration],
        prompts: Mapping[str, Sequence[int]],
        codec: ActionCodec | NumberCodec,
        pictures: PicturePipeline,
        *,
        cameras: Sequence[str],
        chunk: int,
        states: Callable[[NDArray[np.float32]], NDArray[np.float32]],
        keep: int = 4 << 30,
    ) -> None:
        assert chunk >= 1, f"{chunk} actions of a policy call"
        self._shown = [shown for shown in demonstrations if len(shown)]
        self._pictures, self._cameras, self._chunk, self._dim = pictures, list(cameras), chunk, codec.dim
        self.codec = codec
        self._check(prompts)
        self._prompts = {task: list(prompts[task]) for task in {shown.task for shown in self._shown}}
        self._starts = np.cumsum([0, *map(len, self._shown)])
        actions = np.concatenate([shown.actions for shown in self._shown])
        self._actions = self.encode(actions)
        self._states = np.ascontiguousarray(states(np.concatenate([shown.states for shown in self._shown])), np.float32)
        self._kept: dict[int, Tensor] = {}
        self._room = keep // (len(self._cameras) * pictures.size**2 * 3)
        self.fingerprint = self._digest()

    def __len__(self) -> int:
        return len(self._actions)

    def encode(self, actions: NDArray[np.float32]) -> NDArray[Any]:
        """Convert the recorded actions of N environment steps, [N, D], to the tokens that the policy learns, [N, D]."""
        assert isinstance(self.codec, ActionCodec), "other policies have a subclass"
        return self.codec.to_tokens(actions[:, None])

    def targets(self, actions: NDArray[Any], indices: Sequence[int], epoch: int) -> dict[str, Tensor]:
        """Return the fields, with one entry per example, from which the policy learns its actions; `actions` [B, K, D]
        are in the form that `encode` returns."""
        return {"response_ids": torch.from_numpy(actions).flatten(1)}

    def describe(self) -> str:
        """Return one line for the log: the number of examples and the memory of their pictures."""
        tasks = Counter(shown.task for shown in self._shown)
        listed = ", ".join(f"{task} {number}" for task, number in tasks.items())
        examples, in_memory = len(self), min(len(self), self._room)
        size = len(self._cameras) * self._pictures.size**2 * 3 * in_memory / 1e6
        rest = "" if in_memory == examples else f", those of {examples - in_memory} examples are processed each time"
        return (
            f"sft: {count(examples, 'policy call')} of {count(len(self._shown), 'demonstration')} ({listed}); "
            f"pictures take up to {size:.0f} MB{rest}"
        )

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the examples at `indices`, each as an episode with one policy call (megarl/robots/rollout/episode.py).

        The fields are prompt_ids; response_ids and response_mask [K * D]; turn_starts and turn_ends; `frames/CAMERA`
        uint8 [1, size, size, 3]; `states` [1, S]; the other fields of `targets`; and the columns uid, sample_id, task.
        """
        places = np.asarray(indices, np.int64)
        owner = np.searchsorted(self._starts, places, side="right") - 1
        steps = places[:, None] + np.arange(self._chunk)  # [B, K]
        last = self._starts[owner + 1][:, None] - 1
        targets = self.targets(self._actions[np.minimum(steps, last)], indices, epoch)
        executed = np.repeat(steps <= last, self._dim)
        size = self._chunk * self._dim
        tasks = [self._shown[number].task for number in owner]
        uids = [f"train-{epoch}-{index}" for index in indices]

        def each(values: NDArray[np.generic] | Tensor, length: int) -> Jagged:
            return Jagged.from_lengths(torch.as_tensor(values), [length] * len(places))

        fields = {
            "prompt_ids": Jagged.from_list([self._prompts[task] for task in tasks], dtype=torch.int64),
            "response_ids": each(targets.pop("response_ids").flatten(), size),
            **{name: each(values, 1) for name, values in targets.items()},
            "response_mask": each(executed, size),
            "turn_starts": each(np.zeros(len(places), np.int64), 1),
            "turn_ends": each(np.full(len(places), size, np.int64), 1),
            "states": each(self._states[places], 1),
        }
        seen = self._seen(owner, places)
        for place, camera in enumerate(self._cameras):
            fields[FRAMES + camera] = each(seen[:, place], 1)
        return Batch(fields, {"uid": uids, "sample_id": list(uids), "task": tasks}, size=len(places))

    def _seen(self, owner: NDArray[np.int64], places: NDArray[np.int64]) -> Tensor:
        """Return the pictures uint8 [B, cameras, size, size, 3] at environment steps `places`, numbered over all
        demonstrations; `owner` is the demonstration of each."""
        side = self._pictures.size
        pictures = torch.empty(len(places), len(self._cameras), side, side, 3, dtype=torch.uint8)
        for number, (demonstration, place) in enumerate(zip(owner.tolist(), places.tolist(), strict=True)):
            views = self._kept.get(place)
            if views is None:
                shown, step = self._shown[demonstration], place - int(self._starts[demonstration])
                frames = [torch.from_numpy(np.array(shown.frame(camera, step))) for camera in self._cameras]
                views = torch.stack([self._pictures(frame) for frame in frames])
                if len(self._kept) < self._room:
                    self._kept[place] = views
            pictures[number] = views
        return pictures

    def _check(self, prompts: Mapping[str, Sequence[int]]) -> None:
        if not self._shown:
            raise DataError(
                "no examples to clone: no demonstration has an environment step",
                where="demonstrations",
                fix="name demonstrations with at least one step in sft.train_files",
            )
        wide = self._shown[0].states.shape[1]
        for shown in self._shown:
            problem = "the policy has no prompt for the task of this demonstration"
            choose(prompts, shown.task, problem, where=shown.where)
            sizes = (shown.actions.shape[1], shown.states.shape[1])
            if sizes != (self._dim, wide):
                problem = "an action or a state of this demonstration has the wrong number of values"
                raise DataError(problem, where=shown.where, found=sizes, allowed=f"{(self._dim, wide)}")
            for camera in self._cameras:
                if camera not in shown.cameras:
                    problem = "this demonstration has no pictures of a camera of the policy"
                    raise DataError(problem, where=shown.where, found=camera, allowed=shown.cameras)

    def settings(self) -> list[str]:
        """Return what the fingerprint includes in addition to data and prompts: how actions become tokens."""
        assert isinstance(self.codec, ActionCodec), "other policies have a subclass"
        return [repr(self.codec.tokens)]

    def _digest(self) -> str:
        settings = [self._prompts, self._cameras, self._chunk, repr(self._pictures), *self.settings()]
        lengths = [[shown.task, len(shown)] for shown in self._shown]
        digest = hashlib.blake2b(json.dumps([settings, lengths], sort_keys=True).encode(), digest_size=16)
        digest.update(self._actions.tobytes() + self._states.tobytes())
        return digest.hexdigest()
