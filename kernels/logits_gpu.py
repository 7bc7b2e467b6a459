"""Triton kernels over logits [n, V] in float32; their torch references are in `megarl/training/logprob.py`.

    statistics   reads a logit once (4 bytes)                             about 9 FLOPs, 2 of them exponentials
    gradients    reads it once and writes its gradient (4 + 2 of bf16)    about 7 FLOPs, one of them an exponential

Both are bound by memory: one logit in 1.2 ps at 3.35 TB/s, in which an H100 computes 80 FLOPs. The products before and
after them use cuBLAS. Sums run in float32 over blocks of columns, in an order that depends only on the number of
columns: equal logits give equal bits in every run and on every rank, unlike with the usual timing of block sizes at the
first call. `python -m megarl.benchmarks.logits` times the block sizes on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns per block and warps per program, the fastest on an H200: in float32 eight and four 16-byte loads per thread.
STATISTICS, GRADIENTS = (4096, 4), (2048, 4)


def statistics(
    logits: Tensor,
    targets: Tensor,
    out: Tensor,
    *,
    start: int,
    inverse_temperature: float,
    entropy: bool,
    launch: tuple[int, int] = STATISTICS,
) -> None:
    """Write max, sum of exp, sum of exp times shifted logit, and target logit (or 0) of each row to `out`.

    Args:
        logits: float32 [n, V], contiguous, V at least 1. The kernel divides them by the temperature.
        targets: int64 [n], indices into the whole vocabulary.
        out: float32 [4, n], contiguous in its last dimension; row 2 is not written without `entropy`.
        start: vocabulary index of the first column.
        launch: columns of a block and warps of a program.
    """
    count, columns = logits.shape
    block, warps = fitting(columns, launch)
    chosen = targets.contiguous()
    _statistics[(count,)](
        logits, chosen, out, out.stride(0), columns, start, inverse_temperature, block, entropy, num_warps=warps
    )


def gradients(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor | None,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
    *,
    start: int,
    inverse_temperature: float,
    launch: tuple[int, int] = GRADIENTS,
) -> Tensor:
    """Return the gradient [n, V] in `dtype` of the logits before the division by the temperature.

    Args:
        logits: float32 [n, V], contiguous, V at least 1, before the division by the temperature.
        targets: int64 [n], indices into the whole vocabulary.
        log_z, entropy: float32 [n], computed over the whole vocabulary.
        grad_logp, grad_entropy: float32 [n], gradients of both results; None: no gradient. The gradient of the entropy
            counts only if `entropy` is given.
        start: vocabulary index of the first column.
        launch: columns of a block and warps of a program.
    """
    count, columns = logits.shape
    block, warps = fitting(columns, launch)
    out = torch.empty_like(logits, dtype=dtype)
    of_logp, of_entropy = grad_logp is not None, grad_entropy is not None and entropy is not None
    _gradients[(count, triton.cdiv(columns, block))](
        logits,
        targets.contiguous(),
        log_z,
        *(log_z if given is None else given.contiguous() for given in (entropy, grad_logp, grad_entropy)),
        out,
        columns,
        start,
        inverse_temperature,
        block,
        of_logp,
        of_entropy,
        num_warps=warps,
    )
    return out


def fitting(columns: int, launch: tuple[int, int]) -> tuple[int, int]:
    """Return the columns and warps of a block: those of `launch`, or fewer if rows have fewer `columns`."""
    block, warps = launch
    fitting = min(block, triton.next_power_of_2(columns))
    return fitting, max(1, warps * fitting // block)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    logits,
    targets,
    out,
    out_stride,
    columns,
    start,
    inverse_temperature,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Process one row: blocks in turn, with sums relative to the largest logit so far."""
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * columns
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(source + column, mask=inside, other=-float("inf")) * inverse_temperature
        new = tl.maximum(peak, tl.max(x, 0))
        first = peak == -float("inf")  # peak - shift is -inf here, and 0 times -inf would be NaN
        shift = tl.where(new == -float("inf"), 0.0, new)  # avoids inf - inf while all logits are -inf
        factor = tl.where(first, 0.0, tl.exp(peak - shift))
        x -= shift
        exp = tl.exp(x)
        if ENTROPY:
            weighted = factor * (weighted + total * tl.where(first, 0.0, peak - shift))
            weighted += tl.sum(tl.where(exp == 0, 0.0, exp * x), 0)  # 0 times -inf would be NaN
        total = total * factor + tl.sum(exp, 0)
        peak = new
    target = tl.load(targets + row) - start
    here = (target >= 0) & (target < columns)
    chosen = tl.load(source + tl.where(here, target, 0), mask=here, other=0.0) * inverse_temperature
    tl.store(out + row, peak)
    tl.store(out + out_stride + row, total)
    if ENTROPY:
        tl.store(out + 2 * out_stride + row, weighted)
    tl.store(out + 3 * out_stride + row, chosen)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    logits,
    targets,
    log_z,
    entropy,
    grad_logp,
    grad_entropy,
    out,
    columns,
    start,
    inverse_temperature,
    BLOCK: tl.constexpr,
    OF_LOGP: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
):
    """Write (g (onehot - p) - e p (log p + entropy)) / temperature for one block of a row, with the gradients g of the
    log-prob and e of the entropy."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row.to(tl.int64) * columns + column
    logp = tl.load(logits + place, mask=inside, other=0.0) * inverse_temperature - tl.load(log_z + row)
    upstream = tl.zeros((BLOCK,), tl.float32)
    if OF_ENTROPY:
        upstream += (logp + tl.load(entropy + row)) * tl.load(grad_entropy + row)
    if OF_LOGP:
        upstream += tl.load(grad_logp + row)
    p = tl.exp(logp)
    grad = tl.where(p == 0, 0.0, -p * upstream)  # for a logit of -inf, 0 times infinity would be NaN
    if OF_LOGP:
        grad += tl.where(column == tl.load(targets + row) - start, tl.load(grad_logp + row), 0.0)
    tl.store(out + place, (grad * inverse_temperature).to(out.dtype.element_ty), mask=inside)
