"""The object store holds what may be between teams at once."""

from __future__ import annotations

from megarl.config.asynchrony import AsyncConfig
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import Handover, Placement, TeamPlan
from megarl.store.size import LEAST, object_store_bytes


def between(*fields: str) -> Placement:
    layout = ParallelConfig()
    teams = (TeamPlan("actor", (), 1, 0, layout, ()), TeamPlan("reference", (), 1, 1, layout, ()))
    return Placement(teams, (Handover("rollout", "actor", fields, ("reference",), "rollout"),))


def recipe(samples: int, tokens: int) -> RunConfig:
    data = {"batch_size": samples, "max_prompt_tokens": 24}
    return RunConfig.model_validate(
        {"name": "x", "data": data, "rollout": {"sampling": {"n": 8, "max_new_tokens": tokens - 24}}}
    )


def test_two_steps_of_the_longest_samples_fit() -> None:
    large = recipe(512, 16_384)
    assert object_store_bytes(large, between("prompt_ids", "response_ids")) == 2 * 512 * (
        8 * (2 * 8 * 16_384 + 256) + 4096
    )
    assert object_store_bytes(large, between("prompt_ids")) == 2 * 512 * (8 * (8 * 16_384 + 256) + 4096)
    ahead = large.model_copy(update={"async_": AsyncConfig(max_staleness=1)})
    assert object_store_bytes(ahead, between("prompt_ids")) == 3 * 512 * (8 * (8 * 16_384 + 256) + 4096)


def test_all_groups_that_may_have_begun_fit_beside_the_step_that_is_read() -> None:
    section = AsyncConfig(max_staleness=4, order="as_ready", partial=True)
    flowing = recipe(512, 16_384).model_copy(update={"async_": section})
    step = 512 * (8 * (8 * 16_384 + 256) + 4096)
    assert object_store_bytes(flowing, between("prompt_ids")) == (1 + 4) * step + step


def test_it_is_never_smaller_than_ray_needs_for_itself() -> None:
    assert object_store_bytes(recipe(4, 128), between("prompt_ids")) == LEAST
    assert object_store_bytes(recipe(512, 16_384), None) == LEAST
