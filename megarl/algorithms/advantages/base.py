"""What all estimators share: the registry, and the form of the answer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megarl.algorithms.registry import Registry

ADVANTAGES = Registry("advantage estimator", "algorithm.advantage.name")


class Estimate(NamedTuple):
    """Answer of an estimator, both in the shape of the mask, zero where it hides.

    Attributes:
        advantages: weight of each token's log-prob gradient.
        returns: what a critic would regress on; equal to `advantages` for estimators without a critic.
    """

    advantages: Tensor
    returns: Tensor
