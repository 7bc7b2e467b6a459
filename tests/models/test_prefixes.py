"""Attention over a stream with shared prefixes against a dense mask in float64."""

import numpy as np
import pytest
import torch

from megarl.data.prefix_tree import prefix_tree
from megarl.models.layers.attention import prefixes, products
from megarl.models.layers.attention import training as attention
from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.training import attend
from megarl.models.packing import SharedPrefixes, pack_stream
from tests.models import varlen

PADDING = 3


def _path(*nodes: tuple[int, int]) -> np.ndarray:
    """A sequence of nodes: (number that fills it, length)."""
    return np.concatenate([np.full(length, number) for number, length in nodes])


TREES = {
    "groups": [
        *(_path((1, 40), (number, 10)) for number in range(10, 14)),
        *(_path((2, 5), (number, number % 4)) for number in range(20, 24)),
        _path((3, 7)),
    ],
    "deep": [
        _path((1, 20), (2, 70), (3, 9), (4, 5)),
        _path((1, 20), (2, 70), (3, 9)),
        _path((1, 20), (2, 70), (5, 9)),
        _path((1, 20), (6, 9)),
        _path((1, 20), (6, 9)),
        _path((7, 3)),
    ],
}


def _stream(rows):
    tree = prefix_tree(rows, 2)
    stream = pack_stream([*tree.lengths, PADDING])
    fill = np.zeros(PADDING, dtype=np.int64)
    positions, counts = (torch.from_numpy(np.concatenate([x, fill])) for x in (tree.positions(), tree.multiplicity()))
    stream.params.prefixes = SharedPrefixes(stream.params.lengths, tree.spans(), positions, counts)
    return tree, stream.params


def _seen(tree, window: int | None) -> torch.Tensor:
    """Which keys each query sees: those before it in a sequence that has both."""
    total = sum(tree.lengths) + PADDING
    seen = torch.zeros(total, total, dtype=torch.bool)
    for columns in (*tree.columns(), np.arange(total - PADDING, total)):
        for place, column in enumerate(columns):
            seen[column, columns[max(0, place + 1 - (window or total)) : place + 1]] = True
    return seen


def _oracle(q, k, v, seen, scores: Scores) -> torch.Tensor:
    per = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(per, 1) for x in (k, v))
    products = torch.einsum("qhd,khd->hqk", q.double(), keys) * scores.scale
    if scores.cap is not None:
        products = scores.cap * torch.tanh(products / scores.cap)
    products = products.masked_fill(~seen, float("-inf"))
    if scores.sinks is not None:
        column = scores.sinks.double()[:, None, None].expand(-1, len(q), 1)
        products = torch.cat((products, column), -1)
    return torch.einsum("hqk,khd->qhd", products.softmax(-1)[..., : len(k)], values)


def _errors(tree: str, dtype: torch.dtype, window: int | None, *, cap=None, sinks: bool = False, values: int = 16):
    """The largest error of the output and of each gradient, relative to the largest number."""
    made, packed = _stream(TREES[tree])
    rng = torch.Generator().manual_seed(0)
    total = sum(packed.lengths)
    shapes = (total, 6, 16), (total, 2, 16), (total, 2, values), (total, 6, values)
    *inputs, upstream = (torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes)
    inputs += [torch.linspace(-1, 3, 6, dtype=dtype)] if sinks else []
    for x in inputs:
        x.requires_grad_()
    scores = Scores(0.4, inputs[3] if sinks else None, cap)
    want = _oracle(*inputs[:3], _seen(made, window), scores)
    got = attend(*inputs[:3], packed, scores, window)
    pairs = [(got, want)]
    pairs += zip(torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream), strict=True)
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]


# A few roundings of each dtype; bf16 also rounds probabilities and gradients of scores.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 0.03}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("window", "more"),
    [(None, {}), (8, {}), (30, {"sinks": True}), (None, {"sinks": True}), (None, {"values": 8}), (8, {"cap": 0.5})],
    ids=str,
)
@pytest.mark.parametrize("short", [0, prefixes.SHORT])
@pytest.mark.parametrize("tree", TREES)
def test_attention_equals_the_dense_mask(tree, short, window, more, dtype, monkeypatch):
    monkeypatch.setattr(prefixes, "SHORT", short)
    monkeypatch.setattr(products, "_ON_CPU", 4000)  # several blocks of queries
    monkeypatch.setattr(prefixes, "LONG", 30)
    errors = _errors(tree, dtype, window, **more)
    assert max(errors) < TOLERANCES[dtype], errors


@pytest.mark.parametrize(
    ("window", "more"), [(None, {}), (8, {}), (30, {"sinks": True}), (None, {"sinks": True})], ids=str
)
@pytest.mark.parametrize("tree", TREES)
def test_the_calls_of_variable_length_kernels_equal_the_dense_mask(tree, window, more, monkeypatch):
    monkeypatch.setattr(attention, "varlen_kernel", lambda q: varlen.kernel)
    monkeypatch.setattr(attention, "TorchVarlen", varlen.Kernel)
    errors = _errors(tree, torch.float64, window, **more)
    assert max(errors) < TOLERANCES[torch.float64], errors


def test_own_sums_in_the_backward_passes_of_parts_are_wrong(monkeypatch):
    """Each part needs the output and the sum of all parts: with those of the part its gradient is another."""

    def detached(self, grad, q, k, v, out, lse):
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        for part in self.parts:
            here, there = part.queries, part.keys
            context, own = part.kernel.forward(q[here], k[there], v[there])
            share = grad[here] * (own - lse[here]).exp()[..., None]
            for whole, place, add in zip(
                sums,
                (here, there, there),
                part.kernel.backward(share, q[here], k[there], v[there], context, own),
                strict=True,
            ):
                whole[place] += add
        return tuple(sums)

    monkeypatch.setattr(prefixes.MergedParts, "backward", detached)
    output, *gradients = _errors("groups", torch.float64, None)
    assert output < TOLERANCES[torch.float64]
    assert max(gradients) > 0.1
