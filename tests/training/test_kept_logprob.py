"""Log-probs among the tokens that the sampling filters kept, against loops over Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.training.kept_logprob import kept_logprob
from megarl.training.logprob import VocabularyShard

NONE: list[int] = []


@pytest.mark.parametrize(
    ("kept", "target", "logp", "gradient"),
    [
        (NONE, 1, -1.440190, [-0.643914, 0.763117, -0.087144, -0.032059]),
        ([0, 1], 1, -1.313262, [-0.731059, 0.731059, 0.0, 0.0]),
        ([0, 1], 2, -2.407606, [-0.665241, -0.244728, 0.909969, 0.0]),  # a target is always kept
    ],
)
def test_numbers_worked_out_by_hand(kept, target, logp, gradient):
    hidden, weight = (
        torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True),
        torch.eye(4).double(),
    )
    rows = torch.tensor([[*kept, -1]])
    found, none = kept_logprob(hidden, weight, torch.tensor([target]), rows, VocabularyShard(0, 1.0, 10, None))
    assert not len(none)
    found.sum().backward()
    assert found.item() == pytest.approx(logp, abs=1e-6)
    assert hidden.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("chunk", "cap"), [(1, None), (4, 1.5), (100, None)])
def test_values_and_gradients_equal_the_oracle_for_any_chunk(chunk, cap):
    rng = torch.Generator().manual_seed(5)
    n, h, v, temperature = 9, 6, 23, 0.7
    hidden = torch.randn(n, h, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(v, h, generator=rng, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(n, v, generator=rng).argsort(1)
    counts, slots = [3, 0, 1, 5, 2, 4, 0, 5, 1], torch.randn(n, generator=rng, dtype=torch.float64)
    kept = torch.full((n, 5), -1)
    for row, count in enumerate(counts):
        kept[row, :count] = ids[row, :count]
    targets = torch.tensor([int(ids[row, max(counts[row] - 1, 0)]) for row in range(n)])
    targets[3] = ids[3, 9]  # not among the kept tokens
    shard = VocabularyShard(0, 1.0 / temperature, chunk, None, entropy=True, cap=cap)
    found, entropy = kept_logprob(hidden, weight, targets, kept, shard)
    (found * slots - entropy * slots.flip(0)).sum().backward()

    logits = hidden.detach() @ weight.detach().t()
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    z = (capped / temperature).tolist()
    slope = torch.zeros(n, v, dtype=torch.float64)
    for row, count in enumerate(counts):
        target = int(targets[row])
        allowed = set(ids[row, :count].tolist()) | {target} if count else set(range(v))
        total = sum(math.exp(z[row][token]) for token in allowed)
        assert found[row].item() == pytest.approx(z[row][target] - math.log(total), abs=1e-12)
        for token in allowed:
            slope[row, token] = slots[row] * ((token == target) - math.exp(z[row][token]) / total) / temperature
        log_z = math.log(sum(math.exp(x) for x in z[row]))
        mean = sum(math.exp(x - log_z) * (log_z - x) for x in z[row])
        assert entropy[row].item() == pytest.approx(mean, abs=1e-12)
        for token, x in enumerate(z[row]):
            slope[row, token] += slots[n - 1 - row] * math.exp(x - log_z) * (x - log_z + mean) / temperature
    slope *= 1 if cap is None else 1 - torch.tanh(logits / cap) ** 2
    torch.testing.assert_close(hidden.grad, slope @ weight.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(weight.grad, slope.t() @ hidden.detach(), rtol=1e-11, atol=1e-11)
