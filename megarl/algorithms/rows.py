"""One view of both forms of a batch, packed [N] with offsets and padded [B, T], as B rows of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.algorithms.lazy import Tensor, torch

# Tokens that a CPU processes at a time, so that temporaries stay in its cache.
_BLOCK_TOKENS = 1 << 17


def all_true(mask: Tensor) -> bool:
    """Return whether a bool tensor has no False, in an eighth of the time of `mask.all()`."""
    return mask.numel() == 0 or bool(mask.view(torch.uint8).min())


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x`, widened to float32 if its dtype is narrower: exp(20) exceeds float16, and bfloat16 has three
    digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Rows:
    """The boundaries of a batch's B sequences of tokens in flat values [N] of all tokens."""

    offsets: Tensor  # int64 [B + 1], index of each sequence's first token, and N
    width: int | None  # length of every row in the padded form; None in the packed form

    @classmethod
    def of(cls, mask: Tensor, offsets: Tensor | None) -> Rows:
        """Return the rows of a mask: of a padded one [B, T], or with offsets of a packed one [N]."""
        if mask.dtype != torch.bool:
            raise ValueError(f"the mask must be bool, got {mask.dtype}")
        if offsets is None:
            if mask.ndim != 2:
                raise ValueError(f"without offsets the mask must be [B, T], got shape {tuple(mask.shape)}")
            rows, width = mask.shape
            return cls(torch.arange(rows + 1, device=mask.device) * width, width)
        if mask.ndim != 1 or offsets.ndim != 1 or offsets.dtype != torch.int64:
            raise ValueError(
                f"packed samples need a mask [N] and int64 offsets [B + 1], got {tuple(mask.shape)} and "
                f"{offsets.dtype} {tuple(offsets.shape)}"
            )
        if not offsets.is_cuda and int(offsets[-1]) != len(mask):
            raise ValueError(f"offsets must end at the length of the mask, {len(mask)}, got {int(offsets[-1])}")
        return cls(offsets, None)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of each row, [B]; differentiable. Values that a mask hides must already be zero."""
        if self.width is not None:
            return values.reshape(len(self), self.width).sum(1)
        if not values.is_floating_point():
            values = values.to(torch.float32 if len(values) < 1 << 24 else torch.float64)
        if len(values) == 0:
            return values.sum().expand(len(self))  # zeros that autograd still connects to the values
        return torch.segment_reduce(values, "sum", offsets=self.offsets, initial=0)

    def masked_sum(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of each row's valid values, [B], and whether the row has any, bool [B]; not differentiable.

        Sums have the dtype of the values, at least float32. The sums are computed in blocks, so that no temporary
        tensor is as large as the batch.
        """
        total = values.new_zeros(len(self), dtype=torch.promote_types(values.dtype, torch.float32))
        live = mask.new_zeros(len(self))
        flat_values, flat_mask = values.detach().reshape(-1), mask.reshape(-1)
        for first, last, tokens in self.blocks():
            part = Rows(self.offsets[first : last + 1] - tokens.start, self.width)
            here, x = flat_mask[tokens], at_least_float32(flat_values[tokens])
            if all_true(here):
                total[first:last] = part.sum(x)
                live[first:last] = part.offsets.diff() > 0
                continue
            weight = here.to(x.dtype)
            sums = part.sum(x * weight)
            if not bool(sums.isfinite().all()):
                # A masked value may be NaN or infinite, and times 0 still NaN: select instead. This is slow, and rare.
                sums = part.sum(torch.where(here, x, 0))
            total[first:last] = sums
            live[first:last] = part.sum(weight) > 0
        return total, live

    def counts(self, mask: Tensor) -> Tensor:
        """Return the number of valid tokens of each row, int64 [B]."""
        if self.width is not None:
            # int32 sums twice as fast as int64, and no row is too long for int32.
            return mask.reshape(len(self), self.width).sum(1, dtype=torch.int32).long()
        return self.sum(mask.reshape(-1)).round().long()

    def expand(self, per_row: Tensor) -> Tensor:
        """Repeat each row's value at each of its tokens: [B] -> flat [N]."""
        if self.width is not None:
            return per_row[:, None].expand(-1, self.width).reshape(-1)
        lengths = self.offsets.diff()
        return torch.repeat_interleave(per_row, lengths, output_size=None if lengths.is_cuda else int(lengths.sum()))

    def spread(self, per_row: Tensor, mask: Tensor) -> Tensor:
        """Repeat each row's value at its valid tokens, zero elsewhere, in the shape of `mask`."""
        if self.width is not None and not mask.is_cuda and all_true(mask):
            return per_row[:, None].expand(-1, self.width).contiguous()
        if self.width is not None:
            return mask.reshape(len(self), self.width).to(per_row.dtype).mul_(per_row[:, None]).view(mask.shape)
        return mask.to(per_row.dtype).mul_(self.expand(per_row))

    def blocks(self) -> Iterator[tuple[int, int, slice]]:
        """Yield blocks of whole rows as (first row, end row, slice of tokens): small on a CPU, everything at once on a
        GPU."""
        ends = self.offsets.tolist()
        if self.offsets.is_cuda:
            if len(self):
                yield 0, len(self), slice(0, ends[-1])
            return
        first = 0
        for last in range(1, len(ends)):
            full = last == len(self) or ends[last + 1] - ends[first] > _BLOCK_TOKENS
            if full:
                yield first, last, slice(ends[first], ends[last])
                first = last
