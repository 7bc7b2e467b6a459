"""Microseconds of the layers' Triton kernels by size of their blocks, on a GPU: `python -m megarl.benchmarks.layers`.

The launch parameters in `megarl.kernels.layers_gpu` and `experts_gpu` come from the table that it prints: for a layer
of Qwen3-1.7B and, with the first number of tokens, for the kernels between the matrix products of experts such as those
of Qwen3-30B-A3B.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.kernels import gpu
from megarl.models.layers.mlp.swiglu import _SwiGLU

#: (elements per block, warps per program).
CHOICES = tuple(itertools.product((1024, 2048, 4096), (4, 8)))
EPS, RATE = 1e-6, 4.27e6  # RATE: bytes per microsecond, measured on an H200


class Sizes(NamedTuple):
    """The widths of a layer."""

    hidden: int = 2048
    ffn: int = 6144
    heads: int = 16
    groups: int = 8
    head_dim: int = 128


class Mixture(NamedTuple):
    """The widths of a layer with experts, and the number of experts per token."""

    hidden: int = 2048
    ffn: int = 768
    each: int = 8


class Case(NamedTuple):
    """A kernel, called with a `launch`, and torch's operations in its place; each returns a tuple."""

    name: str
    bytes: int
    kernel: Callable[..., tuple[Tensor, ...]]
    torch: Callable[[], tuple[Tensor, ...]]


def cases(tokens: int, device: str, sizes: Sizes) -> Iterator[Case]:
    """Yield all kernels with random tensors in bf16; `gpu.layer_kernels` has to give none to torch's operations."""
    from megarl.kernels import layers_gpu

    x, grad = _draw(device, (tokens, 2 * sizes.ffn), (tokens, sizes.ffn))
    yield Case("swiglu", 6 * grad.numel(), _one(layers_gpu.swiglu, x), _one(_SwiGLU.apply, x))
    backward = _gradients(_SwiGLU.apply, [x], grad)
    yield Case("swiglu backward", 10 * grad.numel(), _one(layers_gpu.swiglu_backward, x, grad), backward)
    for name, heads in (("q", sizes.heads), ("k", sizes.groups)):
        yield _rope(layers_gpu, name, (tokens, heads, sizes.head_dim), device)
        yield from _norm(layers_gpu, name, (tokens * heads, sizes.head_dim), device)
    yield from _norm(layers_gpu, "hidden", (tokens, sizes.hidden), device)


def expert_cases(tokens: int, device: str, sizes: Mixture) -> Iterator[Case]:
    """Yield the kernels for experts in the same way; for comparison, torch computes them as it does without Triton."""
    from megarl.kernels import experts_gpu, layers_gpu

    count = tokens * sizes.each
    (rows,) = _draw(device, (count, sizes.hidden))
    places = torch.randperm(count, device=device).view(tokens, sizes.each)
    owners = torch.empty_like(places).view(-1)
    owners[places.view(-1)] = torch.arange(tokens, device=device).repeat_interleave(sizes.each)
    index = owners[:, None].expand_as(rows)
    add = lambda: rows.new_zeros(tokens, sizes.hidden).scatter_add_(0, index, rows)  # noqa: E731
    size = 2 * (rows.numel() + tokens * sizes.hidden)
    yield Case("sum of rows", size, _one(experts_gpu.sum_rows, rows, places), _one(add))
    by_torch = _gradients(lambda x: x.index_select(0, owners), _draw(device, (tokens, sizes.hidden)), rows)
    yield Case("sum of copies' gradients", size, _one(experts_gpu.sum_rows, rows, places), by_torch)
    x, grad = _draw(device, (count, 2 * sizes.ffn), (count, sizes.ffn))
    scale = torch.rand(count, device=device)
    call = lambda x, scale: (_SwiGLU.apply(x) * scale[:, None]).to(x.dtype)  # noqa: E731
    yield Case("scaled swiglu", 6 * grad.numel(), _one(layers_gpu.swiglu, x, scale), _one(call, x, scale))
    kernel: Any = functools.partial(layers_gpu.scaled_swiglu_backward, x, grad, scale)
    yield Case("scaled swiglu backward", 10 * grad.numel(), kernel, _gradients(call, [x, scale], grad))


def _draw(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def _rope(kernels: Any, name: str, shape: tuple[int, int, int], device: str) -> Case:
    from megarl.models.rope import rotate

    x, angles = _draw(device, shape, (shape[0], shape[2] // 2))
    cos, sin = angles.cos(), angles.sin()
    by_torch = _one(rotate, x, cos, sin, 1.0)
    return Case(f"rope {name}", 4 * (x.numel() + cos.numel()), _one(kernels.rope, x, cos, sin, 1.0), by_torch)


def _norm(kernels: Any, name: str, shape: tuple[int, int], device: str) -> Iterator[Case]:
    x, grad, weight = _draw(device, shape, shape, shape[1:])
    call = lambda x, weight: F.rms_norm(x, shape[1:], weight, EPS)  # noqa: E731
    yield Case(f"norm {name}", 4 * x.numel(), _one(kernels.rms_norm, x, weight, EPS), _one(call, x, weight))
    kernel = functools.partial(kernels.rms_norm_backward, x, grad, weight, EPS)
    yield Case(f"norm {name} backward", 6 * x.numel(), kernel, _gradients(call, [x, weight], grad))


def _one(call: Callable[..., Tensor], *given: Any) -> Callable[..., tuple[Tensor, ...]]:
    return lambda **launch: (call(*given, **launch),)


def _gradients(call: Callable[..., Tensor], given: list[Tensor], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call of the backward pass only; the first call runs the forward pass, too."""
    inputs = [x.detach().requires_grad_() for x in given]
    out = functools.cache(lambda: call(*inputs))
    return lambda: torch.autograd.grad(out(), inputs, grad, retain_graph=True)


def main(argv: list[str] | None = None) -> int:
    """Print the time of torch's operations and of each choice for each kernel; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 78_000])
    parser.add_argument("--programs", type=int, help="that share the rows of a norm's backward pass")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this needs a GPU: a CPU has only the interpreter of Triton", file=sys.stderr)
        return 2
    from triton.testing import do_bench

    from megarl.kernels import layers_gpu

    layers_gpu.PROGRAMS = options.programs or layers_gpu.PROGRAMS
    print(f"{torch.cuda.get_device_name()}, {layers_gpu.PROGRAMS} programs")
    with mock.patch.object(gpu, "layer_kernels", return_value=None):
        for tokens in options.tokens:
            of_mixture = expert_cases(tokens, "cuda", Mixture()) if tokens == options.tokens[0] else ()
            for case in itertools.chain(cases(tokens, "cuda", Sizes()), of_mixture):
                floor, by_torch = case.bytes / RATE, 1e3 * do_bench(case.torch)
                print(f"{case.name}, {tokens} tokens: floor {floor:.0f} us, torch {by_torch:.0f} us")
                for launch in CHOICES:
                    took = 1e3 * do_bench(functools.partial(case.kernel, launch=launch))
                    print(f"    {launch[0]}, {launch[1]} warps: {took:.0f} us, {case.bytes / took / 1e3:.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
