"""The objective of the policy update: from the inputs of a mini-batch's tokens to the loss of each of its parts.

    objective = Objective.of(config.algorithm, knobs)
    tokens, weights = objective.weigh(inputs, all_sum)       # this rank's part of the mini-batch; counts over all ranks
    made = objective.prepare(inputs, keys, all_sum)          # the policy loss's inputs from the whole mini-batch
    loss, metrics = objective.loss(logp, entropy, part, tokens)     # of any micro-batch; the parts add up

The policy loss itself (`megarl/algorithms/losses/`) returns one number per token. Here it is weighted by the rollout
correction and the aggregation, and the entropy bonus and the KL terms are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.algorithms.distillation import teacher_term
from megarl.algorithms.kl import chosen_estimator, kl_tokens
from megarl.algorithms.lazy import torch
from megarl.algorithms.losses.base import POLICY_LOSSES, checked_loss, checked_preparation
from megarl.algorithms.user_code import located
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.correction import Correction
    from megarl.algorithms.distillation import Teacher
    from megarl.algorithms.registry import Chosen
    from megarl.algorithms.stats import AllSum
    from megarl.config.algorithm import AlgorithmConfig, DistillationConfig, KLConfig, PolicyLossConfig
    from megarl.config.correction import ResolvedCorrection

#: Raw metrics of a part by which the gradient is divided once all parts are counted: its tokens or sequences, and the
#: sum and number of its importance weights.
DIVISOR, WEIGHT_SUM, WEIGHT_COUNT = "_update/divisor", "_update/weight_sum", "_update/weight_count"


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of the response tokens of some samples, before the trained policy scores them.

    Tensors are [N], N tokens of all samples end to end, on one device.

    Attributes:
        offsets: int64 [B + 1], boundaries of the samples.
        response_mask: bool, tokens that the policy generated.
        loss_mask: bool, those of them that are trained on.
        weights: float32, share of each token in the loss, from `Objective.weigh`.
        old_logp: of the denominator policy of the ratio. None: one update uses every sample once.
        drawn_logp: the same for samples that waited since an earlier step, NaN for others.
        rollout_logp, ref_logp, teacher_logp: of the engine that generated the tokens, the reference, the teacher.
        teacher_topk: float32 [N, K + 1, 2], the teacher's most likely tokens, see `MegatronEngine.top_tokens`.
        is_weights: importance weights of rollout correction.
        copies: int64 [B], how often each sample counts; None: once.
        own: further inputs of the policy loss, and the results of its preparation, by name.
    """

    offsets: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    weights: Tensor | None = None
    old_logp: Tensor | None = None
    drawn_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    teacher_topk: Tensor | None = None
    is_weights: Tensor | None = None
    copies: Tensor | None = None
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """The settings of an update, and the maths of its loss.

    In bypass with rejection, the trained tokens are known only after the last micro-batch, and so is the mean of the
    importance weights that they may be divided by. The parts are then computed without these global numbers, and the
    summed gradient is divided by them: the loss is linear in both. (With a KL term or an entropy bonus it is not linear
    in the mean weight, which the checks refuse.)
    """

    algorithm: AlgorithmConfig
    correction: ResolvedCorrection
    settings: PolicyLossConfig
    """`algorithm.loss`, or gpg for pg_is: that is gpg with the weights of the correction of the micro-batch."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, correction: ResolvedCorrection) -> Objective:
        """Build the objective from a recipe's sections `algorithm` and `rollout_correction`."""
        return cls(algorithm, correction, algorithm.loss.of("gpg") if correction.loss == "pg" else algorithm.loss)

    @property
    def reads(self) -> tuple[str, ...]:
        """Batch fields that the policy loss takes in addition."""
        return POLICY_LOSSES.choose(self.settings).spec.reads

    @property
    def prepares(self) -> bool:
        """Whether the policy loss has a `prepare` for the whole mini-batch."""
        return POLICY_LOSSES.choose(self.algorithm.loss).spec.prepare is not None

    def measures(self, inputs: TokenInputs) -> bool:
        """Return whether the gap between rollout and trainer is measured here, as no earlier stage scored it."""
        return inputs.rollout_logp is not None and (self.correction.bypass or inputs.old_logp is None)

    def counts_late(self, inputs: TokenInputs) -> bool:
        """Return whether the trained tokens are known only after the last micro-batch."""
        return self.correction.bypass and self.correction.rejects and inputs.rollout_logp is not None

    def normalises_late(self, inputs: TokenInputs) -> bool:
        """Return whether the mean importance weight is known only after the last micro-batch."""
        knobs = self.correction
        normalises = knobs.is_batch_normalize and knobs.is_level != "none"
        return knobs.bypass and normalises and inputs.rollout_logp is not None

    def divides_late(self, inputs: TokenInputs) -> bool:
        """Return whether the gradient has yet to be divided by `divisor`."""
        counts = self.counts_late(inputs) and self.settings.aggregation != "token-sum"
        return counts or self.normalises_late(inputs)

    def divisor(self, metrics: Metrics) -> float:
        """Return the divisor of the gradient of all parts, from their merged `metrics`, where `divides_late`."""
        from megarl.algorithms.correction import mean_weight

        count = 1.0
        if DIVISOR in metrics and self.settings.aggregation != "token-sum":
            count = max(metrics.result()[DIVISOR], 1.0)
        if WEIGHT_COUNT in metrics:
            count *= mean_weight(*(metrics.result()[name] for name in (WEIGHT_SUM, WEIGHT_COUNT)))
        return count

    def weigh(self, inputs: TokenInputs, all_sum: AllSum) -> tuple[float, Tensor | None]:
        """Return the mini-batch's valid tokens over all ranks, and the weight of each token here.

        The weights hold the global counts, so no split of the samples changes the result. They are None when they come
        late.
        """
        from megarl.algorithms.aggregation import local_counts

        mask, offsets = inputs.loss_mask, inputs.offsets
        plain = local_counts(mask, offsets)
        counted = plain if inputs.copies is None else local_counts(mask, offsets, copies=inputs.copies)
        tokens, _, *counts = all_sum(torch.cat([plain, counted])).split(1)
        if self.counts_late(inputs):
            return 1.0, None
        return float(tokens), self._weights(mask, torch.cat(counts), inputs)

    def prepare(self, inputs: TokenInputs, keys: Tensor, all_sum: AllSum) -> dict[str, Tensor]:
        """Run the loss's `prepare` on the whole mini-batch before its split; `keys` int64 [N] are random per token."""
        chosen = POLICY_LOSSES.choose(self.algorithm.loss)
        assert chosen.spec.prepare is not None, "asked of losses that prepare only"
        known = (inputs.old_logp, inputs.advantages, inputs.loss_mask)
        with located(POLICY_LOSSES.kind, chosen.spec.prepare):
            prepared = chosen.spec.prepare(*known, chosen.settings, keys=keys, all_sum=all_sum)
        return checked_preparation(chosen, prepared, inputs.loss_mask)

    @property
    def divergence(self) -> Chosen | None:
        """The divergence of distillation, if it compares distributions: `loss` then needs `policy`."""
        from megarl.algorithms.divergences import chosen_divergence

        section = self.algorithm.distillation
        return chosen_divergence(section) if section.coef else None

    def loss(
        self,
        logp: Tensor,
        entropy: Tensor,
        inputs: TokenInputs,
        tokens: float,
        policy: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the share of one micro-batch in the loss of its mini-batch, and metrics.

        Args:
            logp, entropy: [N], of the policy that is trained; differentiable.
            inputs: the tokens of this micro-batch.
            tokens: valid tokens of the mini-batch, from `weigh`.
            policy: [N, K + 1], the policy's log-probs of the teacher's most likely tokens, and of all others together,
                differentiable; or [N], the divergence over the vocabulary. Only with a `divergence`.
        """
        mask, is_weights, old_logp = inputs.loss_mask, inputs.is_weights, self._old_logp(logp, inputs)
        correction = self._correct(logp, inputs) if self.measures(inputs) else None
        if correction is not None and self.correction.bypass:
            assert inputs.rollout_logp is not None, "measured against it"
            mask, is_weights, old_logp = correction.mask, correction.weights, inputs.rollout_logp
        late = self.counts_late(inputs)
        weights = self._weights(mask, torch.ones(2, dtype=torch.float64), inputs) if late else inputs.weights
        assert weights is not None, "made by `weigh`"
        algorithm = self.algorithm
        loss, metrics = actor_loss(
            logp,
            old_logp,
            inputs.advantages,
            mask,
            weights,
            self.settings,
            tokens=tokens,
            offsets=inputs.offsets,
            entropy=entropy,
            ref_logp=inputs.ref_logp,
            kl=algorithm.kl if algorithm.kl.use == "loss" else None,
            teacher=inputs.teacher_logp if policy is None else (inputs.teacher_topk, policy),
            distillation=algorithm.distillation if algorithm.distillation.coef else None,
            fields=inputs.own,
            is_weights=is_weights,
        )
        if correction is not None:
            metrics.merge(correction.moments)
        if late:
            self._count(metrics, mask, inputs)
        if correction is not None and self.normalises_late(inputs):
            for name, value in zip((WEIGHT_SUM, WEIGHT_COUNT), correction.normaliser.tolist(), strict=True):
                metrics.sum(name, value)
        return loss, metrics

    def settle(self, metrics: Metrics, inputs: TokenInputs) -> None:
        """Divide those of the merged metrics of all parts that still lack their divisor."""
        if not self.divides_late(inputs) and not self.counts_late(inputs):
            return
        if "actor/pg_loss" in metrics:
            total = metrics.pop("actor/pg_loss")[1]
            metrics.mean("actor/pg_loss", total / self.divisor(metrics), 1)
        if WEIGHT_COUNT in metrics:
            from megarl.algorithms.correction import mean_weight

            weights = [metrics.pop(name)[1] for name in (WEIGHT_SUM, WEIGHT_COUNT)]
            metrics.mean("rollout_corr/is_batch_norm", mean_weight(*weights), 1)
        if DIVISOR in metrics:
            metrics.pop(DIVISOR)

    def _old_logp(self, logp: Tensor, inputs: TokenInputs) -> Tensor:
        """Return the ratio's denominator: `old_logp`, else current log-probs, or stored ones of waiting samples."""
        if inputs.old_logp is not None:
            return inputs.old_logp
        stored = inputs.drawn_logp
        return logp.detach() if stored is None else stored.where(~stored.isnan(), logp.detach())

    def _correct(self, logp: Tensor, inputs: TokenInputs) -> Correction:
        """Apply rollout correction from pi_theta / pi_rollout of one micro-batch; without bypass only measure.

        Weights are not divided by their mean here: the rest of the batch is still unknown.
        """
        from megarl.algorithms.correction import correct, rules_of

        knobs = self.correction
        assert inputs.rollout_logp is not None, "measured against it"
        return correct(
            logp.detach(),
            inputs.rollout_logp,
            inputs.response_mask,
            offsets=inputs.offsets,
            is_level=knobs.is_level if knobs.bypass else "none",
            is_threshold=knobs.is_threshold,
            is_normalize_over=knobs.is_normalize_over,
            rules=rules_of(knobs) if knobs.bypass else [],
            veto=knobs.veto_threshold if knobs.bypass else 0.0,
            copies=inputs.copies,
        )

    def _weights(self, mask: Tensor, counts: Tensor, inputs: TokenInputs) -> Tensor:
        from megarl.algorithms.aggregation import aggregation_weights

        mode, sum_norm = self.settings.aggregation, self.settings.sum_norm
        return aggregation_weights(mode, mask, counts, offsets=inputs.offsets, sum_norm=sum_norm, copies=inputs.copies)

    def _count(self, metrics: Metrics, mask: Tensor, inputs: TokenInputs) -> None:
        """Record the counts that late weights lack: tokens for token-mean, else sequences."""
        from megarl.algorithms.aggregation import local_counts

        tokens, sequences = local_counts(mask, inputs.offsets, copies=inputs.copies).tolist()
        metrics.sum(DIVISOR, tokens if self.settings.aggregation == "token-mean" else sequences)


def actor_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    cfg: PolicyLossConfig,
    *,
    tokens: float,
    offsets: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl: KLConfig | None = None,
    teacher: Teacher = None,
    distillation: DistillationConfig | None = None,
    fields: Mapping[str, Any] | None = None,
    is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute sum(w c loss) - entropy_coef sum(w entropy) + kl.coef sum(w kl) + distillation.coef sum(w distillation).

    The first term is omitted if only the teacher teaches (`distillation.task_loss: false`).

    Args:
        logp: float [N] or [B, T], differentiable; old_logp, advantages, ref_logp, entropy and bool mask have its shape.
        weights: same shape, from `aggregation_weights`.
        cfg: `algorithm.loss`: the policy loss, its settings, and entropy_coef.
        tokens: valid tokens of the whole mini-batch over all ranks; the metrics need it.
        offsets: int64 [B + 1] for the packed form.
        entropy: differentiable if it is a bonus; None: none.
        kl, distillation: estimator, coefficient and form of these terms; None: none.
        teacher: log-probs of the teacher, same shape; or its most likely tokens and the policy's log-probs of them.
        fields: this part of the loss's further inputs, and of the results of its `prepare`.
        is_weights: same shape, the factors c of the policy loss (rollout correction); None: 1.

    Returns:
        This part's share of the mini-batch's loss, zero (with zero gradients) without valid tokens, and metrics.
    """
    policy_loss = partial(_policy_loss, cfg, logp, old_logp, mask, offsets, fields or {}, is_weights)
    token_loss, metrics = policy_loss(advantages)
    loss = (weights * token_loss).sum()
    sums = {"count": mask.sum(), "policy": loss.detach()}  # the count first
    if distillation is not None and not distillation.task_loss:
        loss = torch.zeros_like(loss)
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0)
        sums["entropy"] = entropy.detach().double().sum()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * (weights * entropy).sum()
    terms: dict[str, tuple[float, Tensor, Tensor]] = {}
    if kl is not None:
        distance = _distance(kl, logp, ref_logp, mask)
        terms["kl"] = kl.coef, distance, distance
    if distillation is not None:
        taught = teacher_term(distillation, logp, teacher, mask, lambda a: policy_loss(a)[0], metrics)
        terms["distillation"] = (distillation.coef, *taught)
    for name, (coef, term, distance) in terms.items():
        sums[name] = distance.detach().double().sum()
        loss = loss + coef * (weights * term).sum()
    _record(metrics, sums, {name: coef for name, (coef, *_) in terms.items()}, tokens)
    return loss, metrics


def _policy_loss(
    cfg: PolicyLossConfig,
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    offsets: Tensor | None,
    fields: Mapping[str, Any],
    is_weights: Tensor | None,
    advantages: Tensor,
) -> tuple[Tensor, Metrics]:
    """Return c times the policy loss of every token, and its metrics."""
    chosen = POLICY_LOSSES.choose(cfg)
    inputs = (logp, old_logp, advantages, mask, chosen.settings)
    with located(POLICY_LOSSES.kind, chosen.function):
        result = chosen.function(*inputs, offsets=offsets, **fields)
    token_loss, metrics = checked_loss(chosen.function, result, logp, mask, (old_logp, advantages, *fields.values()))
    return token_loss if is_weights is None else is_weights.detach() * token_loss, metrics


def _distance(settings: KLConfig, logp: Tensor, ref_logp: Tensor | None, mask: Tensor) -> Tensor:
    """Return the KL of every token to the reference, whose log-probs are required."""
    if ref_logp is None:
        raise ValueError("a kl term needs the log-probs of its model")
    return kl_tokens(chosen_estimator(settings), logp, ref_logp, mask)


def _record(metrics: Metrics, sums: dict[str, Tensor], coefs: dict[str, float], tokens: float) -> None:
    """Record the metrics of the terms from scalar sums over this part's valid tokens; nothing without any."""
    count, *values = torch.stack([value.double() for value in sums.values()]).tolist()
    numbers = dict(zip(list(sums)[1:], values, strict=True))
    if not count:
        return
    # The counts of all parts add up to 1 per mini-batch, so several mini-batches average.
    metrics.mean("actor/pg_loss", numbers["policy"], count / max(tokens, 1.0))
    if "entropy" in numbers:
        metrics.mean("actor/entropy", numbers["entropy"], count)
    for name, coef in coefs.items():
        metrics.mean(f"actor/{name}_loss", numbers[name], count)
        metrics.mean(f"actor/{name}_coef", coef * count, count)
