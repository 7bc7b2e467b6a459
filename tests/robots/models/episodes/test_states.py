"""Embeddings of episodes by the robot's states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.data.batch import Batch, Jagged
from megarl.robots.config import EmbeddingSettings
from megarl.robots.models.episodes import build_embedder
from megarl.robots.models.episodes.states import StateEmbedder, resampled
from megarl.system.comm import WorkerGroup


def episodes(states: list[np.ndarray], errors: list[str] | None = None) -> Batch:
    """Those of these states; the last one of each is that at the end."""
    calls = Jagged.from_list([torch.from_numpy(some[:-1]).float() for some in states])
    ends = torch.from_numpy(np.stack([some[-1] for some in states])).float()
    return Batch({"states": calls, "end_state": ends}, {"env_error": errors or [""] * len(states)}, size=len(states))


def some_states(*lengths: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(3)
    return [drawn.normal(size=(length, 3)) for length in lengths]


@pytest.mark.parametrize("points", [1, 2, 5, 16])
def test_points_are_those_of_numpys_interpolation(points: int) -> None:
    states = some_states(2, 5, 9)
    batch = episodes(states)
    found = resampled(batch["states"], batch["end_state"], points)
    for mine, whole in zip(found, states, strict=True):
        last = len(whole) - 1
        at = np.linspace(0, last, points) if points > 1 else [last]
        expected = np.stack([np.interp(at, range(len(whole)), column) for column in whole.T], 1)
        np.testing.assert_allclose(mine, expected, atol=1e-6)


def test_distances_are_the_mean_over_points_and_the_weighted_end() -> None:
    batch = episodes(some_states(4, 7))
    path, ends = resampled(batch["states"], batch["end_state"], 6), batch["end_state"]
    first, second = StateEmbedder(6, 3.0).embed(batch)
    expected = (path[0] - path[1]).square().sum(-1).mean() + 3 * (ends[0] - ends[1]).square().sum()
    torch.testing.assert_close((first - second).square().sum(), expected)


def test_zeros_are_for_episodes_that_could_not_be_played() -> None:
    still = np.zeros((3, 3))
    found = StateEmbedder(4, 1.0).embed(episodes([still, still, *some_states(2)], ["", "it crashed", ""]))
    assert found.dtype == torch.float32
    assert found.any(1).tolist() == [True, False, True], "a robot that stands at the origin was played"


def test_an_episode_is_the_same_in_any_batch() -> None:
    states = some_states(4, 7, 2)
    embedder = build_embedder(
        EmbeddingSettings(), cameras=[], device=torch.device("cpu"), group=WorkerGroup.alone(), seed=0
    )
    one_by_one = [embedder.embed(episodes([some]))[0] for some in states]
    assert torch.equal(embedder.embed(episodes(states)), torch.stack(one_by_one))
    assert embedder.learn(episodes(states), 1) is None
    assert embedder.state() == {}
