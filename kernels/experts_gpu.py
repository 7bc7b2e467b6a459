"""Triton kernels of mixtures of experts: sums of rows for each token, and gradients of the experts' weights.

`sum_rows` sums outputs of experts, or gradients of a token's copies. torch's `scatter_add_` and the gradient of
`index_select` use atomics, which round a token's sum once per row, in a different order in each run. Here one program
per token reads its rows once, adds them in float32 in a fixed order, and rounds once. `python -m
megarl.benchmarks.layers` times the block sizes on a GPU.

`add_products` adds the gradients of all experts' weights to float32 buffers. torch's grouped product has no such sum:
it writes the gradients in bf16, which another pass over memory then adds, so that they are rounded to 8 bits and 12
bytes are moved for each weight. Here 8 bytes are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns per program, and warps per program.
SUM = (2048, 8)


class Tiles(NamedTuple):
    """The launch sizes of `add_products`, of which each program computes one block of an expert's weight gradient."""

    out: int  # rows of the block
    width: int  # columns of the block
    tokens: int  # tokens whose products are added at a time
    warps: int
    stages: int  # stages of the pipeline that loads the next tokens


#: These sizes spill no register at compute capability 9.0 (`python -m megarl.benchmarks.aot`). They were never timed.
PRODUCTS = Tiles(128, 128, 64, 8, 3)


def sum_rows(rows: Tensor, places: Tensor, launch: tuple[int, int] = SUM) -> Tensor:
    """Return [n, h] in the dtype of `rows`: sums over j of rows[places[i, j]], in float32 and in the order of j.

    Args:
        rows: [m, h], contiguous; float32, bfloat16 or float16.
        places: int32 or int64 [n, k], contiguous; negative: no row.
    """
    (count, each), width = places.shape, rows.shape[1]
    out = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(launch[0], triton.next_power_of_2(width))
        warps = max(1, launch[1] * block // launch[0])
        _sum_rows[(count, triton.cdiv(width, block))](rows, places, out, width, each, block, num_warps=warps)
    return out


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    rows,
    places,
    out,
    width,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a block of columns over the rows of one token (the results of its experts); a negative place means no row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(EACH):
        place = tl.load(places + token * EACH + number).to(tl.int64)
        total += tl.load(rows + place * width + column, mask=inside & (place >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def add_products(grads: Tensor, rows: Tensor, ends: Tensor, total: Tensor, tiles: Tiles = PRODUCTS) -> None:
    """Add grads[a:b].T @ rows[a:b] to total[e] for every expert e with rows [a, b); products and sums in float32.

    Args:
        grads: [n, out], contiguous; gradients of the experts' outputs, in the dtype of `rows`.
        rows: [n, in], contiguous; the experts' inputs, sorted by expert, in bfloat16, float16 or float32.
        ends: int32 [experts], index after the last row of each expert. Rows after the last expert's are not read.
        total: float32 [experts, out, in], contiguous; gradients of the experts' weights so far.
    """
    experts, out, width = total.shape
    if total.numel():
        grid = (triton.cdiv(out, tiles.out) * triton.cdiv(width, tiles.width), experts)
        sizes = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        _add_products[grid](grads, rows, ends, total, out, width, tuple(tiles[:3]), **sizes)


@triton.jit
def _add_products(  # type: ignore[no-untyped-def]
    grads,
    rows,
    ends,
    total,
    out,
    width,
    SIZES: tl.constexpr,
):
    """Compute one block of one expert's weight gradient and add it to `total`; `SIZES`: the first three numbers of
    `Tiles`."""
    OUT: tl.constexpr = SIZES[0]
    WIDTH: tl.constexpr = SIZES[1]
    TOKENS: tl.constexpr = SIZES[2]
    expert, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    if first < last:
        across = tl.cdiv(width, WIDTH)
        row = (block // across) * OUT + tl.arange(0, OUT)
        column = (block % across) * WIDTH + tl.arange(0, WIDTH)
        product = tl.zeros((OUT, WIDTH), tl.float32)
        for start in range(first, last, TOKENS):
            token = start + tl.arange(0, TOKENS)
            inside, at = token < last, token.to(tl.int64)
            left = grads + at[None, :] * out + row[:, None]
            right = rows + at[:, None] * width + column[None, :]
            a = tl.load(left, mask=inside[None, :] & (row < out)[:, None], other=0.0)
            b = tl.load(right, mask=inside[:, None] & (column < width)[None, :], other=0.0)
            product = tl.dot(a, b, product, input_precision="ieee")
        place = total + (expert * out + row[:, None]) * width + column[None, :]
        within = (row < out)[:, None] & (column < width)[None, :]
        tl.store(place, tl.load(place, mask=within, other=0.0) + product, mask=within)
