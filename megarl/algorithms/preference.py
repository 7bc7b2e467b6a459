"""Losses of preference pairs, from the log-probs of a better and a worse response to one prompt.

    m = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)        margin of log-ratios
    s = label_smoothing                                                  share of pairs that are labelled wrongly

| loss | of a pair | source |
|---|---|---|
| sigmoid | (1 - s) f(m) + s f(-m), f(m) = -log sigmoid(beta m) | DPO, arXiv 2305.18290; s: conservative DPO |
| robust | ((1 - s) f(m) - s f(-m)) / (1 - 2 s) | arXiv 2403.00409 |
| hinge | max(0, 1 - beta m) | SLiC, arXiv 2305.10425 |
| ipo | (m - 1 / (2 beta))^2 | IPO, arXiv 2310.12036, equation 17; of means over tokens, as its authors advise |

A log-ratio is the sum over a response's tokens, or their mean. The reward that a policy implies is beta times the sum;
metrics have the names that TRL gives them.

A reward model's scores r have the loss of Bradley and Terry, -log sigmoid(r(chosen) - r(rejected) - margin), and with
`center_coef` c also c (r(chosen) + r(rejected))^2 (arXiv 2312.09244).
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


#: Share of a response's log-prob by which two float32 passes over it may differ: 16 units in the last place.
_ROUNDING = 16 * 2.0**-23


@dataclass(frozen=True)
class Responses:
    """The response tokens of whole pairs: samples 0, 2, 4, ... are chosen, each before its rejected one.

    Attributes:
        mask: bool [N], tokens that count.
        offsets: int64 [2P + 1], where each response begins.
        ref_logp: float32 [N], log-probs of the reference.
    """

    mask: Tensor
    offsets: Tensor
    ref_logp: Tensor


def log_ratios(logp: Tensor, responses: Responses) -> tuple[Tensor, Tensor]:
    """Return log pi of each whole response, and its log-ratio to the reference; both [B], differentiable."""
    rows, mask = Rows.of(responses.mask, responses.offsets), responses.mask
    own = rows.sum(torch.where(mask, at_least_float32(logp), 0))
    return own, own - rows.sum(torch.where(mask, at_least_float32(responses.ref_logp), 0))


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
    logp: Tensor, responses: Responses, settings: PreferenceConfig, counts: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the part of the loss that whole pairs contribute, and their metrics.

    Args:
        logp: float [N], log-probs of the policy, differentiable.
        counts: `local_pair_counts` added over all ranks of the mini-batch: the loss is a mean over its pairs, and the
            term of the chosen responses one over their tokens.
    """
    own, ratios = log_ratios(logp, responses)
    lengths = Rows.of(responses.mask, responses.offsets).counts(responses.mask)
    chosen, rejected = (ratios / lengths if settings.means else ratios).view(-1, 2).unbind(1)
    pairs, tokens = (float(count) for count in counts)
    losses = pair_losses(chosen - rejected, settings)
    loss = losses.sum() / pairs
    metrics = Metrics()
    metrics.mean("preference/loss", float(losses.detach().double().sum()), len(losses))
    if settings.sft_coef:
        nll = -own.view(-1, 2)[:, 0].sum()
        loss = loss + settings.sft_coef * nll / tokens
        metrics.mean("preference/sft_loss", float(nll.detach()), int(lengths.view(-1, 2)[:, 0].sum()))
    rounding = _ROUNDING * own.detach().abs().view(-1, 2).amax(1).clamp(min=1)
    _measure(metrics, own.detach(), settings.beta * ratios.detach(), settings.beta * rounding)
    return loss, metrics


def score_loss(
    scores: Tensor, margins: Tensor | None, settings: PreferenceConfig, pairs: float
) -> tuple[Tensor, Metrics]:
    """Return the part of a reward model's loss that whole pairs contribute, and their metrics.

    Args:
        scores: float [2P], differentiable, each chosen response's before its rejected one's.
        margins: float [P], by how much chosen scores are to be larger; None: not at all.
        pairs: in the mini-batch over all ranks: the loss is a mean over them.
    """
    scores = at_least_float32(scores)
    chosen, rejected = scores.view(-1, 2).unbind(1)
    difference = chosen - rejected
    losses = -logsigmoid(difference if margins is None else difference - margins)
    losses = losses + settings.center_coef * (chosen + rejected) ** 2
    metrics = Metrics()
    metrics.mean("preference/loss", float(losses.detach().double().sum()), len(losses))
    _measure_rewards(metrics, scores.detach())
    return losses.sum() / pairs, metrics


def local_pair_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    """Count the pairs, and the tokens of their chosen responses: float64 [2] on the CPU. Add the counts over ranks.

    Args:
        mask: bool [N], as in `Responses`.
        offsets: int64 [2P + 1].
    """
    lengths = Rows.of(mask, offsets).counts(mask).view(-1, 2)
    return torch.tensor([len(lengths), int(lengths[:, 0].sum())], dtype=torch.float64)


def _measure(metrics: Metrics, logp: Tensor, rewards: Tensor, rounding: Tensor) -> None:
    """Record what TRL's trainer records of a batch of pairs, from both [2P] of whole responses; `rounding` [P] is the
    margin up to which a pair is a tie."""
    _measure_rewards(metrics, rewards, rounding)
    for name, values in zip(("logps/chosen", "logps/rejected"), logp.view(-1, 2).unbind(1), strict=True):
        metrics.mean(name, float(values.double().sum()), len(values))


def _measure_rewards(metrics: Metrics, rewards: Tensor, rounding: Tensor | float = 0.0) -> None:
    chosen, rejected = rewards.view(-1, 2).unbind(1)
    for name, values in {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": chosen - rejected > rounding,
    }.items():
        metrics.mean(name, float(values.double().sum()), len(chosen))
