"""Scores of failed episodes by their distance to the successful episodes of the same task (SRPO).

    embeddings [B, E]   success [B]   task [B]                 of the whole global batch, on every rank
        |
        +-- for each task: standardise and cluster (DBSCAN) its successes, of earlier steps too if kept
        +-- distance of each failure to the nearest cluster centre, Euclidean, in the space of the embeddings
        +-- distances of the task's failures -> scores: below that of a success, higher for nearer failures

Source: SRPO (arXiv 2511.15605). siiRL's code is `radius: fixed` with `mapping: min_max`, except that a success without
a valid embedding scores 0 there. `mapping: z_score` is the paper's, which siiRL's code lacks: weight 0.8, distances
normalised by the mean and deviation over the task's failures, higher scores for nearer failures.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.registry import Settings
from megarl.system.errors import UserError

if TYPE_CHECKING:
    import numpy as np


#: If the range (or standard deviation) of the failed episodes' distances is below this value, all of them score alike.
_NOTHING = 1e-6
#: `k_distance`: distances that differ by less than this share count as equal. In many dimensions, distances between
#: points of the same kind differ this little.
_ALIKE = 0.1
_STEEPNESS, _MIDDLE = 10.0, 0.5
_WEIGHTS = {"min_max": 0.6, "z_score": 0.8}


class ProgressSettings(Settings):
    """How failed episodes are scored by the distance of their embeddings to those of successes."""

    radius: Literal["k_distance", "scaled", "fixed"] = Field(
        "k_distance",
        description="how far apart standardised successes of a cluster may be: the knee of their distances to the "
        "nearest other one, eps times the root of the embedding's size, or eps as it is, which finds no cluster in "
        "hundreds of dimensions",
    )
    eps: float = Field(0.5, gt=0, description="radius of a cluster's neighbourhood; not read by `k_distance`")
    mapping: Literal["min_max", "z_score"] = Field(
        "min_max",
        description="distances to scores, over the failures of a task: by their place between the least and the "
        "largest, or by their deviation from the mean",
    )
    weight: float | None = Field(
        None, gt=0, le=1, description="bound of a failure's score; null: 0.6 with `min_max`, 0.8 with `z_score`"
    )
    bank: int = Field(0, ge=0, description="successes of earlier steps that are kept for each task; 0: none")
    shuffled: bool = Field(
        False, description="control: exchange the embeddings of a task's episodes at random before they are scored"
    )


@dataclass(frozen=True)
class ProgressReport:
    """Scores of a global batch of episodes, and the values from which they were computed."""

    scores: Tensor  # float64 [B], 1 for a success, below that for a failure
    distances: Tensor  # float64 [B], failures' distances to the nearest reference; NaN: no such distance, or a success
    failed: Tensor  # bool [B], episodes without success
    invalid: Tensor  # bool [B], episodes whose embedding is zero, NaN or infinite
    # number of clusters of each task's successes; 0 if their mean was the only reference. Tasks without a success are
    # missing.
    clusters: dict[Hashable, int]
    task: Sequence[Hashable]

    @property
    def shaped(self) -> Tensor:
        """Failures that are scored by distance, bool [B]."""
        return ~self.distances.isnan()

    def histogram(self, bins: int) -> tuple[list[int], list[float]]:
        """Return the histogram of the distances of failures that are scored by distance: `bins` counts and `bins` + 1
        edges.

        Without such failures the counts are zero and the edges go from 0 to 1.
        """
        import numpy as np

        counts, edges = np.histogram(self.distances[self.shaped].numpy(), bins=bins)
        return counts.tolist(), edges.tolist()

    def rank_correlations(self, progress: Tensor, groups: Sequence[Hashable] | None = None) -> dict[Hashable, float]:
        """Return Spearman's correlation of score and true progress for each task or group.

        Only failed episodes that are scored by distance (`shaped`) count. A task with fewer than two of these
        episodes, or with equal scores or equal progress, is missing.

        Args:
            progress: float [B]; NaN where it is unknown.
            groups: B names of the groups that an advantage compares; None: correlate by task.
        """
        from scipy.stats import spearmanr

        known = self.shaped & ~progress.isnan()
        correlations: dict[Hashable, float] = {}
        for name, places in _by_task(self.task if groups is None else groups).items():
            rows = [place for place in places if known[place]]
            scores, truth = self.scores[rows].numpy(), progress[rows].double().numpy()
            if len(rows) > 1 and scores.min() < scores.max() and truth.min() < truth.max():
                correlations[name] = float(spearmanr(scores, truth).statistic)
        return correlations


def progress_scores(
    embeddings: Tensor,
    success: Tensor,
    task: Sequence[Hashable],
    settings: ProgressSettings,
    *,
    bank: SuccessBank | None = None,
) -> ProgressReport:
    """Score successes 1 and failures by their distance to the successes of their task.

    A failure scores 0 if its embedding is invalid (zero, NaN, or infinite in float32), or if its task has no success
    with a valid embedding in the batch or in `bank`. For an episode that could not be played, pass an embedding of
    zeros. Everything is computed in float64 on the CPU, so that all ranks get equal scores. `bank` is not changed; add
    the batch to it after the step is scored.

    Args:
        embeddings: float [B, E] of all episodes of the global batch.
        success: bool [B].
        task: B names or numbers.
        settings: radius, eps, mapping, weight. The settings `bank` and `shuffled` are handled by `ProgressScorer`.
        bank: successes of earlier steps.

    >>> points = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0], [0.0, 0.0]])
    >>> report = progress_scores(points, torch.tensor([True, False, False, False]), ["reach"] * 4, ProgressSettings())
    >>> report.scores, report.distances, int(report.invalid.sum())
    (tensor([1.0000, 0.5960, 0.0040, 0.0000], dtype=torch.float64), tensor([nan, 1., 3., nan], dtype=torch.float64), 1)
    """
    import numpy as np
    from scipy.spatial.distance import cdist

    _check(embeddings, success, task)
    points, valid = _valid(embeddings)
    won = success.cpu().numpy()
    scores, distances = success.cpu().double(), torch.full((len(task),), math.nan, dtype=torch.float64)
    clusters: dict[Hashable, int] = {}
    for name, places in _by_task(task).items():
        references = points[[place for place in places if won[place] and valid[place]]]
        earlier = None if bank is None else bank.references(name, points.shape[1])
        if earlier is not None:
            references = np.concatenate([earlier.double().numpy(), references])
        if not len(references):
            continue
        centres, clusters[name] = success_centres(references, settings)
        failures = [place for place in places if valid[place] and not won[place]]
        if failures:
            nearest = cdist(points[failures], centres).min(1)
            distances[failures] = torch.from_numpy(nearest)
            scores[failures] = torch.from_numpy(_mapped(nearest, settings))
    return ProgressReport(scores, distances, ~success.cpu(), torch.from_numpy(~valid), clusters, task)


def success_centres(points: np.ndarray, settings: ProgressSettings) -> tuple[np.ndarray, int]:
    """Return the cluster centres of a task's successes, float64 [C, E], and C; without clusters their mean, and 0.

    Args:
        points: float64 [n, E], at least one.
        settings: radius, eps.
    """
    import numpy as np
    from scipy.spatial.distance import cdist
    from sklearn.cluster import DBSCAN
    from sklearn.preprocessing import StandardScaler

    if len(points) == 1:
        return points, 0
    standardised = StandardScaler().fit_transform(points)
    apart = cdist(standardised, standardised)
    eps = _radius(apart, points.shape[1], settings)
    labels = DBSCAN(eps=eps, min_samples=2, metric="precomputed").fit(apart).labels_
    count = int(labels.max()) + 1
    if not count:
        return points.mean(0, keepdims=True), 0
    # Standardisation is affine, so the mean of the original points is the cluster's centre mapped back.
    return np.stack([points[labels == cluster].mean(0) for cluster in range(count)]), count


def shuffled_embeddings(embeddings: Tensor, task: Sequence[Hashable], *seed: int) -> Tensor:
    """Permute the valid embeddings among the episodes of each task, by a permutation from `seed`.

    The set of embeddings of a task stays the same, but an embedding no longer says anything about its episode.

    Args:
        embeddings: [B, E].
        task: B names or numbers.
        seed: non-negative integers: the run's seed, the step, and the round of generation.
    """
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(list(seed)))
    source, valid = torch.arange(len(task)), valid_embeddings(embeddings).tolist()
    for every in _by_task(task).values():
        places = [place for place in every if valid[place]]
        source[places] = torch.tensor(places, dtype=torch.int64)[torch.from_numpy(generator.permutation(len(places)))]
    return embeddings[source.to(embeddings.device)]


def valid_embeddings(embeddings: Tensor) -> Tensor:
    """Return which embeddings are valid, bool [B]: neither zero nor, in float32, NaN or infinite.

    Args:
        embeddings: float [B, E].
    """
    return torch.from_numpy(_valid(embeddings)[1])


def _check(embeddings: Tensor, success: Tensor, task: Sequence[Hashable]) -> None:
    if embeddings.ndim != 2 or not embeddings.is_floating_point() or not embeddings.shape[1]:
        raise ValueError(
            f"embeddings must be float [B, E] with E of at least 1, got {embeddings.dtype} {tuple(embeddings.shape)}"
        )
    if success.dtype != torch.bool or success.shape != embeddings.shape[:1]:
        raise ValueError(f"success must be bool [{len(embeddings)}], got {success.dtype} {tuple(success.shape)}")
    if len(task) != len(embeddings):
        raise ValueError(f"embeddings and tasks must have equal length, got {len(embeddings)} and {len(task)}")


def _valid(embeddings: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings as float64 [B, E], and which of them are valid as in `valid_embeddings`, bool [B]."""
    points = embeddings.detach().float().cpu().double().numpy()
    return points, ((points != 0).any(1) & ~(abs(points) == math.inf).any(1) & ~(points != points).any(1))


def _radius(apart: np.ndarray, dims: int, settings: ProgressSettings) -> float:
    """Return DBSCAN's eps for points with pairwise distances `apart`, float64 [n, n], n >= 2.

    For `k_distance`, the ascending distances to the nearest other point form a curve. Eps is 1.1 times its knee: the
    point farthest below the chord from its first to its last point (Kneedle, Satopaa and others 2011). A curve that
    stays within a tenth of its largest value of the chord has no knee; its last value is used in place of the knee,
    which gives every point a neighbour.
    """
    import numpy as np

    if settings.radius == "fixed":
        return settings.eps
    if settings.radius == "scaled":
        return settings.eps * math.sqrt(dims)
    curve = np.sort((apart + np.diag([math.inf] * len(apart))).min(1))
    below = np.linspace(curve[0], curve[-1], len(curve)) - curve
    knee = int(below.argmax()) if below.max() > _ALIKE * curve[-1] else -1
    return float(curve[knee]) * (1 + _ALIKE) + 1e-12  # the result must not be 0 if all points are equal


def _mapped(distances: np.ndarray, settings: ProgressSettings) -> np.ndarray:
    """Map the distances of one task's failed episodes from its references to scores, float64 [n]; the nearest episode
    scores best."""
    import numpy as np
    from scipy.special import expit

    weight = _WEIGHTS[settings.mapping] if settings.weight is None else settings.weight
    if settings.mapping == "z_score":
        spread = distances.std()
        exponent = (distances.mean() - distances) / spread if spread >= _NOTHING else np.zeros_like(distances)
    else:
        span = np.ptp(distances)
        place = (distances - distances.min()) / span if span >= _NOTHING else np.full_like(distances, _MIDDLE)
        exponent = _STEEPNESS * (_MIDDLE - place)
    scores: np.ndarray = weight * expit(exponent)
    return scores


def _by_task(task: Sequence[Any]) -> dict[Hashable, list[int]]:
    places: dict[Hashable, list[int]] = {}
    for place, name in enumerate(task):
        places.setdefault(name, []).append(place)
    return places


#: Number of a task's successes that are kept within one step, as references for later rounds of its generation.
_OF_A_STEP = 4096


class ProgressScorer:
    """Scores failed episodes by the distance of their embeddings from successful ones, step after step.

    Ranks that get equal global batches get equal scores.

    Args:
        settings: how to score, how many successful episodes of earlier steps to keep as references for each task, and
            whether to shuffle embeddings (as a control experiment).
        seed: the run's seed; with the step and its round of generation it determines the shuffling.
    """

    def __init__(self, settings: ProgressSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._bank = SuccessBank(settings.bank) if settings.bank else None
        self._step, self._round, self._earlier = -1, 0, SuccessBank(_OF_A_STEP)

    def score(self, embeddings: Tensor, success: Tensor, task: Sequence[Hashable], *, step: int) -> ProgressReport:
        """Return `progress_scores` of a batch, and keep its successes as references.

        Later rounds of generation in the same step use these references. If `settings.bank` is set, so do later steps.

        Args:
            embeddings: float [B, E] of the global batch.
            success: bool [B].
            task: B names or numbers.
            step: training step, from 0; a step may be scored in several rounds.
        """
        if step != self._step:
            self._step, self._round, self._earlier = step, 0, SuccessBank(_OF_A_STEP)
        if self._settings.shuffled:
            embeddings = shuffled_embeddings(embeddings, task, self._seed, step, self._round)
        bank = self._earlier if self._bank is None else self._bank
        report = progress_scores(embeddings, success, task, self._settings, bank=bank)
        bank.add(embeddings, success, task)
        self._round += 1
        return report

    def state(self) -> dict[str, Any]:
        """Return the successful episodes of earlier steps, for a checkpoint; empty without `settings.bank`."""
        return {} if self._bank is None else self._bank.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the successful episodes of earlier steps, which new episodes are compared with, from `state`.

        Nothing is done if `state` is empty or none of these episodes are kept.
        """
        if self._bank is not None and state:
            self._bank.load_state(state)


class SuccessBank:
    """A store of the embeddings of each task's latest successful episodes, oldest first.

    Its content depends only on the added batches, in order: ranks that add the same global batches hold the same.

    Args:
        size: number of successes kept for each task, at least 1.

    >>> bank = SuccessBank(2)
    >>> bank.add(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([True, False, True, True]), ["a"] * 4)
    >>> bank.references("a", 1)
    tensor([[3.],
            [4.]])
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"the size of a success bank must be at least 1, got {size}")
        self._size = size
        self._held: dict[Hashable, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of successes of all tasks."""
        return sum(map(len, self._held.values()))

    def references(self, task: Hashable, dims: int) -> Tensor | None:
        """Return the embeddings of a task's successes, float32 [n, dims], oldest first; None if there are none."""
        self._check(dims)
        return self._held.get(task)

    def add(self, embeddings: Tensor, success: Tensor, task: Sequence[Hashable]) -> None:
        """Add the successes with valid embeddings of a global batch, and drop the oldest ones beyond `size` per task.

        Args:
            embeddings: float [B, E].
            success: bool [B].
            task: B names or numbers.
        """
        added = (success.cpu() & valid_embeddings(embeddings)).nonzero()[:, 0].tolist()
        rows = embeddings.detach().float().cpu()
        self._check(rows.shape[1])
        for name, numbers in _by_task([task[place] for place in added]).items():
            before, places = self._held.get(name, rows[:0]), [added[number] for number in numbers]
            self._held[name] = torch.cat([before, rows[places]])[-self._size :].clone()

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state: `embedding` (float32 [N, E]), `task` (N names or numbers), oldest first."""
        embeddings = list(self._held.values())
        names = [name for name, rows in self._held.items() for _ in range(len(rows))]
        return {"embedding": torch.cat(embeddings) if embeddings else torch.zeros(0, 0), "task": names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace all successes by those in `state`, keeping the latest of each task that fit."""
        self._held = {}
        if state["task"]:
            self.add(state["embedding"], torch.ones(len(state["task"]), dtype=torch.bool), state["task"])

    def _check(self, dims: int) -> None:
        for name, rows in self._held.items():
            if rows.shape[1] != dims:
                raise UserError(
                    "the embeddings differ in size from those of the run's earlier successes",
                    where=f"success bank, task {name!r}",
                    found=dims,
                    allowed=str(rows.shape[1]),
                    fix="use the encoder with which the run began, or begin a new run",
                )
