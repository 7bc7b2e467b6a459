"""The object store holds what may be between teams at once."""

from __future__ import annotations

from megarl.config.asynchrony import AsyncConfig
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import Handover, Placement, TeamPlan
from megarl.store.size import LEAST, object_store_bytes, refuse_too_large


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


def test_samples_that_do_not_fit_into_shared_memory_are_refused_with_what_to_do() -> None:
    large, handed = recipe(512, 16_384), between("prompt_ids")
    wanted = object_store_bytes(large, handed)
    for free in (None, wanted, wanted + 1):
        assert refuse_too_large(large, handed, free) is None
    problem = refuse_too_large(large, handed, wanted - 1)
    assert problem is not None
    for word in ("data.batch_size", "1.1 GB for 2 steps", "which is what /dev/shm has", "placement.spill=true"):
        assert word in str(problem)
    spills = large.model_copy(update={"placement": large.placement.model_copy(update={"spill": True})})
    assert refuse_too_large(spills, handed, 0) is None
    assert refuse_too_large(large, None, 0) is None, "one team hands nothing over"
