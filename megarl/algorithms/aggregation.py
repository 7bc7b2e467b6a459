"""Aggregation of token losses: a weight per token, so that the loss of any part is just sum(weight * loss).

The weights are computed once per mini-batch from counts over all ranks. For any split of the mini-batch into
micro-batches or over ranks, the parts add up to the same loss and the same gradient.

    counts = all_sum(local_counts(mask, offsets))
    weights = aggregation_weights("token-mean", mask, counts, offsets=offsets)
    loss = (weights * token_loss).sum()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.rows import Rows
from megarl.system.errors import ConfigError


def local_counts(mask: Tensor, offsets: Tensor | None = None, *, copies: Tensor | None = None) -> Tensor:
    """Count valid tokens and sequences with a valid token, float64 [2] on the CPU; the caller adds the counts over
    ranks.

    Args:
        mask: bool [N] or [B, T].
        offsets: int64 [B + 1] for the packed form.
        copies: int64 [B], how often each sequence counts; None: once.
    """
    per_row = Rows.of(mask, offsets).counts(mask)
    tokens, live = (per_row, per_row > 0) if copies is None else (per_row * copies, copies * (per_row > 0))
    return torch.stack([tokens.sum(), live.sum()]).double().cpu()


def aggregation_weights(
    mode: str,
    mask: Tensor,
    counts: Tensor,
    *,
    offsets: Tensor | None = None,
    sum_norm: float | None = None,
    copies: Tensor | None = None,
) -> Tensor:
    """Return the weight of every token's loss, float32 in the shape of `mask`, zero where the mask is False.

    | mode | weight of a valid token; n = valid tokens of its sequence |
    |---|---|
    | token-mean | 1 / tokens |
    | seq-mean-token-mean | 1 / (sequences n) |
    | seq-mean-token-sum | 1 / sequences |
    | seq-mean-token-sum-norm | 1 / (sequences sum_norm) |
    | token-sum | 1 |

    Sequences without a valid token are not counted.

    Args:
        mode: a name from the table.
        mask: bool [N] or [B, T].
        counts: `local_counts` added over all ranks of the mini-batch.
        offsets: int64 [B + 1] for the packed form.
        sum_norm: divisor of seq-mean-token-sum-norm, for instance the longest response allowed.
        copies: int64 [B], how often each sequence counts: its weights are multiplied by this count. None: once.

    Source: DAPO (arXiv 2503.14476) for token-mean, Dr. GRPO (arXiv 2503.20783) for the constant divisor.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> aggregation_weights("seq-mean-token-mean", mask, local_counts(mask))[:, 0]
    tensor([0.1667, 0.5000])
    """
    if mode not in _PER_ROW:
        raise ConfigError(
            f"unknown aggregation {mode!r}",
            where="algorithm.loss.aggregation or critic.aggregation",
            found=mode,
            allowed=_PER_ROW,
        )
    if mode == "seq-mean-token-sum-norm" and not sum_norm:
        raise ConfigError(
            "aggregation seq-mean-token-sum-norm needs a divisor",
            where="algorithm.loss.sum_norm or critic.sum_norm",
            found=sum_norm,
            allowed="a positive number",
            fix="set the sum_norm of this loss to the value of rollout.sampling.max_new_tokens",
        )
    rows = Rows.of(mask, offsets)
    # The counts of an empty mini-batch are 0: divide by 1 instead.
    tokens, sequences = (max(float(c), 1.0) for c in counts)
    lengths = rows.counts(mask).double().clamp(min=1)
    per_row = _PER_ROW[mode](lengths, tokens, sequences, sum_norm or 1.0)
    if copies is not None:
        per_row = per_row * copies
    return rows.spread(per_row.float(), mask)


_PER_ROW: dict[str, Callable[[Tensor, float, float, float], Tensor]] = {
    "token-mean": lambda n, tokens, sequences, norm: torch.ones_like(n) / tokens,
    "seq-mean-token-mean": lambda n, tokens, sequences, norm: 1 / (sequences * n),
    "seq-mean-token-sum": lambda n, tokens, sequences, norm: torch.ones_like(n) / sequences,
    "seq-mean-token-sum-norm": lambda n, tokens, sequences, norm: torch.ones_like(n) / (sequences * norm),
    "token-sum": lambda n, tokens, sequences, norm: torch.ones_like(n),
}
