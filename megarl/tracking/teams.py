"""Analysis of a run with several teams: which team limits its steps, and which team waited for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# prefix of one metric per team, which is 1 in steps that this team limits, and otherwise 0
BOTTLENECK = "perf/bottleneck/"
_TEAM, _BUSY, _FOR, _WHAT, _QUEUE = "team/", "/busy_s", "/wait_for/", "/wait/", "store/queue/"
Values = Mapping[str, Sequence[float | None]]


def bounding_team(values: Values) -> str | None:
    """Return the team that was the bottleneck of most steps, as text; None if there is only one team.

    Args:
        values: values of all steps, by metric name.

    >>> bounding_team({"perf/bottleneck/draw": [1, 1, 0], "perf/bottleneck/train": [0, 0, 1], "actor/lr": [0.1]})
    'draw, in 67% of the steps'
    """
    shares = {
        name.removeprefix(BOTTLENECK): _mean(marks) for name, marks in values.items() if name.startswith(BOTTLENECK)
    }
    if not shares:
        return None
    name = max(shares, key=shares.__getitem__)
    return f"{name}, in {shares[name]:.0%} of the steps"


def waits(values: Values) -> list[dict[str, Any]]:
    """Return for each team its mean seconds of work per step, and its mean seconds of waiting for each other team.

    >>> waits({"team/draw/busy_s": [3, 5], "team/draw/wait_for/train_s": [1, 1], "team/train/busy_s": [2, 2],
    ...        "team/train/wait_for/draw_s": [3, 3]})
    [{'name': 'draw', 'work': 4.0, 'waits': [['train', 1.0]]}, {'name': 'train', 'work': 2.0, 'waits': [['draw', 3.0]]}]
    """
    teams = [name.removeprefix(_TEAM).removesuffix(_BUSY) for name in sorted(values) if _is(name, _BUSY)]
    rows = []
    for team in teams:
        before = f"{_TEAM}{team}{_FOR}"
        pairs = [[other, _mean(values.get(f"{before}{other}_s", ()))] for other in teams if other != team]
        rows.append({"name": team, "work": _mean(values[f"{_TEAM}{team}{_BUSY}"]), "waits": pairs})
    return rows


def after_start(series: Mapping[str, tuple[Sequence[int], Sequence[float | None]]]) -> Values:
    """Return each metric's values without step 0, which only validates."""
    return {
        name: [value for step, value in zip(steps, values, strict=True) if step > 0]
        for name, (steps, values) in series.items()
    }


def shown_as_waits(names: Iterable[str]) -> set[str]:
    """Return the metrics in the table of teams: seconds that teams wait, and the team that bounds the steps."""
    return {
        name
        for name in names
        if name.startswith(BOTTLENECK) or _is(name, _BUSY, "/wait_s") or (_is(name, "_s") and _FOR in name)
    }


def lines_of_waits(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return metric and legend of each team's waiting times.

    >>> lines_of_waits(["team/draw/wait/weights_s", "team/train/wait/generation_s", "team/train/wait/drawn_s"])
    [('team/draw/wait/weights_s', 'draw: weights'), ('team/train/wait/generation_s', 'train: generation')]
    """
    metrics = {name for name in names if _is(name, "_s") and _WHAT in name}
    # Waits for generation are also recorded under their earlier name.
    metrics -= {name.replace(f"{_WHAT}generation", f"{_WHAT}drawn") for name in metrics if f"{_WHAT}generation" in name}
    return [(name, name.removeprefix(_TEAM).removesuffix("_s").replace(_WHAT, ": ")) for name in sorted(metrics)]


def lines_of_queues(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return metric and legend of each queue in the buffer, such as `rollout, for train`."""
    metrics = [name for name in sorted(names) if name.startswith(_QUEUE)]
    return [(name, name.removeprefix(_QUEUE).replace("/", ", for ")) for name in metrics]


def _is(name: str, *ends: str) -> bool:
    return name.startswith(_TEAM) and name.endswith(ends)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
