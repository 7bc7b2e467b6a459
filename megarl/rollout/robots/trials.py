"""Rows of robots' data: start states of tasks, parted into those that are trained on and those that are held out."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megarl.data.batch import Batch, Jagged
from megarl.data.render import Split
from megarl.errors import ConfigError, count
from megarl.simulators.protocol import TaskSpec


@dataclass
class Trials:
    """(task, start state) pairs of a split, task after task; see `megarl.data.loader.Indexed`.

    Attributes:
        split: `train` or `val`.
        pairs: of all tasks.
        prompts: tokens of each task's instruction.
        texts: the instructions.
        fingerprint: hash of tasks, prompts and start states.
    """

    split: Split
    pairs: Sequence[tuple[str, int]]
    prompts: Mapping[str, Sequence[int]]
    texts: Mapping[str, str]
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        told = repr((self.pairs, sorted(self.prompts.items()))).encode()
        self.fingerprint = hashlib.blake2b(told, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.pairs)

    def describe(self) -> str:
        """One line for the log."""
        tasks = dict.fromkeys(task for task, _ in self.pairs)
        return f"{self.split}: {count(len(self), 'start state')} of {count(len(tasks), 'task')}"

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Those at `indices`, as rows of prompts; `row` has `task` and `trial`."""
        pairs = [self.pairs[index] for index in indices]
        return Batch(
            {"prompt_ids": Jagged.from_list([list(self.prompts[task]) for task, _ in pairs], dtype=torch.int64)},
            {
                "uid": [f"{self.split}-{epoch}-{index}" for index in indices],
                "prompt_text": [self.texts[task] for task, _ in pairs],
                "answer": [None] * len(pairs),
                "data_source": [task for task, _ in pairs],
                "row": [{"task": task, "trial": trial} for task, trial in pairs],
            },
        )


def part_trials(
    tasks: Iterable[TaskSpec], *, seed: int, held_out: int, trained: int | None
) -> dict[Split, list[tuple[str, int]]]:
    """Which start states of each task are trained on, and which are held out; the same whatever other tasks there are.

    Args:
        tasks: what is played.
        seed: of the run.
        held_out: start states of each task.
        trained: start states of each task; None: all others.

    Raises:
        ConfigError: a task has too few.
    """
    found: dict[Split, list[tuple[str, int]]] = {"train": [], "val": []}
    for task in tasks:
        if task.trials < held_out + (trained or 1):
            raise ConfigError(
                f"{task.name} has too few start states",
                where="robot.held_out",
                found=f"{held_out} held out, {trained or 'the others'} trained on",
                allowed=f"{task.trials} together, at least one trained on",
                fix="lower robot.held_out or robot.trials",
            )
        generator = np.random.Generator(np.random.PCG64([seed % 2**64, zlib.crc32(task.name.encode())]))
        order = generator.permutation(task.trials)
        rest = order[held_out:] if trained is None else order[held_out : held_out + trained]
        found["val"] += [(task.name, int(trial)) for trial in np.sort(order[:held_out])]
        found["train"] += [(task.name, int(trial)) for trial in np.sort(rest)]
    return found


def limited(pairs: Sequence[tuple[str, int]], limit: int | None) -> list[tuple[str, int]]:
    """At most `limit` of `pairs` in their order, as many of each task as of the others (`data.max_val_samples`).

    >>> limited([("a", 1), ("a", 5), ("a", 7), ("b", 2)], 3)
    [('a', 1), ('a', 5), ('b', 2)]
    """
    met: dict[str, int] = {}
    turns = []
    for place, (task, _) in enumerate(pairs):
        turns.append((met.get(task, 0), place))
        met[task] = met.get(task, 0) + 1
    return [pairs[place] for place in sorted(place for _, place in sorted(turns)[:limit])]
