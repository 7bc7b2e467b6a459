"""Discounted suffix sums over valid tokens, without a loop over time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.rows import Rows, all_true

_CHUNK = 16

#: Takes dense [R, T] inputs and their prefix mask; returns dense [R, T] outputs.
Dense: TypeAlias = "Callable[..., Sequence[Tensor]]"


def suffix_sum(values: Tensor, discount: float) -> Tensor:
    """Compute out[r, t] = sum over s >= t of discount^(s - t) values[r, s], for values [R, T].

    Chunks of 16 tokens are summed by one triangular matrix product. Their totals are the same problem, 16 times
    smaller, with discount^16. Rounding errors grow with log T, not T.
    """
    rows, length = values.shape
    if rows == 0 or length == 0:
        return values.clone()
    triangle = _triangle(discount, values.dtype, values.device)
    if length <= _CHUNK:
        return values @ triangle[:length, :length]
    chunks = -(-length // _CHUNK)
    if chunks * _CHUNK != length:
        values = torch.nn.functional.pad(values, (0, chunks * _CHUNK - length))
    out = (values.reshape(-1, _CHUNK) @ triangle).view(rows, chunks, _CHUNK)
    carry = suffix_sum(out[:, :, 0], discount**_CHUNK)
    if discount > 0:
        out[:, :-1].addcmul_(carry[:, 1:, None], triangle[-1] * discount)
    return out.view(rows, -1)[:, :length]


@functools.lru_cache(maxsize=64)
def _triangle(discount: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [16, 16] with discount^(s - t) at [s, t] for s >= t. The tensor is cached: do not change it."""
    gap = torch.arange(_CHUNK)[:, None] - torch.arange(_CHUNK)
    powers = torch.tensor(discount, dtype=torch.float64) ** gap.clamp(min=0)
    return torch.where(gap >= 0, powers, 0.0).to(device, dtype)


def over_valid(fn: Dense, rows: Rows, mask: Tensor, inputs: Sequence[Tensor], n_outputs: int) -> list[Tensor]:
    """Apply `fn` to the valid tokens of each row, moved to its start so that holes in the mask vanish.

    Args:
        fn: `fn(*dense_inputs, prefix)`: gets read-only dense [R, T] blocks that are zero outside `prefix`, bool [R, T],
            which is true for the first n tokens of each row; returns `n_outputs` tensors [R, T].
        rows: the rows of `mask`.
        mask: bool, padded or packed.
        inputs: tensors in the shape of `mask`.
        n_outputs: number of tensors `fn` returns.

    Returns:
        Tensors in the shape of `mask`, zero where the mask is False, of the widest dtype among the inputs and float32.
    """
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in inputs], torch.float32)
    outputs = [torch.empty(mask.shape, dtype=dtype, device=mask.device) for _ in range(n_outputs)]
    flat_mask, flat_inputs = mask.reshape(-1), [x.detach().reshape(-1) for x in inputs]
    for first, last, tokens in rows.blocks():
        here, xs = flat_mask[tokens], [x[tokens] for x in flat_inputs]
        targets = [out.view(-1)[tokens] for out in outputs]
        whole = all_true(here)
        prefix = here.view(-1, rows.width) if rows.width else here
        # If padded rows all have their valid tokens first, `fn` gets the rows as they are, with zeros for other tokens.
        if rows.width and (whole or not bool((prefix[:, 1:] > prefix[:, :-1]).any())):
            dense = [x.view(prefix.shape) for x in xs]
            dense = [(x if whole else torch.where(prefix, x, 0)).to(dtype) for x in dense]
            for target, result in zip(targets, fn(*dense, prefix), strict=True):
                target.copy_(result.reshape(-1))
        elif len(here):
            block = Rows(rows.offsets[first : last + 1] - tokens.start, rows.width)
            counts = block.offsets.diff() if whole else block.counts(here)
            prefix = torch.arange(int(counts.max()), device=mask.device) < counts[:, None]
            # `slot`: each valid token's index in the flattened dense block.
            ends = counts.cumsum(0)
            shift = torch.arange(len(counts), device=counts.device) * prefix.shape[1] - (ends - counts)
            slot = torch.repeat_interleave(shift, counts)
            slot.add_(torch.arange(len(slot), device=slot.device))
            dense = [torch.zeros(prefix.shape, dtype=dtype, device=mask.device) for _ in xs]
            for pad, x in zip(dense, xs, strict=True):
                pad.view(-1).index_copy_(0, slot, (x if whole else x[here]).to(dtype))
            for target, result in zip(targets, fn(*dense, prefix), strict=True):
                valid = result.reshape(-1).index_select(0, slot)
                if whole:
                    target.copy_(valid)
                else:
                    target.zero_()
                    target[here] = valid
    return outputs
