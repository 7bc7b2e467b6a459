"""Logits by chunks of tokens, and their log sum exp, where columns may be split over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.head import head_logits
from megarl.models.soft_cap import capped
from megarl.system.comm import WorkerGroup


def chunks(count: int, size: int) -> list[slice]:
    """Split `count` rows into slices of `size` rows; the last slice may have fewer."""
    return [slice(at, at + size) for at in range(0, count, size)]


def scaled_logits(hidden: Tensor, weight: Tensor, inverse_temperature: float, cap: float | None) -> Tensor:
    """Return this rank's logits [C, v] in at least float32, capped by `cap` and then divided by the temperature."""
    logits = capped(head_logits(hidden, weight), cap)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) * inverse_temperature


def log_partition(logits: Tensor, group: WorkerGroup | None) -> Tensor:
    """Return log sum exp of each row of logits [C, v], over the columns of all ranks: [C]."""
    return joined_log_z(*partition(logits), group)


def partition(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of this shard's columns and the sum of exp(logit - largest), [C] each."""
    if logits.shape[1] == 0:  # no column of the vocabulary is on this rank; a maximum of -inf would lead to NaN
        return logits.new_full((len(logits),), torch.finfo(logits.dtype).min / 2), logits.new_zeros(len(logits))
    peak = logits.amax(1).clamp(min=torch.finfo(logits.dtype).min / 2)  # finite also for a row of -inf
    return peak, (logits - peak[:, None]).exp_().sum(1)


def joined_log_z(peak: Tensor, mass: Tensor, group: WorkerGroup | None) -> Tensor:
    """Return log sum exp over the columns of all ranks, [N]."""
    parts = torch.stack([peak, mass])[None]
    if group is not None and group.size > 1 and len(peak):
        parts = torch.stack(group.all_gather(parts[0]))
    highest = parts[:, 0].amax(0)
    return highest + (parts[:, 1] * (parts[:, 0] - highest).exp()).sum(0).log()
