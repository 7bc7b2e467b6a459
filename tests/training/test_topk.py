"""A teacher's likeliest tokens, and what a policy gives to them, against a float64 log-softmax, whole and in shards."""

import pytest
import torch

from megarl.algorithms.divergences import EMPTY, divergence
from megarl.algorithms.kl import KL
from megarl.config.algorithm import DistillationConfig
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from megarl.metrics import Metrics
from megarl.training.heads import LogProbs
from megarl.training.topk import TopTokens, token_logprobs
from tests.dist import fresh_layout, run_distributed, world
from tests.training import cases

N, H, V, K = 23, 16, 53, 5
LAYOUTS = ({"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {})


def _inputs(dtype=torch.float64):
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.rand(N, V, generator=rng).argsort(1)[:, :K]
    return hidden, weight, ids


def _oracle(hidden, weight, ids, temperature):
    """Log-probs of the tokens, and of all others together."""
    logq = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1)
    others = torch.ones_like(logq, dtype=torch.bool).scatter(1, ids, False)
    rest = logq.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logq.gather(1, ids), rest], 1)


def _loss(logq):
    return (logq * torch.linspace(-1, 1, logq.numel(), dtype=logq.dtype).view_as(logq).sin()).sum()


@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_values_and_gradients_equal_the_oracle_for_any_chunk(chunk):
    hidden, weight, ids = _inputs()
    expected = _oracle(hidden, weight, ids, 0.7)
    _loss(expected).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    found = token_logprobs(hidden, weight, ids, temperature=0.7, chunk_tokens=chunk)
    _loss(found).backward()
    for a, b in zip((found, hidden.grad, weight.grad), (expected, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_all_tokens_leave_an_empty_rest_without_gradient():
    hidden, weight, _ = _inputs()
    every = torch.arange(V).expand(N, V)
    found = token_logprobs(hidden, weight, every, chunk_tokens=8)
    assert (found[:, -1] == EMPTY).all()
    found[:, -1].sum().backward()
    assert (weight.grad == 0).all()


def test_no_token_gives_no_gradient():
    weight = torch.randn(V, H, requires_grad=True)
    hidden = torch.zeros(0, H, requires_grad=True)
    found = token_logprobs(hidden, weight, torch.zeros(0, K, dtype=torch.int64))
    found.sum().backward()
    assert found.shape == (0, K + 1)
    assert (weight.grad == 0).all()


def _sharded() -> dict[str, float]:
    group, errors = world(), {}
    for rows in (-(-V // group.size), V):  # with V the last rank holds no row at all
        hidden, whole, ids = _inputs()
        own = slice(min(group.rank * rows, V), min((group.rank + 1) * rows, V))
        mine = whole.detach()[own].clone().requires_grad_()
        found = token_logprobs(hidden, mine, ids, temperature=0.9, vocab_start=own.start, chunk_tokens=8, group=group)
        _loss(found).backward()
        grad = group.all_reduce(hidden.grad.clone())
        hidden.grad = None
        expected = _oracle(hidden, whole, ids, 0.9)
        _loss(expected).backward()
        top = TopTokens(K, V - 4, LogProbs(0.9, 8, group, entropy=False))
        best = top._of(hidden.detach().float(), mine.detach().float(), own.start)
        logp = torch.log_softmax(hidden.detach() @ whole.detach().t() / 0.9, 1)
        order = logp[:, : V - 4].topk(K, dim=1).indices
        errors[str(rows)] = max(
            float((a - b).abs().max())
            for a, b in (
                (found, expected),
                (grad, hidden.grad),
                *(((mine.grad, whole.grad[own]),) if len(mine) else ()),
            )
        )
        assert torch.equal(best[:, :K].long(), order)
        assert (best[:, K] == -1).all()
        assert (best[:, K + 1 :] - _oracle(hidden, whole, order, 0.9)).abs().max() < 1e-5
    return errors


def _of_an_engine() -> torch.Tensor:
    """All tokens of a small engine, which are fewer than it is asked for."""
    batch, engine = cases.make_batch(3, longest=9), cases.make_engine(frozen=True, layers=1)
    return engine.top_tokens(batch, cases.VOCAB + 7, cases.VOCAB - 2).values


def _taught_step(parallel: ParallelConfig, budget: int) -> dict[str, float]:
    """Metrics of one optimizer step towards a teacher, both under this layout."""
    layout, engine = fresh_layout(parallel), EngineConfig(micro_batch_tokens=budget, logits_chunk_tokens=16)
    teacher = cases.make_engine("dense", parallel, layout=layout, engine=engine, layers=2, seed=5, frozen=True)
    policy = cases.make_engine("dense", parallel, layout=layout, engine=engine, layers=2)
    batch = cases.split_over(cases.make_batch(7), layout.dp_rank, layout.dp_size)
    batch.set("teacher_topk", teacher.top_tokens(batch, 6, cases.VOCAB, 0.8))
    chosen = KL.choose(DistillationConfig(estimator="jsd"))

    def loss(logp, entropy, likely, micro):
        theirs = micro["teacher_topk"].values[:, :, 1].to(likely.device)
        value = (micro["loss_weights"].values.abs() * divergence(chosen, theirs, likely)).sum()
        metrics = Metrics()
        metrics.sum("loss", value.item())
        return value, metrics

    return policy.train_step(batch, loss, 0.8, taught="teacher_topk").result()


def _on_ranks() -> dict:
    """All that needs process groups: shards, layouts, and an engine of one rank."""
    found = {"errors": _sharded()}
    if world().size == 1:
        found |= {"every": _of_an_engine(), "steps": [_taught_step(ParallelConfig(), 10_000)]}
    else:
        found["steps"] = [_taught_step(ParallelConfig(**sizes), 60) for sizes in LAYOUTS]
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict]]:
    return {count: run_distributed(_on_ranks, count, 240) for count in (1, 2)}


@pytest.mark.procs
def test_more_tokens_than_the_policy_has_are_all_of_them(ranks):
    found = ranks[1][0]["every"]
    assert found.shape[1] == cases.VOCAB - 2 + 1
    ids, logp = found[:, :-1, 0], found[:, :, 1].double()
    assert torch.equal(ids.sort(1).values, torch.arange(cases.VOCAB - 2.0).expand(len(found), -1))
    assert (logp[:, :-1].diff(dim=1) <= 0).all()
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(len(found)).double(), rtol=1e-6, atol=0)
    for name in ("forward_kl", "reverse_kl", "jsd"):
        assert divergence(KL.choose(DistillationConfig(estimator=name)), logp, logp).abs().max() < 1e-15


@pytest.mark.procs
def test_vocabulary_shards_equal_the_whole(ranks):
    for found in (*ranks[1], *ranks[2]):
        assert max(found["errors"].values()) < 1e-11


@pytest.mark.procs
def test_a_step_towards_a_teacher_is_the_same_under_every_layout(ranks):
    """As in test_layouts: sums in another order cost a few units in the last place."""
    (want,) = ranks[1][0]["steps"]
    assert want["loss"] > 0.01
    for found in ranks[2]:
        for sizes, step in zip(LAYOUTS, found["steps"], strict=True):
            for key in ("loss", "actor/grad_norm"):
                assert step[key] == pytest.approx(want[key], rel=5e-6), (sizes, key)
