"""The policy update: mini-batches, epochs, and the loss that a micro-batch contributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.algorithms.divergences import terms
from megarl.algorithms.kl import KL
from megarl.algorithms.rows import Rows
from megarl.algorithms.select import random_keys
from megarl.algorithms.user_code import naming_samples
from megarl.dag.stage import Kind, Role, stage
from megarl.data.fields import EXPERT_MASK
from megarl.data.groups import ORDINAL, group_numbers, group_places
from megarl.data.versions import VERSION_FIELDS
from megarl.runtime.stages.correction import outside_tokens
from megarl.runtime.stages.logprob import SURPLUS_LOGP
from megarl.runtime.stages.needs import update_fields
from megarl.runtime.stages.resampling import COPIES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megarl.algorithms.objective import Objective, TokenInputs
    from megarl.data.batch import Batch, Jagged
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import ActorRole
    from megarl.system.metrics import Metrics
    from megarl.training.engine import TeacherTargets


@stage(
    reads=["prompt_ids", "response_ids", "response_mask", "advantages", "uid"],
    optional=[
        "old_logp",
        SURPLUS_LOGP,
        "ref_logp",
        "teacher_logp",
        "teacher_topk",
        "teacher_hidden",
        "ref_hidden",
        "rollout_logp",
        *VERSION_FIELDS,
        "loss_mask",
        "is_weights",
        "sample_id",
        ORDINAL,
        COPIES,
        EXPERT_MASK,
    ],
    needs=update_fields,
    writes=[],
    kind=Kind.MODEL_TRAIN,
    role=Role.ACTOR,
)
def actor_train(c: StepContext, samples: Batch, *, actor: ActorRole) -> Batch:
    """Train the policy: `ppo_epochs` passes over the samples, one optimizer step per mini-batch.

    Without `old_logp` each sample is used in one optimizer step only, with a ratio of 1 (except surplus samples of an
    earlier step). Nothing is trained while only the critic warms up (`critic.warmup_steps`).
    """
    from megarl.runtime.exchange import record_tokens

    record_tokens(c, samples)
    _record_sources(c, samples)
    if c.step <= c.resting:
        return samples
    train_actor(c, samples, lambda mini: actor_step(c, mini, actor))
    return samples


def _record_sources(c: StepContext, samples: Batch) -> None:
    """Record which share of the step's trained tokens are an expert's, and which share is replayed."""
    trained, expert = trained_mask(samples).values, samples[EXPERT_MASK] if EXPERT_MASK in samples.names() else None
    for source, tokens in (("experts", expert), ("replay", _replayed(c, samples))):
        # the supervised term learns expert tokens that the policy loss does not
        learnt = trained if source == "replay" or tokens is None else trained | tokens.values
        if tokens is not None and (count := int(learnt.sum())):
            c.metrics.mean(f"{source}/token_share", int((tokens.values & learnt).sum()), count)


def _replayed(c: StepContext, samples: Batch) -> Jagged | None:
    """Return the mask of the tokens of replayed samples, bool Jagged; None without `data.replay`."""
    import torch

    if c.config.data.replay is None:
        return None
    mask, fresh = samples["response_mask"], c.config.data.batch_size
    again = torch.tensor([number >= fresh for number in samples[ORDINAL]], dtype=torch.bool)
    return mask.like(torch.repeat_interleave(again, mask.lengths))


def train_actor(c: StepContext, samples: Batch, step: Callable[[Batch], Metrics], *, head: bool = True) -> None:
    """Make `ppo_epochs` passes over the samples, with one `step` of the optimizer per mini-batch.

    Args:
        step: takes one optimizer step; returns metrics already merged over all ranks.
        head: whether to count the FLOPs of the output layer.
    """
    for epoch in range(c.config.actor.ppo_epochs):
        for mini in mini_batches(c, samples, "actor", epoch):
            metrics = step(mini)
            c.count_pass(mini, train=True, head=head)
            if c.layout.rank == 0:
                c.metrics.merge(metrics)


def mini_batches(c: StepContext, samples: Batch, role: str, epoch: int) -> Iterator[Batch]:
    """Yield this rank's part of each mini-batch of a role's `mini_batch_size` prompts (null: one mini-batch of all).

    The role is actor, critic or the name of a further model. All samples of a prompt are in one mini-batch, in the
    order of the data, or with `shuffle` in a random order for each epoch. Groups of `data.replay` come in addition,
    dealt to the mini-batches in turn. Samples that resampling dropped (0 copies) are left out. Every rank yields
    equally many parts; a part may be empty.
    """
    settings = c.config.training_of(role)
    size = settings.mini_batch_size
    if size is None or size >= c.config.data.batch_size:
        parts = iter([samples.copy()])  # a copy, because an update adds fields to its mini-batch
    elif settings.shuffle:
        parts = _shuffled(c, samples, size, c.seeds.order(role, c.step, epoch))
    else:
        parts = _in_order(c, samples, size)
    for part in parts:
        yield part.select(part[COPIES] > 0) if COPIES in part else part


def _in_order(c: StepContext, samples: Batch, size: int) -> Iterator[Batch]:
    (groups, replayed), count = _groups(c, samples), c.config.data.batch_size // size
    minis: list[list[list[int]]] = [[] for _ in range(count)]
    numbers = group_numbers(samples, groups, c.layout.dp_rank, c.layout.dp_size)
    for number, group in zip(numbers, groups, strict=True):
        minis[min(number // size, count - 1)].append(group)  # the remainder joins the last mini-batch
    for place, group in replayed:
        minis[place % count].append(group)
    order = [place for mini in minis for group in mini for place in group]
    if order != list(range(len(samples))):
        samples = samples.select(order)
    yield from samples.split([sum(map(len, mini)) for mini in minis])


def _shuffled(c: StepContext, samples: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Yield mini-batches of prompts in a random order that depends on `seed`, not on which rank holds a prompt."""
    import numpy as np

    generator, replay = np.random.Generator(np.random.PCG64(seed)), c.config.data.replay
    batch = c.config.data.batch_size
    order, again = (generator.permutation(n).tolist() for n in (batch, replay.groups(batch) if replay else 0))
    (groups, replayed), count = _groups(c, samples), batch // size
    numbers = group_numbers(samples, groups, c.layout.dp_rank, c.layout.dp_size)
    # Prompts beyond a whole batch, and those that do not divide into mini-batches, are in the last one.
    places = [order[number] if number < len(order) else number for number in numbers]
    ranked = sorted(zip(places, groups, strict=True))
    for mini in range(count):
        members = [group for place, group in ranked if min(place // size, count - 1) == mini]
        members += [group for place, group in replayed if again[place] % count == mini]
        yield samples.select([place for group in members for place in group])


def _groups(c: StepContext, samples: Batch) -> tuple[list[list[int]], list[tuple[int, list[int]]]]:
    """Return the positions of each fresh group's samples, and (number among the step's replayed groups, positions) of
    each replayed one. The number is the same on any number of replicas, so it decides on the mini-batch.
    """
    groups, fresh = group_places(samples["uid"]), c.config.data.batch_size
    if c.config.data.replay is None:
        return groups, []
    numbers = group_numbers(samples, groups, c.layout.dp_rank, c.layout.dp_size)
    pairs = [*zip(numbers, groups, strict=True)]
    return [group for n, group in pairs if n < fresh], [(n - fresh, group) for n, group in pairs if n >= fresh]


def actor_step(c: StepContext, mini: Batch, actor: ActorRole) -> Metrics:
    """Take one optimizer step on this rank's part of a mini-batch; the maths is in `megarl.algorithms.objective`."""
    from megarl.algorithms.correction import finish
    from megarl.algorithms.objective import Objective
    from megarl.runtime.stages.correction import ages

    objective = Objective.of(c.config.algorithm, c.config.rollout_correction.resolved())
    mask = trained_mask(mini)
    mini.set("loss_mask", mask)
    if (again := _replayed(c, mini)) is not None:
        mini.set("replayed", again)
    fields = {name: name for name in objective.reads}
    inputs = token_inputs(mini, {name: name for name in objective.prepare_reads})
    tokens, weights = objective.weigh(inputs, c.all_sum)
    if weights is not None:
        mini.set("loss_weights", mask.like(weights))
    if objective.settings.echo_coef:
        mini.set("echo_weights", mask.like(objective.echo_weights(inputs, c.all_sum)))
    if objective.settings.expert_coef:
        mini.set("expert_weights", mask.like(objective.expert_weights(inputs, c.all_sum)))
    if objective.prepares:
        for name, values in objective.prepare(inputs, _keys(c, mini, actor.step), c.all_sum).items():
            fields[name] = f"prepared_{name}"
            mini.set(fields[name], mask.like(values))

    def loss(logp: Tensor, entropy: Tensor, *more: Any) -> tuple[Tensor, Metrics]:
        *policy, micro = more
        with naming_samples(micro["sample_id"]):
            return objective.loss(logp, entropy, token_inputs(micro, fields, logp.device), tokens, *policy)

    divisor = objective.divisor if objective.divides_late(inputs) else None
    metrics = actor.train_step(mini, loss, divisor, _teacher_targets(objective))
    objective.settle(metrics, inputs)
    if objective.measures(inputs):
        metrics.merge(c.layout.dp_group.reduce_metrics(ages(c, mini)))
        finish(metrics)
    return metrics


def _teacher_targets(objective: Objective) -> TeacherTargets | None:
    from megarl.training.engine import TeacherTargets

    if objective.compares_reference:
        return TeacherTargets("ref_hidden", KL.choose(objective.algorithm.kl).function)
    chosen = objective.divergence
    if chosen is None:
        return None
    if chosen.settings.topk is None:
        return TeacherTargets("teacher_hidden", partial(terms, chosen))
    return TeacherTargets("teacher_topk")


def trained_mask(samples: Batch) -> Jagged:
    """Return the mask of tokens to train on: the response mask without tokens rejected by rollout correction."""
    mask = samples["response_mask"]
    return mask.like(mask.values & samples["loss_mask"].values) if "loss_mask" in samples else mask


def token_inputs(
    samples: Batch, own: Mapping[str, str] | None = None, device: torch.device | str = "cpu"
) -> TokenInputs:
    """Return the loss's inputs for `samples` on `device`.

    Args:
        own: the field for each argument that only the chosen policy loss takes.
    """
    from megarl.algorithms.objective import TokenInputs
    from megarl.data.batch import Jagged

    def flat(name: str) -> Any:
        value = samples[name]
        value = value.values if isinstance(value, Jagged) else value
        return value.to(device) if hasattr(value, "to") else value  # a column is a list, which stays on the host

    outside = outside_tokens(samples) if "rollout_logp" in samples else None
    return TokenInputs(
        offsets=samples["response_mask"].offsets.to(device),
        outside=None if outside is None else outside.to(device),
        **{argument: flat(name) for argument, name in _INPUTS.items() if name in samples.names()},
        own={argument: flat(name) for argument, name in (own or {}).items()},
    )


def _keys(c: StepContext, mini: Batch, update: int) -> Tensor:
    """Return a random key per token, int64 [N], for losses with randomness.

    It depends on the sample's name and the optimizer step, not on the rank or the position in the batch.
    """
    import torch

    mask = mini["loss_mask"]
    seeds = [c.seeds.tokens(update, sample) for sample in mini["sample_id"]]
    return random_keys(torch.tensor(seeds, dtype=torch.int64), Rows.of(mask.values, mask.offsets))


#: Argument of TokenInputs -> field of the samples.
_INPUTS = {
    "advantages": "advantages",
    "response_mask": "response_mask",
    "loss_mask": "loss_mask",
    "weights": "loss_weights",
    "old_logp": "old_logp",
    "surplus_logp": SURPLUS_LOGP,
    "rollout_logp": "rollout_logp",
    "ref_logp": "ref_logp",
    "teacher_logp": "teacher_logp",
    "teacher_topk": "teacher_topk",
    "is_weights": "is_weights",
    "observation_mask": "observation_mask",
    "echo_weights": "echo_weights",
    "expert_mask": EXPERT_MASK,
    "expert_weights": "expert_weights",
    "replayed": "replayed",
    "copies": COPIES,
}
