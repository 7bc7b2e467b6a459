"""A teacher's likeliest tokens, and what a policy gives to them, against a float64 log-softmax, whole and in shards."""

import pytest
import torch

from megarl.algorithms.topk import forward_kl_topk
from megarl.training.heads import LogProbs
from megarl.training.topk import TopTokens, soft_logprob
from tests.dist import run_distributed, world
from tests.training import cases

N, H, V, K = 23, 16, 53, 5


def _inputs(dtype=torch.float64):
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.rand(N, V, generator=rng).argsort(1)[:, :K]
    shares = torch.softmax(torch.randn(N, K + 1, generator=rng, dtype=torch.float64), 1)[:, :K]
    return hidden, weight, ids, shares


def _oracle(hidden, weight, ids, shares, temperature, floor):
    logq = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1).gather(1, ids)
    cross = (shares * (logq if floor is None else logq.clamp(min=floor))).sum(1)
    return cross, logq.exp().sum(1)


def _loss(cross):
    return (cross * torch.linspace(-1, 1, len(cross), dtype=cross.dtype)).sum()


@pytest.mark.parametrize("chunk", [1, 8, 1000])
@pytest.mark.parametrize(("temperature", "floor"), [(1.0, None), (0.7, -6.0)])
def test_values_and_gradients_equal_the_oracle_for_any_chunk(chunk, temperature, floor):
    hidden, weight, ids, shares = _inputs()
    expected = _oracle(hidden, weight, ids, shares, temperature, floor)
    _loss(expected[0]).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    found = soft_logprob(hidden, weight, ids, shares, temperature=temperature, chunk_tokens=chunk, floor=floor)
    assert not found[1].requires_grad
    _loss(found[0]).backward()
    for a, b in zip((*found, hidden.grad, weight.grad), (*expected, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    if floor is not None:
        assert (torch.log_softmax(hidden @ weight.t() / temperature, 1).gather(1, ids) < floor).any()


def test_gradcheck():
    hidden, weight, ids, shares = _inputs()
    few = hidden.detach()[:4].requires_grad_()
    torch.autograd.gradcheck(
        lambda h, w: soft_logprob(h, w, ids[:4], shares[:4], temperature=1.3, chunk_tokens=3)[0], (few, weight)
    )


def test_no_token_gives_no_gradient():
    weight = torch.randn(V, H, requires_grad=True)
    hidden = torch.zeros(0, H, requires_grad=True)
    cross, mass = soft_logprob(hidden, weight, torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K))
    cross.sum().backward()
    assert len(mass) == 0
    assert (weight.grad == 0).all()


def _sharded() -> dict[str, float]:
    group, errors = world(), {}
    for rows in (-(-V // group.size), V):  # with V the last rank holds no row at all
        hidden, whole, ids, shares = _inputs()
        own = slice(min(group.rank * rows, V), min((group.rank + 1) * rows, V))
        mine = whole.detach()[own].clone().requires_grad_()
        found = soft_logprob(
            hidden, mine, ids, shares, temperature=0.9, vocab_start=own.start, chunk_tokens=8, floor=-6.0, group=group
        )
        _loss(found[0]).backward()
        grad = group.all_reduce(hidden.grad.clone())
        hidden.grad = None
        expected = _oracle(hidden, whole, ids, shares, 0.9, -6.0)
        _loss(expected[0]).backward()
        top = TopTokens(K, V - 4, LogProbs(0.9, 8, group, entropy=False))
        best = top._of(hidden.detach().float(), mine.detach().float(), own.start)
        logp = torch.log_softmax(hidden.detach() @ whole.detach().t() / 0.9, 1)
        values, order = logp[:, : V - 4].topk(K, dim=1)
        errors[str(rows)] = max(
            float((a - b).abs().max())
            for a, b in (
                *zip(found, expected, strict=True),
                (grad, hidden.grad),
                *(((mine.grad, whole.grad[own]),) if len(mine) else ()),
            )
        )
        assert torch.equal(best[:, :K].long(), order)
        assert (best[:, K:] - values).abs().max() < 1e-5
    return errors


def _of_an_engine() -> torch.Tensor:
    batch, engine = cases.make_batch(3, longest=9), cases.make_engine(frozen=True)
    return engine.top_tokens(batch, cases.VOCAB + 7, cases.VOCAB - 2).values


@pytest.mark.procs
def test_more_tokens_than_the_policy_has_are_all_of_them():
    (found,) = run_distributed(_of_an_engine, 1, 120)
    assert found.shape[1] == cases.VOCAB - 2
    assert torch.equal(found[:, :, 0].sort(1).values, torch.arange(cases.VOCAB - 2.0).expand(len(found), -1))
    logp = found[:, :, 1].double()
    assert (logp.diff(dim=1) <= 0).all()
    assert logp.exp().sum(1).max() < 1
    same = forward_kl_topk(found, (logp.exp() * logp).sum(1), topk=9, log_prob_min_clamp=None)
    assert same.max() < 1e-6


@pytest.mark.procs
@pytest.mark.parametrize("ranks", [1, 2])
def test_vocabulary_shards_equal_the_whole(ranks):
    for errors in run_distributed(_sharded, ranks, 120):
        assert max(errors.values()) < 1e-11
