"""A teacher's likeliest tokens, and what a policy gives to them, against a float64 log-softmax, whole and in shards."""

from functools import partial

import pytest
import torch

from megarl.algorithms.divergences import EMPTY, divergence, reverse_kl, terms
from megarl.algorithms.kl import KL
from megarl.config.algorithm import DistillationConfig
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from megarl.system.comm import WorkerGroup
from megarl.system.metrics import Metrics
from megarl.training.engine import TeacherTargets
from megarl.training.heads import LogProbs
from megarl.training.logprob import VocabularyShard
from megarl.training.topk import TopTokens, token_logprobs
from megarl.training.vocabulary import TeacherHead, vocabulary_divergence
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


def _capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _oracle(hidden, weight, ids, temperature, cap=None):
    """Log-probs of the tokens, and of all others together."""
    logq = torch.log_softmax(_capped(hidden.double() @ weight.double().t(), cap) / temperature, -1)
    others = torch.ones_like(logq, dtype=torch.bool).scatter(1, ids, False)
    rest = logq.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logq.gather(1, ids), rest], 1)


def _loss(logq):
    return (logq * torch.linspace(-1, 1, logq.numel(), dtype=logq.dtype).view_as(logq).sin()).sum()


@pytest.mark.parametrize(("chunk", "cap"), [(1, None), (8, 3.0), (1000, None)])
def test_values_and_gradients_equal_the_oracle_for_any_chunk(chunk, cap):
    hidden, weight, ids = _inputs()
    expected = _oracle(hidden, weight, ids, 0.7, cap)
    _loss(expected).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    found = token_logprobs(hidden, weight, ids, VocabularyShard(0, 1 / 0.7, chunk, None, cap=cap))
    _loss(found).backward()
    for a, b in zip((found, hidden.grad, weight.grad), (expected, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_all_tokens_leave_an_empty_rest_without_gradient():
    hidden, weight, _ = _inputs()
    every = torch.arange(V).expand(N, V)
    found = token_logprobs(hidden, weight, every, VocabularyShard(0, 1.0, 8, None))
    assert (found[:, -1] == EMPTY).all()
    found[:, -1].sum().backward()
    assert (weight.grad == 0).all()


def test_no_token_gives_no_gradient():
    weight = torch.randn(V, H, requires_grad=True)
    hidden = torch.zeros(0, H, requires_grad=True)
    found = token_logprobs(hidden, weight, torch.zeros(0, K, dtype=torch.int64), VocabularyShard(0, 1.0, 8, None))
    found.sum().backward()
    assert found.shape == (0, K + 1)
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize(
    ("name", "beta", "cap", "of_teacher"),
    [("forward_kl", None, None, None), ("reverse_kl", None, 3.0, 2.0), ("jsd", 0.3, None, 2.0)],
)
def test_a_divergence_over_the_vocabulary_equals_the_oracle(name, beta, cap, of_teacher, chunk):
    hidden, weight, _ = _inputs()
    rng = torch.Generator().manual_seed(4)
    states, head = (torch.randn(rows, 9, generator=rng, dtype=torch.float64) for rows in (N, V))
    chosen = KL.choose(DistillationConfig(estimator=name, **({} if beta is None else {"beta": beta})))
    p = (_capped(states @ head.t(), of_teacher) / 0.7).log_softmax(1)
    q = (_capped(hidden @ weight.t(), cap) / 0.7).log_softmax(1)
    if beta is None:
        expected = (p.exp() * (p - q) if name == "forward_kl" else q.exp() * (q - p)).sum(1)
    else:
        m = beta * p.exp() + (1 - beta) * q.exp()
        expected = (beta * p.exp() * (p - m.log()) + (1 - beta) * q.exp() * (q - m.log())).sum(1)
    _loss(expected).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    teacher = TeacherHead(head, partial(terms, chosen), of_teacher)
    same = {"temperature": 0.7, "chunk_tokens": chunk, "group": WorkerGroup.alone(), "cap": cap}
    found = vocabulary_divergence(hidden, weight, states, teacher, **same)
    _loss(found).backward()
    for a, b in zip((found, hidden.grad, weight.grad), (expected, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def _of_the_vocabulary(own: slice) -> float:
    """Largest error of a divergence over the vocabulary and its gradients, where this rank holds `own`."""
    hidden, whole, _ = _inputs()
    states, head = hidden.detach().flip(0), whole.detach().flip(0)
    mine = whole.detach()[own].clone().requires_grad_()
    same = {"temperature": 0.9, "chunk_tokens": 8, "cap": 3.0}
    found = vocabulary_divergence(hidden, mine, states, TeacherHead(head[own], reverse_kl), **same, group=world())
    _loss(found).backward()
    grad = world().all_reduce(hidden.grad.clone())
    hidden.grad = None
    expected = vocabulary_divergence(
        hidden, whole, states, TeacherHead(head, reverse_kl), **same, group=WorkerGroup.alone()
    )
    _loss(expected).backward()
    pairs = (found, expected), (grad, hidden.grad), (mine.grad, whole.grad[own])
    return max(float((a - b).abs().max()) for a, b in pairs if len(a))


def _sharded() -> dict[str, float]:
    group, errors = world(), {}
    for rows, cap in ((-(-V // group.size), 3.0), (V, None)):  # with V the last rank holds no row at all
        hidden, whole, ids = _inputs()
        own = slice(min(group.rank * rows, V), min((group.rank + 1) * rows, V))
        mine = whole.detach()[own].clone().requires_grad_()
        found = token_logprobs(hidden, mine, ids, VocabularyShard(own.start, 1 / 0.9, 8, group, cap=cap))
        _loss(found).backward()
        grad = group.all_reduce(hidden.grad.clone())
        hidden.grad = None
        expected = _oracle(hidden, whole, ids, 0.9, cap)
        _loss(expected).backward()
        errors[f"{rows}, of the vocabulary"] = _of_the_vocabulary(own)
        top = TopTokens(K, V - 4, LogProbs(0.9, 8, group, entropy=False))
        best = top._of(hidden.detach().float(), mine.detach().float(), own.start, cap)
        logp = torch.log_softmax(_capped(hidden.detach() @ whole.detach().t(), cap) / 0.9, 1)
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
        assert (best[:, K + 1 :] - _oracle(hidden, whole, order, 0.9, cap)).abs().max() < 1e-5
    return errors


def _of_an_engine() -> torch.Tensor:
    """All tokens of a small engine, which are fewer than it is asked for."""
    batch, engine = cases.make_batch(3, longest=9), cases.make_engine(frozen=True, layers=1)
    return engine.top_tokens(batch, cases.VOCAB + 7, cases.VOCAB - 2).values


def _kept_of_states() -> list[str]:
    """The dtypes of hidden states of a bf16 teacher: of all micro-batches together, and in the end."""
    batch, engine = cases.make_batch(3, longest=9), cases.make_engine(frozen=True, layers=1, dtype=torch.bfloat16)
    ordered, kept = engine._in_batch_order, []
    engine._in_batch_order = lambda rows, *more: kept.append(rows.dtype) or ordered(rows, *more)
    found = engine.hidden_states(batch).values
    assert found.shape == (int(batch["response_ids"].lengths.sum()), engine.model_config.hidden_size)
    return [str(dtype) for dtype in (*kept, found.dtype)]


def _taught_step(parallel: ParallelConfig, budget: int, topk: int | None = 6) -> dict[str, float]:
    """Metrics of one optimizer step towards a teacher, both under this layout; `topk` None: over the vocabulary."""
    layout, engine = fresh_layout(parallel), EngineConfig(micro_batch_tokens=budget, logits_chunk_tokens=16)
    teacher = cases.make_engine("dense", parallel, layout=layout, engine=engine, layers=2, seed=5, frozen=True)
    policy = cases.make_engine("dense", parallel, layout=layout, engine=engine, layers=2)
    batch = cases.split_over(cases.make_batch(7), layout.dp_rank, layout.dp_size)
    chosen, targets = KL.choose(DistillationConfig(estimator="jsd")), TeacherTargets("teacher_topk")
    if topk is None:
        batch.set("teacher_hidden", teacher.hidden_states(batch))
        policy.teacher_weight = teacher.chunks[-1].lm_head_weight if layout.is_last_stage else None
        targets = TeacherTargets("teacher_hidden", partial(terms, chosen))
    else:
        batch.set("teacher_topk", teacher.top_tokens(batch, topk, cases.VOCAB, 0.8))

    def loss(logp, entropy, found, micro):
        if topk is not None:
            found = divergence(chosen, micro["teacher_topk"].values[:, :, 1], found)
        value = (micro["loss_weights"].values.abs() * found).sum()
        metrics = Metrics()
        metrics.sum("loss", value.item())
        return value, metrics

    return policy.train_step(batch, loss, 0.8, targets=targets).result()


def _on_ranks() -> dict:
    """All that needs process groups: shards, layouts, and an engine of one rank."""
    found = {"errors": _sharded()}
    if world().size == 1:
        found["every"] = _of_an_engine()
        found["kept"] = _kept_of_states()
        found["steps"] = [[_taught_step(ParallelConfig(), 10_000, topk) for topk in (6, None, cases.VOCAB)]]
    else:
        found["steps"] = [[_taught_step(ParallelConfig(**sizes), 60, k) for k in (6, None)] for sizes in LAYOUTS]
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
def test_hidden_states_are_kept_in_the_dtype_of_the_model(ranks):
    assert ranks[1][0]["kept"] == ["torch.bfloat16"] * 2


@pytest.mark.procs
def test_vocabulary_shards_equal_the_whole(ranks):
    for found in (*ranks[1], *ranks[2]):
        assert max(found["errors"].values()) < 1e-11


@pytest.mark.procs
def test_a_step_towards_a_teacher_is_the_same_under_every_layout(ranks):
    """As in test_layouts: sums in another order cost a few units in the last place."""
    ((*wants, of_all_tokens),) = ranks[1][0]["steps"]
    assert wants[0]["loss"] > 0.01
    for key in ("loss", "actor/grad_norm"):
        assert wants[1][key] == pytest.approx(of_all_tokens[key], rel=5e-6), "the whole vocabulary is its top k"
        for found in ranks[2]:
            for sizes, steps in zip(LAYOUTS, found["steps"], strict=True):
                for step, want in zip(steps, wants, strict=True):
                    assert step[key] == pytest.approx(want[key], rel=5e-6), (sizes, key)
