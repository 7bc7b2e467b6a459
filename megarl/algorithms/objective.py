"""The objective of the policy update: from the inputs of a mini-batch's tokens to the loss of each micro-batch.

    objective = Objective.of(config.algorithm, correction)
    tokens, weights = objective.weigh(inputs, all_sum)   # this rank's part of the mini-batch; counts over all ranks
    prepared = objective.prepare(inputs, keys, all_sum)  # keyword arguments of the policy loss, for the mini-batch
    loss, metrics = objective.loss(logp, entropy, part, tokens)     # of a micro-batch; the parts add up

The policy loss (`megarl/algorithms/losses/`) returns one number per token. The objective multiplies it by the weights
of rollout correction and aggregation, and adds the entropy bonus and the KL terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.algorithms.distillation import teacher_term
from megarl.algorithms.kl import KL, chosen_estimator, kl_tokens
from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs, checked_loss, checked_preparation
from megarl.algorithms.needs import reference_fields
from megarl.algorithms.rows import Rows
from megarl.algorithms.user_code import located
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.algorithms.correction import Correction
    from megarl.algorithms.distillation import Teacher
    from megarl.algorithms.registry import Chosen
    from megarl.algorithms.stats import AllSum
    from megarl.config.algorithm import AlgorithmConfig, DistillationConfig, KLConfig, PolicyLossConfig
    from megarl.config.correction import ResolvedCorrection

#: Metrics that only add up, over micro-batches, what the gradient is divided by after the last one: the number of
#: tokens or sequences, and the sum and number of importance weights.
DIVISOR, WEIGHT_SUM, WEIGHT_COUNT = "_update/divisor", "_update/weight_sum", "_update/weight_count"


@dataclass(frozen=True)
class TokenInputs:
    """The loss's inputs for the response tokens of some samples, except what the policy's forward pass computes.

    Tensors are [N], N tokens of all samples end to end, on one device.

    Attributes:
        rollout_logp, ref_logp, teacher_logp: log-probs of the generation engine, the reference and the teacher.
    """

    offsets: Tensor  # int64 [B + 1], boundaries of the samples
    advantages: Tensor
    response_mask: Tensor  # bool, tokens that the policy generated
    loss_mask: Tensor  # bool, tokens that are trained on
    weights: Tensor | None = None  # float32, share of each token in the loss, from `Objective.weigh`
    # log-probs in the denominator of the ratio. None: the log-probs of this update, which is the only one.
    old_logp: Tensor | None = None
    surplus_logp: Tensor | None = None  # old log-probs of surplus samples from an earlier step; NaN for others
    rollout_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    # float32 [N, K + 1, 2], ids and log-probs of the teacher's most likely tokens, the last entry for all other tokens
    teacher_topk: Tensor | None = None
    is_weights: Tensor | None = None  # importance weights of rollout correction
    observation_mask: Tensor | None = None  # bool, the environment's own tokens, for `algorithm.loss.echo_coef`
    echo_weights: Tensor | None = None  # float32, weights of observation tokens in their cross-entropy
    outside: Tensor | None = None  # bool, tokens without a rollout log-prob, which correction does not touch
    expert_mask: Tensor | None = None  # bool, tokens of expert responses
    expert_weights: Tensor | None = None  # float32, weights of expert tokens in their cross-entropy
    replayed: Tensor | None = None  # bool, tokens of replayed samples
    copies: Tensor | None = None  # int64 [B], how often each sample counts; None: each counts once
    # further inputs of the policy loss by name: fields that it reads, and the results of its `prepare`
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """The settings of a policy update, and the maths of its loss.

    In bypass mode with rejection, the trained tokens are known only after the last micro-batch, and so is the mean
    importance weight. The micro-batches are then computed without these global numbers, and the summed gradient is
    divided by them: the loss is linear in both. (A KL term or an entropy bonus is not linear in the mean weight; the
    checks refuse this combination.)
    """

    algorithm: AlgorithmConfig
    correction: ResolvedCorrection
    settings: PolicyLossConfig
    """`algorithm.loss`; with `rollout_correction.loss: pg` the settings of gpg, whose weights the correction gives."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, correction: ResolvedCorrection) -> Objective:
        """Build the objective from the sections `algorithm` and `rollout_correction` of a recipe."""
        return cls(algorithm, correction, algorithm.loss.of("gpg") if correction.loss == "pg" else algorithm.loss)

    @property
    def reads(self) -> tuple[str, ...]:
        """Batch fields that the policy loss reads beyond its standard arguments."""
        return POLICY_LOSSES.choose(self.settings).spec.reads

    @property
    def prepare_reads(self) -> list[str]:
        """Batch fields that the policy loss's `prepare` reads beyond its standard arguments."""
        return POLICY_LOSSES.choose(self.settings).spec.prepare_reads

    @property
    def prepares(self) -> bool:
        """Whether the policy loss has a `prepare` function for the whole mini-batch."""
        return POLICY_LOSSES.choose(self.algorithm.loss).spec.prepare is not None

    def measures(self, inputs: TokenInputs) -> bool:
        """Return whether the update itself measures how the rollout's log-probs differ from the trainer's; with old
        log-probs an earlier stage has measured this.
        """
        return inputs.rollout_logp is not None and (self.correction.bypass or inputs.old_logp is None)

    def counts_late(self, inputs: TokenInputs) -> bool:
        """Return whether the trained tokens are known only after the last micro-batch."""
        return self.correction.bypass and self.correction.rejects and inputs.rollout_logp is not None

    def normalises_late(self, inputs: TokenInputs) -> bool:
        """Return whether the mean importance weight is known only after the last micro-batch."""
        correction = self.correction
        normalises = correction.is_batch_normalize and correction.is_level != "none"
        return correction.bypass and normalises and inputs.rollout_logp is not None

    def divides_late(self, inputs: TokenInputs) -> bool:
        """Return whether the gradient must be divided by `divisor` after the last micro-batch."""
        counts = self.counts_late(inputs) and self.settings.aggregation != "token-sum"
        return counts or self.normalises_late(inputs)

    def divisor(self, metrics: Metrics) -> float:
        """Return the number by which the summed gradient must be divided, computed from the merged `metrics` of all
        micro-batches: the number of trained tokens or sequences times the mean importance weight, each as far as it was
        unknown before (`divides_late`).
        """
        from megarl.algorithms.correction import mean_weight

        count = 1.0
        if DIVISOR in metrics and self.settings.aggregation != "token-sum":
            count = max(metrics.result()[DIVISOR], 1.0)
        if WEIGHT_COUNT in metrics:
            count *= mean_weight(*(metrics.result()[name] for name in (WEIGHT_SUM, WEIGHT_COUNT)))
        return count

    def weigh(self, inputs: TokenInputs, all_sum: AllSum) -> tuple[float, Tensor | None]:
        """Return the number of the mini-batch's valid tokens over all ranks, and the weight of each token of this rank.

        The weights contain the global counts, so no split of the samples changes the result. If the counts are known
        only after the last micro-batch, return 1 and None.
        """
        from megarl.algorithms.aggregation import local_counts

        mask, offsets = inputs.loss_mask, inputs.offsets
        plain = local_counts(mask, offsets)
        counted = plain if inputs.copies is None else local_counts(mask, offsets, copies=inputs.copies)
        tokens, _, *counts = all_sum(torch.cat([plain, counted])).split(1)
        if self.counts_late(inputs):
            return 1.0, None
        return float(tokens), self._weights(mask, torch.cat(counts), inputs)

    def echo_weights(self, inputs: TokenInputs, all_sum: AllSum) -> Tensor:
        """Return the weight of each token in the cross-entropy on observations, whose sum over the mini-batch and all
        ranks is 1. It is 0 for tokens that are not an observation's, and in samples without a trained token.
        """
        rows, mask = Rows.of(inputs.loss_mask, inputs.offsets), inputs.observation_mask
        if mask is None:
            raise ValueError("the cross-entropy on observations needs the mask of their tokens")
        times = rows.counts(inputs.loss_mask).clamp(max=1)
        if inputs.copies is not None:
            times = times * inputs.copies
        counted = rows.spread(times.double(), mask)
        return (counted / all_sum(counted.sum()[None]).clamp(min=1)).float()

    def expert_weights(self, inputs: TokenInputs, all_sum: AllSum) -> Tensor:
        """Return the share of each token in the cross-entropy on expert responses: for an expert token 1 / the number
        of expert tokens in the mini-batch over all ranks, else 0."""
        if inputs.expert_mask is None:
            raise ValueError("the cross-entropy on expert responses needs the mask of their tokens")
        counted = inputs.expert_mask.double()
        return (counted / all_sum(counted.sum()[None]).clamp(min=1)).float()

    def prepare(self, inputs: TokenInputs, keys: Tensor, all_sum: AllSum) -> dict[str, Tensor]:
        """Call the loss's `prepare` on the whole mini-batch before its split; `keys` int64 [N] are random per token."""
        chosen = POLICY_LOSSES.choose(self.algorithm.loss)
        prepare = chosen.spec.prepare
        assert prepare is not None, "only called for losses with a `prepare`"
        known = (inputs.old_logp, inputs.advantages, inputs.loss_mask)
        fields = {name: inputs.own[name] for name in chosen.spec.prepare_reads}
        with located(POLICY_LOSSES.kind, prepare):
            prepared = prepare(*known, chosen.settings, keys=keys, all_sum=all_sum, **fields)
        return checked_preparation(chosen, prepared, inputs.loss_mask)

    @property
    def divergence(self) -> Chosen | None:
        """The distillation divergence if it compares distributions (then `loss` needs `policy`), else None."""
        from megarl.algorithms.divergences import chosen_divergence

        section = self.algorithm.distillation
        return chosen_divergence(section) if section.coef else None

    @property
    def compares_reference(self) -> bool:
        """Whether the KL term compares the whole distributions of policy and reference (then `loss` needs `policy`)."""
        return "ref_hidden" in reference_fields(self.algorithm)

    def loss(
        self, logp: Tensor, entropy: Tensor, inputs: TokenInputs, tokens: float, policy: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Return one micro-batch's share of the mini-batch's loss, and metrics.

        Args:
            logp, entropy: [N], log-probs and entropies of the trained policy, differentiable.
            inputs: the tokens of this micro-batch.
            tokens: valid tokens of the mini-batch, from `weigh`.
            policy: differentiable; [N, K + 1], the policy's log-probs of the teacher's most likely tokens, and of all
                others together; or [N], the divergence over the vocabulary from the teacher or the reference.
        """
        mask, is_weights, old_logp = inputs.loss_mask, inputs.is_weights, inputs.old_logp
        if old_logp is None:
            old_logp, surplus = logp.detach(), inputs.surplus_logp
            old_logp = old_logp if surplus is None else surplus.where(~surplus.isnan(), old_logp)
        correction = self._correct(logp, inputs) if self.measures(inputs) else None
        bypasses = correction is not None and self.correction.bypass
        if correction is not None and bypasses:
            mask, is_weights = correction.mask, correction.weights
        if bypasses or POLICY_LOSSES.spec(self.settings.name).mode == "decoupled":
            assert inputs.rollout_logp is not None, "correction or the loss compares with it"
            old_logp = inputs.rollout_logp
            if inputs.outside is not None:
                old_logp = torch.where(inputs.outside, logp.detach(), old_logp)
        late = self.counts_late(inputs)
        weights = self._weights(mask, torch.ones(2, dtype=torch.float64), inputs) if late else inputs.weights
        assert weights is not None, "set from `weigh`"
        kl, distillation = self.algorithm.kl, self.algorithm.distillation
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
            ref_logp=policy if self.compares_reference else inputs.ref_logp,
            kl=kl if kl.use == "loss" else None,
            teacher=inputs.teacher_logp if self.divergence is None else (inputs.teacher_topk, policy),
            distillation=distillation if distillation.coef else None,
            fields=inputs.own,
            is_weights=is_weights,
        )
        loss = self._with_cross_entropy(loss, logp, inputs, metrics)
        metrics.merge(source_metrics(logp, old_logp, mask, inputs))
        if correction is not None:
            metrics.merge(correction.moments)
        if late:
            # Add up the gradient's divisor (tokens or sequences), which is known only after the last micro-batch.
            from megarl.algorithms.aggregation import local_counts

            counts = local_counts(mask, inputs.offsets, copies=inputs.copies).tolist()
            metrics.sum(DIVISOR, counts[0 if self.settings.aggregation == "token-mean" else 1])
        if correction is not None and self.normalises_late(inputs):
            for name, value in zip((WEIGHT_SUM, WEIGHT_COUNT), correction.normaliser.tolist(), strict=True):
                metrics.sum(name, value)
        return loss, metrics

    def _with_cross_entropy(self, loss: Tensor, logp: Tensor, inputs: TokenInputs, metrics: Metrics) -> Tensor:
        """Add the cross-entropy of tokens of environments and of demonstrations, if there are any, to the loss."""
        if inputs.echo_weights is not None:
            loss = loss + echo_loss(logp, inputs.echo_weights, self.settings.echo_coef, metrics)
        if inputs.expert_weights is not None:
            name = "actor/expert_loss"
            loss = loss + echo_loss(logp, inputs.expert_weights, self.settings.expert_coef, metrics, name)
        return loss

    def settle(self, metrics: Metrics, inputs: TokenInputs) -> None:
        """Divide the sums in the merged metrics of all micro-batches by their divisor, and drop the raw metrics."""
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

    def _correct(self, logp: Tensor, inputs: TokenInputs) -> Correction:
        """Apply rollout correction from pi_theta / pi_rollout to a micro-batch; without bypass only measure the gap.

        Weights are not divided by their mean here: the rest of the batch is not known yet.
        """
        from megarl.algorithms.correction import correct, rules_of

        correction = self.correction
        assert inputs.rollout_logp is not None, "correction compares with it"
        return correct(
            logp.detach(),
            inputs.rollout_logp,
            inputs.response_mask,
            offsets=inputs.offsets,
            is_level=correction.is_level if correction.bypass else "none",
            is_threshold=correction.is_threshold,
            is_normalize_over=correction.is_normalize_over,
            rules=rules_of(correction) if correction.bypass else [],
            veto=correction.veto_threshold if correction.bypass else 0.0,
            copies=inputs.copies,
            outside=inputs.outside,
        )

    def _weights(self, mask: Tensor, counts: Tensor, inputs: TokenInputs) -> Tensor:
        from megarl.algorithms.aggregation import aggregation_weights

        mode, sum_norm = self.settings.aggregation, self.settings.sum_norm
        return aggregation_weights(mode, mask, counts, offsets=inputs.offsets, sum_norm=sum_norm, copies=inputs.copies)


def source_metrics(logp: Tensor, old_logp: Tensor, mask: Tensor, inputs: TokenInputs) -> Metrics:
    """Return how far the policy is from the one that wrote replayed samples, and expert responses with log-probs:
    `SOURCE/ppo_kl`, the mean of old_logp - logp over the source's tokens, and `SOURCE/ratio_mean` and `ratio_max`.

    Args:
        mask: bool [N], tokens that are trained on.
    """
    metrics = Metrics()
    for source, tokens in (("replay", inputs.replayed), ("experts", inputs.expert_mask)):
        if tokens is None or not len(tokens):
            continue
        known = mask & tokens if inputs.outside is None else mask & tokens & ~inputs.outside
        p = LossInputs.of(logp.detach(), old_logp, torch.zeros_like(logp), known)
        ratio = torch.where(known, p.ratio, 0)
        # One transfer for all numbers: each transfer stalls the GPU.
        numbers = [known.sum(), p.log_ratio.sum(), ratio.sum(), ratio.max()]
        count, log_ratios, total, most = torch.stack([x.double() for x in numbers]).tolist()
        if count:
            metrics.mean(f"{source}/ppo_kl", 0.0 - log_ratios, count)
            metrics.mean(f"{source}/ratio_mean", total, count)
            metrics.max(f"{source}/ratio_max", most)
    return metrics


def echo_loss(logp: Tensor, weights: Tensor, coef: float, metrics: Metrics, name: str = "actor/echo_loss") -> Tensor:
    """Return coef * sum(w (-logp)): the cross-entropy of the environment's own tokens (ECHO), or of expert responses.

    Args:
        logp: float [N], differentiable, of all tokens.
        weights: [N], from `Objective.echo_weights` or `expert_weights`; 0 for all other tokens.
        name: name of the metric.

    Source: ECHO (arXiv 2605.24517).
    """
    seen = weights > 0
    losses = torch.where(seen, -logp, 0)
    if count := int(seen.sum()):
        metrics.mean(name, float(losses.detach().double().sum()), count)
    return coef * (weights * losses).sum()


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
    """Return sum(w c loss) - entropy_coef sum(w entropy) + kl.coef sum(w kl) + distillation.coef sum(w distillation).

    The first term is omitted if only the teacher gives a signal (`distillation.task_loss: false`).

    Args:
        logp: float [N] or [B, T], differentiable; old_logp, advantages, ref_logp, entropy and bool mask have its shape.
        weights: w, same shape, from `aggregation_weights`.
        cfg: `algorithm.loss`: the policy loss, its settings, and entropy_coef.
        tokens: valid tokens of the whole mini-batch over all ranks, for the metrics.
        offsets: int64 [B + 1] for the packed form.
        ref_logp: log-probs of the reference; for an estimator of whole distributions each token's KL.
        entropy: differentiable if entropy_coef is not 0; None: no entropy metric or bonus.
        kl, distillation: settings of these terms; None: no such term.
        teacher: log-probs of the teacher, same shape; or its most likely tokens and the policy's log-probs of them.
        fields: this micro-batch's part of the loss's other inputs and of the results of its `prepare`.
        is_weights: c, same shape, the importance weights of rollout correction; None: 1.

    Returns:
        The micro-batch's share of the mini-batch's loss, zero (with zero gradients) without valid tokens, and metrics.
    """
    policy_loss = partial(_policy_loss, cfg, logp, old_logp, mask, offsets, fields or {}, is_weights)
    token_loss, metrics = policy_loss(advantages)
    loss = (weights * token_loss).sum()
    sums = {"count": mask.sum(), "policy": loss.detach()}  # _record expects the count first
    if distillation is not None and not distillation.task_loss:
        loss = torch.zeros_like(loss)
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0)
        sums["entropy"] = entropy.detach().double().sum()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * (weights * entropy).sum()
    terms: dict[str, tuple[float, Tensor, Tensor]] = {}
    if kl is not None:
        terms["kl"] = kl.coef, *(_distance(kl, logp, old_logp, ref_logp, mask),) * 2
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
    """Return each token's policy loss times its importance weight, and the metrics."""
    chosen = POLICY_LOSSES.choose(cfg)
    inputs = (logp, old_logp, advantages, mask, chosen.settings)
    with located(POLICY_LOSSES.kind, chosen.function):
        result = chosen.function(*inputs, offsets=offsets, **fields)
    token_loss, metrics = checked_loss(chosen.function, result, logp, mask, (old_logp, advantages, *fields.values()))
    return token_loss if is_weights is None else is_weights.detach() * token_loss, metrics


def _distance(settings: KLConfig, logp: Tensor, old_logp: Tensor, ref_logp: Tensor | None, mask: Tensor) -> Tensor:
    """Return the KL of every token to the reference."""
    if ref_logp is None:
        raise ValueError("the KL term needs the reference's log-probs")
    spec = KL.choose(settings).spec
    if spec.whole:
        return torch.where(mask, ref_logp, 0)
    distance = kl_tokens(chosen_estimator(settings), logp, ref_logp, mask)
    if not spec.weighted:
        return distance
    return LossInputs.of(logp, old_logp, distance, mask).ratio * distance


def _record(metrics: Metrics, sums: dict[str, Tensor], coefs: dict[str, float], tokens: float) -> None:
    """Record the metrics of the loss terms from scalar sums over the micro-batch's valid tokens, if it has any."""
    count, *values = torch.stack([value.double() for value in sums.values()]).tolist()
    numbers = dict(zip(list(sums)[1:], values, strict=True))
    if not count:
        return
    # The weights of a mini-batch's parts add up to 1, so the metric averages over mini-batches.
    metrics.mean("actor/pg_loss", numbers["policy"], count / max(tokens, 1.0))
    if "entropy" in numbers:
        metrics.mean("actor/entropy", numbers["entropy"], count)
    for name, coef in coefs.items():
        metrics.mean(f"actor/{name}_loss", numbers[name], count)
        metrics.mean(f"actor/{name}_coef", coef * count, count)
