"""Embeds episodes by the robot's states, without a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.data.batch import Batch
from megarl.data.jagged import Jagged
from megarl.robots.models.episodes import EpisodeEmbedder


class StateEmbedder(EpisodeEmbedder):
    """Embeds an episode as its states at evenly spaced points, and the last state again, weighted.

    The squared distance of two episodes is the mean squared distance over their points plus `end_weight` times that of
    their ends, in the simulator's units.

    Args:
        points: states along the episode, linearly interpolated over its calls and its end.
        end_weight: weight of the end relative to the mean over all points.
    """

    def __init__(self, points: int, end_weight: float) -> None:
        self._points, self._end_weight = points, end_weight

    def embed(self, episodes: Batch) -> Tensor:
        """Return the episodes' embeddings, float32 [B, points * S + S + 1]: the states at `points` times, the end
        state, and a constant; zeros for episodes with an error. A state has S numbers.
        """
        states, ends = episodes["states"].to("cpu"), episodes["end_state"].float().cpu()
        path = resampled(states, ends, self._points) / math.sqrt(self._points)
        # The constant 1 keeps a valid embedding from being all zeros; it does not change distances.
        made = torch.cat([path.flatten(1), ends * math.sqrt(self._end_weight), torch.ones(len(ends), 1)], 1)
        return made * valid_episodes(episodes)[:, None]


def valid_episodes(episodes: Batch) -> Tensor:
    """Return bool [B], True for episodes whose simulator did not fail."""
    return torch.tensor([not error for error in episodes["env_error"]], dtype=torch.bool)


def resampled(calls: Jagged, ends: Tensor, points: int) -> Tensor:
    """Return each episode's states at evenly spaced points in time, linearly interpolated, float32 [B, points, S].

    The first point is the first call, and the last point is the end; with one point, it is the end.

    Args:
        calls: states before each policy call, float [calls, S] of each episode.
        ends: states after the last call, float [B, S].
        points: number of points, at least 1.
    """
    lengths = calls.lengths  # index `lengths[b]` is the end state of episode b
    share = torch.linspace(0, 1, points, dtype=torch.float64) if points > 1 else torch.ones(1, dtype=torch.float64)
    at = lengths[:, None] * share
    before = at.floor().long()
    after = torch.minimum(before + 1, lengths[:, None])
    every = torch.cat([calls.values.float(), ends.float()])

    def seen(place: Tensor) -> Tensor:
        # In `every` the states of all calls come first, then one end state per episode.
        episode = torch.arange(len(lengths))[:, None]
        inside = calls.offsets[:-1, None] + place
        return every[torch.where(place < lengths[:, None], inside, len(calls.values) + episode)]

    part = (at - before).float()[..., None]
    return torch.lerp(seen(before), seen(after), part)
