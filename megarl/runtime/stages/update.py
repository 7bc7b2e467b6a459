"""The policy update: mini-batches, epochs, and the loss that a micro-batch contributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megarl.dag.stage import Kind, Role, stage
from megarl.runtime.stages.logprob import DRAWN_LOGP
from megarl.runtime.stages.needs import update_fields

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megarl.config.correction import Knobs
    from megarl.data.batch import Batch, Jagged
    from megarl.metrics import Metrics
    from megarl.runtime.controller import Controller

#: Raw metric that holds this part's tokens or sequences, by which the gradient is divided when all are counted.
DIVISOR = "_update/divisor"


@stage(
    reads=["prompt_ids", "response_ids", "response_mask", "advantages"],
    optional=[
        "old_logp",
        DRAWN_LOGP,
        "ref_logp",
        "teacher_logp",
        "rollout_logp",
        "weight_version",
        "loss_mask",
        "is_weights",
        "sample_id",
    ],
    needs=update_fields,
    writes=[],
    kind=Kind.MODEL_TRAIN,
    role=Role.ACTOR,
)
def actor_train(c: Controller, samples: Batch) -> Batch:
    """`ppo_epochs` passes over the samples, one optimizer step per mini-batch.

    Without `old_logp` every sample is used once, by the policy that drew it: the ratio is 1, except for samples that
    waited since an earlier step. While a critic warms up the policy rests.
    """
    from megarl.runtime.generation import make_room

    if c.critic is not None and c.step <= c.config.critic.warmup_steps:
        return samples
    make_room(c)  # generation is over
    c.actor.onload()
    for _ in range(c.config.actor.ppo_epochs):
        for mini in mini_batches(c, samples, c.config.actor.mini_batch_size):
            metrics = train_on(c, mini)
            c.count_pass(mini, train=True)
            if c.layout.rank == 0:  # already merged over all ranks
                c.metrics.merge(metrics)
    return samples


def mini_batches(c: Controller, samples: Batch, size: int | None) -> Iterator[Batch]:
    """This rank's part of each mini-batch of `size` prompts (null: of all), in order.

    They are equally many on every rank, and the last ones may be empty.
    """
    if size is None or size >= c.config.data.batch_size:
        yield samples.copy()  # an update adds fields of its own to a mini-batch
        return
    per_rank = size // c.layout.dp_size * c.config.rollout.sampling.n
    count = c.config.data.batch_size // size
    sizes = [max(0, min(per_rank, len(samples) - i * per_rank)) for i in range(count)]
    sizes[-1] += len(samples) - sum(sizes)
    yield from samples.split(sizes)


def train_on(c: Controller, mini: Batch) -> Metrics:
    """One optimizer step. The loss weights hold the global counts, so no split of the samples changes the result.

    In bypass with rejection these counts are known only when the last micro-batch has been scored. Weights are then
    made without them, and the summed gradient is divided by them: the loss is linear in this one number.
    """
    from megarl.algorithms.aggregation import aggregation_weights, local_counts
    from megarl.algorithms.correction import finish
    from megarl.runtime.stages.correction import ages

    algorithm, knobs = c.config.algorithm, c.config.rollout_correction.resolved()
    late = knobs.bypass and knobs.rejects and "rollout_logp" in mini
    mask = trained_mask(mini)
    mini.set("loss_mask", mask)
    counts = c.all_sum(local_counts(mask.values, mask.offsets))
    if not late:
        weights = aggregation_weights(
            algorithm.loss.aggregation, mask.values, counts, offsets=mask.offsets, sum_norm=algorithm.loss.sum_norm
        )
        mini.set("loss_weights", mask.like(weights))
    measured = "rollout_logp" in mini and (knobs.bypass or "old_logp" not in mini)
    loss = _Objective(c, knobs, float(counts[0]), _prepare(c, mini), measured=measured, late=late)
    divided = late and algorithm.loss.aggregation != "token-sum"
    metrics = c.actor.train_step(mini, loss, c.temperature, divisor=DIVISOR if divided else None)
    if late:
        divisor = metrics.pop(DIVISOR)[1] if DIVISOR in metrics else 0.0
        if "actor/pg_loss" in metrics:
            metrics.mean("actor/pg_loss", metrics.pop("actor/pg_loss")[1] / (divisor if divided else 1.0), 1)
    if measured:
        _add_ages(c, metrics, ages(c, mini))
        finish(metrics)
    return metrics


def _add_ages(c: Controller, metrics: Metrics, mine: Metrics) -> None:
    metrics.merge(c.layout.dp_group.reduce_metrics(mine))


def trained_mask(samples: Batch) -> Jagged:
    """Tokens that are trained on: the response mask, without what rollout correction rejected."""
    mask = samples["response_mask"]
    return mask.like(mask.values & samples["loss_mask"].values) if "loss_mask" in samples else mask


class _Objective:
    """The loss of one micro-batch of a mini-batch with `tokens` valid tokens over all ranks.

    Attributes:
        measured: rollout -> theta is measured here.
        late: weights lack the global count, see `train_on`.
    """

    def __init__(
        self, c: Controller, knobs: Knobs, tokens: float, prepared: list[str], *, measured: bool, late: bool
    ) -> None:
        from megarl.algorithms.losses import POLICY_LOSSES

        self._c, self._knobs, self._tokens, self._measured, self._late = c, knobs, tokens, measured, late
        self._prepared = prepared
        algorithm = c.config.algorithm
        self._kl = algorithm.kl if algorithm.kl.use == "loss" else None
        self._distillation = algorithm.distillation if algorithm.distillation.coef else None
        self._settings = algorithm.loss
        if knobs.loss == "pg":  # pg_is is gpg with weights, and those come from the correction of the micro-batch
            self._settings = algorithm.loss.of("gpg")
        self._reads = POLICY_LOSSES.choose(self._settings).spec.reads

    def __call__(self, logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
        from megarl.algorithms.losses import actor_loss
        from megarl.runtime.stages.correction import in_update

        tokens = {name: micro[name].values.to(logp.device) for name in micro.names() if name in _TOKEN_FIELDS}
        offsets = micro["response_mask"].offsets.to(logp.device)
        mask, is_weights = tokens["loss_mask"], tokens.get("is_weights")
        old_logp = tokens["old_logp"] if "old_logp" in tokens else _own_or_drawn(logp, tokens)
        correction = in_update(self._c, self._knobs, logp, tokens, offsets) if self._measured else None
        if correction is not None and self._knobs.bypass:
            mask, is_weights, old_logp = correction.mask, correction.weights, tokens["rollout_logp"]
        loss, metrics = actor_loss(
            logp,
            old_logp,
            tokens["advantages"],
            mask,
            self._late_weights(mask, offsets) if self._late else tokens["loss_weights"],
            self._settings,
            tokens=1.0 if self._late else self._tokens,
            offsets=offsets,
            entropy=entropy,
            ref_logp=tokens.get("ref_logp"),
            kl=self._kl,
            teacher_logp=tokens.get("teacher_logp"),
            distillation=self._distillation,
            fields=self._fields_of(micro, logp.device),
            is_weights=is_weights,
        )
        if correction is not None:
            metrics.merge(correction.moments)
        if self._late:
            self._count(metrics, mask, offsets)
        return loss, metrics

    def _fields_of(self, micro: Batch, device: torch.device) -> dict[str, Any]:
        """What the loss takes in addition to its inputs: fields that it reads, and what it made of the mini-batch."""
        from megarl.data.batch import Jagged

        names = {**{name: name for name in self._reads}, **{name: f"prepared_{name}" for name in self._prepared}}
        fields = {name: micro[field] for name, field in names.items()}
        flat = {name: value.values if isinstance(value, Jagged) else value for name, value in fields.items()}
        return {name: value.to(device) if hasattr(value, "to") else value for name, value in flat.items()}

    def _late_weights(self, mask: Tensor, offsets: Tensor) -> Tensor:
        """Weights with a global count of 1."""
        import torch

        from megarl.algorithms.aggregation import aggregation_weights

        settings = self._c.config.algorithm.loss
        one = torch.ones(2, dtype=torch.float64)
        return aggregation_weights(settings.aggregation, mask, one, offsets=offsets, sum_norm=settings.sum_norm)

    def _count(self, metrics: Metrics, mask: Tensor, offsets: Tensor) -> None:
        """What the weights lack: tokens for token-mean, else sequences."""
        from megarl.algorithms.aggregation import local_counts

        tokens, sequences = local_counts(mask, offsets).tolist()
        metrics.sum(DIVISOR, tokens if self._c.config.algorithm.loss.aggregation == "token-mean" else sequences)


def _own_or_drawn(logp: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    """Old log-probs where one update uses every sample once: its own, and for samples that waited those they bring."""
    drawn = tokens.get(DRAWN_LOGP)
    return logp.detach() if drawn is None else drawn.where(~drawn.isnan(), logp.detach())


def _prepare(c: Controller, mini: Batch) -> list[str]:
    """Let the loss look at the whole mini-batch before it is cut. Returns the names of what it made, which are fields
    `prepared_<name>` of the mini-batch now."""
    import torch

    from megarl.algorithms.losses import POLICY_LOSSES
    from megarl.algorithms.rows import Rows
    from megarl.algorithms.select import drawn
    from megarl.rollout.seeds import token_seed

    chosen, mask = POLICY_LOSSES.choose(c.config.algorithm.loss), mini["loss_mask"]
    prepare = chosen.spec.prepare
    if prepare is None:
        return []
    # What is drawn for a token depends on its sample's name and the optimizer step, not on rank or place in the batch.
    seeds = [token_seed(c.config.trainer.seed, c.actor.step, sample) for sample in mini["sample_id"]]
    keys = drawn(torch.tensor(seeds, dtype=torch.int64), Rows.of(mask.values, mask.offsets))
    inputs = (mini[name].values for name in ("old_logp", "advantages", "loss_mask"))
    made = prepare(*inputs, chosen.settings, keys=keys, all_sum=c.all_sum)
    for name, values in made.items():
        mini.set(f"prepared_{name}", mask.like(values))
    return list(made)


_TOKEN_FIELDS = frozenset(
    {
        "old_logp",
        DRAWN_LOGP,
        "ref_logp",
        "teacher_logp",
        "rollout_logp",
        "advantages",
        "response_mask",
        "loss_mask",
        "loss_weights",
        "is_weights",
    }
)
