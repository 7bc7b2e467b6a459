"""The Triton kernels of a decode step against float64: on a GPU as they are, elsewhere in Triton's interpreter.

make triton-test     # where Triton is not installed
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

from megarl.kernels.cpu import add_norm_reference
from megarl.models.noise import exponential_noise

if not torch.cuda.is_available():
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
    elif os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed: make triton-test")

from megarl.kernels import decode_gpu, layers_gpu
from megarl.models.layers.attention.decoding import HeadNorm
from megarl.models.layers.passes import RopeTables
from megarl.rollout.embedded.model import DecoderStage
from tests.dist import single_process as start
from tests.rollout.cases import STOP, build, engine, logprobs, make_requests, sampled, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter multiplies the bits of bf16
EPS = 1e-6
#: float32 sums in another order, and exponentials of a GPU; bf16 keeps 8 bits and rounds norm, rotation and context,
#: where Triton's interpreter cuts bits off in place of rounding.
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 1e-2},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def heads_of(positions, groups, per, size, length, dtype, *, norm, seed=0, turned=None):
    """Arguments of `attend`, with a cache whose places beyond a row's position hold NaN."""
    g = torch.Generator().manual_seed(seed)
    n = len(positions)
    qkv = torch.randn(n, groups, per + 2, size, generator=g)
    weights = torch.rand(2, size, generator=g) + 0.5 if norm else None
    angles = torch.randn(n, (turned or size) // 2, generator=g)
    keys, values = (torch.randn(n + 2, groups, length, size, generator=g) for _ in range(2))
    for row, position in enumerate(positions):
        keys[row, :, position:] = values[row, :, position:] = torch.nan
    given = [qkv, weights, angles.cos(), angles.sin(), keys, values]
    qkv, weights, cos, sin, keys, values = (None if x is None else x.to(DEVICE, dtype) for x in given)
    return qkv, weights, (cos, sin), keys, values, torch.tensor(positions, device=DEVICE)


def exact_attention(qkv, norm, rope, keys, values, positions, window, scale, sinks=None):
    """Context, keys and values in float64, one row after the other."""
    x, keys, values = qkv.double(), keys.double(), values.double()
    cos, sin = (t.double()[:, None, None] for t in rope)
    qk = x[:, :, :-1]
    if norm is not None:
        qk = qk * (qk.square().mean(-1, keepdim=True) + EPS).rsqrt()
        qk = torch.cat([qk[:, :, :-1] * norm[0].double(), qk[:, :, -1:] * norm[1].double()], 2)
    a, b, rest = qk.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), -1)
    qk = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    out = []
    for row, last in enumerate(positions.tolist()):
        keys[row, :, last], values[row, :, last] = qk[row, :, -1], x[row, :, -1]
        seen = slice(0 if window is None else max(0, last - window + 1), last + 1)
        scores = qk[row, :, :-1] @ keys[row, :, seen].transpose(1, 2) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(*scores.shape[:2], 1)], -1)
        weights = scores.softmax(-1)[..., : seen.stop - seen.start]
        out.append((weights @ values[row, :, seen]).flatten())
    return torch.stack(out), keys, values


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("positions", "groups", "per", "size", "length", "window", "norm"),
    [
        ([0, 5, 63, 64, 200], 2, 2, 16, 256, None, True),
        ([7, 299, 256, 255], 1, 5, 64, 320, None, False),  # more chunks than one; heads that are no power of two
        ([0, 9, 130, 299], 2, 1, 16, 320, 40, True),  # a window within a chunk, and over the border of two
        ([290, 300], 1, 3, 24, 320, 30, True),  # a size that is no power of two
    ],
)
def test_attention_is_that_of_float64(positions, groups, per, size, length, window, norm, dtype):
    given = heads_of(positions, groups, per, size, length, dtype, norm=norm)
    wanted, keys, values = exact_attention(*given, window, size**-0.5)
    found = decode_gpu.attend(*given, window=window, scale=size**-0.5, eps=EPS)
    torch.testing.assert_close(found.double(), wanted, **CLOSE[dtype])
    for cache, expected in ((given[3], keys), (given[4], values)):
        torch.testing.assert_close(cache.double(), expected, equal_nan=True, **CLOSE[dtype])


def test_part_of_a_head_turns_and_sinks_take_a_share_of_the_softmax():
    given = heads_of([0, 9, 130, 299], 2, 2, 16, 320, torch.float32, norm=False, turned=8)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 9.0], device=DEVICE)
    wanted, keys, _ = exact_attention(*given, 40, 0.2, sinks)
    found = decode_gpu.attend(*given, window=40, scale=0.2, eps=EPS, sinks=sinks)
    torch.testing.assert_close(found.double(), wanted, **CLOSE[torch.float32])
    torch.testing.assert_close(given[3].double(), keys, equal_nan=True, **CLOSE[torch.float32])


@pytest.mark.parametrize("launch", [(64, 32, 4, 3), (128, 64, 4, 2), (512, 128, 8, 3)])
def test_every_size_of_chunks_gives_the_same_context(launch):
    given = heads_of([0, 70, 127, 128, 299], 2, 2, 32, 320, torch.float32, norm=True)
    wanted = decode_gpu.attend(*given, window=None, scale=0.2, eps=EPS)
    found = decode_gpu.attend(*given, window=None, scale=0.2, eps=EPS, launch=launch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_among_others_and_by_itself():
    qkv, norm, rope, keys, values, positions = heads_of([30, 299, 4], 2, 2, 32, 320, torch.bfloat16, norm=True)
    rest = {"window": None, "scale": 0.2, "eps": EPS}
    together = decode_gpu.attend(qkv, norm, rope, keys, values, positions, **rest)
    own = slice(1, 2)
    rope = (rope[0][own], rope[1][own])
    single = decode_gpu.attend(qkv[own], norm, rope, keys[own], values[own], positions[own], **rest)
    assert torch.equal(single, together[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("width", [8, 96, 1500])
def test_norms_are_the_reference_and_the_stream_takes_what_is_added(width, delta, dtype):
    g = torch.Generator().manual_seed(width)
    sizes = (5, width), (5, width), (width,)
    hidden, added, weight = (torch.randn(size, generator=g).to(DEVICE, dtype) for size in sizes)
    stream = (hidden.double() + added.double()) if delta else hidden.double()
    found = decode_gpu.add_norm(hidden, added if delta else None, weight, EPS)
    torch.testing.assert_close(hidden.double(), stream, **CLOSE[dtype])
    wanted = add_norm_reference(hidden.double(), None, weight.double(), EPS)
    torch.testing.assert_close(found.double(), wanted, **CLOSE[dtype])


def draws(logits, start=0, temperature=1.0, greedy=False, seed=0, **launch):
    """Tokens, logits and log of the sum of exp of all parts, and the noise."""
    n, columns = logits.shape
    seeds = torch.arange(n, device=DEVICE) * 7919 + seed * 2**40 - 5
    index = torch.arange(n, device=DEVICE) * 3
    parts = decode_gpu.draw(
        logits, seeds, index, start=start, inverse_temperature=1 / temperature, greedy=greedy, **launch
    )
    rows = torch.arange(n, device=DEVICE)
    chosen = parts[parts[:, :, 0].argmax(0), rows]
    ids = torch.arange(start, start + columns, device=DEVICE)
    return chosen[:, 1].long(), chosen[:, 2], torch.logsumexp(parts[:, :, 3], 0), exponential_noise(seeds, index, ids)


@pytest.mark.parametrize("columns", [1, 37, 300, 5000])
@pytest.mark.parametrize("start", [0, 100_000])
def test_tokens_are_the_winners_of_the_race(columns, start):
    logits = (torch.randn(16, columns, generator=torch.Generator().manual_seed(columns)) * 3).to(DEVICE)
    winners, chosen, total, noise = draws(logits, start, 0.7, launch=(2048, 256, 4))
    z = logits / 0.7
    assert torch.equal(winners - start, (z - noise).argmax(1))
    torch.testing.assert_close(chosen, z.gather(1, winners[:, None] - start)[:, 0].double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, torch.logsumexp(z.double(), 1), rtol=1e-6, atol=1e-5)


def test_draws_follow_the_probabilities():
    """400 draws of 4 tokens: a share is off by 0.025 at most (one sigma)."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], device=DEVICE).repeat(400, 1)
    found, *_ = draws(logits, seed=3)
    shares = torch.bincount(found, minlength=4).double() / 400
    torch.testing.assert_close(shares, logits[0].double().softmax(0), rtol=0, atol=0.08)


def test_without_a_race_the_largest_logit_wins_and_the_first_of_equal_ones():
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[3, 5] = logits[3, 600] = 9.0
    winners, chosen, *_ = draws(logits, greedy=True, launch=(256, 64, 1))
    assert torch.equal(winners, logits.argmax(1))
    assert winners[3] == 5
    assert torch.equal(chosen.float(), logits.amax(1))


def test_excluded_tokens_do_not_win_and_bad_logits_show_in_log_probs():
    logits = torch.full((3, 300), -torch.inf)
    logits[0, 7], logits[1, :] = 0.0, 1.0
    logits[1, 40], logits[2, 250] = torch.nan, 2.0
    winners, chosen, total, _ = draws(logits.to(DEVICE), launch=(128, 32, 1))
    assert winners[0] == 7
    assert winners[2] == 250
    assert (chosen - total).isfinite().tolist() == [True, False, True]


@pytest.fixture
def single_process():
    start()


@pytest.mark.usefixtures("single_process")
def test_generation_takes_the_tokens_of_torch_operations(monkeypatch):
    chunks, requests = build("qwen3"), make_requests(n=2)
    plain = engine(chunks, max_running=4).generate(requests, sampled(max_new_tokens=4), STOP)
    monkeypatch.setattr(DecoderStage, "_load_kernels", lambda stage: decode_gpu)
    found = engine(chunks, max_running=4).generate(requests, sampled(max_new_tokens=4), STOP)
    assert tokens(found) == tokens(plain)
    torch.testing.assert_close(logprobs(found), logprobs(plain), rtol=0, atol=1e-4)


@pytest.mark.parametrize("normed", [True, False])
def test_heads_of_prompts_are_those_of_torch_operations(normed):
    qkv, norm, rope, *_ = heads_of([0, 3, 7], 2, 3, 16, 8, torch.float64, norm=normed)
    wanted = HeadNorm(norm, EPS).split(qkv, RopeTables(*rope))
    single = None if norm is None else norm.float()
    tables = RopeTables(*(table.float().t().contiguous().t() for table in rope))  # as of three positions
    found = HeadNorm(single, EPS)._split_on_gpu(layers_gpu, qkv.float(), tables)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
