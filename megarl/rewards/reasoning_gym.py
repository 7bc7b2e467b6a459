"""Tasks of the package reasoning-gym: rows for `data.train_files: [megarl.rewards.reasoning_gym:rows]`, and a reward.

A row carries the task's entry, so that whatever process scores it needs neither the seed nor the other rows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from megarl.algorithms.registry import Settings
from megarl.rewards.registry import REWARDS
from megarl.system.errors import ConfigError, close_matches

_KEY = "data.loader_kwargs"
_UNSEEDED = ("composite", "list_functions")  # their problems differ although the seed is the same
_TRIES = 20  # entries drawn for each held-out one before the tasks count as too small


class ReasoningGymSettings(Settings):
    """Which part of a response is its answer."""

    tag: str | None = Field(
        "answer", description="the answer is in the last `<tag>...</tag>`, else wrong; null: the whole response"
    )


def rows(
    split: str = "train",
    tasks: str | list[str] | Mapping[str, Mapping[str, Any] | None] = "leg_counting",
    size: int = 1000,
    val_size: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return generated problems. Held-out problems have other questions than those for training.

    Args:
        split: `train`, or `val` for the held-out problems.
        tasks: name of a task, several, or names with the keys of each task's configuration. Problems take turns.
        size: problems for training.
        val_size: held-out problems.
        seed: seed of the problems.

    Returns:
        Rows with `prompt`, `answer` (null for tasks that accept several), `data_source` (`reasoning_gym/TASK`) and
        `reasoning_gym`, the entry that the reward reads.

    Raises:
        ConfigError: the package is missing, or a task or its configuration is invalid, or the tasks have too few
            different problems.
    """
    configs = tasks if isinstance(tasks, Mapping) else dict.fromkeys([tasks] if isinstance(tasks, str) else tasks)
    every = _draw({name: dict(config or {}) for name, config in configs.items()}, size, val_size, seed)
    training = [next(every) for _ in range(size)]
    if split == "train":
        return training
    known = {row["prompt"] for row in training}
    held_out: list[dict[str, Any]] = []
    for _ in range(_TRIES * val_size):
        if len(held_out) == val_size:
            break
        row = next(every)
        if row["prompt"] not in known:
            known.add(row["prompt"])
            held_out.append(row)
    if len(held_out) < val_size:
        raise ConfigError(
            "the tasks have too few different problems",
            where=f"{_KEY}.val_size",
            found=f"{len(held_out)} problems that are not among the {size} for training",
            allowed=f"{val_size}",
            fix="lower size or val_size, or configure the tasks for a larger range",
        )
    return held_out


def _draw(tasks: dict[str, dict[str, Any]], size: int, val_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows in turn from all tasks, without end."""
    if not tasks:
        raise ConfigError(
            "no task is named",
            where=f"{_KEY}.tasks",
            allowed="the names of reasoning-gym's tasks",
            fix=f"set {_KEY}.tasks, for example to leg_counting, or remove the key",
        )
    total = size + _TRIES * val_size
    sets = {name: _dataset(name, {"seed": seed, **config, "size": total}) for name, config in tasks.items()}
    index = 0
    while True:
        for name, dataset in sets.items():
            entry = dataset[index]
            yield {
                "prompt": entry["question"],
                "answer": entry["answer"],
                "data_source": f"reasoning_gym/{name}",
                "reasoning_gym": json.dumps({"task": name, "config": tasks[name], "entry": _packed(entry)}),
            }
        index += 1


def _package() -> Any:
    try:
        import reasoning_gym  # type: ignore[import-not-found,unused-ignore]
        import reasoning_gym.factory  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"the package reasoning-gym cannot be imported: {error}",
            where="data.train_files",
            found="megarl.rewards.reasoning_gym:rows",
            fix="pip install '.[reasoning-gym]'",
        ) from error
    return reasoning_gym


def _dataset(name: str, config: dict[str, Any]) -> Any:
    """Return the package's data set of a task."""
    package = _package()
    known = sorted(set(package.factory.DATASETS).difference(_UNSEEDED))
    if name not in known:
        near = close_matches(name, known)
        raise ConfigError(
            "reasoning-gym has no repeatable task of this name",
            where=f"{_KEY}.tasks",
            found=name,
            allowed=near or known,
            fix=f"did you mean {near[0]!r}?" if near else "name one of these",
        )
    try:
        return package.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        fields = package.factory.DATASETS[name][1].__dataclass_fields__
        raise ConfigError(
            f"reasoning-gym's task {name} refuses its configuration: {error}",
            where=f"{_KEY}.tasks.{name}",
            found=config,
            allowed=[key for key in fields if key != "size"],
            fix="correct the keys and values",
        ) from error


@functools.lru_cache(maxsize=256)
def _scorer(name: str, config: str) -> Any:
    return _dataset(name, json.loads(config))


@REWARDS.register(
    "reasoning_gym",
    settings=ReasoningGymSettings,
    package="reasoning-gym",
    names=lambda settings: ("reasoning_gym",),
    process=True,
)
def reasoning_gym(sample: dict[str, Any], *, tag: str | None = "answer") -> dict[str, Any]:
    """Score a response as its task does (`score_answer`): 1 is right; some tasks give a part for answers that are near.

    Args:
        sample: `response`, and column `reasoning_gym` of `rows`.
        tag: the answer is in the last `<tag>...</tag>`; None: the whole response.
    """
    task = json.loads(sample["reasoning_gym"])
    text = sample["response"]
    if tag is not None:
        text, opened, _ = text.rpartition(f"</{tag}>")
        _, begun, text = text.rpartition(f"<{tag}>")
        if not (opened and begun):
            return {"overall": 0.0, "acc": 0.0, "answered": 0.0, "extracted": ""}
    text = text.strip()
    dataset = _scorer(task["task"], json.dumps(task["config"]))
    try:
        score = float(dataset.score_answer(text, _unpacked(task["entry"])))
    except Exception:  # some tasks parse the answer, and raise whatever a malformed one causes
        score = 0.0
    return {"overall": score, "acc": float(score >= 1.0), "answered": 1.0, "extracted": text}


def _packed(value: Any) -> Any:
    """Return a value as JSON data from which `_unpacked` restores it, with tuples and keys that are no text."""
    if isinstance(value, Mapping):
        return {"dict": [[_packed(key), _packed(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_packed(item) for item in value]}
    return [_packed(item) for item in value] if isinstance(value, list) else value


def _unpacked(value: Any) -> Any:
    """Return the value of which `_packed` has made JSON data."""
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_unpacked(item) for item in value["tuple"])
    return {_unpacked(key): _unpacked(item) for key, item in value["dict"]}
