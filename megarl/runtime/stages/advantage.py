"""From rewards to advantages, and the KL penalty inside the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.advantages import ADVANTAGES, Estimate, estimate
from megarl.algorithms.decisions import Decisions
from megarl.algorithms.kl import chosen_estimator
from megarl.algorithms.kl import kl_in_reward as penalise
from megarl.algorithms.needs import advantage_fields
from megarl.dag.stage import Role, stage
from megarl.data.fields import VALUE_MASK
from megarl.data.lanes import EPISODE, LANE, SHARE, UNSAMPLED, branches, leads, refuse_branches, spread_constant
from megarl.data.policies import POLICY, compared, places_of
from megarl.runtime.stages.needs import estimator_needs, estimators

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.algorithm import AdvantageConfig
    from megarl.data.batch import Batch, Jagged
    from megarl.runtime.context import StepContext


@stage(
    reads=["token_rewards", "response_mask", "uid"],
    optional=[
        "keep",
        "values",
        VALUE_MASK,
        "old_logp",
        "teacher_logp",
        "sum_pi_squared",
        "greedy_score",
        "reward_parts",
        "is_weights",
        EPISODE,
        LANE,
        POLICY,
        UNSAMPLED,
        SHARE,
    ],
    needs=estimator_needs,
    writes=["advantages", "returns"],
    role=Role.ADVANTAGE,
)
def advantage(c: StepContext, samples: Batch) -> Batch:
    """Estimate advantages with `algorithm.advantage`. Each group is on one rank; statistics over groups span all ranks.

    Each of several policies has its own estimator, which gets only the samples of this policy. If the critic has values
    at some tokens only (`value_mask`), an advantage belongs to a decision, which consists of several tokens
    (`megarl.algorithms.decisions`).
    """
    if POLICY in samples:
        return _by_policy(c, samples)
    advantages, returns = _estimated(c, samples, c.config.algorithm.advantage, "")
    samples.set("advantages", samples["response_mask"].like(advantages))
    samples.set("returns", samples["response_mask"].like(returns))
    return samples


def _by_policy(c: StepContext, samples: Batch) -> Batch:
    """Set the advantages of samples of several policies; those of policies that are not trained are 0. Collective."""
    import torch

    mask, places = samples["response_mask"], places_of(samples)
    tokens = mask.like(torch.arange(len(mask.values)))
    both = torch.zeros(2, len(mask.values))
    for policy, section in estimators(c.config).items():
        settings = c.config.policies[policy]
        if settings.train:  # called also without samples, because estimators may communicate between ranks
            part = samples.select(places.get(policy, []))
            part.set("uid", compared(part, settings.compare))
            both[:, tokens.select(places.get(policy, [])).values] = torch.stack(_estimated(c, part, section, policy))
    samples.set("advantages", mask.like(both[0]))
    samples.set("returns", mask.like(both[1]))
    return samples


def _estimated(c: StepContext, samples: Batch, section: AdvantageConfig, policy: str) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of all response tokens by the estimator of `section`, and record their metrics.

    Args:
        policy: the policy of the samples; empty: the run has only one.
    """
    from megarl.data.batch import Jagged

    algorithm, needed = c.config.algorithm, advantage_fields(section)
    every = samples
    if "values" in needed:  # only an episode's first row has the reward, so episodes of several rows are refused
        refuse_branches(samples, f"the estimator {section.name}", "algorithm.advantage.name")
    if grouped := branches(samples) and "values" not in needed:  # estimators compare episodes, not their sequences
        if algorithm.loss.aggregation.startswith("seq"):
            refuse_branches(samples, f"the aggregation {algorithm.loss.aggregation}", "algorithm.loss.aggregation")
        samples = samples.select(leads(samples))
    mask = _mask(samples, grouped="values" not in needed)
    trained = mask.values & samples["response_mask"].values
    decisions = None
    if "values" in needed and VALUE_MASK in samples:
        mask = samples[VALUE_MASK]
        decisions = Decisions.of(mask.values, mask.offsets)
    offered = {name: samples[name] for name in (*OFFERED, *needed) if name in samples}
    fields = {name: value.values if isinstance(value, Jagged) else value for name, value in offered.items()}
    fields |= {"mask": mask.values, "offsets": mask.offsets}
    if decisions is not None:
        fields["token_rewards"] = decisions.gather(fields["token_rewards"])
    options = dict(ADVANTAGES.choose(section).settings)
    if policy and "allow_singleton" in options:
        options["allow_singleton"] = True  # the group's other episodes may have failed, or not called the policy
    result = estimate(section.name, fields, {**options, "all_sum": c.all_sum})
    if decisions is not None:
        result = Estimate(*(decisions.spread(values, trained) for values in result))
    advantages, returns = result.advantages.float(), result.returns.float()
    if UNSAMPLED in samples:
        advantages, returns = advantages * trained, returns * trained
    if grouped:
        advantages = returns = spread_constant(advantages, every, section.name)
    if SHARE in every:
        advantages = advantages * every[SHARE].values
    valid = result.advantages[trained]
    for prefix in dict.fromkeys(("", f"{policy}/" if policy else "")):
        if valid.numel():
            c.metrics.mean(f"{prefix}critic/advantages/mean", float(valid.double().sum()), valid.numel())
            c.metrics.max(f"{prefix}critic/advantages/max", float(valid.max()))
            c.metrics.min(f"{prefix}critic/advantages/min", float(valid.min()))
    return advantages, returns


#: Fields passed to every estimator, if the samples have them.
OFFERED = (
    *("token_rewards", "values", "old_logp", "teacher_logp", "sum_pi_squared"),
    *("uid", "greedy_score", "reward_parts", "is_weights"),
)


def _mask(samples: Batch, *, grouped: bool) -> Jagged:
    """Return the tokens that estimators see: `response_mask`, but none of samples that rollout correction removes from
    their group's statistics, and all tokens of episodes without a trained turn, whose score counts there.

    Without `grouped` (the estimator uses a critic) it is `response_mask`, because the critic needs all returns.
    """
    import torch

    mask = samples["response_mask"]
    if not grouped:
        return mask
    values = mask.values
    if "keep" in samples:
        values = values & torch.repeat_interleave(samples["keep"], mask.lengths)
    if UNSAMPLED in samples:
        values = values | torch.repeat_interleave(samples[UNSAMPLED], mask.lengths)
    return mask.like(values)


@stage(
    reads=["token_rewards", "old_logp", "ref_logp", "response_mask"],
    optional=[EPISODE, LANE],
    writes=["token_rewards"],
    role=Role.ADVANTAGE,
)
def kl_in_reward(c: StepContext, samples: Batch) -> Batch:
    """Subtract coef * KL(policy || reference) from every token's reward, then let the KL controller adjust coef."""
    refuse_branches(samples, "the KL penalty inside the reward", "algorithm.kl.use")
    rewards = samples["token_rewards"]
    values, sums = penalise(
        rewards.values,
        samples["old_logp"].values,
        samples["ref_logp"].values,
        samples["response_mask"].values,
        coef=c.kl_controller.coef,
        estimator=chosen_estimator(c.config.algorithm.kl),
    )
    samples.set("token_rewards", rewards.like(values))
    total, tokens = sums.tolist()
    c.metrics.mean("actor/reward_kl", total, tokens)
    c.metrics.mean("actor/reward_kl_coef", c.kl_controller.coef * len(samples), len(samples))
    c.metrics.mean("critic/rewards/mean", float(values.double().sum()), len(samples))
    total, tokens, count = c.all_sum(sums.new_tensor([total, tokens, float(len(samples))])).tolist()
    c.kl_controller.update(total / max(tokens, 1.0), int(count))
    return samples
