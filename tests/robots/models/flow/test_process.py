"""The denoising process: likelihoods of chains by brute force, and the marginals of its ODE and its SDE."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from megarl.robots.models.flow.process import Denoising, example_times, normal_noise


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_log_prob_of_a_chain_is_the_product_of_its_steps(steps: int) -> None:
    """Number by number, in the words of pi_RL's code: weights of the estimated actions and of the estimated noise."""
    level, chain, velocities = 0.7, drawn(2, steps + 1, 3, 2), drawn(2, steps, 3, 2)
    process = Denoising(steps, level)
    found = process.log_probs(chain, velocities)
    times = [1 - k / steps for k in range(steps)]
    for place in torch.cartesian_prod(*(torch.arange(n) for n in velocities.shape)).tolist():
        call, step, action, number = place
        t, d = times[step], 1 / steps
        x, v = chain[call, step, action, number], velocities[call, step, action, number]
        rest = 1 - (times[1] if steps > 1 else 0.0) if t == 1 else 1 - t
        s = level * math.sqrt(t / rest)
        actions, noise = x - v * t, x + v * (1 - t)
        mean = actions * (1 - (t - d)) + noise * (t - d - s**2 * d / (2 * t))
        wanted = Normal(mean, s * math.sqrt(d))
        next_point = chain[call, step + 1, action, number]
        assert float(found[tuple(place)]) == pytest.approx(float(wanted.log_prob(next_point)), abs=1e-12)
        assert float(process.entropies(found)[tuple(place)]) == pytest.approx(float(wanted.entropy()), abs=1e-12)


@pytest.mark.parametrize("level", [0.0, 0.8])
def test_ode_and_sde_end_in_the_distribution_of_the_actions(level: float) -> None:
    """Actions are N(m, s^2), for which the velocity is known. 20,000 chains of 200 steps."""
    m, s, steps, count = 0.6, 0.3, 200, 20_000
    process, generator = Denoising(steps, level), torch.Generator().manual_seed(3)
    normal = lambda: torch.randn(count, generator=generator, dtype=torch.float64)  # noqa: E731
    x = normal()
    for step, t in enumerate(process.times):
        variance = t**2 + ((1 - t) * s) ** 2  # of x_t, whose mean is (1 - t) m
        off = (x - (1 - t) * m) / variance
        velocity = t * off - (m + (1 - t) * s**2 * off)  # E[e | x] - E[a | x]
        x = process.mean(x, velocity, step, stochastic=level > 0)
        x = x + process.deviation(step) * normal() if level else x
    # four standard errors of the mean and of the deviation, and the error of steps of 1 / 200: up to 1% of s
    assert abs(float(x.mean()) - m) < 4 * s / math.sqrt(count) + 0.01 * s
    assert abs(float(x.std()) - s) < 4 * s / math.sqrt(2 * count) + 0.01 * s


def test_noise_is_normal_and_depends_on_its_own_seed_only() -> None:
    noise = normal_noise(torch.arange(2000), 10)
    assert torch.equal(normal_noise(torch.tensor([7, 3]), 10), noise[[7, 3]])
    share = [float((noise.abs() < bound).double().mean()) for bound in (0.5, 1.0, 2.0)]
    expected = [math.erf(bound / math.sqrt(2)) for bound in (0.5, 1.0, 2.0)]
    assert share == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(20_000))
    assert float(noise.mean()) == pytest.approx(0, abs=4 / math.sqrt(20_000))
    assert float((noise[:, 0] * noise[:, 1]).mean()) == pytest.approx(0, abs=4 / math.sqrt(2000))


def test_flow_times_are_drawn_as_pi0_draws_them() -> None:
    times = example_times(torch.arange(4000)).double()
    assert 0.001 <= float(times.min()) < float(times.max()) <= 1
    for bound in (0.2, 0.5, 0.8):
        share = ((bound - 0.001) / 0.999) ** 1.5  # the distribution function of Beta(1.5, 1)
        assert float((times < bound).double().mean()) == pytest.approx(share, abs=4 * 0.5 / math.sqrt(4000))
