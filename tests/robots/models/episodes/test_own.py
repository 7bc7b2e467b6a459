"""The encoder that learns on a run's own episodes."""

from __future__ import annotations

import pytest
import torch

from megarl.robots.config import EmbeddingSettings
from megarl.robots.models.episodes import build_embedder
from megarl.robots.models.episodes.own import POINTS, OwnEmbedder, neighbours_loss
from megarl.system.comm import WorkerGroup, team_world
from megarl.system.errors import ConfigError
from tests.dist import run_distributed
from tests.robots.models.episodes.made import moving_squares

LENGTHS = (7, 4, 1, 11, 6, 7)


def own(group: WorkerGroup | None = None, **settings: object) -> OwnEmbedder:
    made = build_embedder(
        EmbeddingSettings(name="own", **settings),
        cameras=["top"],
        device=torch.device("cpu"),
        group=group or WorkerGroup.alone(),
        seed=3,
    )
    assert isinstance(made, OwnEmbedder)
    return made


def test_the_loss_is_that_of_its_definition() -> None:
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(2, POINTS, 5), dim=-1)
    counts = [POINTS, 3]
    expected, number, hits = torch.zeros(()), 0, 0
    for points, count in zip(vectors, counts, strict=True):
        for at in range(count):
            others = [points[at] @ points[far] * 10 for far in range(count) if abs(far - at) > 1]
            for near in (at - 1, at + 1):
                if 0 <= near < count and others:
                    mine = points[at] @ points[near] * 10
                    expected = expected - torch.log_softmax(torch.stack([mine, *others]), 0)[0]
                    number, hits = number + 1, hits + int(mine > max(others))
    found = neighbours_loss(vectors, torch.arange(POINTS) < torch.tensor(counts)[:, None])
    torch.testing.assert_close(found[0], expected)
    assert found[1:] == (hits, number)


def test_it_learns_what_is_near_in_time() -> None:
    embedder, batch = own(updates=5), moving_squares([8] * 12)
    found = [embedder.learn(batch, step) for step in range(8)]
    first, last = (metrics.result() for metrics in (found[0], found[-1]) if metrics is not None)
    assert last["srpo/encoder/accuracy"] > first["srpo/encoder/accuracy"] + 0.2
    assert last["srpo/encoder/loss"] < 0.7 * first["srpo/encoder/loss"]


def test_an_embedding_is_points_of_the_episode_with_its_end_last() -> None:
    embedder, batch = own(points=2, width=8), moving_squares([4, 6, 5], errors=["", "it crashed", ""])
    found = embedder.embed(batch)
    assert found.shape == (3, 16)
    assert found.dtype == torch.float32
    assert found.any(1).tolist() == [True, False, True]
    torch.testing.assert_close(found[0].view(2, 8).norm(dim=1), torch.ones(2))
    end = own(points=1, width=8).embed(batch)
    torch.testing.assert_close(found[:, 8:], end)
    half = moving_squares([4])
    half.set("end_state", half["states"].values[2:3])
    half.set("end_frames/top", half["frames/top"].values[2:3])
    torch.testing.assert_close(own(points=1, width=8).embed(half)[0], found[0, :8])


def test_episodes_too_short_or_not_played_are_not_learned() -> None:
    embedder = own()
    assert embedder.learn(moving_squares([1, 7], errors=["", "it crashed"]), 1) is None
    assert embedder.state() == {}


def test_a_rank_of_which_no_episode_was_played_has_zeros() -> None:
    found = own(points=2, width=8).embed(moving_squares([3, 4], errors=["it crashed", "it hung"]))
    assert found.shape == (2, 16)
    assert not found.any()


def test_what_goes_on_from_its_state_is_bit_equal() -> None:
    batch, undisturbed, first, second = moving_squares(LENGTHS), own(), own(), own()
    for step in (1, 2, 3):
        undisturbed.learn(batch, step)
    first.learn(batch, 1)
    kept = first.state()
    first.learn(batch, 2)  # what goes on does not change what was kept
    second.load_state(kept)
    for step in (2, 3):
        second.learn(batch, step)
    assert torch.equal(second.embed(batch), undisturbed.embed(batch))


def learned() -> torch.Tensor:
    """Embeddings of all episodes, learned on two ranks of which the second has more."""
    world, batch = team_world(60), moving_squares(LENGTHS)
    embedder, mine = own(world), batch.select([[0, 1], [2, 3, 4, 5]][world.rank])
    for step in (1, 2):
        embedder.learn(mine, step)
    return embedder.embed(batch)


@pytest.mark.procs
def test_the_split_over_ranks_changes_only_rounding() -> None:
    embedder, batch = own(), moving_squares(LENGTHS)
    before = embedder.embed(batch)
    for step in (1, 2):
        embedder.learn(batch, step)
    expected = embedder.embed(batch)
    assert (expected - before).abs().max() > 0.01
    for found in run_distributed(learned, 2):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_keys_of_another_embedding_are_refused() -> None:
    with pytest.raises(ConfigError, match="end_weight"):
        own(end_weight=2.0)
