"""Which term of the loss a prompt is trained with: the policy loss on its own samples, or expert responses (HPT)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.data.fields import EXPERT, EXPERT_MASK, SOURCE

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(
    reads=["uid", "score", "response_mask", SOURCE, EXPERT_MASK],
    writes=["response_mask", EXPERT_MASK],
    role=Role.ADVANTAGE,
)
def expert_gate(c: StepContext, samples: Batch) -> Batch:
    """Mask out the policy's own samples of unsolved prompts, and the expert responses of all other prompts.

    A prompt counts as solved if a larger share of its own samples than `algorithm.loss.expert_gate` scores above 0.5. A
    prompt without expert responses keeps its samples. Source: HPT (arXiv 2509.04419), with the switch per prompt.
    """
    import torch

    from megarl.data.groups import group_places
    from megarl.evaluation.metrics import CORRECT_ABOVE

    gate = c.config.algorithm.loss.expert_gate or 0.0
    right, experts = samples["score"] > CORRECT_ABOVE, [source == EXPERT for source in samples[SOURCE]]
    keep, taught, switched = torch.ones(len(samples), dtype=torch.bool), 0, 0
    for group in group_places(samples["uid"]):
        answers = [bool(right[place]) for place in group if not experts[place]]
        if len(answers) == len(group):
            continue
        learns = sum(answers) <= gate * len(answers)
        taught, switched = taught + 1, switched + learns
        for place in group:
            keep[place] = experts[place] == learns
    c.metrics.mean("experts/sft_groups", switched, max(1, taught))
    for name in ("response_mask", EXPERT_MASK):
        mask = samples[name]
        samples.set(name, mask.like(mask.values & torch.repeat_interleave(keep, mask.lengths)))
    return samples
