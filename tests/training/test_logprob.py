"""The fused log-prob against a float64 log-softmax: values, gradients, vocabulary shards, and what it never holds."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.training import logprob
from megarl.training.logprob import (
    LogprobRows,
    VocabularyShard,
    capped_gradient,
    combine_shards,
    linear_logprob,
    reduce_logits,
)
from tests.dist import run_distributed, world

N, H, V = 37, 16, 53


def _inputs(dtype=torch.float64, n=N, rows=V):
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(rows, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (n,), generator=rng)
    return hidden, weight, targets


def _oracle(hidden, weight, targets, temperature, vocab_size=V, cap=None):
    logits = hidden.double() @ weight.double()[:vocab_size].t()
    logp = torch.log_softmax((logits if cap is None else cap * torch.tanh(logits / cap)) / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _loss(logp, entropy):
    weights = torch.linspace(-1, 1, len(logp), dtype=logp.dtype)
    return (logp * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum()


@pytest.fixture(params=["cpu", "gpu"])
def as_on(request, monkeypatch):
    """The form of the backward pass that a device has; a GPU's product of bf16 is not rounded. A CPU's cache has room
    for three rows."""
    monkeypatch.setattr(logprob, "_CACHED", 3 * V)
    if request.param == "gpu":
        monkeypatch.setattr(logprob, "_adds_wide", lambda hidden: True)
        wide = lambda a, b: torch.mm(a.to(logprob._wide(a.dtype)), b.to(logprob._wide(b.dtype)))  # noqa: E731
        monkeypatch.setattr(logprob, "wide_product", wide)
        monkeypatch.setattr(logprob, "head_logits", lambda hidden, weight: wide(hidden, weight.t()))
    return request.param


@pytest.mark.usefixtures("as_on")
@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize(
    ("temperature", "tokens", "cap"), [(1.0, N, None), (0.7, N, None), (0.7, N, 3.0), (0.7, 2 * V, None)]
)
def test_values_and_gradients_equal_the_oracle_for_any_chunk(chunk, temperature, tokens, cap):
    hidden, weight, targets = _inputs(n=tokens)
    expected = _oracle(hidden, weight, targets, temperature, cap=cap)
    _loss(*expected).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    found = linear_logprob(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk, cap=cap)
    _loss(*found).backward()
    for a, b in zip((*found, hidden.grad, weight.grad), (*expected, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("as_on")
@pytest.mark.parametrize("chunk", [2, 16])
def test_gradcheck(chunk):
    hidden, weight, targets = _inputs(n=5, rows=11)
    targets = targets % 9
    torch.autograd.gradcheck(
        lambda h, w: linear_logprob(h, w, targets, temperature=1.3, chunk_tokens=chunk), (hidden, weight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # compiled kernels, and torch operations
def test_a_token_that_is_ruled_out_adds_nothing(dtype):
    """A logit of -inf has probability 0, no part in the entropy, and no gradient."""
    logits, targets = torch.randn(3, V, generator=torch.Generator().manual_seed(1)).to(dtype), torch.zeros(3).long()
    logits[:, [5, 20, V - 1]] = -torch.inf
    possible, ones, results = ~logits[0].isinf(), torch.ones(3, dtype=dtype), []
    shard = VocabularyShard(0, 0.7, 3, None, entropy=True)
    for some in (logits, logits[:, possible].contiguous()):
        stats = torch.empty(4, 3, dtype=dtype)
        reduce_logits(some, targets, shard, stats, True)
        logp, log_z, entropy = combine_shards(stats, shard)
        rows = LogprobRows(logits, targets, log_z, entropy, ones, ones)
        results.append((logp, entropy, capped_gradient(some, rows, shard, True, dtype)))
    (*values, gradient), (*expected, gradient_of_possible) = results
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradient[:, possible], gradient_of_possible)
    assert (gradient[:, ~possible] == 0).all()


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # compiled kernels, and torch operations
def test_a_shard_that_is_ruled_out_adds_nothing(dtype, entropy):
    """The second rank's logits are all -inf. The first rank's decide; without them no result is finite."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1)).to(dtype)
    shard, stats = VocabularyShard(0, 0.7, 3, None, entropy), torch.empty(2, 4, 3, dtype=dtype)
    for rank, half in enumerate((logits, torch.full_like(logits, -torch.inf))):
        reduce_logits(half, torch.zeros(3).long(), shard._replace(start=rank * V), stats[rank], True)
    group = SimpleNamespace(all_gather=lambda own: [own, stats[1]])
    expected = combine_shards(stats[0], shard)
    torch.testing.assert_close(combine_shards(stats[0], shard._replace(group=group)), expected, rtol=0, atol=0)
    assert not combine_shards(stats[1], shard)[0].isfinite().any()


def test_float32_reductions_of_large_logits():
    hidden, weight, targets = _inputs(torch.float32)
    hidden = (hidden * 30).detach()
    logp, entropy = linear_logprob(hidden, weight, targets)
    expected = _oracle(hidden, weight, targets, 1.0)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((logp.double(), entropy.double()), expected, rtol=1e-5, atol=2e-4)


def test_bf16_inputs_reduce_in_float32():
    hidden, weight, targets = _inputs(torch.bfloat16)
    logits = (hidden @ weight.t()).double()  # bf16 logits: rounding them is the dtype's own error
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    logp, _ = linear_logprob(hidden, weight, targets, chunk_tokens=10)
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-5)
    logp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_tokens_and_only_one_output_used():
    hidden, weight, targets = _inputs()
    logp, entropy = linear_logprob(hidden[:0], weight, targets[:0])
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad.abs().max() == 0
    weight.grad = hidden.grad = None
    linear_logprob(hidden, weight, targets)[1].sum().backward()
    found = hidden.grad.clone()
    hidden.grad = None
    _oracle(hidden, weight, targets, 1.0)[1].sum().backward()
    torch.testing.assert_close(found, hidden.grad)


def test_entropy_can_be_skipped():
    hidden, weight, targets = _inputs()
    logp, entropy = linear_logprob(hidden, weight, targets, entropy=False)
    assert entropy.shape == (0,)
    torch.testing.assert_close(logp, _oracle(hidden, weight, targets, 1.0)[0])


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


class _Weights(TorchDispatchMode):
    """Counts results of a weight's shape."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += isinstance(out, torch.Tensor) and out.shape == (V, H) and not func.is_view
        return out


@pytest.mark.parametrize("as_on", ["gpu"], indirect=True)
def test_the_gradient_of_the_head_is_written_once_however_many_chunks_there_are(as_on):
    counts = []
    for chunk in (20, 2):
        hidden, weight, targets = _inputs(torch.bfloat16)
        logp, _ = linear_logprob(hidden, weight, targets, chunk_tokens=chunk)
        with _Weights() as seen:
            logp.sum().backward()
        counts.append(seen.count)
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("as_on")
def test_many_chunks_of_bf16_are_as_exact_as_one():
    n, rows, width = 24, 512, 64
    rng = torch.Generator().manual_seed(5)
    hidden = (torch.randn(n, width, generator=rng) / width**0.5).bfloat16().requires_grad_()
    # A row that all share: it cancels in the gradient's sum over columns, and rounding errors of its parts do not.
    weight = (torch.randn(rows, width, generator=rng) + 8 * torch.randn(1, width, generator=rng)).bfloat16()
    weight.requires_grad_()
    targets = torch.randint(0, rows, (n,), generator=rng)
    exact = torch.func.grad(lambda h: _oracle(h, weight, targets, 1.0, rows)[0].sum())(hidden.detach().double())

    def error(chunk):
        hidden.grad = None
        linear_logprob(hidden, weight, targets, chunk_tokens=chunk)[0].sum().backward()
        return (hidden.grad - exact).abs().max()

    assert error(2) <= 1.5 * error(n)


@pytest.mark.usefixtures("as_on")
def test_never_more_than_one_chunk_of_logits():
    n, v, chunk = 64, 1000, 8
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 4, generator=rng, requires_grad=True)
    weight = torch.randn(v, 4, generator=rng, requires_grad=True)
    with _Largest() as seen:
        logp, entropy = linear_logprob(hidden, weight, torch.arange(n), chunk_tokens=chunk)
        (logp.sum() + entropy.sum()).backward()
    assert seen.numel <= chunk * v


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"chunk_tokens": 0}])
def test_senseless_arguments_are_refused(bad):
    hidden, weight, targets = _inputs()
    with pytest.raises(ValueError, match="must be positive"):
        linear_logprob(hidden, weight, targets, **bad)


def _shard_case() -> dict:
    group = world()
    rank, size = group.rank, group.size
    out = {}
    # Uneven shards; with 3 the last ranks hold no row at all. Each as on a CPU and as on a GPU.
    for vocab, gpu, cap in ((V, False, 3.0), (3, False, None), (V, True, None), (3, True, 3.0)):
        logprob._adds_wide = lambda hidden, gpu=gpu: gpu
        rows = -(-V // size) if vocab == V else 3
        hidden, _, targets = _inputs()
        targets = targets % vocab
        whole = _inputs(rows=vocab)[1]
        own = slice(rank * rows, min((rank + 1) * rows, vocab))
        mine = whole.detach()[own].clone().requires_grad_()
        place = {"vocab_start": own.start, "chunk_tokens": 8, "group": group}
        found = linear_logprob(hidden, mine, targets, temperature=0.9, cap=cap, **place)
        _loss(*found).backward()
        grad = hidden.grad.clone()
        group.all_reduce(grad)
        hidden.grad = None
        expected = _oracle(hidden, whole, targets, 0.9, vocab, cap)
        _loss(*expected).backward()
        errors = [
            *((a - b).abs().max() for a, b in zip(found, expected, strict=True)),
            (grad - hidden.grad).abs().max(),
            (mine.grad - whole.grad[own]).abs().sum(),
        ]
        out[f"{vocab} {gpu}"] = max(error.item() for error in errors)
    return out


@pytest.mark.procs
def test_vocabulary_shards_equal_the_whole():
    for errors in run_distributed(_shard_case, 2, 120):
        assert max(errors.values()) < 1e-12
