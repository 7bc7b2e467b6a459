"""The mask of an episode's action tokens that a robot executed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def executed_mask(finish_step: Tensor, calls: Tensor, *, chunk: int, dims: int) -> tuple[Tensor, Tensor]:
    """Return the response mask of episodes, packed: true for tokens of executed actions.

    An episode's response is the tokens of its policy calls in order, `chunk` actions of `dims` tokens each. The first
    `finish_step` actions were executed; if it ended inside a call, the rest of that call was not.

    Args:
        finish_step: int [B], environment steps that each episode executed.
        calls: int [B], its policy calls.
        chunk: actions of a policy call.
        dims: numbers, and so tokens, of an action.

    Returns:
        bool [N] and int64 offsets [B + 1], N = sum of calls * chunk * dims.

    Raises:
        ValueError: an episode's number of executed actions is negative, or more than its calls have.

    >>> executed_mask(torch.tensor([3, 0]), torch.tensor([2, 1]), chunk=2, dims=1)
    (tensor([ True,  True,  True, False, False, False]), tensor([0, 4, 6]))
    """
    if chunk < 1 or dims < 1:
        raise ValueError(f"a policy call has at least one action of one number, got {chunk} actions of {dims}")
    if finish_step.shape != calls.shape or finish_step.ndim != 1:
        raise ValueError(
            f"finish_step and calls must be [B], got shapes {tuple(finish_step.shape)} and {tuple(calls.shape)}"
        )
    steps, possible = finish_step.long(), calls.long() * chunk
    wrong = (steps < 0) | (steps > possible)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"episode {place} executed {int(steps[place])} actions of the {int(possible[place])} of its "
            f"{int(calls[place])} policy calls"
        )
    lengths = possible * dims
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    token = torch.arange(int(offsets[-1]), device=offsets.device) - offsets[:-1].repeat_interleave(lengths)
    return token < (steps * dims).repeat_interleave(lengths), offsets
