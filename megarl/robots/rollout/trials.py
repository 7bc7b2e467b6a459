"""The rows of robots' data sets: start states of tasks, split into training and validation.

Validation has up to three sets of start states of a task: held-out ones, whose data source is the task's name, some
training start states (`train_iid`), and the simulator's own evaluation list (`eval_ood`). All start states of a task
that belongs to a set of tasks (`TaskSpec.part`) are in this set instead.

Held-out start states of `held_out_tasks` form the set `ood`; those of other tasks form `iid`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.data.batch import Batch, Jagged
from megarl.data.render import Split
from megarl.robots.simulators.protocol import TaskSpec
from megarl.system.errors import ConfigError, count


@dataclass
class Trials:
    """The (task, start state) pairs of a split, task after task; see `megarl.data.loader.Indexed`."""

    split: Split
    pairs: Sequence[tuple[str, int]]  # (task, start state) pairs of all tasks
    prompts: Mapping[str, Sequence[int]]  # tokens of each task's instruction
    texts: Mapping[str, str]
    # (task, start state) -> name of its validation set, for pairs whose data source is not just the task's name
    sets: Mapping[tuple[str, int], str] = field(default_factory=dict)
    # task -> name of the data source under which it is measured together with other tasks
    sources: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = field(init=False)  # hash of tasks, prompts and start states

    def __post_init__(self) -> None:
        content = repr((self.pairs, sorted(self.prompts.items()))).encode()
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.pairs)

    def describe(self) -> str:
        """Describe the number of start states and tasks in one line for the log."""
        tasks = dict.fromkeys(task for task, _ in self.pairs)
        named = Counter(self.sets[pair] for pair in self.pairs if pair in self.sets)
        parts = "".join(f", {number} of them {name}" for name, number in named.items())
        return f"{self.split}: {count(len(self), 'start state')} of {count(len(tasks), 'task')}{parts}"

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the prompts of the start states at `indices`; `row` has `task` and `trial`."""
        pairs = [self.pairs[index] for index in indices]
        return Batch(
            {"prompt_ids": Jagged.from_list([list(self.prompts[task]) for task, _ in pairs], dtype=torch.int64)},
            {
                "uid": [f"{self.split}-{epoch}-{index}" for index in indices],
                "prompt_text": [self.texts[task] for task, _ in pairs],
                "answer": [None] * len(pairs),
                "data_source": [
                    self.sources.get(pair[0]) or "_".join(filter(None, (pair[0], self.sets.get(pair))))
                    for pair in pairs
                ],
                "row": [{"task": task, "trial": trial} for task, trial in pairs],
                "set": [self.sets.get(pair, "") for pair in pairs],
            },
        )


def part_trials(
    tasks: Iterable[TaskSpec],
    *,
    seed: int,
    held_out: int,
    trained: int | None,
    val_trained: int = 0,
    val_evaluation: int | None = None,
    held_out_tasks: Collection[str] = (),
) -> dict[Split, list[tuple[str, int]]]:
    """Split each task's start states into training and validation, independently of other tasks.

    Args:
        held_out: number of start states of each task that are only for validation.
        trained: number of start states of each task for training; None: all that are not held out.
        val_trained: number of training start states that are also used for validation.
        val_evaluation: number of start states from the simulator's evaluation list for validation; None: all.
        held_out_tasks: names of tasks that are not trained on; `held_out` start states of each are for validation.

    Returns:
        (task, start state) of the training and of the validation set.
    """
    pairs: dict[Split, list[tuple[str, int]]] = {"train": [], "val": []}
    for task in tasks:
        available = task.trials - task.evaluation  # number of start states that may be trained on
        if held_out_tasks and task.part:
            raise ConfigError(
                "tasks cannot be held out, because the simulator already divides its tasks into sets for validation: "
                f"{task.name} belongs to {task.part!r}",
                where="robot.held_out_tasks",
                found=list(held_out_tasks),
                allowed="[], for a simulator whose tasks belong to sets",
                fix="set robot.held_out_tasks=[]",
            )
        if task.name in held_out_tasks:
            pairs["val"] += _only_measured(task, seed, held_out, available)
            continue
        if available < held_out + (trained or 1):
            raise _too_few(task, "held_out", f"{held_out} held out, {trained or 'the others'} trained on", available)
        order = _order(task, seed, available)
        rest = order[held_out:] if trained is None else order[held_out : held_out + trained]
        measured = task.evaluation if val_evaluation is None else val_evaluation
        if val_trained > len(rest):
            raise _too_few(task, "val_trained", val_trained, len(rest))
        if measured > task.evaluation:
            raise _too_few(task, "val_evaluation", measured, task.evaluation)
        if not held_out + val_trained + measured:
            raise _none_measured(task)
        chosen = (order[:held_out], rest[:val_trained], np.arange(available, available + measured))
        pairs["val"] += [(task.name, int(trial)) for part in chosen for trial in np.sort(part)]
        pairs["train"] += [(task.name, int(trial)) for trial in np.sort(rest)]
    return pairs


def _order(task: TaskSpec, seed: int, count: int) -> NDArray[np.int64]:
    """Return the numbers of the task's first `count` start states in a random order, which depends only on the seed and
    the task's name."""
    generator = np.random.Generator(np.random.PCG64([seed % 2**64, zlib.crc32(task.name.encode())]))
    return generator.permutation(count)


def _only_measured(task: TaskSpec, seed: int, held_out: int, available: int) -> list[tuple[str, int]]:
    """Return the start states for validation of a task that is not trained on."""
    if not 0 < held_out <= available:
        raise ConfigError(
            f"the held-out task {task.name} needs start states for validation, of which it has {available}",
            where="robot.held_out",
            found=held_out,
            allowed=f"1 to {available}",
            fix="set robot.held_out to an allowed number, or remove the task from robot.held_out_tasks",
        )
    return [(task.name, int(trial)) for trial in np.sort(_order(task, seed, available)[:held_out])]


def val_sets(
    tasks: Collection[TaskSpec],
    parted: Mapping[Split, Sequence[tuple[str, int]]],
    held_out_tasks: Collection[str] = (),
) -> dict[tuple[str, int], str]:
    """Return the validation set to which each validation start state belongs, by (task, start state).

    The first of these that applies: the set of its task (`TaskSpec.part`); `eval_ood` for the task's last start states,
    which are only for evaluation (`TaskSpec.evaluation`); `train_iid` for a start state that is also trained on; and,
    if there are `held_out_tasks`, `ood` for these tasks and `iid` for the others. All other start states are in no set.
    """
    parts = {task.name: task.part for task in tasks}
    first = {task.name: task.trials - task.evaluation for task in tasks}
    trained = set(parted["train"])
    named = {pair: "eval_ood" if pair[1] >= first[pair[0]] else "train_iid" for pair in parted["val"]}
    by_task = {pair: "ood" if pair[0] in held_out_tasks else "iid" for pair in parted["val"]} if held_out_tasks else {}
    of_states = {pair: name for pair, name in named.items() if name == "eval_ood" or pair in trained}
    return by_task | of_states | {pair: parts[pair[0]] for pair in parted["val"] if parts[pair[0]]}


def _too_few(task: TaskSpec, key: str, found: object, most: int) -> ConfigError:
    return ConfigError(
        f"{task.name} has too few start states",
        where=f"robot.{key}",
        found=found,
        allowed=f"at most {most} together, at least one trained on" if key == "held_out" else f"0 to {most}",
        fix="lower robot.held_out or robot.trials" if key == "held_out" else f"lower robot.{key}",
    )


def _none_measured(task: TaskSpec) -> ConfigError:
    return ConfigError(
        f"validation measures no start state of {task.name}",
        where="robot.held_out",
        found=0,
        allowed="above 0, or 0 with robot.val_trained or robot.val_evaluation above 0",
        fix="set robot.held_out=1 or more; lower robot.trials if too few start states are left",
    )


def limited(
    pairs: Sequence[tuple[str, int]],
    limit: int | None,
    sets: Mapping[tuple[str, int], str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> list[tuple[str, int]]:
    """Return at most `limit` of `pairs` in their order, chosen evenly over tasks and sets (`data.max_val_samples`).

    Args:
        pairs: (task, start state).
        sets: the validation set of a pair; pairs that are missing belong to no set.
        sources: task -> name of its data source; tasks with the same source count as one.

    >>> limited([("a", 1), ("a", 5), ("a", 7), ("b", 2)], 3)
    [('a', 1), ('a', 5), ('b', 2)]
    """
    met: Counter[tuple[str, str]] = Counter()
    turns = []
    for place, pair in enumerate(pairs):
        kind = (sources or {}).get(pair[0]) or pair[0], (sets or {}).get(pair, "")
        turns.append((met[kind], place))
        met[kind] += 1
    return [pairs[place] for place in sorted(place for _, place in sorted(turns)[:limit])]
