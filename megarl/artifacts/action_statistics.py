"""Statistics of the actions and states in demonstrations: `dataset_statistics.json`, in the form of OpenVLA's
checkpoints.

{"libero_goal": {"action": {"mean": [...], "std": [...], "max": [...], "min": [...], "q01": [...], "q99": [...],
                            "mask": [true, ...]},
                 "proprio": {... no mask ...}, "num_transitions": 52042, "num_trajectories": 428}, ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.system.errors import ConfigError, DataError, close_matches

#: The two statistics that are scaled to -1 and 1. `q99`: OpenVLA, and OpenVLA-OFT for LIBERO; `minmax`: OpenVLA-OFT for
#: the two-armed ALOHA and RoboTwin.
Bounds = Literal["q99", "minmax"]
NAMES = ("mean", "std", "max", "min", "q01", "q99")
FILE = "dataset_statistics.json"
_TINY = 1e-8


@dataclass(frozen=True, eq=False)
class ActionStatistics:
    """The statistics of each of the D numbers of an action, or of a robot's own state."""

    mean: NDArray[np.float64]  # mean of each value, float64 [D]; the next five fields have the same shape
    std: NDArray[np.float64]  # standard deviation of the population
    max: NDArray[np.float64]  # largest value
    min: NDArray[np.float64]  # smallest value
    q01: NDArray[np.float64]  # 1% quantile
    q99: NDArray[np.float64]  # 99% quantile
    mask: NDArray[np.bool_]  # bool [D]: which numbers are normalised; the others pass through
    bounds: Bounds = "q99"  # the statistics that are scaled to -1 and 1

    @property
    def dim(self) -> int:
        """Number of values of an action or state, D."""
        return len(self.mean)

    @classmethod
    def of(cls, values: ArrayLike, mask: Sequence[bool] | None = None, bounds: Bounds = "q99") -> ActionStatistics:
        """Compute the exact statistics of values [N, D], and attach `mask` and `bounds`, which do not affect them."""
        table = np.asarray(values)
        if table.ndim != 2 or not table.size:
            raise DataError(
                "values must be a non-empty table of numbers", where="values", found=list(table.shape), allowed="[N, D]"
            )
        _finite(table, "values")
        rows: dict[str, list[float]] = {name: [] for name in NAMES}
        for column in table.T.astype(np.float64):
            low, high = np.quantile(column, [0.01, 0.99])
            numbers = (column.mean(), column.std(), column.max(), column.min(), low, high)
            for name, value in zip(NAMES, numbers, strict=True):
                rows[name].append(float(value))
        return cls.from_json(rows if mask is None else rows | {"mask": list(mask)}, "values", bounds)

    @classmethod
    def plain(cls, dim: int) -> ActionStatistics:
        """Return statistics that change no number, for numbers that are already between -1 and 1."""
        zeros, ones = np.zeros(dim), np.ones(dim)
        return cls(mean=zeros, std=ones, max=ones, min=-ones, q01=-ones, q99=ones, mask=np.zeros(dim, np.bool_))

    @classmethod
    def from_json(cls, content: Any, where: str, bounds: Bounds = "q99") -> ActionStatistics:
        """Read the statistics from a dictionary of lists; without a mask all numbers are normalised."""
        if not isinstance(content, Mapping):
            raise DataError(
                "the statistics are not a mapping", where=where, found=content, allowed=f"lists {', '.join(NAMES)}"
            )
        missing = [name for name in NAMES if name not in content]
        if missing:
            raise DataError(f"the statistic {missing[0]!r} is missing", where=where, allowed=NAMES)
        try:
            rows = {name: np.asarray(content[name], dtype=np.float64) for name in NAMES}
        except (TypeError, ValueError) as problem:
            raise DataError(
                f"the statistics must be lists of numbers: {problem}",
                where=where,
                fix="correct this entry, or write the file again",
            ) from None
        mask = np.asarray(content.get("mask", [True] * rows["mean"].size))
        sizes = {name: list(row.shape) for name, row in [*rows.items(), ("mask", mask)]}
        if len({tuple(size) for size in sizes.values()}) != 1 or mask.ndim != 1 or not mask.size:
            raise DataError(
                "the lists of the statistics differ in length, are empty, or hold lists",
                where=where,
                found=sizes,
                allowed="lists of numbers, all of one length above 0",
            )
        if mask.dtype != np.bool_:
            raise DataError(
                "`mask` must be a list of true and false",
                where=where,
                found=mask.tolist(),
                fix="write true for every number that is normalised, else false",
            )
        for name, row in rows.items():
            _finite(row, f"{where}.{name}")
        return cls(**rows, mask=mask, bounds=bounds)

    def to_json(self) -> dict[str, list[Any]]:
        """Return the statistics and the mask as lists, by name."""
        return {name: getattr(self, name).tolist() for name in (*NAMES, "mask")}

    @property
    def range(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The action values that `normalise` maps to -1 and to 1, float64 [D] each: quantiles, or the extremes."""
        return (self.q01, self.q99) if self.bounds == "q99" else (self.min, self.max)

    def normalise(self, values: ArrayLike) -> NDArray[np.float32]:
        """Scale values [..., D] from their range to -1 to 1, clipped; float32.

        A masked-out number passes through; a constant one becomes 0.
        """
        table = self._table(values)
        low, high = self.range
        scaled = np.clip(2 * (table - low) / (high - low + _TINY) - 1, -1, 1)
        scaled = np.where(self.min == self.max, 0, scaled)
        return np.where(self.mask, scaled, table).astype(np.float32)

    def denormalise(self, values: ArrayLike) -> NDArray[np.float32]:
        """Scale values [..., D] from -1..1 back to the range of the statistics, float32; numbers that the mask leaves
        out are not changed."""
        table = self._table(values)
        low, high = self.range
        return np.where(self.mask, 0.5 * (table + 1) * (high - low + _TINY) + low, table).astype(np.float32)

    def _table(self, values: ArrayLike) -> NDArray[np.float64]:
        table = np.asarray(values, dtype=np.float64)
        if table.ndim == 0 or table.shape[-1] != self.dim:
            raise DataError(
                "the values of an action or state do not have the dimension of the statistics",
                where="values",
                found=f"shape {list(table.shape)}",
                allowed=f"[..., {self.dim}]",
            )
        return table


@dataclass(frozen=True, eq=False)
class DatasetStatistics:
    """The statistics of one data set."""

    action: ActionStatistics  # statistics of the actions
    state: ActionStatistics | None = None  # statistics of the robot's own state; None: the state was not recorded
    transitions: int = 0  # number of environment steps
    trajectories: int = 0  # number of episodes

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], where: str, bounds: Bounds = "q99") -> DatasetStatistics:
        """Read the statistics from a data set's entry in a statistics file; the entry must have `action`."""
        state = entry.get("proprio")
        return cls(
            ActionStatistics.from_json(entry["action"], f"{where}.action", bounds),
            None if state is None else ActionStatistics.from_json(state, f"{where}.proprio", bounds),
            int(entry.get("num_transitions", 0)),
            int(entry.get("num_trajectories", 0)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the data set's entry for a statistics file."""
        state = {} if self.state is None else {"proprio": self.state.to_json()}
        sizes = {"num_transitions": self.transitions, "num_trajectories": self.trajectories}
        return {"action": self.action.to_json(), **state, **sizes}


@dataclass
class StatisticsCollector:
    """A collector of statistics over demonstrations that arrive one by one; their frames need not be kept.

    The numbers themselves are kept, as float32: quantiles are exact. A million environment steps of 7 numbers and a
    state of 8 are 60 MB.
    """

    actions: list[NDArray[np.float32]] = field(default_factory=list)
    states: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, actions: ArrayLike, states: ArrayLike | None = None) -> None:
        """Add an episode: actions [T, D], with grippers as the policy has them, and states [T, state_dim]."""
        episode = len(self.actions)
        if episode and (states is None) != (not self.states):
            raise DataError(
                "some episodes have states and others have none",
                where=f"episode {episode}",
                found="no states" if states is None else "states",
                allowed="states in all episodes, or in none",
                fix="use demonstrations of one kind: all with states, or all without",
            )
        new = [("actions", self.actions, actions), *([("states", self.states, states)] if states is not None else [])]
        tables: list[NDArray[np.float32]] = []
        for name, episodes, values in new:
            table = np.asarray(values, dtype=np.float32)
            dim = episodes[0].shape[1] if episodes else "D"
            steps = len(tables[0]) if tables else "T"
            if table.ndim != 2 or not table.size or dim not in ("D", table.shape[1]) or steps not in ("T", len(table)):
                raise DataError(
                    f"{name} have a different shape than expected",
                    where=f"episode {episode}",
                    found=list(table.shape),
                    allowed=f"[{steps}, {dim}], each above 0",
                )
            _finite(table, f"episode {episode}: {name}")
            tables.append(table)
        for (_, episodes, _), table in zip(new, tables, strict=True):
            episodes.append(table)

    def finish(self, mask: Sequence[bool] | None = None, bounds: Bounds = "q99") -> DatasetStatistics:
        """Return the statistics of all episodes.

        Args:
            mask: which numbers of an action are normalised; None: all.
            bounds: the statistics that are scaled to -1 and 1.
        """
        if not self.actions:
            raise DataError(
                "cannot compute statistics without episodes",
                where="demonstrations",
                fix="name demonstrations that contain episodes",
            )
        action = ActionStatistics.of(np.concatenate(self.actions), mask, bounds)
        state = ActionStatistics.of(np.concatenate(self.states), None, bounds) if self.states else None
        return DatasetStatistics(action, state, sum(map(len, self.actions)), len(self.actions))


def read_statistics(path: Path, bounds: Bounds = "q99") -> dict[str, DatasetStatistics]:
    """Read the statistics of all data sets in a file, by name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(
            f"cannot read the action statistics: {problem}",
            where=str(path),
            fix="check the path, or copy the file again",
        ) from None
    return parse_statistics(content, str(path), bounds)


def parse_statistics(content: Any, where: str, bounds: Bounds = "q99") -> dict[str, DatasetStatistics]:
    """Parse the content of a `dataset_statistics.json`; `where` names the file for errors."""
    if not isinstance(content, dict) or not content:
        raise DataError(
            "the file must map at least one data set to its statistics",
            where=where,
            allowed='{"name": {"action": {...}, ...}, ...}',
        )
    data_sets = {}
    for name, entry in content.items():
        if not isinstance(entry, dict) or "action" not in entry:
            raise DataError(
                "the statistics of this data set have no 'action'",
                where=f"{where}: {name}",
                allowed="a dictionary with `action`",
            )
        data_sets[name] = DatasetStatistics.from_json(entry, f"{where}: {name}", bounds)
    return data_sets


def statistics_text(statistics: Mapping[str, DatasetStatistics]) -> str:
    """Return the statistics in the JSON format of OpenVLA, which `read_statistics` reads too."""
    return json.dumps({name: entry.to_json() for name, entry in statistics.items()}, indent=2) + "\n"


def write_statistics(path: Path, statistics: Mapping[str, DatasetStatistics]) -> None:
    """Write the statistics in the JSON format of OpenVLA, which `read_statistics` reads too."""
    path.write_text(statistics_text(statistics), encoding="utf-8")


def choose_statistics(
    statistics: Mapping[str, DatasetStatistics], unnorm_key: str | None, where: str
) -> DatasetStatistics:
    """Return the statistics of one data set.

    Args:
        statistics: statistics by name of the data set.
        unnorm_key: name of the data set; None if there is only one.
    """
    if unnorm_key is None and len(statistics) == 1:
        return next(iter(statistics.values()))
    if unnorm_key is None or unnorm_key not in statistics:
        problem = (
            "the statistics have several data sets, but none is chosen"
            if unnorm_key is None
            else "the statistics have no such data set"
        )
        near = close_matches(str(unnorm_key), statistics) or [
            key for key in statistics if key == f"{unnorm_key}_no_noops"
        ]
        fix = f"set `unnorm_key` to {near[0]!r}" if near else "set `unnorm_key` to one of them"
        raise ConfigError(problem, where=where, found=unnorm_key, allowed=statistics, fix=fix)
    return statistics[unnorm_key]


def _finite(table: NDArray[Any], where: str) -> None:
    wrong = np.argwhere(~np.isfinite(table))
    if len(wrong):
        place = tuple(int(number) for number in wrong[0])
        raise DataError(
            "a value is not finite",
            where=f"{where}{list(place)}",
            found=table[place].item(),
            allowed="a finite number",
            fix="correct this number, or leave out the file or episode that has it",
        )
