"""The object store holds what may be between teams at once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megarl.config.model import ParallelConfig
from megarl.config.rollout import AsyncConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import Handover, Placement, TeamPlan, place
from megarl.data.batch import Batch, Jagged
from megarl.disaggregated.buffer.size import LEAST, handover_bytes, object_store_bytes, refuse_too_large, steps_held
from megarl.recipes.build import build_task_graph


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


@pytest.mark.parametrize(
    ("topk", "field", "size"), [(9, "teacher_topk", 8 * (9 + 1)), (None, "teacher_hidden", 2 * 4096)]
)
def test_what_a_teacher_says_of_a_distribution_counts_with_all_its_numbers(topk, field, size) -> None:
    config = recipe(4, 128).model_dump(exclude_unset=True) | {
        "model": {"dtype": "bf16"},
        "algorithm": {"distillation": {"coef": 1, "estimator": "jsd", "topk": topk}},
        "teacher": {"path": "Qwen/Qwen3-8B"},
    }
    (handover,) = between(field).handovers
    assert handover_bytes(RunConfig.model_validate(config), handover) == 4 * (8 * (size * 128 + 256) + 4096)


@pytest.mark.parametrize(
    ("model", "field", "size"),
    [
        ("Qwen/Qwen3-30B-A3B", "routes", 48 * 8),  # 128 experts: a byte for each
        ("deepseek-ai/DeepSeek-V3", "routes", 58 * 8 * 2),  # 256 experts, and a number for none; 3 dense layers
        ("Qwen/Qwen3-8B", "kept_ids", 4 * 20),
    ],
)
def test_what_generation_recorded_of_a_token_counts_with_all_its_numbers(model, field, size) -> None:
    config = recipe(4, 128).model_dump(exclude_unset=True) | {"model": {"path": model}}
    config["rollout"]["sampling"]["top_k"] = 20
    (handover,) = between(field).handovers
    assert handover_bytes(RunConfig.model_validate(config), handover) == 4 * (8 * (size * 128 + 256) + 4096)


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
    for word in ("data.batch_size", "1.1 GB for 2 steps", "the free part of /dev/shm", "placement.spill=true"):
        assert word in str(problem)
    spills = large.model_copy(update={"placement": large.placement.model_copy(update={"spill": True})})
    assert refuse_too_large(spills, handed, 0) is None
    assert refuse_too_large(large, None, 0) is None, "one team hands nothing over"


#: Settings of a rollout, a reference and a critic in teams of their own; PPO has the most fields.
APART = {
    "algorithm": {"pipeline": "ppo", "advantage": {"name": "gae"}, "kl": {"use": "reward"}},
    "cluster": {"nproc": 4},
    "placement": {
        "teams": {role: {"roles": [role], "devices": 1} for role in ("actor", "critic", "reference", "rollout")}
    },
}
TEXT = ("uid", "sample_id", "finish_reason")


def longest(config: RunConfig, names: Iterable[str]) -> Batch:
    """A step in which every prompt and every response is as long as it may be; fields are as wide as any is."""
    count = config.data.batch_size * config.rollout.sampling.n
    prompt, response = config.data.max_prompt_tokens, config.response_tokens(config.rollout.sampling)
    ids = [f"{k // config.rollout.sampling.n:032x}" for k in range(count)]
    fields = {}
    offsets = Jagged.from_lengths(torch.zeros(count * response, dtype=torch.int64), [response] * count)
    for name in {*names} - {*TEXT}:
        if name == "prompt_ids":
            fields[name] = Jagged.from_lengths(torch.zeros(count * prompt, dtype=torch.int64), [prompt] * count)
        else:
            fields[name] = offsets.like(torch.zeros(count * response, dtype=torch.int64))
    return Batch(fields, {"uid": ids, "sample_id": [f"{one}#{k % 8}" for k, one in enumerate(ids)]})


@pytest.mark.parametrize(("new_tokens", "samples"), [(1, 1), (9, 8), (700, 8)])
@pytest.mark.parametrize("k", [0, 2])
def test_credits_in_groups_bound_the_bytes(new_tokens: int, samples: int, k: int) -> None:
    sampling = {"n": samples, "max_new_tokens": new_tokens}
    data = {"batch_size": 16, "max_prompt_tokens": 24}
    config = RunConfig.model_validate(
        {"name": "x", "data": data, "rollout": {"sampling": sampling}, "async": {"max_staleness": k}, **APART}
    )
    placement = place(build_task_graph(config), config)
    assert len(placement.handovers) >= 4
    given = 0
    for handover in placement.handovers:
        names = [name for name in handover.fields if name not in TEXT]
        batch = longest(config, names)
        groups = [range(g * samples, (g + 1) * samples) for g in range(16)]
        size = sum(len(span.block) for span in batch.to_blocks(groups))
        assert size <= handover_bytes(config, handover), handover.key
        given += size
    # What has been given and not been taken, in either order: the steps that may be ahead, and the one that is read.
    assert steps_held(config) * given <= object_store_bytes(config, placement)
