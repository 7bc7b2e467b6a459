"""The compiled CPU kernels against their torch references; test_build.py has those of other processors."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
import torch.nn.functional as F

from megarl.kernels import cpu
from megarl.kernels.cpu import HEAD_SIZES, add_norm_reference, silu_mul_reference
from megarl.models.noise import exponential_noise

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module")
def kernels():
    return cpu.load()


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_norm(kernels, dtype, with_delta):
    hidden, weight = randn(5, 48, dtype=dtype), randn(48, dtype=dtype)
    delta = randn(5, 48, dtype=dtype, seed=1) if with_delta else None
    expected_hidden = hidden.clone()
    expected = add_norm_reference(expected_hidden, delta, weight, 1e-6)
    torch.testing.assert_close(kernels.add_norm(hidden, delta, weight, 1e-6), expected, **TOLERANCE[dtype])
    assert torch.equal(hidden, expected_hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_norm_backward(kernels, dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, grad, weight = randn(37, 48, dtype=dtype), randn(37, 48, dtype=dtype, seed=1), randn(48, dtype=dtype)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    dx, dweight = torch.autograd.grad(F.rms_norm(exact[0], (48,), exact[1], 1e-6), exact, grad.double())
    found = kernels.norm_backward(x, grad, weight, 1e-6)
    torch.testing.assert_close(found[0].double(), dx, **TOLERANCE[dtype])
    torch.testing.assert_close(found[1].double(), dweight, rtol=1e-5, atol=2e-5)  # summed in fp32 in either dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(kernels, dtype):
    x = torch.cat([torch.linspace(-120, 120, 64)[None], torch.linspace(-2, 2, 64)[None]]).to(dtype)
    torch.testing.assert_close(kernels.silu_mul(x), silu_mul_reference(x), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_backward(kernels, dtype):
    x, grad = 3 * randn(7, 96, dtype=dtype), randn(7, 48, dtype=dtype)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, exact, grad.double())
    torch.testing.assert_close(kernels.silu_mul_backward(x, grad).double(), expected, **TOLERANCE[dtype])


def attention_reference(qkv, norm, rope, keys, values, positions, window, scale, eps):
    """In float64, row by row; also writes the caches."""
    n, groups, heads, size = qkv.shape
    out = torch.empty(n, groups, heads - 2, size, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        x = qkv[row].double()
        q, k, v = x[:, :-2], x[:, -2], x[:, -1]
        if norm is not None:
            q, k = (F.rms_norm(t, (size,), w.double(), eps) for t, w in zip((q, k), norm, strict=True))
        cos, sin = (t[row].double() for t in rope)

        def turn(t, cos=cos, sin=sin):
            return torch.cat(
                (
                    t[..., : size // 2] * cos - t[..., size // 2 :] * sin,
                    t[..., size // 2 :] * cos + t[..., : size // 2] * sin,
                ),
                -1,
            )

        keys[row, :, position], values[row, :, position] = turn(k).to(keys.dtype), v.to(values.dtype)
        first = max(0, position - window + 1) if window else 0
        seen = slice(first, position + 1)
        scores = turn(q) @ keys[row, :, seen].double().transpose(1, 2) * scale
        out[row] = torch.softmax(scores, -1) @ values[row, :, seen].double()
    return out.view(n, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(("heads", "window", "normed"), [(1, None, True), (2, 5, False), (7, None, False)])
def test_attend(kernels, dtype, size, heads, window, normed):
    n, groups, length = 4, 2, 40
    qkv = randn(n, groups, heads + 2, size, dtype=dtype)
    norm = randn(2, size, dtype=dtype) if normed else None
    angles = torch.rand(n, size // 2, generator=torch.Generator().manual_seed(2))
    rope = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = randn(n + 1, groups, length, size, dtype=dtype), randn(n + 1, groups, length, size, dtype=dtype)
    positions = torch.tensor([0, 3, 17, 39])
    scale = size**-0.5
    wide_keys, wide_values = keys.clone(), values.clone()
    expected = attention_reference(qkv, norm, rope, wide_keys, wide_values, positions, window, scale, 1e-6)
    got = kernels.attend(qkv, norm, rope, keys, values, positions, window=window, scale=scale, eps=1e-6)
    torch.testing.assert_close(got.double(), expected, **TOLERANCE[dtype])
    torch.testing.assert_close(keys, wide_keys, **TOLERANCE[dtype])
    assert torch.equal(values, wide_values)


def test_a_nan_is_not_hidden(kernels):
    x = torch.full((1, 32), float("nan"))
    assert kernels.silu_mul(x).isnan().all()
    ones = torch.ones(1, 32, dtype=torch.bfloat16)
    assert kernels.add_norm(x.bfloat16(), None, ones[0], 1e-6).isnan().all()
    every_bit = torch.full((32,), -1, dtype=torch.int32).view(torch.float32)  # adding to it to round carries over to 0
    assert kernels.add_norm(ones, None, every_bit, 1e-6).isnan().all()


def test_sizes_that_fit():
    supports = cpu.CpuKernels.supports
    assert supports(torch.bfloat16, 64, 512, 1536)
    assert not supports(torch.float64, 64, 512)
    assert not supports(torch.float32, 72, 512)
    assert not supports(torch.float32, 64, 512, 1000)


def test_rows_of_another_width_are_not_written(kernels):
    """A kernel would write past their end."""
    with pytest.raises(AssertionError, match="rows of 24"):
        kernels.silu_mul(torch.zeros(1, 48))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_logits_depends_on_no_other_row(kernels, dtype):
    """Neither its statistics nor its gradient, whatever the batch and the memory between rows."""
    logits, place = 5 * randn(7, 2 * 1024 + 21, dtype=dtype), {"start": 0, "inverse_temperature": 0.7}
    targets, wide = torch.arange(7) * 300, torch.cat([logits, logits], 1)

    def run(rows, of):
        out = torch.empty(4, len(rows))
        kernels.statistics(rows, targets[of], out, **place, entropy=True)
        log_z, numbers = out[0] + out[1].log(), torch.ones(len(rows))
        return out.t(), kernels.gradients(rows, targets[of], log_z, numbers, numbers, numbers, dtype, **place)

    together = run(logits, slice(None))
    for row in range(7):
        of = slice(row, row + 1)
        for given in (logits[of], wide[of, : logits.shape[1]]):
            for alone, whole in zip(run(given, of), together, strict=True):
                assert torch.equal(alone[0], whole[row])


def test_targets_may_be_a_column_of_a_tensor(kernels):
    """Their copy, which the kernels read, lives until the call returns."""
    logits, place = randn(4096, 32, dtype=torch.float32), {"start": 0, "inverse_temperature": 1.0}
    columns = torch.randint(32, (4096, 3), generator=torch.Generator().manual_seed(1))
    target, plain = columns[:, 1], columns[:, 1].contiguous()
    logs, ones = torch.empty(2, 4, 4096), torch.ones(4096)
    for out, of in zip(logs, (target, plain), strict=True):
        kernels.statistics(logits, of, out, **place, entropy=True)
    assert torch.equal(*logs)
    log_z = logs[1, 0] + logs[1, 1].log()
    sides = [kernels.gradients(logits, of, log_z, ones, ones, ones, torch.float32, **place) for of in (target, plain)]
    assert torch.equal(*sides)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_drawn_token_is_the_one_of_torch_operations(kernels, dtype):
    """In one piece or in shards of the vocabulary."""
    logits, seeds, index = 3 * randn(50, 700, dtype=dtype), torch.arange(50) << 33, torch.arange(50)
    place = {"inverse_temperature": 0.5, "greedy": False}
    score, winner = (0.5 * logits.float() - exponential_noise(seeds, index, torch.arange(700))).max(-1)
    (whole,) = kernels.draw(logits, seeds, index, start=0, **place)
    assert torch.equal(whole[:, 1].long(), winner)
    torch.testing.assert_close(whole[:, 0].float(), score, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[:, 3], (0.5 * logits.double()).logsumexp(-1), rtol=1e-6, atol=1e-6)
    shards = [kernels.draw(logits[:, part], seeds, index, start=part.start, **place)[0]
              for part in (slice(0, 333), slice(333, 700))]  # fmt: skip
    best = torch.stack(shards)[:, :, 0].argmax(0)
    assert torch.equal(torch.stack(shards)[best, torch.arange(50), :3], whole[:, :3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_of_shared_prefixes_gives_the_bits_of_whole_sequences(kernels, dtype):
    """Five tokens, then four or nine more, of which the last three have two branches."""
    lengths, parents, paths = (5, 4, 6, 3, 2), (-1, 0, 0, 2, 2), ((0, 1), (0, 2, 3), (0, 2, 4))
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    tokens = [torch.arange(starts[node], starts[node + 1]) for node in range(len(lengths))]
    q, k, v = (randn(int(starts[-1]), heads, 32, dtype=dtype, seed=heads) for heads in (6, 2, 2))
    out, sums = kernels.stream_forward(q, k, v, starts, torch.tensor(parents), 0.2)
    for path in paths:
        here = torch.cat([tokens[node] for node in path])
        alone = kernels.stream_forward(q[here], k[here], v[here], torch.tensor([0, len(here)]), None, 0.2)
        assert torch.equal(alone[0], out[here])
        assert torch.equal(alone[1], sums[here])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_heads_of_a_single_tree(kernels, dtype, monkeypatch):
    """Outputs keep their bits; gradients of keys and values are sums over the threads' heads, in another order."""
    starts, parents, of_thread = torch.tensor([0, 20, 37]), torch.tensor([-1, 0]), []
    q, k, v, up = (randn(37, heads, 32, dtype=dtype, seed=heads) for heads in (5, 1, 1, 5))
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        out, sums = kernels.stream_forward(q, k, v, starts, parents, 0.2)
        slopes = kernels.stream_backward((q, k, v), out, sums, up, starts, parents, 0.2)
        of_thread.append((out, sums, *slopes))
    for name, alone, shared in zip(("out", "sums", "dq", "dk", "dv"), *of_thread, strict=True):
        if name in ("dk", "dv"):
            torch.testing.assert_close(shared, alone, **TOLERANCE[dtype])
        else:
            assert torch.equal(shared, alone)
    assert dtype != torch.float32 or not torch.equal(of_thread[0][3], of_thread[1][3]), "one thread had all heads"
