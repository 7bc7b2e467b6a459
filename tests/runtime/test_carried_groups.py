"""Groups in flight in a checkpoint that a run with another batch continues."""

from __future__ import annotations

import json
from itertools import combinations, combinations_with_replacement
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.rollout import RolloutConfig
from megarl.config.run import RunConfig
from megarl.data.partials import partials_to_json
from megarl.data.trajectory import Trajectory
from megarl.runtime.oversampling import Oversampling, first_crowded_step
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError

SAVED = {"parts": 1, "groups": 4, "temperature": 1.0, "carries": True}


def load(folder: Path, size: int, begun: list[int], *, step: int = 5, **rollout: Any) -> Oversampling:
    """Continue after `step` of 9 with batches of `size`; group k of the checkpoint began in step `begun[k]`."""
    partials = {number: [Trajectory([1, 2])] for number in range(len(begun))}
    content = {"begun": dict(enumerate(begun)), "partials": partials_to_json(partials)}
    (folder / "carried_0.json").write_text(json.dumps(content))
    config = RunConfig.model_validate(
        {"name": "x", "trainer": {"steps": 9}, "rollout": {"oversample": 1.5, "carry_steps": 1, **rollout}}
    )
    layout = SimpleNamespace(dp_group=WorkerGroup.alone(), dp_rank=0, dp_size=1, rank=0, is_lead=True)
    context: Any = SimpleNamespace(config=config, layout=layout, step=step, temperature=1.0)
    loader: Any = SimpleNamespace(batch_size=size, in_flight=[0], needed=None)
    oversampling = Oversampling(loader)
    oversampling.load(context, folder, SAVED)
    return oversampling


@pytest.mark.parametrize(
    ("size", "begun", "rollout", "least"),
    [
        (4, [5, 5, 5, 5], {}, None),
        (3, [5, 5, 5, 5], {}, 4),  # all four are due, and one of them would be two steps old
        (2, [4, 4, 5, 5], {"carry_steps": 2}, None),  # two are due now, the others in the next step
        (2, [4, 4, 4, 5], {"carry_steps": 2}, 3),
        (1, [5, 5, 5, 5], {"carry_steps": 3}, 2),  # of those left after a step more than one could be due at once
        (1, [5, 5, 5, 5], {"carry_steps": 4}, None),  # three are used before the last one is due
        (1, [5, 5, 5, 5], {"carry_steps": 0}, None),  # they begin again
        (1, [5, 5, 5, 5], {"round_prompts": 1}, 4),
    ],
)
def test_a_smaller_batch_continues_groups_only_if_none_gets_too_old(tmp_path, size, begun, rollout, least):
    if least is None:
        assert load(tmp_path, size, begun, **rollout).in_flight == len(begun)
        return
    key = "rollout.round_prompts" if "round_prompts" in rollout else "data.batch_size"
    with pytest.raises(ConfigError, match=f"(?s){key}: the checkpoint has 4 prompt groups.*allowed: {least} or more"):
        load(tmp_path, size, begun, **rollout)


def test_the_message_names_the_step_in_which_too_many_groups_are_due(tmp_path):
    with pytest.raises(ConfigError, match=r"step 8 could have to train on 2 of them \(rollout.carry_steps=3\)"):
        load(tmp_path, 1, [5, 5, 5, 5], carry_steps=3)


def overcrowded(left: list[int], now: int, carry: int, size: int, most: int) -> bool:
    """Whether any order in which groups complete leaves more of them due in one step than a batch has."""
    due = [each for each in left if each <= now - carry]
    if len(due) > size:
        return True
    left = left + [now] * max(0, most - len(left))
    free = [each for each in left if each > now - carry]
    picks = {tuple(sorted(pick)) for pick in combinations(free, size - len(due))}
    for pick in picks if now < 9 else ():
        rest = list(free)
        for each in pick:
            rest.remove(each)
        if overcrowded(rest, now + 1, carry, size, most):
            return True
    return False


@pytest.mark.parametrize("carry", [1, 2, 3])
def test_groups_are_refused_if_and_only_if_an_order_of_completion_makes_some_too_old(carry):
    rollout = RolloutConfig(oversample=1.5, carry_steps=carry)
    for begun in combinations_with_replacement(range(6 - carry, 6), 4):
        for size in (1, 2, 3):
            wanted = overcrowded([*begun], 6, carry, size, rollout.in_flight(size))
            assert (first_crowded_step(begun, 5, 9, rollout, size) is not None) == wanted, (begun, size)


def test_a_run_without_a_step_left_is_not_refused(tmp_path):
    assert load(tmp_path, 1, [9, 9, 9, 9], step=9).in_flight == 4
