"""Validation metrics of n samples per prompt: accuracy, best@k, worst@k, maj@n, pass@k; by data source and overall.

best@k and worst@k are exact expectations over all k-subsets of the n samples (no bootstrap), so they are unbiased for
every k <= n and equal the maximum and minimum at k = n. With 0/1 correctness best@k is pass@k of Chen et al. 2021
(arXiv:2107.03374), 1 - C(n - c, k) / C(n, k).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics

CORRECT_ABOVE = 0.5  # pass@k counts a sample as correct if its accuracy or score is above this
# The first of these parts that a reward has is a sample's accuracy; `overall` is the score, which every reward has.
_ACCURACY_PARTS = ("acc", "accuracy", "overall")


@dataclass(frozen=True)
class Scored:
    """One scored sample.

    Attributes:
        uid: the prompt of the sample; samples of one prompt form a group.
        value: correctness, usually 0 or 1.
        vote: vote in maj@n: the extracted answer; None or "" does not count as a vote.
        data_source: data set of the prompt; "" is none.
        part: set of data sources with metrics of its own to which the prompt belongs; "" is none.
        rank: the sample with the largest rank is selected among those of its prompt; None: no selection.
    """

    uid: Hashable
    value: float
    vote: str | None
    data_source: str = ""
    part: str = ""
    rank: float | None = None


def from_reward(
    uid: Hashable,
    result: dict[str, Any],
    response: str,
    data_source: str = "",
    part: str = "",
    select_by: str | None = None,
) -> Scored:
    """Return the sample of a reward result; its value is part `acc` or `accuracy`, else `overall`, its vote
    `extracted`. Without an extracted answer the whole response, stripped, is the vote. Raise ConfigError if the result
    lacks the part `select_by`."""
    if select_by is not None and select_by not in result:
        raise ConfigError(
            "the reward returned no part with this name, so it cannot select among the samples of a prompt",
            where="validation.select_by",
            found=select_by,
            allowed=sorted(name for name, value in result.items() if isinstance(value, int | float)),
            fix="set validation.select_by to one of these parts",
        )
    vote = result["extracted"] if "extracted" in result else response.strip()
    rank = None if select_by is None else float(result[select_by])
    return Scored(uid, correctness(result), vote, data_source, part, rank)


def correctness(result: dict[str, Any]) -> float:
    """Return how correct a reward result is: its part `acc` or `accuracy`, else `overall`."""
    return next(float(result[name]) for name in _ACCURACY_PARTS if name in result)


def validation_metrics(samples: Iterable[Scored]) -> Metrics:
    """Return the metrics of all samples of some prompts. Merging the metrics of several ranks is exact.

    Names: `val/acc`, `val/prompts`, `val/samples`; `val/graded`, the number of prompts with scores other than 0 and 1,
    if there are any; with n > 1 samples per prompt also `val/best@k`, `val/worst@k`, `val/pass@k` and, if samples are
    ranked, `val/selected@k` for k = n and the powers of two below, and `val/maj@n`.
    With several data sources the same names again as `val/<data_source>/...`, and if these belong to several sets, as
    `val/<part>/...`. All prompts have equal weight, whatever their number of samples; if n differs, a metric of k is a
    mean over the prompts that have it. All samples of a prompt must be in the same call.
    """
    groups: dict[tuple[str, Hashable], list[Scored]] = defaultdict(list)
    for sample in samples:
        groups[sample.data_source, sample.uid].append(sample)
    metrics = Metrics()
    for (source, _), group in groups.items():
        for name in dict.fromkeys(("", source, group[0].part)):
            _add_group(metrics, f"val/{name}" if name else "val", group)
    return metrics


def _add_group(metrics: Metrics, where: str, group: Sequence[Scored]) -> None:
    n = len(group)
    values = [sample.value for sample in group]
    correct = sum(value > CORRECT_ABOVE for value in values)
    metrics.mean(f"{where}/acc", sum(values) / n, 1)
    if where == "val" and not {0, 1}.issuperset(values):
        metrics.sum("val/graded", 1)
    metrics.sum(f"{where}/prompts", 1)
    metrics.sum(f"{where}/samples", n)
    if n == 1:
        return
    for k in subset_sizes(n):
        metrics.mean(f"{where}/best@{k}", best_at_k(values, k), 1)
        metrics.mean(f"{where}/worst@{k}", worst_at_k(values, k), 1)
        metrics.mean(f"{where}/pass@{k}", pass_at_k(n, correct, k), 1)
        ranks = [sample.rank for sample in group if sample.rank is not None]
        if len(ranks) == n:
            metrics.mean(f"{where}/selected@{k}", selected_at_k(ranks, values, k), 1)
    metrics.mean(f"{where}/maj@{n}", majority(group), 1)


def by_source(numbers: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return (accuracy, number of prompts) of each data source or set, from the metrics of a step.

    >>> by_source({"val/acc": 0.5, "val/prompts": 2, "val/a/b/acc": 0.5, "val/a/b/prompts": 2})
    {'a/b': (0.5, 2)}
    """
    names = [name.removeprefix("val/").removesuffix("/acc") for name in numbers if name.startswith("val/")]
    return {
        name: (numbers[f"val/{name}/acc"], numbers[f"val/{name}/prompts"])
        for name in names
        if f"val/{name}/acc" in numbers
    }


def metric_names(n: int, *, ranked: bool = False) -> list[str]:
    """Return the last parts of the names of `validation_metrics` for n samples per prompt; `ranked` adds selected@k."""
    kinds = ("best", "worst", "pass", *(("selected",) if ranked else ()))
    more = [f"{kind}@{k}" for kind in kinds for k in subset_sizes(n)] + [f"maj@{n}"]
    return ["acc", "prompts", "samples", *(more if n > 1 else [])]


def subset_sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, and n itself.

    >>> subset_sizes(12)
    [2, 4, 8, 12]
    """
    sizes = []
    k = 2
    while k < n:
        sizes.append(k)
        k *= 2
    return [*sizes, n]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n samples, chosen without replacement, contain a correct one. Unbiased estimator
    of Chen et al. 2021, in exact integer arithmetic. Requires 1 <= k <= n and 0 <= correct <= n."""
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    total = comb(n, k)
    return (total - comb(n - correct, k)) / total


def best_at_k(values: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of the values, chosen without replacement; 1 <= k <= len(values)."""
    return _expected_last(sorted(values), k)


def worst_at_k(values: Sequence[float], k: int) -> float:
    """Return the expected minimum of k of the values, chosen without replacement; 1 <= k <= len(values)."""
    return -best_at_k([-value for value in values], k)


def selected_at_k(ranks: Sequence[float], values: Sequence[float], k: int) -> float:
    """Return the expected value of the highest ranked of k samples, chosen without replacement; 1 <= k <= len(values).

    Equal ranks: the expectation under a random tie break.

    >>> selected_at_k([0.1, 0.9, 0.5], [0.0, 0.0, 1.0], 2)
    0.3333333333333333
    """
    tied: dict[float, list[float]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        tied[rank].append(value)
    # A random tie break makes samples of equal rank interchangeable, so each counts with their mean.
    return _expected_last([sum(tied[rank]) / len(tied[rank]) for rank in sorted(ranks)], k)


def _expected_last(ordered: Sequence[float], k: int) -> float:
    """Return the expectation of the last of k of the ordered values, chosen without replacement."""
    n = len(ordered)
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and {n}, not {k}")
    # Value i (from 0) is the last one of the subsets whose other k - 1 members come before it.
    return sum(value * (comb(i, k - 1) / comb(n, k)) for i, value in enumerate(ordered))


def majority(group: Sequence[Scored]) -> float:
    """Return the score of the most frequent vote (the answer that a sample gives) among one prompt's samples.

    Samples without a vote abstain; if all abstain, the mean of their scores is returned. A tie gives the mean over the
    tied votes, which is the expectation under a random tie break. If samples with the same vote have different scores,
    the vote has their mean.
    """
    votes: dict[str | None, list[float]] = defaultdict(list)
    for sample in group:
        votes[sample.vote or None].append(sample.value)
    if len(votes) > 1:
        votes.pop(None, None)
    most = max(len(values) for values in votes.values())
    winners = [sum(values) / len(values) for values in votes.values() if len(values) == most]
    return sum(winners) / len(winners)
