"""The running baselines of policies (RAE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.advantages.rae import DECAY
from megarl.algorithms.needs import advantage_fields
from megarl.algorithms.rows import Rows
from megarl.dag.stage import Role, stage
from megarl.data.groups import ORDINAL, group_numbers, group_places
from megarl.data.lanes import EPISODE, LANE, leads, spread
from megarl.data.policies import POLICY
from megarl.runtime.stages.needs import estimators

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(
    reads=["token_rewards", "response_mask", "uid"],
    optional=[EPISODE, LANE, POLICY, ORDINAL],
    writes=["running_baseline"],
    role=Role.ADVANTAGE,
)
def running_baseline(c: StepContext, samples: Batch) -> Batch:
    """Write the baseline of each sample's policy before the sample, in the order of the data over all replicas.

    Samples without a trained token, such as those of failed episodes, do not change the baseline.
    """
    import torch

    led = samples.select(leads(samples))
    rewards, mask = led["token_rewards"], led["response_mask"]
    scores, trained = Rows.of(mask.values, mask.offsets).masked_sum(rewards.values.double(), mask.values)
    policies = led[POLICY] if POLICY in led else [""] * len(led)
    order, groups = [(0, 0)] * len(led), group_places(led["uid"])
    numbers = group_numbers(led, groups, c.layout.dp_rank, c.layout.dp_size)
    for number, group in zip(numbers, groups, strict=True):
        for k, place in enumerate(group):
            order[place] = (number, k)
    columns = zip(order, policies, scores.tolist(), trained.tolist(), strict=True)
    of_rank = [[*at, policy, score if counts else None] for at, policy, score, counts in columns]
    decays = {
        policy: section.own.get("decay", DECAY)
        for policy, section in estimators(c.config).items()
        if "running_baseline" in advantage_fields(section)
    }
    everyone = [sample for part in c.layout.dp_group.all_gather_json(of_rank) for sample in part]
    before = {
        (number, k): c.baselines.before(policy, score if policy in decays else None, decays.get(policy, DECAY))
        for number, k, policy, score in sorted(everyone, key=lambda sample: sample[:2])
    }
    for policy in decays:
        c.metrics.max(f"{policy}/critic/baseline".removeprefix("/"), c.baselines[policy])
    values = spread([before[at] for at in order], samples)
    samples.set("running_baseline", torch.tensor(values, dtype=torch.float32))
    return samples
