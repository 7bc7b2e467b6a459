"""Group-relative advantage (GRPO, Dr. GRPO)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, NormSettings, for_all_tokens, score_groups
from megarl.algorithms.lazy import no_grad

if TYPE_CHECKING:
    from torch import Tensor


@ADVANTAGES.register("grpo", settings=NormSettings)
@no_grad
def grpo(
    token_rewards: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    norm_by_std: bool = True,
    allow_singleton: bool = False,
) -> Estimate:
    """A = (score - group mean) / (group std + 1e-6), the same for all tokens of a sample.

    score = sum of the sample's valid token rewards; std is unbiased. A group must not be split over ranks.

    Args:
        token_rewards: float [N] or [B, T].
        mask: bool, same shape.
        uid: B group names.
        offsets: int64 [B + 1] for the packed form.
        norm_by_std: False leaves the division out (Dr. GRPO).
        allow_singleton: accept groups of one sample, with A = 0.

    Raises:
        UserError: a group of one sample, unless allowed.

    Source: DeepSeekMath (arXiv 2402.03300); without std: Understanding R1-Zero-Like Training (arXiv 2503.20783).

    >>> import torch
    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    >>> grpo(rewards, torch.ones(2, 2, dtype=torch.bool), ["a", "a"], norm_by_std=False).advantages
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    return for_all_tokens(groups.standardised if norm_by_std else groups.centred, rows, mask, token_rewards)
