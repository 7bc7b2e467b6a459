"""Losses of preference pairs, from the log-probs of the chosen and the rejected response to one prompt.

    m = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)        margin of log-ratios
    s = label_smoothing                                                  share of pairs that are labelled wrongly

| loss | of a pair | source |
|---|---|---|
| sigmoid | (1 - s) f(m) + s f(-m), f(m) = -log sigmoid(beta m) | DPO, arXiv 2305.18290; s: conservative DPO |
| robust | ((1 - s) f(m) - s f(-m)) / (1 - 2 s) | arXiv 2403.00409 |
| hinge | max(0, 1 - beta m) | SLiC, arXiv 2305.10425 |
| ipo | (m - 1 / (2 beta))^2 | IPO, arXiv 2310.12036, equation 17; log-ratios are means over tokens |

A log-ratio is the sum over a response's tokens, or their mean. The implied reward is beta times the sum; metrics are
named as in TRL.

The loss on a reward model's scores r is that of Bradley and Terry, -log sigmoid(r(chosen) - r(rejected) - margin); with
`center_coef` c it also has the term c (r(chosen) + r(rejected))^2 (arXiv 2312.09244).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.rows import Rows, at_least_float32
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.config.training import PreferenceConfig


#: Units in the last place by which float32 sums of the same numbers in different orders may differ.
_UNITS = 16


@dataclass(frozen=True)
class Responses:
    """The response tokens of whole pairs: responses 0, 2, 4, ... are the chosen ones, each followed by the rejected
    response of its pair.
    """

    mask: Tensor  # bool [N], tokens that count
    offsets: Tensor  # int64 [2P + 1], where each response begins
    ref_logp: Tensor  # float32 [N], log-probs of the reference


def log_ratios(logp: Tensor, responses: Responses) -> tuple[Tensor, Tensor]:
    """Return the policy's log-prob of each whole response, and its log-ratio to the reference; both [B],
    differentiable."""
    rows, mask = Rows.of(responses.mask, responses.offsets), responses.mask
    response_logp = rows.sum(torch.where(mask, at_least_float32(logp), 0))
    return response_logp, response_logp - rows.sum(torch.where(mask, at_least_float32(responses.ref_logp), 0))


def rounding(logp: Tensor, responses: Responses, dtype: torch.dtype) -> Tensor:
    """Return by how much each response's log-prob may differ between two passes over equal weights, float [B].

    The float32 sum over a response's tokens may differ by `_UNITS` units in its last place. A model in a narrower dtype
    also rounds each token's log-prob by about one unit. These errors are independent, so they add up as the root of the
    sum of squares; a plain sum would hide what changed in a long response.

    Args:
        logp: float [N], log-probs of the policy.
        dtype: dtype of the model that computed them.
    """
    rows, tokens = Rows.of(responses.mask, responses.offsets), at_least_float32(logp.detach())
    tokens = torch.where(responses.mask, tokens, 0)
    size = _UNITS * torch.finfo(torch.float32).eps * rows.sum(tokens).abs().clamp(min=1)
    if dtype.itemsize < torch.float32.itemsize:
        size = size + torch.finfo(dtype).eps * rows.sum(tokens**2).sqrt()
    return size


def score_rounding(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return by how much each of a reward model's `scores` may differ between two passes over equal weights.

    A float32 score is a sum over the hidden state; a narrower dtype adds in float32 and rounds the result once."""
    narrow = dtype.itemsize < torch.float32.itemsize
    units = torch.finfo(dtype).eps if narrow else _UNITS * torch.finfo(torch.float32).eps
    return units * scores.detach().abs()


def pair_losses(margins: Tensor, settings: PreferenceConfig) -> Tensor:
    """Return the loss of each pair from its margin of log-ratios, both [P]."""
    scaled, wrong = settings.beta * margins, settings.label_smoothing
    if settings.loss == "hinge":
        return torch.relu(1 - scaled)
    if settings.loss == "ipo":
        return (margins - 1 / (2 * settings.beta)) ** 2
    right, flipped = -(1 - wrong) * logsigmoid(scaled), -wrong * logsigmoid(-scaled)
    return right + flipped if settings.loss == "sigmoid" else (right - flipped) / (1 - 2 * wrong)


def preference_loss(
    logp: Tensor,
    responses: Responses,
    settings: PreferenceConfig,
    counts: Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Metrics]:
    """Return the share of this rank's pairs in the mini-batch's loss, and their metrics.

    Args:
        logp: float [N], log-probs of the policy, differentiable.
        counts: `local_pair_counts` added over all ranks of the mini-batch: the loss is a mean over pairs, and the SFT
            term a mean over the tokens of chosen responses.
        dtype: the model's dtype; a margin within its rounding error is a tie.
    """
    response_logp, ratios = log_ratios(logp, responses)
    lengths = Rows.of(responses.mask, responses.offsets).counts(responses.mask)
    chosen, rejected = (ratios / lengths if settings.means else ratios).view(-1, 2).unbind(1)
    pairs, tokens = (float(count) for count in counts)
    losses = pair_losses(chosen - rejected, settings)
    loss = losses.sum() / pairs
    metrics = Metrics()
    metrics.mean("preference/loss", float(losses.detach().double().sum()), len(losses))
    if settings.sft_coef:
        nll = -response_logp.view(-1, 2)[:, 0].sum()
        loss = loss + settings.sft_coef * nll / tokens
        metrics.mean("preference/sft_loss", float(nll.detach()), int(lengths.view(-1, 2)[:, 0].sum()))
    ties = settings.beta * rounding(logp, responses, dtype).view(-1, 2).amax(1)
    _measure_rewards(metrics, settings.beta * ratios.detach(), ties)
    for name, values in zip(("chosen", "rejected"), response_logp.detach().view(-1, 2).unbind(1), strict=True):
        metrics.mean(f"logps/{name}", float(values.double().sum()), len(values))
    return loss, metrics


def score_loss(
    scores: Tensor,
    margins: Tensor | None,
    settings: PreferenceConfig,
    pairs: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Metrics]:
    """Return the share of this rank's pairs in the mini-batch's reward-model loss, and their metrics.

    Args:
        scores: float [2P], differentiable; chosen and rejected responses alternate.
        margins: float [P], by how much chosen scores should be larger; None: 0.
        pairs: number of pairs in the mini-batch over all ranks, over which the loss is a mean.
        dtype: the model's dtype; a difference within its rounding error is a tie.
    """
    scores = at_least_float32(scores)
    chosen, rejected = scores.view(-1, 2).unbind(1)
    difference = chosen - rejected
    losses = -logsigmoid(difference if margins is None else difference - margins)
    losses = losses + settings.center_coef * (chosen + rejected) ** 2
    metrics = Metrics()
    metrics.mean("preference/loss", float(losses.detach().double().sum()), len(losses))
    _measure_rewards(metrics, scores.detach(), score_rounding(scores, dtype).view(-1, 2).amax(1))
    return losses.sum() / pairs, metrics


def local_pair_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    """Count the pairs and the tokens of their chosen responses, float64 [2] on the CPU; the caller adds over ranks.

    Args:
        mask: bool [N], as in `Responses`.
        offsets: int64 [2P + 1].
    """
    lengths = Rows.of(mask, offsets).counts(mask).view(-1, 2)
    return torch.tensor([len(lengths), int(lengths[:, 0].sum())], dtype=torch.float64)


def _measure_rewards(metrics: Metrics, rewards: Tensor, ties: Tensor) -> None:
    """Record TRL's metrics of the rewards [2P] of pairs; a margin of at most `ties` [P] counts as a tie."""
    chosen, rejected = rewards.view(-1, 2).unbind(1)
    for name, values in {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": chosen - rejected > ties,
    }.items():
        metrics.mean(name, float(values.double().sum()), len(chosen))
