"""Credit for single turns of episodes: turns that begin in the same state are compared with each other (GiGPO)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pydantic import Field

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.scan import suffix_sum
from megarl.algorithms.stats import GroupStats


class GigpoSettings(GroupSettings):
    """The discount of rewards over turns."""

    gamma: float = Field(0.95, ge=0, le=1, description="discount per turn of later rewards")


@ADVANTAGES.register("gigpo", settings=GigpoSettings)
@no_grad
def gigpo(
    token_rewards: Tensor,
    turn_keys: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    allow_singleton: bool = False,
    gamma: float = 0.95,
) -> Estimate:
    """Compute A = (score - group mean) + (R - mean of R over the turns of the group with the same state).

    R is the sum of the rewards of this turn and, discounted by gamma per turn, of later ones. A turn whose state no
    other turn of the group has gets no credit of its own. The group's mean is over episodes; the authors' code takes it
    over turns by default. Their weight of the second difference (1) and their division by deviations are left out.

    Args:
        turn_keys: int64 in the shape of `mask`, at the first token of each turn a number other than 0 for the state in
            which the turn begins; 0 elsewhere.

    Source: GiGPO (arXiv 2505.10978). Arguments and result: see `advantages.base`.

    >>> keys, rewards = torch.tensor([[5, 7, 5], [5, 9, 0]]), torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> gigpo(rewards, keys, mask, ["a", "a"]).advantages
    tensor([[ 0.7683,  0.5000,  0.8658],
            [-1.1342, -0.5000,  0.0000]])
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    keys, valid, device = turn_keys.reshape(-1), mask.reshape(-1), mask.device
    begins = keys != 0
    # A row without a key at its first token begins a turn, too.
    begins[rows.offsets[:-1][rows.offsets.diff() > 0]] = True
    turn, row = begins.cumsum(0) - 1, rows.expand(torch.arange(len(rows), device=device))
    row_of_turn = row[begins]
    rewards = torch.zeros(len(row_of_turn), dtype=torch.float64, device=device)
    rewards.index_add_(0, turn[valid], token_rewards.reshape(-1)[valid].double())
    returns = _discounted(rewards, row_of_turn, len(rows), gamma)
    states = [
        (uid[i], key) if key else number
        for number, (i, key) in enumerate(zip(row_of_turn.tolist(), keys[begins].tolist(), strict=True))
    ]
    steps = GroupStats.of(returns, groups.live[row_of_turn], states, allow_singleton=True)
    advantages = torch.where(valid, groups.centred[row] + steps.centred[turn], 0)
    dtype = torch.promote_types(token_rewards.dtype, torch.float32)
    advantages = advantages.to(dtype).view(mask.shape)
    return Estimate(advantages, advantages)


def _discounted(rewards: Tensor, row: Tensor, rows: int, gamma: float) -> Tensor:
    """Return the discounted sum of each turn's reward and later ones of its row; `row` [turns] is ascending."""
    counts = torch.bincount(row, minlength=rows)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    dense = rewards.new_zeros(rows, int(counts.max()) if rows else 0)
    dense[row, place] = rewards
    return suffix_sum(dense, gamma)[row, place]
