"""A Triton kernel that sums rows for each token: outputs of experts, or gradients of a token's copies.

torch's `scatter_add_` and the gradient of `index_select` use atomics, which round a token's sum once per row, in a
different order in each run. Here one program per token reads its rows once, adds them in float32 in a fixed order, and
rounds once. `python -m megarl.benchmarks.layers` times the block sizes on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns per program, and warps per program.
SUM = (2048, 8)


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
