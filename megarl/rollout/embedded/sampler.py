"""Sampling tokens: counter-based noise, exact filters, log-probs of the full or filtered distribution, on shards.

A token is the winner of an exponential race: with E_v ~ Exp(1) independent, argmax_v(z_v - log E_v) is distributed as
softmax(z) (the Gumbel-max trick). E_v is a hash of (seed, token number, v), so a token depends only on its own
sample, and every tensor-parallel rank finds the winner of its own shard without seeing the others' logits.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.config.rollout import SamplingConfig
from megarl.kernels import cpu
from megarl.kernels.gpu import decode_kernels
from megarl.models.layers.mesh import Axis
from megarl.models.noise import exponential_noise


def _kth_largest(z: Tensor, k: int, tp: Axis) -> Tensor:
    """Return the k-th largest of every row over all shards, [n, 1]."""
    top = torch.topk(z, min(k, z.shape[-1]), dim=-1).values
    top = tp.gather(top).transpose(0, 1).flatten(1)
    return torch.topk(top, min(k, top.shape[-1]), dim=-1).values[:, -1:]


def _floor(ordered: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return the threshold [n, 1]: top_p and min_p keep the tokens whose logit is not below it.

    Args:
        ordered: logits in descending order, [n, tokens]; without top_p the largest is enough.
    """
    floor = ordered[:, :1] + (math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf)
    if sampling.top_p < 1.0:
        probs = torch.softmax(ordered, dim=-1)
        before = probs.cumsum(-1) - probs
        last = (before < sampling.top_p).sum(-1, keepdim=True) - 1
        floor = torch.maximum(floor, ordered.gather(-1, last))
    return floor


class Sampler:
    """The sampler of one token per row from vocabulary-sharded logits.

    Args:
        sampling: temperature, filters, min_new_tokens.
        stop_ids: end tokens, which are not sampled before min_new_tokens.
        vocab_start: first vocabulary id of this rank's shard.
        vocab_size: true vocabulary size, over all shards.
        shard: width of every rank's shard; logits may be narrower where the vocabulary ends.
        tp: the parallel axis over which the vocabulary is sharded.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        stop_ids: list[int],
        *,
        vocab_start: int,
        vocab_size: int,
        shard: int,
        tp: Axis,
        device: torch.device,
    ) -> None:
        self._cfg, self._tp, self._vocab_size = sampling, tp, vocab_size
        self._greedy = sampling.temperature == 0
        self._inv_temperature = 1.0 if self._greedy else 1.0 / sampling.temperature
        self._start = vocab_start
        self._ids = torch.arange(vocab_start, vocab_start + shard, device=device)
        local = [i - vocab_start for i in stop_ids if vocab_start <= i < vocab_start + shard]
        self._stops = torch.tensor(local, dtype=torch.int64, device=device) if sampling.min_new_tokens else None
        cut = sampling.top_p < 1.0 or 0 < sampling.top_k < vocab_size or sampling.min_p > 0
        self._filters = sampling.min_new_tokens > 0 or (cut and not self._greedy)

    def __call__(self, logits: Tensor, seeds: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled tokens int64 [n] and log-probs float32 [n] (`SamplingConfig.logprobs`), equal on all ranks.

        Args:
            logits: [n, V / tp] or narrower, any float dtype.
            seeds: int64 [n].
            index: int64 [n], number of the token within its sample, from 0.
        """
        kernels: ModuleType | cpu.CpuKernels | None = None
        if not self._filters:
            kernels = decode_kernels(torch.float32) if logits.is_cuda else cpu.logit_kernels(logits)
        if kernels is not None:
            place: dict[str, Any] = {"start": self._start, "inverse_temperature": self._inv_temperature}
            scored = logits.float() if logits.is_cuda else logits  # only the CPU's kernel reads bf16
            return self._join(_best(kernels.draw(scored, seeds, index, greedy=self._greedy, **place)))
        z = self._scaled(logits)
        allowed = self._filter(z, index)
        total = torch.logsumexp(allowed if self._cfg.logprobs == "processed" else z, dim=-1)
        times = None if self._greedy else exponential_noise(seeds, index, self._ids)
        score = allowed if times is None else allowed - times
        best, column = score.max(dim=-1)
        logit = z.gather(1, column[:, None])[:, 0]
        if self._tp.size == 1:
            return column, logit - total
        return self._join(torch.stack([best, self._ids[column], logit, total], dim=-1).double())

    def sample_kept(self, logits: Tensor, seeds: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens int64 [n], their log-probs among the kept tokens float32 [n], and the kept tokens int64
        [n, top_k], where -1 is none; equal on all ranks.

        Arguments as in the call. Samples from the same distribution as the call with the same noise, but of tokens that
        tie for the last place of top_k only some are kept, so that `top_k` bounds their number.
        """
        z = self._without_early_stops(self._scaled(logits), index)
        most = self._cfg.top_k
        top, places = torch.topk(z, min(most, z.shape[-1]), dim=-1)
        ids = self._ids[places]
        if self._tp.size > 1:
            # float64 holds token ids exactly
            shards = self._tp.gather(torch.stack([top.double(), ids.double()], dim=-1))
            both = shards.transpose(0, 1).flatten(1, 2)
            _, places = torch.topk(both[..., 0], min(most, both.shape[1]), dim=-1)
            top, ids = both[..., 0].gather(1, places).float(), both[..., 1].gather(1, places).long()
        is_kept = (top > -torch.inf) & (top >= _floor(top, self._cfg))
        allowed = top.masked_fill(~is_kept, -torch.inf)
        column = (allowed - exponential_noise(seeds, index, ids)).argmax(-1, keepdim=True)
        logp = allowed.gather(1, column)[:, 0] - torch.logsumexp(allowed, dim=-1)
        return ids.gather(1, column)[:, 0], logp, ids.masked_fill(~is_kept, -1)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return this rank's logits [n, V / tp] in float32, divided by the temperature."""
        z = logits.float()
        if self._inv_temperature != 1.0:
            z = z * self._inv_temperature
        if z.shape[1] < len(self._ids):  # vocabulary padding has no logits
            z = F.pad(z, (0, len(self._ids) - z.shape[1]), value=-torch.inf)
        return z

    def _without_early_stops(self, z: Tensor, index: Tensor) -> Tensor:
        if self._stops is None or not self._stops.numel():
            return z
        early = (index < self._cfg.min_new_tokens)[:, None]
        return z.index_copy(1, self._stops, z[:, self._stops].masked_fill(early, -torch.inf))

    def _filter(self, z: Tensor, index: Tensor) -> Tensor:
        """Return `z` with the excluded tokens at -inf: stop tokens that come too early, then top-k, then top-p, then
        min-p, in the order of SGLang."""
        z = self._without_early_stops(z, index)
        if 0 < self._cfg.top_k < self._vocab_size and not self._greedy:
            z = z.masked_fill(z < _kth_largest(z, self._cfg.top_k, self._tp), -torch.inf)
        if (self._cfg.top_p < 1.0 or self._cfg.min_p > 0) and not self._greedy:
            if self._cfg.top_p < 1.0:
                ordered = torch.sort(self._tp.gather(z).transpose(0, 1).flatten(1), dim=-1, descending=True).values
            else:
                ordered = _kth_largest(z, 1, self._tp)
            z = z.masked_fill(z < _floor(ordered, self._cfg), -torch.inf)
        return z

    def _join(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [n] and log-probs [n] over all shards of the vocabulary. `shard` [n, 4] describes each row's
        best token in this shard.
        """
        best = shard if self._tp.size == 1 else _best(self._tp.gather(shard))
        return best[:, 1].long(), (best[:, 2] - best[:, 3]).float()


def _best(parts: Tensor) -> Tensor:
    """Return the best token of each row from the best tokens of several parts of the vocabulary.

    Args:
        parts: float64 [parts, n, 4]: score of a part's best token, its id, its logit, and the log of the sum of exp of
            all logits of the part. Float64 holds token ids exactly.

    Returns:
        The same four numbers of each row over all parts, [n, 4].
    """
    winner = parts[:, :, 0].argmax(dim=0)
    chosen = parts[winner, torch.arange(len(winner), device=winner.device)]
    return torch.cat([chosen[:, :3], torch.logsumexp(parts[:, :, 3], dim=0)[:, None]], dim=1)
