"""The distribution of sample lengths in tokens: log-normal, approximately as for language models' responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from megarl.system.errors import ConfigError

_EULER = 0.5772156649015329
_NORMAL = NormalDist()


def refuse_longer(mean: float, longest: int, where: str, allowed: str) -> None:
    """Refuse an assumed mean above the longest response; a mean of 0 stands for none.

    Raises:
        ConfigError: the mean is above `longest`; the error names `where` it was set, and what is `allowed`.
    """
    if mean > longest:
        raise ConfigError(
            "the mean response cannot be longer than the longest one",
            where=where,
            found=f"{mean:g}",
            allowed=allowed,
        )


@dataclass(frozen=True)
class Lengths:
    """The distribution of response lengths: log-normal, capped at the longest length."""

    mean: float  # mean tokens of a response, before the cap at `longest`
    sigma: float  # standard deviation of the logarithm; 0: all responses have `mean` tokens
    longest: int  # maximum tokens per response

    def sample(self, seed: tuple[int, ...], groups: int, samples: int) -> list[list[int]]:
        """Return the sampled response lengths of `samples` samples in each of `groups` groups, determined by `seed`."""
        lengths = np.random.default_rng(seed).lognormal(self._mu, self.sigma, (groups, samples))
        return np.clip(np.rint(lengths), 1, self.longest).astype(int).tolist()

    @classmethod
    def of(cls, mean: float, longest_seen: float, samples: int, longest: int) -> Lengths:
        """Return the distribution with this mean in which the longest of `samples` has a mean of `longest_seen` tokens.

        The largest of n log-normal values is approximately where the distribution has e^-gamma / n above it.
        """
        z = _largest_of(samples)
        spread = math.log(max(1.0, longest_seen / mean))
        # Solve log(max / mean) = sigma z - sigma^2 / 2 for sigma: the smaller root, or sigma = z if there is none.
        sigma = z - math.sqrt(max(0.0, z * z - 2 * spread))
        return cls(mean, sigma, longest)

    @property
    def _mu(self) -> float:
        return math.log(self.mean) - self.sigma**2 / 2

    @cached_property
    def expected(self) -> float:
        """Mean length of a response in tokens, capped at `longest`."""
        return self._moment(1)

    @cached_property
    def variation(self) -> float:
        """Standard deviation of response lengths, capped at `longest`, divided by their mean."""
        return math.sqrt(max(0.0, self._moment(2) / self.expected**2 - 1))

    @property
    def variance(self) -> float:
        """Variance of response lengths in tokens squared, capped at `longest`."""
        return (self.variation * self.expected) ** 2

    def above(self, tokens: float) -> float:
        """Return the share of responses with more than `tokens` tokens."""
        if tokens >= self.longest:
            return 0.0
        if not self.sigma:
            return float(tokens < self.mean)
        return 1.0 if tokens <= 0 else 1 - _NORMAL.cdf((math.log(tokens) - self._mu) / self.sigma)

    def longest_of(self, samples: float) -> float:
        """Return the approximate expected length of the longest among `samples` responses."""
        if samples < 2:
            return self.expected
        return min(self.longest, math.exp(self._mu + self.sigma * _largest_of(samples)))

    def _moment(self, power: int) -> float:
        """Return E[min(X, L)^p] of a log-normal length X that is capped at L, the longest length; p = `power`:

        e^(p mu + p^2 sigma^2 / 2) Phi(z - p sigma) + L^p (1 - Phi(z)), z = (log L - mu) / sigma.
        """
        if not self.sigma:
            return min(self.mean, self.longest) ** power
        z = (math.log(self.longest) - self._mu) / self.sigma
        below = math.exp(power * self._mu + (power * self.sigma) ** 2 / 2) * _NORMAL.cdf(z - power * self.sigma)
        return below + self.longest**power * (1 - _NORMAL.cdf(z))


def _largest_of(samples: float) -> float:
    """Return the value that a standard normal variable exceeds with probability e^-gamma / n."""
    return _NORMAL.inv_cdf(1 - math.exp(-_EULER) / max(samples, 2))
