"""Sampling as a function of (seed, position, vocabulary id), against the distributions it claims to draw from."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.config.rollout import SamplingConfig
from megarl.models.layers.mesh import Axis
from megarl.models.noise import uniforms
from megarl.rollout.embedded.sampler import Sampler

DRAWS = 20_000


def make(vocab: int, stop: tuple[int, ...] = (), **kwargs) -> Sampler:
    config = SamplingConfig(**kwargs)
    return Sampler(
        config, list(stop), vocab_start=0, vocab_size=vocab, shard=vocab, tp=Axis(), device=torch.device("cpu")
    )


def draw(sampler: Sampler, logits: torch.Tensor, index: int = 0) -> torch.Tensor:
    rows = logits.expand(DRAWS, -1)
    return sampler(rows, torch.arange(DRAWS), torch.full((DRAWS,), index))[0]


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    from scipy.stats import chisquare

    assert counts[probs == 0].sum() == 0
    keep = probs > 0
    if keep.sum() == 1:
        return 1.0
    return float(chisquare(counts[keep], probs[keep] / probs[keep].sum() * counts.sum()).pvalue)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.randn(37, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(draw(make(37, temperature=temperature), logits), minlength=37)
    assert chi_square_p(counts, torch.softmax(logits.double() / temperature, -1)) > 1e-3


def test_draws_of_neighbouring_positions_are_independent():
    logits = torch.zeros(5)
    sampler = make(5)
    pairs = draw(sampler, logits, 3) * 5 + draw(sampler, logits, 4)
    assert chi_square_p(torch.bincount(pairs, minlength=25), torch.full((25,), 1 / 25)) > 1e-3


def test_uniforms_are_uniform_and_uncorrelated():
    u = uniforms(torch.arange(200), torch.zeros(200, dtype=torch.int64), torch.arange(500)).double()
    assert u.min() > 0
    assert u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=0.004)
    assert u.var().item() == pytest.approx(1 / 12, rel=0.02)
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.015


def test_large_vocabularies_are_drawn_evenly():
    vocab = 150_000
    tokens = make(vocab)(torch.zeros(120, vocab), torch.arange(120) << 40, torch.zeros(120, dtype=torch.int64))[0]
    assert tokens.double().mean().item() == pytest.approx(vocab / 2, rel=0.15)
    assert len(tokens.unique()) > 115


def test_top_k_keeps_the_k_likeliest():
    logits = torch.randn(30, generator=torch.Generator().manual_seed(2))
    counts = torch.bincount(draw(make(30, top_k=4), logits), minlength=30)
    probs = torch.softmax(logits.double(), -1)
    probs[probs < probs.topk(4).values[-1]] = 0
    assert chi_square_p(counts, probs) > 1e-3


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.95])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p):
    logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(draw(make(30, top_p=top_p), logits), minlength=30)
    probs, order = torch.softmax(logits.double(), -1).sort(descending=True)
    size = int((probs.cumsum(0) < top_p).sum()) + 1
    expected = torch.zeros(30, dtype=torch.float64)
    expected[order[:size]] = probs[:size]
    assert chi_square_p(counts, expected) > 1e-3


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 4},
        {"top_p": 0.7},
        {"top_k": 9, "top_p": 0.7, "temperature": 0.6},
        {"min_p": 0.3},
        {"min_p": 0.6, "top_k": 9, "top_p": 0.9, "temperature": 1.5},
    ],
)
def test_log_probs_of_the_distribution_that_tokens_are_sampled_from(filters):
    """A softmax over what the filters leave, by loops; the tokens are the same with either kind of log-prob."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(4)).double()
    seeds, index = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    plain = make(30, **filters)(logits.expand(500, -1), seeds, index)
    tokens, logp = make(30, logprobs="processed", **filters)(logits.expand(500, -1), seeds, index)
    assert torch.equal(tokens, plain[0])
    z = (logits / filters.get("temperature", 1.0)).tolist()
    ranked = sorted(range(30), key=lambda v: -z[v])[: filters.get("top_k", 30)]
    mass, kept = sum(math.exp(z[v]) for v in ranked), []
    for v in ranked:
        if sum(math.exp(z[u]) for u in kept) / mass < filters.get("top_p", 1.0):
            kept.append(v)
    kept = [v for v in kept if math.exp(z[v] - z[kept[0]]) >= filters.get("min_p", 0.0)]
    total = math.log(sum(math.exp(z[v]) for v in kept))
    assert set(tokens.tolist()) == set(kept)
    assert logp.tolist() == pytest.approx([z[v] - total for v in tokens.tolist()], abs=1e-5)
    assert bool((logp > plain[1]).all()), "what is left out makes the rest likelier"
    if "top_k" in filters:
        recorded = make(30, **filters).sample_kept(logits.expand(500, -1), seeds, index)
        assert torch.equal(recorded[0], tokens)
        torch.testing.assert_close(recorded[1], logp)
        assert {tuple(sorted(set(row) - {-1})) for row in recorded[2].tolist()} == {tuple(sorted(kept))}


def test_top_k_bounds_the_record_of_tokens_that_tie():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    tokens, logp, kept = make(4, top_k=2).sample_kept(logits.expand(50, -1), torch.arange(50), torch.zeros(50).long())
    assert kept.shape == (50, 2)
    assert bool((kept == tokens[:, None]).any(1).all())
    assert logp.tolist() == pytest.approx([-math.log(2)] * 50)


def test_top_p_counts_the_mass_after_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the top three, 4/9 and 3/9 reach 0.7 together; of all four they would, too, but 0.4 + 0.3 < 0.75.
    kept = draw(make(4, top_k=3, top_p=0.75), logits).unique().tolist()
    assert kept == [0, 1]


def test_logprobs_are_those_of_the_full_distribution():
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(4))
    tokens, logprobs = make(30, temperature=0.5, top_k=2)(logits, torch.arange(8), torch.zeros(8, dtype=torch.int64))
    expected = torch.log_softmax(logits / 0.5, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_greedy_takes_the_maximum_at_temperature_one():
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(5))
    tokens, logprobs = make(30, temperature=0.0)(logits, torch.arange(8), torch.zeros(8, dtype=torch.int64))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))


def test_stop_tokens_cannot_be_drawn_early_and_can_later():
    logits = torch.zeros(6)
    sampler = make(6, stop=(1, 4), min_new_tokens=2)
    assert set(draw(sampler, logits, 1).unique().tolist()) == {0, 2, 3, 5}
    assert set(draw(sampler, logits, 2).unique().tolist()) == set(range(6))
