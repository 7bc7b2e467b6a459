"""Rows of a batch that are sequences of one episode: sub-agents, shortened histories, siblings.

    episode   a#0   a#0   a#0   a#1
    lane        0     1     2     0       lane 0 has the episode's reward; the others share its score and advantage

A turn of the policy is trained on in one row, although several rows have it as context. Estimators compare episodes,
not rows: they get the rows of lane 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from megarl.system.errors import MegarlError

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.batch import Batch
    from megarl.data.trajectory import Trajectory

EPISODE, LANE = "episode", "lane"
#: Whether a row has no turn that is trained on, although its environment did not fail; bool [B].
UNSAMPLED = "unsampled"
#: Factor of each token's advantage, float32 [B, response].
SHARE = "advantage_share"
T = TypeVar("T")


def rows_of(episode: Trajectory) -> list[Trajectory]:
    """Return the sequences of an episode that are trained on, each turn in one of them.

    The first one has the sum of the episode's rewards, and contains the turn `Trajectory.answer` if it is trained on.
    Sequences that add no trained turn are left out. Each sequence is cut after its last trained turn, so that a reward
    on the last token is on a trained token. If no turn is trained on, `episode` itself is the only sequence.
    """
    if not episode.lanes and len(_trained(episode)) in (0, episode.turns):
        return [episode]
    rows: list[Trajectory] = []
    owned: set[int] = set()
    rewards: dict[int, float] = {}
    for lane in episode.all_lanes:
        rewards |= zip(lane.turn_numbers, lane.turn_rewards, strict=True)
    total = sum(rewards.values())
    for lane in sorted(
        episode.all_lanes, key=lambda lane: (episode.answer not in lane.turn_numbers, -len(_trained(lane)))
    ):
        new = [number for number in _trained(lane) if number not in owned]
        if new:
            owned |= set(new)
            row = replace(lane.up_to(new[-1]), lanes=[], info=episode.info, ended_by=episode.ended_by)
            row.output = episode.output
            if new[-1] == lane.turn_numbers[-1]:
                row.finish_reason = lane.finish_reason
            row.leave_out([number for number in row.turn_numbers if number not in new])
            row.turn_rewards = [0.0] * row.turns
            rows.append(row)
    rows = rows or [replace(episode, lanes=[])]
    rows[0].turn_rewards = [*[0.0] * (rows[0].turns - 1), total]
    return rows


def leads(samples: Batch) -> list[int]:
    """Return the numbers of the first rows of episodes, the lead rows; all rows if every episode has one row."""
    return list(range(len(samples))) if LANE not in samples else (samples[LANE] == 0).nonzero()[:, 0].tolist()


def branches(samples: Batch) -> bool:
    """Return whether any episode of the samples has several rows."""
    return LANE in samples and bool((samples[LANE] > 0).any())


def spread(values: Sequence[T], samples: Batch) -> list[T]:
    """Return, for every row, the value of its episode; `values` has one per episode, in the order of first rows."""
    if LANE not in samples:
        return list(values)
    names = samples[EPISODE]
    by_name = dict(zip([names[place] for place in leads(samples)], values, strict=True))
    return [by_name[name] for name in names]


def spread_constant(values: Tensor, samples: Batch, name: str) -> Tensor:
    """Return a value for every response token, from values of the tokens of first rows (`leads`) that are
    the same within a row: all tokens of an episode get the value of its first row.

    Args:
        values: one value per response token of the rows `leads`, row after row.
        name: the estimator's name, for the error.

    Raises:
        MegarlError: a row's trained tokens have different values.
    """
    import torch

    mask = samples["response_mask"]
    led = samples.select(leads(samples))["response_mask"]
    constants: list[float] = []
    for of_row, trained in zip(led.like(values).unbind(), led.unbind(), strict=True):
        chosen = of_row[trained.bool()]
        if len(chosen) and bool((chosen != chosen[0]).any()):
            raise MegarlError(
                f"the estimator {name} gives the tokens of an episode different advantages, but an episode has several "
                "sequences\n  where:   algorithm.advantage.name\n  allowed: an estimator with one advantage per "
                "sample, such as grpo or rloo\n  fix:     choose one, or use env.history=exact and an agent that only "
                "appends to its messages"
            )
        constants.append(float(chosen[0]) if len(chosen) else 0.0)
    of_rows = torch.tensor(spread(constants, samples), dtype=values.dtype)
    return torch.repeat_interleave(of_rows, mask.lengths)


def refuse_branches(samples: Batch, what: str, where: str) -> None:
    """Raise MegarlError if an episode has several rows; `what` cannot be used for it, and is set by the key `where`."""
    if branches(samples):
        raise MegarlError(
            f"{what} counts each row as a sample, but an episode of this step has several rows\n  where:   {where}\n"
            f"  fix:     remove or change {where}, or use env.history=exact and an agent that only appends to its "
            "messages"
        )


def _trained(lane: Trajectory) -> list[int]:
    """Return the numbers of the turns that are trained on."""
    turns = zip(lane.turn_numbers, lane.turn_starts, lane.turn_ends, strict=True)
    return [number for number, start, end in turns if any(lane.sampled[start:end])]
