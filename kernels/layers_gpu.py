"""Triton kernels for SwiGLU, RoPE and RMSNorm; their torch references are in `megarl/models`.

    swiglu, swiglu_backward        3 and 5 numbers of memory traffic per number of the result, also with row factors
    rope                           2 per number, and the tables
    rms_norm, rms_norm_backward    2 and 3 per number

All are bound by memory: each reads its inputs once and writes its results once. Tensors are float32, bfloat16 or
float16, with one dtype per call; arithmetic is in float32, and results are rounded once. Up to `PROGRAMS` programs
sum the gradient of a norm's weight, each over its own rows, in an order that depends only on the shape, so equal
tensors give equal bits. `python -m megarl.benchmarks.layers` times the block sizes on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.logits_gpu import fitting

#: Elements per block and warps per program; for RoPE, pairs of elements per block. A norm's row fits in one block.
SWIGLU, SWIGLU_BACKWARD, ROPE, NORM, NORM_BACKWARD = (2048, 4), (2048, 8), (1024, 4), (2048, 4), (1024, 4)
SCALED_SWIGLU_BACKWARD = (1024, 4)
#: Programs of a norm's backward pass, at most: eight for each of an H100's 132 multiprocessors.
PROGRAMS = 8 * 132
_WIDEST = 16_384  # longest row of a norm: 32 numbers per thread of 16 warps
_MOST_WARPS = 16


def swiglu(x: Tensor, scale: Tensor | None = None, launch: tuple[int, int] = SWIGLU) -> Tensor:
    """Return silu(gate) * up [n, f]; the contiguous `x` [n, 2f] holds the gate in its first f columns, then up.

    With `scale` [n], each row is multiplied by its scale before rounding."""
    rows, width = len(x), x.shape[1] // 2
    out = x.new_empty(rows, width)
    if out.numel():
        block, warps = fitting(width, launch)
        inputs = (
            x,
            x if scale is None else scale,
            out,
            width,
        )  # without a scale, `x` takes its place as an argument that the kernel does not read
        _swiglu[(rows, triton.cdiv(width, block))](*inputs, block, scale is not None, num_warps=warps)
    return out


def swiglu_backward(x: Tensor, grad: Tensor, launch: tuple[int, int] = SWIGLU_BACKWARD) -> Tensor:
    """Return the gradient [n, 2f] of `x` from the gradient `grad` [n, f] of the result; both contiguous."""
    rows, width = grad.shape
    dx = torch.empty_like(x)
    if dx.numel():
        block, warps = fitting(width, launch)
        _swiglu_backward[(rows, triton.cdiv(width, block))](x, grad, dx, width, block, num_warps=warps)
    return dx


def scaled_swiglu_backward(
    x: Tensor, grad: Tensor, scale: Tensor, launch: tuple[int, int] = SCALED_SWIGLU_BACKWARD
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` [n, 2f] and of `scale` [n] (float32) from `grad` [n, f]; all contiguous."""
    count, width = grad.shape
    dx, dscale = torch.empty_like(x), torch.zeros(count, dtype=torch.float32, device=x.device)
    if dx.numel():
        rows, block, warps = _tile(min(width, launch[0]), launch)
        inputs = x, grad, scale, dx, dscale, count, width
        _scaled_swiglu_backward[(triton.cdiv(count, rows),)](*inputs, rows, block, num_warps=warps)
    return dx, dscale


def rope(x: Tensor, cos: Tensor, sin: Tensor, sign: float, launch: tuple[int, int] = ROPE) -> Tensor:
    """Rotate the two halves of each head of `x` [t, heads, d] against each other; the result is contiguous.

    Args:
        x: copied if its last dimension is not contiguous; other dimensions may have any strides.
        cos, sin: [t, d / 2]; copied if they are not contiguous, which happens for positions with three numbers.
        sign: 1 for the rotation, -1 for its gradient.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, block, warps = _tile(size // 2, launch)
        grid = (triton.cdiv(tokens * heads, rows),)
        strides = x.stride(0), x.stride(1)
        _rope[grid](x, cos, sin, out, tokens * heads, heads, size // 2, *strides, sign, rows, block, num_warps=warps)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, launch: tuple[int, int] = NORM) -> Tensor:
    """Return x / rms(x) * weight for the rows of `x` [n, width], contiguous, width up to 16,384."""
    count, width = x.shape
    out = torch.empty_like(x)
    if out.numel():
        rows, block, warps = _tile(width, launch)
        _rms_norm[(triton.cdiv(count, rows),)](x, weight, out, count, width, eps, rows, block, num_warps=warps)
    return out


def rms_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    eps: float,
    *,
    of_weight: bool = True,
    launch: tuple[int, int] = NORM_BACKWARD,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `x` [n, width] and `weight` [width] from the gradient `grad` [n, width] of the result.

    Args:
        x, grad: contiguous.
        of_weight: whether to compute the weight's gradient; if not, it is None.
    """
    count, width = x.shape
    dx = torch.empty_like(x)
    if not dx.numel():
        return dx, torch.zeros_like(weight) if of_weight else None
    rows, block, warps = _tile(width, launch)
    programs = min(PROGRAMS, triton.cdiv(count, rows))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device) if of_weight else None
    sums = dx if partial is None else partial  # without `partial` the kernel reads no sums, so any pointer will do
    inputs = x, grad, weight, dx, sums, count, width, eps
    _rms_norm_backward[(programs,)](*inputs, rows, block, of_weight, num_warps=warps)
    return dx, None if partial is None else partial.sum(0).to(weight.dtype)


def fits(width: int) -> bool:
    """Return whether a norm's rows of `width` numbers fit into one block."""
    return width <= _WIDEST


def _tile(width: int, launch: tuple[int, int]) -> tuple[int, int, int]:
    """Return the rows, columns and warps of a Triton block that processes whole rows of `width` numbers; longer rows
    get more warps.
    """
    size, warps = launch
    block = triton.next_power_of_2(width)
    rows = max(1, size // block)
    return rows, block, min(_MOST_WARPS, max(1, warps * rows * block // size))


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    x,
    scale,
    out,
    width,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Process one block of a row: gate * sigmoid(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = x + row * 2 * width
    gate = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width + column, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    if SCALED:
        product *= tl.load(scale + row)
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    x,
    grad,
    dx,
    width,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of one block of a row, with g from `grad` and s = sigmoid(gate): for gate
    g up s (1 + gate (1 - s)), and for up g gate s."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = row * 2 * width + column
    gate = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + source + width, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = upstream * up * share * (1.0 + gate * (1.0 - share))
    tl.store(dx + source, of_gate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + source + width, (upstream * gate * share).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_swiglu_backward(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    x,
    grad,
    scale,
    dx,
    dscale,
    count,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of some rows of scale * silu(gate) * up, with g from `grad` and s = sigmoid(gate): those of
    `_swiglu_backward` for g scale in place of g, and for scale the sum of g gate s up."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    factor = tl.load(scale + row, mask=row < count, other=0.0)[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < count) & (column < width)
        source = row[:, None] * 2 * width + column
        gate = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + source + width, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + row[:, None] * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        total += upstream * gate * share * up
        scaled = upstream * factor
        of_gate = scaled * up * share * (1.0 + gate * (1.0 - share))
        tl.store(dx + source, of_gate.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + source + width, (scaled * gate * share).to(dx.dtype.element_ty), mask=inside)
    tl.store(dscale + row, tl.sum(total, 1), mask=row < count)


@triton.jit
def _rope(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    x,
    cos,
    sin,
    out,
    count,
    heads,
    half,
    token_stride,
    head_stride,
    sign,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply RoPE to a block of heads; x1 and x2 are a head's halves: x1 cos - x2 sin, and x2 cos + x1 sin."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < half)
    token = (row // heads).to(tl.int64)
    source = x + token * token_stride + (row % heads) * head_stride + column
    x1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * half + column
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32) * sign
    place = out + row.to(tl.int64) * 2 * half + column
    tl.store(place, (x1 * c - x2 * s).to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, (x2 * c + x1 * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    x,
    weight,
    out,
    count,
    width,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the RMS norm of ROWS rows of `x`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < width)
    place = row.to(tl.int64) * width + column
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    source = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(source * source, 1) / width + eps)[:, None]
    tl.store(out + place, (source * inverse * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    x,
    grad,
    weight,
    dx,
    partial,
    count,
    width,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_WEIGHT: tl.constexpr,
):
    """Compute the gradients of a norm for blocks of ROWS rows, which the programs share out in turn.

    With n = x / rms and a = g weight: (a - n mean(a n)) / rms, and the sum of g n.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(program * ROWS, count, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        inside = (row < count) & (column < width)
        place = row.to(tl.int64) * width + column
        source = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(source * source, 1) / width + eps)[:, None]
        normed = source * inverse
        scaled = upstream * scale
        along = (tl.sum(scaled * normed, 1) / width)[:, None]
        tl.store(dx + place, ((scaled - normed * along) * inverse).to(dx.dtype.element_ty), mask=inside)
        if OF_WEIGHT:
            total += upstream * normed
    if OF_WEIGHT:
        columns = tl.arange(0, BLOCK)
        tl.store(partial + program * width + columns, tl.sum(total, 0), mask=columns < width)
