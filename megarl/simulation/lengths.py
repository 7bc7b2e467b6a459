"""How many tokens samples have: log-normal, as responses of language models roughly are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_EULER = 0.5772156649015329
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Tokens of a response, log-normal and cut off.

    Attributes:
        mean: tokens, if none were cut off.
        sigma: standard deviation of the logarithm.
        longest: tokens of a response, at most.
    """

    mean: float
    sigma: float
    longest: int

    def draw(self, seed: tuple[int, ...], groups: int, samples: int) -> list[list[int]]:
        """Tokens of the samples of so many groups, which follow from the seed."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        found = np.random.default_rng(seed).lognormal(mu, self.sigma, (groups, samples))
        return np.clip(np.rint(found), 1, self.longest).astype(int).tolist()

    @classmethod
    def of(cls, mean: float, longest_seen: float, samples: int, longest: int) -> Lengths:
        """The lengths with this mean, and this mean of the longest of `samples`.

        The largest of n log-normal values lies about where the distribution has e^-gamma / n above it.
        """
        z = _NORMAL.inv_cdf(1 - math.exp(-_EULER) / max(samples, 2))
        spread = math.log(max(1.0, longest_seen / mean))
        # log(max / mean) = sigma z - sigma^2 / 2: the smaller root, or the vertex where no sigma has it
        sigma = z - math.sqrt(max(0.0, z * z - 2 * spread))
        return cls(mean, sigma, longest)
