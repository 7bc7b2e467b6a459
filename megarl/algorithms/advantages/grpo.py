"""Group-relative advantage (GRPO, Dr. GRPO)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pydantic import Field

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, NormSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.stats import EPS
from megarl.system.errors import ConfigError


class GrpoSettings(NormSettings):
    """Settings of GRPO."""

    lone_score: bool = Field(
        False,
        description="advantage of a sample alone in its group: its score (needs allow_singleton); false: 0",
    )

    def problems(self, path: str) -> list[ConfigError]:
        """Return an error if `lone_score` is set while groups of one sample are not accepted."""
        if not self.lone_score or self.allow_singleton:
            return []
        return [
            ConfigError(
                "lone_score has no effect: groups of one sample are not accepted",
                where=f"{path}.lone_score",
                found=True,
                allowed=f"false, or true with {path}.allow_singleton=true",
                fix=f"set {path}.allow_singleton=true",
            )
        ]


@ADVANTAGES.register("grpo", settings=GrpoSettings)
@no_grad
def grpo(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    norm_by_std: bool = True,
    allow_singleton: bool = False,
    lone_score: bool = False,
) -> Estimate:
    """Compute A = (score - group mean) / (group std + 1e-6), the same for all tokens of a sample.

    score = sum of the sample's valid token rewards; std is unbiased. A group must not be split over ranks.

    Args:
        norm_by_std: whether to divide by the standard deviation; Dr. GRPO does not.
        lone_score: give the only (unmasked) sample of a group A = score / (1 + 1e-6), as in siiRL and verl; without
            the division A = score.

    Source: DeepSeekMath (arXiv 2402.03300); without std: Understanding R1-Zero-Like Training (arXiv 2503.20783).
    Arguments and result: see `advantages.base`.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    >>> grpo(rewards, torch.ones(2, 2, dtype=torch.bool), ["a", "a"], norm_by_std=False).advantages
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    advantages = groups.standardised if norm_by_std else groups.centred
    if lone_score:
        alone = groups.live & (groups.count == 1)
        advantages = torch.where(alone, groups.scores / (1 + EPS if norm_by_std else 1), advantages)
    return for_all_tokens(advantages, rows, mask, token_rewards)
