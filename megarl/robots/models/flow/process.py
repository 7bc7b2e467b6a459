"""The denoising process of a flow-matching policy, as an ODE, or as an SDE whose chains have a likelihood.

The flow time t goes from 1 (noise) to 0 (actions), as in pi0: x_t = t e + (1 - t) a with noise e ~ N(0, I), and the
expert predicts the velocity v(x_t, t) = E[e - a | x_t]. In S steps of length d = 1 / S, from x_1 = e to x_0:

    ODE      x' = x - d v
    SDE      x' = x - d v - s^2 d / (2 t) (x + (1 - t) v) + s sqrt(d) z,     z ~ N(0, I),    s = c sqrt(t / (1 - t))

x + (1 - t) v estimates the noise e, and -e / t is the score of x_t, so the SDE has the marginals of the ODE for small d
(Flow-SDE of pi_RL, Chen et al. 2025, arXiv 2510.25889; Flow-GRPO, Liu et al. 2025, arXiv 2505.05470). At t = 1, s has
1 - t of the second step, as there. `noise` is c.

Each step of the SDE is a Gaussian whose mean the expert predicts and whose deviation is known. So the log-likelihood of
a chain x_1 -> ... -> x_0 given x_1 is a sum over steps, actions and numbers; x_1 does not depend on the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.noise import uniforms

#: pi0 draws the flow time of an example as SHIFT + SCALE * Beta(ALPHA, 1).
_ALPHA, _SCALE, _SHIFT = 1.5, 0.999, 0.001


@dataclass(frozen=True)
class Denoising:
    """The denoising process from noise to actions, as an SDE or an ODE. A chunk of actions is a tensor [..., K, D]."""

    steps: int  # number of denoising steps, S
    noise: float  # factor c of the noise that a step of the SDE adds

    @property
    def times(self) -> list[float]:
        """The flow time at which each step begins, from 1 (noise) towards 0 (actions)."""
        return [1 - step / self.steps for step in range(self.steps)]

    def deviation(self, step: int) -> float:
        """Return the standard deviation of the noise that a step of the SDE adds, s sqrt(d)."""
        return self._level(step) * self.steps**-0.5

    def _level(self, step: int) -> float:
        time = 1 - step / self.steps
        rest = 1 - time if step else (1 / self.steps if self.steps > 1 else 1.0)
        return self.noise * math.sqrt(time / rest)

    def mean(self, noisy: Tensor, velocity: Tensor, step: int, *, stochastic: bool) -> Tensor:
        """Return the mean of a chain's next point under the SDE; if not `stochastic`, the next point of the ODE.

        Args:
            noisy: the chain's present point.
            velocity: the expert's velocity at this point.
            step: number of the step, from 0.
        """
        time, length = 1 - step / self.steps, 1 / self.steps
        moved = noisy - length * velocity
        if not stochastic:
            return moved
        drift = self._level(step) ** 2 * length / (2 * time)
        return moved - drift * (noisy + (1 - time) * velocity)

    def log_probs(self, chain: Tensor, velocities: Tensor) -> Tensor:
        """Return the log-density under the SDE of each number of the points that the steps produced.

        Args:
            chain: [B, S + 1, K, D], the points of chains, noise first.
            velocities: [B, S, K, D], the expert's velocities at all points but the last.

        Returns:
            [B, S, K, D], in the dtype of the chain.
        """
        parts = []
        for step in range(self.steps):
            deviation = self.deviation(step)
            mean = self.mean(chain[:, step], velocities[:, step].to(chain.dtype), step, stochastic=True)
            scaled = (chain[:, step + 1] - mean) / deviation
            parts.append(-0.5 * scaled.square() - math.log(deviation) - 0.5 * math.log(2 * math.pi))
        return torch.stack(parts, 1)

    def entropies(self, like: Tensor) -> Tensor:
        """Return the entropy of each number that a step of the SDE samples, in the shape [B, S, K, D] and dtype of
        `like`. It depends only on the step.
        """
        each = [math.log(self.deviation(step)) + 0.5 * math.log(2 * math.pi * math.e) for step in range(self.steps)]
        return like.new_tensor(each).view(1, -1, 1, 1).expand_as(like)


def normal_noise(seeds: Tensor, count: int) -> Tensor:
    """Return standard normal numbers, float32 [B, count]; row b depends only on `seeds[b]` (int64 [B])."""
    ids = torch.arange(2 * count, device=seeds.device)
    radius, angle = uniforms(seeds, torch.zeros_like(seeds), ids).chunk(2, 1)
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()  # Box-Muller transform (1958)


def example_times(seeds: Tensor) -> Tensor:
    """Return random flow times, float32 [B], from pi0's distribution for training; each depends only on its seed."""
    drawn = uniforms(seeds, torch.ones_like(seeds), torch.zeros(1, dtype=torch.int64, device=seeds.device))[:, 0]
    # The distribution function of Beta(alpha, 1) is x^alpha, so its inverse turns uniform numbers into Beta numbers.
    return _SHIFT + _SCALE * drawn ** (1 / _ALPHA)
