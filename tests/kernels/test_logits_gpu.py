"""The Triton kernels of the head against float64: on a GPU as they are, elsewhere in Triton's interpreter.

make triton-test     # where Triton is not installed
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.nn.functional as F

from megarl.benchmarks import logits as benchmark
from megarl.training import logprob
from megarl.training.logprob import linear_logprob
from tests.dist import run_distributed, world

if not torch.cuda.is_available():
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
    elif os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed: make triton-test")

from megarl.kernels import logits_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 8


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The way of a GPU, whose products of bf16 are not rounded."""
    pretend(monkeypatch.setattr)


def pretend(replace):
    wide = lambda a, b: torch.mm(a.float(), b.float())  # noqa: E731
    replace(logprob, "_adds_wide", lambda hidden: True)
    replace(logprob, "wide_product", wide)
    replace(logprob, "head_logits", lambda hidden, weight: wide(hidden, weight.t()))
    replace(logprob, "_kernels", lambda logits: logits_gpu)


def inputs(tokens, columns, dtype=torch.float32, scale=3.0):
    rng = torch.Generator().manual_seed(tokens * 1000 + columns)
    hidden = (torch.randn(tokens, WIDTH, generator=rng) * scale).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(columns, WIDTH, generator=rng).to(DEVICE, dtype).requires_grad_()
    targets = torch.randint(0, columns, (tokens,), generator=rng).to(DEVICE)
    return hidden, weight, targets


def exact(hidden, weight, targets, temperature, loss):
    """Log-probs, entropies and gradients of hidden states and weight, in float64."""
    given = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = F.log_softmax(given[0] @ given[1].t() / temperature, -1)
    results = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    return *results, *torch.autograd.grad(loss(*results), given)


def signs(logp, entropy):
    """Gradients of both signs, and rows that a mask leaves none."""
    weights = torch.linspace(-1, 1, len(logp), dtype=logp.dtype, device=logp.device)
    weights = torch.where(torch.arange(len(logp), device=logp.device) % 3 == 1, 0.0, weights)
    return (logp * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum()


#: Sums of thousands of float32 numbers; a gradient that is rounded to bf16 has 8 bits.
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-5, 2e-2)}


def test_a_token_that_is_ruled_out_adds_nothing():
    """A logit of -inf has probability 0, no part in the entropy, and no gradient; NaN is not hidden."""
    logits, targets = inputs(3, 33)[0] @ inputs(3, 33)[1].t(), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    logits, ones, place = logits.detach(), torch.ones(3, device=DEVICE), {"start": 0, "inverse_temperature": 1.0}
    logits[:, [5, 32]] = -torch.inf
    possible, results = ~logits[0].isinf(), []
    for some in (logits, logits[:, possible].contiguous()):
        stats = torch.empty(4, 3, device=DEVICE)
        logits_gpu.statistics(some, targets, stats, **place, entropy=True)
        log_z, entropy = stats[0] + stats[1].log(), stats[1].log() - stats[2] / stats[1]
        slope = logits_gpu.gradients(some, targets, log_z, entropy, ones, ones, torch.float32, **place)
        results.append((stats, slope))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1][:, possible], results[1][1])
    assert (results[0][1][:, ~possible] == 0).all()
    logits[0, 0] = torch.nan
    slope = logits_gpu.gradients(logits, targets, log_z, entropy, ones, ones, torch.float32, **place)
    assert slope[0, 0].isnan()


def test_a_block_that_is_ruled_out_adds_nothing():
    """A row whose first block is all -inf has the statistics of the rest, and a row that is all -inf has sums of 0."""
    block = logits_gpu.STATISTICS[0]
    logits = torch.randn(2, block + 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, :block] = logits[1] = -torch.inf
    targets, stats = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.empty(4, 2, device=DEVICE)
    logits_gpu.statistics(logits, targets, stats, start=1, inverse_temperature=1.0, entropy=True)
    rest = logits[0, block:].double()
    shifted = rest - rest.max()
    expected = torch.stack([rest.max(), shifted.exp().sum(), (shifted.exp() * shifted).sum()])
    torch.testing.assert_close(stats[:3, 0].double(), expected, rtol=2e-5, atol=2e-5)
    assert stats[:, 1].tolist() == [-torch.inf, 0, 0, 0]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("tokens", "columns", "temperature", "chunk"),
    [
        (1, 1, 1.0, 1024),
        (5, 33, 0.7, 1024),
        (7, 1000, 1.3, 3),
        (3, 4097, 1.0, 1024),
        (2, 9001, 0.5, 1),
        (40, 17, 1.0, 16),
    ],
)
def test_log_probs_entropies_and_gradients_equal_float64(dtype, tokens, columns, temperature, chunk):
    hidden, weight, targets = inputs(tokens, columns, dtype)
    found = linear_logprob(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk)
    gradients = torch.autograd.grad(signs(*found), (hidden, weight))
    expected = exact(hidden, weight, targets, temperature, signs)
    sums, rounded = TOLERANCES[dtype]
    for one, other in zip(found, expected[:2], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=sums, atol=sums)
    for one, other in zip(gradients, expected[2:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rounded, atol=rounded * float(other.abs().max()))
    if temperature == 1.0:
        assert hidden.grad is None  # the inputs are as they were


@pytest.mark.parametrize("loss", [lambda logp, entropy: logp.sum(), lambda logp, entropy: entropy.sum()])
def test_either_result_may_be_used_alone(loss):
    hidden, weight, targets = inputs(6, 45)
    found = torch.autograd.grad(loss(*linear_logprob(hidden, weight, targets)), (hidden, weight))
    for one, other in zip(found, exact(hidden, weight, targets, 1.0, loss)[2:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


def test_without_the_entropy():
    hidden, weight, targets = inputs(6, 45)
    logp, entropy = linear_logprob(hidden, weight, targets, entropy=False)
    assert entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    expected = exact(hidden, weight, targets, 1.0, lambda logp, entropy: logp.sum())
    torch.testing.assert_close(logp.double(), expected[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(hidden.grad.double(), expected[2], rtol=2e-5, atol=2e-5)


def test_logits_of_hundreds_and_blocks_far_below_the_largest():
    """Blocks of columns whose exponentials are all zero beside another block's, before it and after it."""
    logits = torch.full((2, 70), -900.0, device=DEVICE)
    logits[0, 3], logits[1, 66] = 500.0, 500.0
    targets, out = torch.tensor([3, 0], device=DEVICE), torch.empty(4, 2, device=DEVICE)
    launch = (16, 1)
    logits_gpu.statistics(logits, targets, out, start=0, inverse_temperature=1.0, entropy=True, launch=launch)
    assert out.tolist() == [[500.0, 500.0], [1.0, 1.0], [0.0, 0.0], [500.0, -900.0]]


def test_the_reference_gives_the_same_statistics_and_gradients():
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 6
    targets = torch.tensor([10, 60, 109, 110, 500], device=DEVICE)  # the shard has 10 to 109
    shard = logprob.VocabularyShard(10, 1 / 0.7, 1024, None, True)
    out = torch.empty(4, 5, device=DEVICE)
    logprob.reduce_logits(logits, targets, shard, out, True)
    _, log_z, entropy = logprob.combine_shards(out, shard)
    rows = logprob.LogprobRows(logits, targets, log_z, entropy, torch.ones(5, device=DEVICE), -log_z)
    found = out.clone(), logprob._grad_logits(logits, rows, shard, True, torch.float32)
    logprob._kernels = lambda logits: None  # as_on_a_gpu restores it
    logprob.reduce_logits(logits, targets, shard, out, True)
    expected = out, logprob._grad_logits(logits, rows, shard, True, torch.float32)
    # Exponentials of a GPU differ by some units in the last place: one of 500 numbers was 1e-5 off on an H200.
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_every_size_of_blocks_gives_the_same_numbers():
    for _, _, call in benchmark.calls(2, 5000, DEVICE):
        first = call(benchmark.CHOICES[0]).clone()
        for launch in benchmark.CHOICES[1:]:
            torch.testing.assert_close(call(launch), first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("column", [0, 20, 69])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_bad_numbers_stay_bad(bad, column):
    """Neither may become a number that training goes on with."""
    logits = torch.zeros(1, 70, device=DEVICE)
    logits[0, column] = bad
    out, target = torch.empty(4, 1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    given = {"start": 0, "inverse_temperature": 1.0, "entropy": True, "launch": (16, 1)}
    logits_gpu.statistics(logits, target, out, **given)
    logp, _, entropy = logprob.combine_shards(out, logprob.VocabularyShard(0, 1.0, 1024, None, True))
    assert logp.isnan().all()
    assert entropy.isnan().all()


def shards():
    group = world()
    pretend(setattr)
    out = {}
    for columns in (53, 1):  # uneven; with 1 the second rank has none
        rows = -(-columns // group.size)
        hidden, whole, targets = inputs(7, columns)
        own = slice(group.rank * rows, min((group.rank + 1) * rows, columns))
        mine = whole.detach()[own].clone().requires_grad_()
        results = linear_logprob(
            hidden, mine, targets, temperature=0.9, vocab_start=own.start, chunk_tokens=3, group=group
        )
        signs(*results).backward()
        grad = hidden.grad.clone()
        group.all_reduce(grad)
        expected = exact(hidden, whole, targets, 0.9, signs)
        found = (*(result.detach() for result in results), grad, mine.grad)
        wanted = (*(one.detach() for one in expected[:3]), expected[3][own])
        out[columns] = max(float((a - b).abs().sum()) for a, b in zip(found, wanted, strict=True))
    return out


@pytest.mark.procs
@pytest.mark.skipif(DEVICE != "cpu", reason="two processes of gloo with tensors of the host")
def test_vocabulary_shards_equal_the_whole():
    for errors in run_distributed(shards, 2, 120):
        # sums of the rounding errors of all elements of a tensor; 5.6e-5 seen in the interpreter
        assert max(errors.values()) < 1e-4, errors
