"""Warnings while a run is going: nothing to learn from, or a policy that breaks."""

from __future__ import annotations

import pytest

from megarl.runtime.alarms import Alarms


def given(steps: list[dict[str, float]]) -> list[str]:
    alarms = Alarms()
    return [line for step, numbers in enumerate(steps, 1) for line in alarms.check(step, numbers)]


def scored(low: float, high: float, advantage: float = 1.0) -> dict[str, float]:
    return {
        "critic/score/min": low,
        "critic/score/max": high,
        "critic/advantages/min": -advantage,
        "critic/advantages/max": advantage,
    }


def test_rewards_that_never_differ_are_said_once():
    assert given([scored(0, 0, 0)] * 2) == []
    (line,) = given([scored(0, 1)] + [scored(0, 0, 0)] * 6)
    assert line.startswith("step 4: every response of the last 3 steps or more scored 0, ")
    again = given([scored(0, 0, 0)] * 3 + [scored(0, 1)] + [scored(1, 1, 0)] * 3)
    assert [line.split(":")[0] for line in again] == ["step 3", "step 7"]
    assert "scored 1," in again[1]


def test_groups_that_agree_are_said():
    (line,) = given([scored(0, 1, 0)] * 4)
    assert line.startswith("step 3: for 3 steps or more all responses to a prompt scored alike")


def test_episodes_that_a_limit_ends_are_said():
    cut, played = ({"env/cut": share, "env/turns/mean": 1.01} for share in (0.98, 0.4))
    assert given([cut, cut, played, cut, cut]) == []
    (line,) = given([cut] * 5)
    assert line.startswith("step 3: for 3 steps or more a limit ended nearly all episodes (98%; mean turns 1.01)")


def test_a_critic_learns_from_equal_rewards_but_they_are_said_too():
    assert len(given([scored(1, 1, 0.5)] * 3)) == 1


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_gradient_that_explodes_names_the_learning_rate(role: str):
    calm = [{f"{role}/grad_norm": 0.5 + 0.1 * (i % 3), f"{role}/lr": 0.01} for i in range(8)]
    wild = {f"{role}/grad_norm": 900.0, f"{role}/lr": 0.01}
    (line,) = given([*calm, wild, wild, *calm])
    assert line.startswith(f"step 9: {role}/grad_norm is 900 at a learning rate of 0.01, ")
    assert "before is 0.6" in line
    assert given([*calm, {f"{role}/grad_norm": 20.0}]) == [], "a hard batch"
    assert given([*calm[:4], wild]) == [], "too early to tell"
    assert given([{f"{role}/grad_norm": 0.0}] * 8 + [wild]) == [], "steps that trained on nothing are no measure"


def test_a_loss_of_examples_that_explodes():
    falling = [{"sft/loss": 2.5 / step} for step in range(1, 11)]
    (line,) = given([*falling, {"sft/loss": 4.0}])
    assert line.startswith("step 11: sft/loss is 4, ")
    assert given([{"sft/loss": 0.01}] * 10 + [{"sft/loss": 0.5}]) == []


@pytest.mark.parametrize(("size", "warned"), [(17, True), (16, False)])
def test_a_batch_larger_than_the_data(size: int, warned: bool):
    from megarl.config.run import repeated_problem

    problem = repeated_problem("data.batch_size", size, 16)
    assert (problem is not None) is warned
    assert not warned or "data.batch_size: the data have only 16 different samples" in str(problem)
    assert not warned or "data.batch_size=16 or less" in str(problem)
