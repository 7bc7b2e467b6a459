"""A loader that draws prompts by past success: `data.curriculum`.

Every row has a moving average of the mean scores of its groups. The average puts the row into a pool, and the pool's
weight is the row's weight in the next draw; a row without a score has weight 1. All ranks hold the same averages and
draw the same batch by themselves, because scores are gathered from all replicas before they count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megarl.config.data import UNSEEN, CurriculumConfig
from megarl.data.loader import PromptLoader
from megarl.data.read_ahead import Indexed
from megarl.data.weighted_draw import weighted_draw
from megarl.system.errors import DataError


class GroupScore(NamedTuple):
    """The mean score of one prompt group, and the pool (`data.curriculum.pools`) of its row before this score."""

    pool: str  # name of the pool; `unseen`: no group of the row had a score
    score: float


class CurriculumLoader(PromptLoader):
    """A loader whose global batches are drawn by the weights of `data.curriculum`.

    A batch has different rows, unless fewer than `batch_size` rows have a weight above 0: then it repeats rows. The
    uid of a group is `SPLIT-K-ROW`, where K counts the earlier draws of the row. A batch depends on the seed, the
    number of prompts drawn before it, and the averages; `state_dict` contains all three. Scores of the current batch
    change the next draw, so threads read a batch only when it is taken.
    """

    _knows_next: ClassVar[bool] = False

    def __init__(
        self,
        dataset: Indexed,
        batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        *,
        settings: CurriculumConfig,
        workers: int = 0,
    ) -> None:
        super().__init__(dataset, batch_size, dp_rank, dp_size, seed, workers=workers)
        self.settings = settings
        self._averages = np.full(len(dataset), np.nan)  # NaN: no group of the row has a score
        self._draws = np.zeros(len(dataset), dtype=np.int64)

    def record(self, scores: Mapping[str, float]) -> list[GroupScore]:
        """Move the averages of rows towards the mean scores of their groups; return each score with the row's pool.

        Args:
            scores: uid -> mean score of the group, from all ranks. The scores of a row's groups count in the order in
                which the groups were drawn.
        """
        recorded, names = [], [*self.settings.pools, UNSEEN]
        draws = []
        for uid, score in scores.items():
            _, draw, number = uid.rsplit("-", 2)
            draws.append((int(draw), int(number), score))
        for _, row, score in sorted(draws):
            average = self._averages[row]
            recorded.append(GroupScore(names[int(self._places(average))], score))
            unseen, decay = np.isnan(average), self.settings.decay
            self._averages[row] = score if unseen else decay * average + (1 - decay) * score
        return recorded

    def shares(self) -> dict[str, float]:
        """Return each pool's share of the rows; `unseen` is the pool of rows without a score."""
        names, places = [*self.settings.pools, UNSEEN], self._places(self._averages)
        counts = np.bincount(places, minlength=len(names))
        return {name: float(number) / len(places) for name, number in zip(names, counts, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as JSON values, with the draws and the average of every row drawn so far."""
        rows = self._draws.nonzero()[0]
        averages = [None if np.isnan(average) else average for average in self._averages[rows].tolist()]
        drawn = {"rows": rows.tolist(), "draws": self._draws[rows].tolist(), "averages": averages}
        return super().state_dict() | {"curriculum": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`. A state of a run without a curriculum has no averages, so all rows are unseen."""
        super().load_state_dict(state)
        self._averages[:], self._draws[:] = np.nan, 0
        if (drawn := state.get("curriculum")) is not None:
            rows = np.array(drawn["rows"], dtype=np.int64)
            self._draws[rows] = drawn["draws"]
            self._averages[rows] = [np.nan if average is None else average for average in drawn["averages"]]

    def _pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (earlier draws, dataset indices) of the next global batch, and count its rows as drawn."""
        drawn = []
        for row in self._draw():
            drawn.append((int(self._draws[row]), row))
            self._draws[row] += 1
        for draws, group in groupby(drawn, key=lambda pair: pair[0]):
            yield draws, np.array([row for _, row in group])

    def _draw(self) -> list[int]:
        """Return the rows of the next batch: a draw without replacement, repeated while it does not fill the batch.

        Raises:
            DataError: every row has weight 0.
        """
        of_pools = np.array([*(pool.weight for pool in self.settings.pools.values()), 1.0])
        weights = of_pools[self._places(self._averages)]
        rows = weights.nonzero()[0]
        if not len(rows):
            raise DataError(
                "no prompt is left to draw: the averages of all rows are in pools of weight 0",
                where="data.curriculum.pools",
                found=", ".join(f"{name} {share:.0%} of the rows" for name, share in self.shares().items() if share),
                fix="give these pools a weight above 0, or add prompts of other difficulty",
            )
        generator = np.random.Generator(np.random.PCG64([self.seed % 2**64, self.number]))
        chosen = list[int]()
        while len(chosen) < self.batch_size:
            chosen += rows[weighted_draw(weights[rows], self.batch_size - len(chosen), generator)].tolist()
        return chosen

    def _places(self, averages: np.ndarray) -> np.ndarray:
        """Return the number of the pool of each average in the order of the recipe; NaN comes after the last pool."""
        bounds = [np.inf if pool.up_to is None else pool.up_to for pool in self.settings.pools.values()]
        return np.where(np.isnan(averages), len(bounds), np.searchsorted(np.array(bounds), averages))


def group_means(uids: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """Return the mean score of each group by uid, in float64.

    >>> group_means(["a", "b", "a"], [1.0, 0.5, 0.0])
    {'a': 0.5, 'b': 0.5}
    """
    groups: dict[str, list[float]] = {}
    for uid, score in zip(uids, scores, strict=True):
        groups.setdefault(uid, []).append(score)
    return {uid: sum(values) / len(values) for uid, values in groups.items()}
