"""The policy update: mini-batches, epochs, and the loss that a micro-batch contributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.dag.stage import stage

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.batch import Batch
    from megarl.metrics import Metrics
    from megarl.runtime.controller import Controller


@stage(reads=["prompt_ids", "response_ids", "response_mask", "advantages"], writes=[])
def actor_train(c: Controller, samples: Batch) -> Batch:
    """`ppo_epochs` passes over the samples, one optimizer step per mini-batch.

    Without `old_logp` every sample is used once, by the policy that drew it: the ratio is 1. While a critic warms up
    the policy rests.
    """
    if c.critic is not None and c.step <= c.config.critic.warmup_steps:
        return samples
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
        yield samples
        return
    per_rank = size // c.layout.dp_size * c.config.rollout.sampling.n
    count = c.config.data.batch_size // size
    sizes = [max(0, min(per_rank, len(samples) - i * per_rank)) for i in range(count)]
    sizes[-1] += len(samples) - sum(sizes)
    yield from samples.split(sizes)


def train_on(c: Controller, mini: Batch) -> Metrics:
    """One optimizer step. The loss weights hold the global counts, so no split of the samples changes the result."""
    from megarl.algorithms.aggregation import aggregation_weights, local_counts
    from megarl.algorithms.losses import actor_loss

    algorithm = c.config.algorithm
    mask = mini["response_mask"]
    counts = c.all_sum(local_counts(mask.values, mask.offsets))
    weights = aggregation_weights(
        algorithm.loss.aggregation, mask.values, counts, offsets=mask.offsets, sum_norm=algorithm.loss.sum_norm
    )
    mini.set("loss_weights", mask.like(weights))
    kl = algorithm.kl if algorithm.kl.use == "loss" else None
    distillation = algorithm.distillation if algorithm.distillation.coef else None
    prepared = _prepare(c, mini)

    def loss(logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
        tokens = {name: micro[name].values.to(logp.device) for name in micro.names() if name in _TOKEN_FIELDS}
        return actor_loss(
            logp,
            tokens.get("old_logp", logp.detach()),
            tokens["advantages"],
            tokens["response_mask"],
            tokens["loss_weights"],
            algorithm.loss,
            tokens=float(counts[0]),
            offsets=micro["response_mask"].offsets.to(logp.device),
            entropy=entropy,
            ref_logp=tokens.get("ref_logp"),
            kl=kl,
            teacher_logp=tokens.get("teacher_logp"),
            distillation=distillation,
            prepared={name: micro[f"prepared_{name}"].values.to(logp.device) for name in prepared},
        )

    return c.actor.train_step(mini, loss, c.temperature)


def _prepare(c: Controller, mini: Batch) -> list[str]:
    """Let the loss look at the whole mini-batch before it is cut. Returns the names of what it made, which are fields
    `prepared_<name>` of the mini-batch now."""
    import torch

    from megarl.algorithms.losses import POLICY_LOSSES, preparation_of
    from megarl.algorithms.rows import Rows
    from megarl.algorithms.select import drawn
    from megarl.rollout.seeds import sample_seed

    settings, mask = c.config.algorithm.loss, mini["response_mask"]
    prepare = preparation_of(POLICY_LOSSES.get(settings.name))
    if prepare is None:
        return []
    # What is drawn for a token depends on its sample's name and the optimizer step, not on rank or place in the batch.
    seeds = [sample_seed(c.config.trainer.seed, c.actor.step, sample, 0) for sample in mini["sample_id"]]
    keys = drawn(torch.tensor(seeds, dtype=torch.int64), Rows.of(mask.values, mask.offsets))
    inputs = (mini[name].values for name in ("old_logp", "advantages", "response_mask"))
    made = prepare(*inputs, settings, keys=keys, all_sum=c.all_sum)
    for name, values in made.items():
        mini.set(f"prepared_{name}", mask.like(values))
    return list(made)


_TOKEN_FIELDS = frozenset({"old_logp", "ref_logp", "teacher_logp", "advantages", "response_mask", "loss_weights"})
