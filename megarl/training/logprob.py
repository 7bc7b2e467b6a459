"""Log-probability and entropy of tokens straight from hidden states, without the logits of all tokens at once.

Shape legend: N tokens, H hidden size, V columns of this rank's vocabulary shard, C tokens of one chunk.

For logits l = hidden @ weight.T / T over the whole vocabulary: logp = l[target] - logZ and entropy = logZ - sum(p l).
With a cap c, c tanh(hidden @ weight.T / c) is in the place of the product (Gemma).
Only one chunk of logits [C, V] exists at a time. The backward pass computes the logits again, unless there is a single
chunk, which is kept. On a GPU with fewer tokens than columns, the backward pass goes by blocks of columns: it writes
each row of the weight's gradient once, and the gradient to which all blocks add is the smaller one, [N, H]. Otherwise,
and always on a CPU, whose bf16 products are rounded before they can be added, it goes by chunks of tokens. With a
tensor-parallel group each rank reduces its columns to four numbers per token, and one all-gather of [4, N] combines
them; the backward pass needs no communication. Kernels reduce the logits and compute their gradient in one pass each:
kernels/logits_gpu.py on a GPU, kernels/cpu.cpp on a CPU. Without them, and in float64, torch operations do.

    rank r:   m_r = max l,  s_r = sum exp(l - m_r),  t_r = sum exp(l - m_r) (l - m_r),  l[target] or 0
    together: M = max m_r,  S = sum s_r e^(m_r - M),  logZ = M + log S,
              entropy = log S - sum e^(m_r - M) (t_r + s_r (m_r - M)) / S
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megarl.kernels import cpu
from megarl.kernels.gpu import triton_kernels
from megarl.models.head import head_logits, wide_product
from megarl.models.soft_cap import cap_slope, capped
from megarl.system.comm import WorkerGroup

if TYPE_CHECKING:
    from types import ModuleType


_CACHED = 1 << 18  # how many logits a CPU processes at a time, so that their float32 copies stay in its cache
_LEAST = -1e4  # exp of it is 0; 0 times a logit of -inf, of a token that is ruled out, would be NaN
_ALIGNED = 16  # columns of a block are a multiple of this, so that rows begin at multiples of 32 bytes


class VocabularyShard(NamedTuple):
    """The arguments of `linear_logprob` or `token_logprobs` that are not tensors."""

    start: int  # vocabulary index of this rank's first column
    inverse_temperature: float
    chunk: int
    group: WorkerGroup | None
    entropy: bool = False
    cap: float | None = None  # soft cap of the logits: cap * tanh(logit / cap)

    @property
    def scaled_cap(self) -> float | None:
        """The cap of the logits after their division by the temperature; None: no cap."""
        return None if self.cap is None else self.cap * self.inverse_temperature


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    chunk_tokens: int = 1024,
    entropy: bool = True,
    group: WorkerGroup | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `targets` and entropies under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [N, H], equal on all ranks of `group`. Its gradient is only this rank's part and must be summed
            over the group, as Megatron's mappings copy_to and gather_from_sequence_parallel before this call do.
        weight: [V, H], this rank's rows of the output embedding, without rows that only pad the vocabulary; V may
            differ between ranks and be 0.
        targets: int64 [N], indices into the whole vocabulary.
        temperature: softmax temperature, > 0.
        vocab_start: vocabulary index of the first row of `weight`.
        chunk_tokens: number of tokens whose logits are in memory at the same time.
        entropy: False skips the entropy and returns an empty tensor.
        group: tensor-parallel group that splits the vocabulary; None: one process.
        cap: soft cap of the logits, before the temperature divides them; None: no cap.

    Returns:
        logp [N] and entropy [N], float32 (float64 for float64 inputs), equal on all ranks of `group`.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"shapes do not match: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, "
            f"targets {tuple(targets.shape)}"
        )
    if temperature <= 0 or chunk_tokens <= 0:
        raise ValueError(f"temperature {temperature} and chunk_tokens {chunk_tokens} must be positive")
    group = None if group is None or group.size == 1 else group
    shard = VocabularyShard(vocab_start, 1.0 / temperature, chunk_tokens, group, entropy, cap)
    return _LinearLogprob.apply(hidden, weight, targets, shard)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        count = hidden.shape[0]
        keep = count <= shard.chunk and any(ctx.needs_input_grad)
        stats = hidden.new_empty((4, count), dtype=_wide(hidden.dtype))
        kept_logits = None
        for begin in range(0, count, shard.chunk):
            part = slice(begin, begin + shard.chunk)
            logits = capped(head_logits(hidden[part], weight), shard.cap)
            reduce_logits(logits, targets[part], shard, stats[:, part], keep)
            kept_logits = logits if keep else None
            del logits  # frees the memory for the next chunk
        logp, log_z, entropy = combine_shards(stats, shard)
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, kept_logits)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_z, entropy, kept_logits = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None
        rows = LogprobRows(hidden, targets, log_z, entropy if shard.entropy else None, grad_logp, grad_entropy)
        # Blocks of columns add products to the gradient of `hidden`, which is exact enough only where `wide_product`
        # does not round them. Logits that were kept are one chunk of tokens: there is nothing to compute in blocks.
        sums = _adds_wide(hidden) and kept_logits is None
        if sums and ctx.needs_input_grad[1] and 0 < len(hidden) < len(weight):
            return *_by_columns(rows, weight, shard, wants_hidden=ctx.needs_input_grad[0]), None, None
        return *_by_tokens(rows, weight, shard, kept_logits, ctx.needs_input_grad), None, None


@dataclass(frozen=True)
class LogprobRows:
    """Inputs, results and incoming gradients of some tokens' log-probs, from which the gradient of logits follows."""

    hidden: Tensor
    targets: Tensor
    log_z: Tensor
    entropy: Tensor | None
    grad_logp: Tensor | None
    grad_entropy: Tensor | None

    def part(self, place: slice) -> LogprobRows:
        """Return the rows in the slice `place`."""
        values = (getattr(self, field.name) for field in fields(self))
        return LogprobRows(*(None if value is None else value[place] for value in values))  # type: ignore[arg-type]


def _by_tokens(
    rows: LogprobRows, weight: Tensor, shard: VocabularyShard, kept_logits: Tensor | None, wants: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden states and weight, computed for `shard.chunk` tokens at a time; None for a weight
    with `add_gradient`, to whose buffer the gradient is added."""
    hidden, add_gradient = rows.hidden, getattr(weight, "add_gradient", None)
    if kept_logits is not None:  # all tokens are one chunk, so there is no sum over chunks
        grad_logits = _grad_logits(kept_logits, rows, shard, True, weight.dtype)
        grad_hidden = grad_logits @ weight if wants[0] else None
        if wants[1] and add_gradient is not None:
            add_gradient(weight.main_grad, grad_logits, hidden)  # type: ignore[attr-defined]
            return grad_hidden, None
        return grad_hidden, grad_logits.t() @ hidden if wants[1] else None
    grad_hidden = torch.empty_like(hidden) if wants[0] else None
    # Sums over chunks are float32: a bf16 accumulator would lose the small contributions of late chunks.
    kept_apart = wants[1] and add_gradient is None
    grad_weight = weight.new_zeros(weight.shape, dtype=rows.log_z.dtype) if kept_apart else None
    for begin in range(0, hidden.shape[0], shard.chunk):
        part = slice(begin, begin + shard.chunk)
        logits = capped(head_logits(hidden[part], weight), shard.cap)
        grad_logits = _grad_logits(logits, rows.part(part), shard, False, weight.dtype)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[part])
        if grad_weight is not None:
            grad_weight += torch.mm(grad_logits.t(), hidden[part])
        elif wants[1] and add_gradient is not None:
            add_gradient(weight.main_grad, grad_logits, hidden[part])  # type: ignore[attr-defined]
        del logits, grad_logits  # frees the memory for the next chunk
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _by_columns(
    rows: LogprobRows, weight: Tensor, shard: VocabularyShard, *, wants_hidden: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of hidden states and weight, computed in blocks of vocabulary columns.

    Each block has about as many logits as `shard.chunk` tokens, so it takes no more memory."""
    hidden = rows.hidden
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=rows.log_z.dtype) if wants_hidden else None
    grad_weight = torch.empty_like(weight)
    columns = shard.chunk * len(weight) // len(hidden)
    columns = max(1, columns - columns % _ALIGNED if columns > _ALIGNED else columns)
    for begin in range(0, len(weight), columns):
        part = slice(begin, begin + columns)
        place = shard._replace(start=shard.start + begin)
        logits = capped(head_logits(hidden, weight[part]), shard.cap)
        grad_logits = _grad_logits(logits, rows, place, False, weight.dtype)
        torch.mm(grad_logits.t(), hidden, out=grad_weight[part])
        if grad_hidden is not None:
            grad_hidden += wide_product(grad_logits, weight[part])
        del logits, grad_logits  # frees the memory for the next block
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight


def _adds_wide(hidden: Tensor) -> bool:
    """Return whether `wide_product` returns unrounded products, so that a sum of them is as exact as one product."""
    return hidden.is_cuda


def _kernels(logits: Tensor) -> ModuleType | cpu.CpuKernels | None:
    """Return the Triton or the compiled CPU kernels for these logits; None to use torch operations."""
    if logits.is_cuda:
        return triton_kernels().logits if logits.dtype == torch.float32 else None
    return cpu.logit_kernels(logits)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are reduced: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _scaled(logits: Tensor, shard: VocabularyShard, keep: bool) -> Tensor:
    """Return `logits` in at least float32, divided by the temperature; without `keep` float32 logits are
    overwritten."""
    scaled = logits.to(_wide(logits.dtype), copy=keep)
    return scaled if shard.inverse_temperature == 1.0 else scaled.mul_(shard.inverse_temperature)


def local_columns(ids: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the column of each id in this shard (0 for ids of other shards), and whether the id is in this shard."""
    column = ids - start
    here = (column >= 0) & (column < columns)
    return column.masked_fill(~here, 0), here


def reduce_logits(logits: Tensor, targets: Tensor, shard: VocabularyShard, out: Tensor, keep: bool) -> None:
    """Write max, sum of exp, sum of exp times shifted logit, and target logit (or 0) of this shard to out [4, C]."""
    if logits.shape[1] == 0:  # no column on this rank: a contribution of zero that stays finite
        out.zero_()
        out[0] = torch.finfo(out.dtype).min / 2
        return
    kernels = _kernels(logits)
    if kernels is not None:
        place: dict[str, Any] = {"start": shard.start, "inverse_temperature": shard.inverse_temperature}
        kernels.statistics(logits, targets, out, entropy=shard.entropy, **place)
        return
    for rows in _cached_rows(logits):
        _reduce_rows(logits[rows], targets[rows], shard, out[:, rows], keep)


def _reduce_rows(logits: Tensor, targets: Tensor, shard: VocabularyShard, out: Tensor, keep: bool) -> None:
    """Write the four numbers per token of `reduce_logits` to `out`, computed with torch operations."""
    logits = _scaled(logits, shard, keep)
    column, here = local_columns(targets, shard.start, logits.shape[1])
    out[3] = logits.gather(1, column[:, None])[:, 0].masked_fill_(~here, 0)  # not 0 times -inf
    torch.amax(logits, 1, out=out[0])
    logits -= out[0][:, None].clamp(min=torch.finfo(out.dtype).min)  # not -inf minus -inf
    if shard.entropy:
        exp = logits.clamp_(min=_LEAST).exp()
        torch.sum(exp, 1, out=out[1])
        torch.sum(exp.mul_(logits), 1, out=out[2])
    else:
        torch.sum(logits.exp_(), 1, out=out[1])


def _cached_rows(logits: Tensor) -> list[slice]:
    """Divide the rows of logits [C, V] into slices that are processed one after the other: on a CPU so small that a
    slice stays in its cache, elsewhere one slice."""
    step = max(1, _CACHED // max(1, logits.shape[1])) if logits.is_cpu else max(1, len(logits))
    return [slice(begin, begin + step) for begin in range(0, len(logits), step)]


def combine_shards(stats: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, log Z and entropies, [N] each, from the statistics [4, N] (`reduce_logits`) of all ranks'
    shards."""
    parts = stats[None]
    if shard.group is not None and stats.shape[1]:
        parts = torch.stack(shard.group.all_gather(stats))
    peak, total, weighted, target = parts.unbind(1)
    highest = peak.amax(0)
    shift = (peak - highest).clamp_(min=_LEAST)  # a shard may have no token that is possible
    factor = shift.exp()
    mass = (total * factor).sum(0)
    log_mass = mass.log()
    log_z = highest + log_mass
    if not shard.entropy:
        return target.sum(0) - log_z, log_z, stats.new_empty(0)
    entropy = log_mass - (factor * (weighted + total * shift)).sum(0) / mass
    return target.sum(0) - log_z, log_z, entropy


def _grad_logits(logits: Tensor, rows: LogprobRows, shard: VocabularyShard, keep: bool, dtype: torch.dtype) -> Tensor:
    """Return the gradient [C, V] in `dtype` of the logits before cap and temperature."""
    if shard.cap is None:
        return capped_gradient(logits, rows, shard, keep, dtype)
    slope = cap_slope(logits, shard.cap)
    return capped_gradient(logits, rows, shard, keep, slope.dtype).mul_(slope).to(dtype)


def capped_gradient(
    logits: Tensor, rows: LogprobRows, shard: VocabularyShard, keep: bool, dtype: torch.dtype
) -> Tensor:
    """Return the gradient [C, V] in `dtype` of the logits before the temperature.

    With gradients g of the log-prob and e of the entropy: (g (onehot - p) - e p (log p + entropy)) / temperature."""
    kernels = _kernels(logits) if logits.shape[1] else None
    if kernels is not None:
        inputs = rows.targets, rows.log_z, rows.entropy, rows.grad_logp, rows.grad_entropy
        place: dict[str, Any] = {"start": shard.start, "inverse_temperature": shard.inverse_temperature}
        return kernels.gradients(logits, *inputs, dtype, **place)
    gradient = torch.empty_like(logits, dtype=dtype)
    for part in _cached_rows(logits):
        gradient[part] = _row_gradients(logits[part], rows.part(part), shard, keep)
    return gradient


def _row_gradients(logits: Tensor, rows: LogprobRows, shard: VocabularyShard, keep: bool) -> Tensor:
    """Return the gradient [C, V] of the logits before the temperature by torch operations, in the dtype of `log_z`; see
    `capped_gradient` for the formula."""
    logp = _scaled(logits, shard, keep).sub_(rows.log_z[:, None])
    grad_logp, grad = rows.grad_logp, logp.exp()
    if rows.grad_entropy is not None and rows.entropy is not None:
        logp.clamp_(min=_LEAST).add_(rows.entropy[:, None]).mul_(rows.grad_entropy[:, None])
        if grad_logp is not None:
            logp.add_(grad_logp[:, None])
        grad.mul_(logp)
    else:
        assert grad_logp is not None
        grad.mul_(grad_logp[:, None])
    grad.neg_()
    if grad_logp is not None and grad.shape[1]:
        column, here = local_columns(rows.targets, shard.start, grad.shape[1])
        grad.scatter_add_(1, column[:, None], (grad_logp * here)[:, None])
    return grad if shard.inverse_temperature == 1.0 else grad.mul_(shard.inverse_temperature)
