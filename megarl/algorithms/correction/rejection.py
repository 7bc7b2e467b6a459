"""Rejection of tokens and sequences too far from the policy that sampled them: rules on the ratio, and the veto."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.correction.ratios import LIMIT, Ratios

LEVELS = ("token", "sequence", "geometric", "seq_max")
STATS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Rule:
    """A rejection rule: a token or sequence is accepted if lower <= value <= upper.

    | stat | token | sequence | geometric | seq_max |
    |---|---|---|---|---|
    | k1 | rho | exp(sum log rho) | exp(mean log rho) | max rho |
    | k2 | 0.5 log^2 rho | sum | mean | max |
    | k3 | rho - 1 - log rho | sum | mean | max |

    `token` rejects single tokens, the other levels whole sequences.

    Source: k1, k2, k3 are the estimators of Schulman's "Approximating KL divergence" (2020).
    """

    level: str  # one of LEVELS
    stat: str = "k1"  # one of STATS
    lower: float | None = None  # None means 1 / upper for k1 of token, sequence and geometric, otherwise no lower bound
    upper: float | None = None  # None means no upper bound

    def __post_init__(self) -> None:
        if self.level not in LEVELS or self.stat not in STATS:
            raise ValueError(
                f"a rejection rule needs a level of {LEVELS} and a stat of {STATS}, not {self.level!r}, {self.stat!r}"
            )

    @property
    def name(self) -> str:
        """Name of the rule in metrics: its level and stat, such as `token_k1`."""
        return f"{self.level}_{self.stat}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest accepted value."""
        lower = self.lower
        if lower is None and self.stat == "k1" and self.level != "seq_max" and self.upper is not None:
            lower = 1 / self.upper
        return -math.inf if lower is None else lower, math.inf if self.upper is None else self.upper


def rule_value(rule: Rule, ratios: Ratios) -> Tensor:
    """Return the value that a rule bounds: [N] for level token, otherwise [B]; values of masked tokens are undefined.

    >>> import torch
    >>> r = Ratios.of(torch.log(torch.tensor([[0.5, 8.0]])), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    >>> [round(float(rule_value(Rule(level), r)), 4) for level in ("sequence", "geometric", "seq_max")]
    [4.0, 2.0, 8.0]
    """
    if rule.stat == "k1":
        if rule.level == "token":
            return ratios.rho
        if rule.level == "seq_max":
            return ratios.max_of(ratios.rho)
        log = ratios.total if rule.level == "sequence" else ratios.total / ratios.count.clamp(min=1)
        return log.clamp(-LIMIT, LIMIT).exp()
    distance = 0.5 * ratios.log.square() if rule.stat == "k2" else ratios.excess - ratios.log
    if rule.level == "token":
        return distance
    if rule.level == "seq_max":
        return ratios.max_of(distance)
    return ratios.rows.sum(distance) if rule.level == "sequence" else ratios.mean_of(distance)


def rejected_by(rule: Rule, ratios: Ratios) -> Tensor:
    """Return which valid tokens (bool [N], token rules) or rows with a valid token (bool [B], other rules) are
    rejected.

    A NaN ratio is rejected.
    """
    value, (lower, upper) = rule_value(rule, ratios), rule.bounds
    inside = (value >= lower).logical_and_(value <= upper)
    return inside.logical_not_().logical_and_(ratios.mask if rule.level == "token" else ratios.live)


def vetoed(ratios: Ratios, threshold: float) -> Tensor:
    """Return bool [B]: rows with a token whose ratio, not clamped, is below `threshold` (0: no veto)."""
    if threshold <= 0:
        return ratios.live.new_zeros(len(ratios.rows))
    return ratios.max_of(-ratios.raw) > -math.log(threshold)


def reject(ratios: Ratios, rules: Sequence[Rule], veto: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens that all rules and the veto accept, bool [N], and the number of tokens that each rule and the
    veto reject.
    """
    accepted, counts = ratios.mask, {}
    for rule in rules:
        outside = rejected_by(rule, ratios)
        if rule.level == "token":
            counts[rule.name] = outside.sum()
            accepted = accepted & ~outside
        else:
            counts[rule.name] = (outside * ratios.count).sum()
            accepted = accepted & ~ratios.rows.expand(outside)
    if veto > 0:
        outside = vetoed(ratios, veto)
        counts["veto"] = (outside * ratios.count).sum()
        accepted = accepted & ~ratios.rows.expand(outside)
    return accepted, counts
