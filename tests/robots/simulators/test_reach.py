"""Reach and push: repeatable, its physics need a plan, its expert has one, its progress tells how far things are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.robots.simulators.reach import DIRECTIONS, DISC, EDGE, GRIPPER, INSTRUCTIONS, Reach

STILL = np.array([[0, 0, -1]], np.float32)


def played(made, trial, calls):
    """Bytes of all that an episode shows, and what it says of itself."""
    seen, said = [made.reset(trial)], []
    for actions in calls:
        outcome = made.step(actions)
        seen.append(outcome.observation)
        said.append((outcome.executed, outcome.success, outcome.over, outcome.progress))
        if outcome.over:
            break
    return [(one.frames["top"].tobytes(), one.state.tobytes()) for one in seen], said


def random_calls(seed, count=8, steps=4):
    # Lowered half of the time, and further than allowed: numbers are clipped.
    return np.random.default_rng(seed).uniform(-1.5, 1.5, (count, steps, 3)).astype(np.float32)


@pytest.mark.parametrize("task", INSTRUCTIONS)
def test_the_expert_solves_fifty_trials_and_progress_leads_up_to_one(task):
    made, solved, steps = Reach(task, {}), 0, []
    for trial in range(50):
        made.reset(trial)
        before = 0.0
        for _ in range(32):
            outcome = made.step(made.expert()[None])
            # The expert goes round a disc that it starts beside: a step back of a few per cent at most.
            assert before - 0.1 < outcome.progress <= 1
            assert (outcome.progress == 1) == outcome.success
            before = outcome.progress
            if outcome.over:
                break
        solved += outcome.success
        steps.append(made._steps)
    assert solved == 50
    assert max(steps) <= 28  # of 32


@pytest.mark.parametrize("task", ["reach_green", "push_up"])
def test_the_same_trial_and_actions_give_the_same_episode(task):
    made, other = Reach(task, {}), Reach(task, {})
    first = played(made, 3, random_calls(0))
    assert played(made, 4, random_calls(0)) != first
    assert played(made, 3, random_calls(1)) != first
    assert played(made, 3, random_calls(0)) == first
    assert played(other, 3, random_calls(0)) == first


def test_trials_of_the_first_version_stay_what_they_were():
    """Bitwise on any machine and with any numpy; whoever changes them changes every published split of trials."""
    np.testing.assert_array_equal(Reach("reach_red", {}).reset(0).state, np.float32(GOLDEN["reach_red"]))
    np.testing.assert_array_equal(Reach("push_left", {}).reset(999).state, np.float32(GOLDEN["push_left"]))


GOLDEN = {
    "reach_red": [-0.37210142612457275, -0.6421201229095459, -1.0],
    "push_left": [-0.3850861191749573, -0.02373034879565239, -1.0],
}


@pytest.mark.parametrize("kind", ["reach", "push"])
def test_only_the_instruction_tells_tasks_of_a_kind_apart(kind):
    tasks = [name for name in INSTRUCTIONS if name.startswith(kind)]
    pictures = {Reach(name, {}).reset(7).frames["top"].tobytes() for name in tasks}
    assert len(pictures) == 1
    assert len({INSTRUCTIONS[name] for name in tasks}) == len(tasks)


def test_observations_are_as_the_task_says():
    specs = {spec.name: spec for spec in Reach.tasks({"size": 48, "max_steps": 20})}
    assert list(specs) == list(INSTRUCTIONS)
    made = Reach("push_down", {"size": 48, "max_steps": 20})
    assert made.spec == specs["push_down"]
    for seen in (made.reset(0), made.step(STILL).observation):
        assert seen.frames["top"].shape == (*made.spec.cameras["top"], 3) == (48, 48, 3)
        assert seen.frames["top"].dtype == np.uint8
        assert seen.state.shape == (made.spec.state_dim,)
        assert seen.state.dtype == np.float32
    assert made.expert().shape == (made.spec.action_dim,)
    with pytest.raises(ValueError, match="push_down has no trial 1000; allowed: 0 to 999"):
        made.reset(1000)


def test_a_chunk_ends_at_the_limit_and_at_success():
    made = Reach("reach_red", {"max_steps": 10})
    made.reset(0)
    outcomes = [made.step(np.repeat(STILL, 4, 0)) for _ in range(3)]
    assert [(one.executed, one.over) for one in outcomes] == [(4, False), (4, False), (2, True)]
    assert not outcomes[-1].success
    with pytest.raises(RuntimeError, match="reach_red: this episode is over"):
        made.step(STILL)
    _hover(made, *made._squares["red"])
    outcome = made.step(np.array([[0, 0, -1], [0, 0, 1], [1, 0, -1]], np.float32))
    assert (outcome.executed, outcome.success, outcome.over, outcome.progress) == (2, True, True, 1.0)


def test_actions_are_clipped():
    made = Reach("reach_red", {})
    near = played(made, 0, np.clip(random_calls(5), -1, 1))
    assert played(made, 0, random_calls(5)) == near
    assert played(made, 0, 0.5 * random_calls(5)) != near


def _hover(made, x, y):
    """Put the raised gripper there, in a new episode of trial 0."""
    made.reset(0)
    made._x, made._y = x, y


def test_progress_is_of_the_present_not_of_how_one_came_here():
    made = Reach("push_right", {"max_steps": 100})
    made.reset(2)
    there = np.array([[0.5, -0.25, -1]] * 3, np.float32)
    straight = made.step(there).progress
    made.reset(2)
    made.step(np.array([[-0.5, 0.5, -1]] * 2, np.float32))
    made.step(np.array([[0.5, -0.5, -1]] * 2, np.float32))
    assert made.step(there).progress == pytest.approx(straight, abs=1e-9)


def test_lowering_beside_the_square_or_hovering_over_it_is_no_success():
    made = Reach("reach_blue", {})
    made.reset(0)
    blue, red = made._squares["blue"], made._squares["red"]
    _hover(made, *blue)
    assert not made.step(STILL).success
    _hover(made, *red)
    outcome = made.step(-STILL)
    assert not outcome.success
    assert outcome.progress < 1


def test_a_disc_is_pushed_from_its_far_side_only():
    """Straight at the goal over the disc, or lowered in front of it, moves it the wrong way or not at all."""
    for task, (ux, uy) in DIRECTIONS.items():
        made = Reach(f"push_{task}", {})
        for side in (1, -1):
            made.reset(0)
            ox, oy = made._discs[0]
            _hover(made, ox + side * 0.25 * ux, oy + side * 0.25 * uy)
            before = ox * ux + oy * uy
            made.step(-STILL)
            made.step(np.array([[-side * ux, -side * uy, 1]] * 3, np.float32))
            along = made._discs[0][0] * ux + made._discs[0][1] * uy - before
            assert along == pytest.approx(-side * 0.27, abs=0.02)
        _hover(made, ox, oy)  # raised, over the disc
        made.step(np.array([[-ux, -uy, -1]], np.float32))
        assert made._discs[0] == [ox, oy]


def test_a_push_off_centre_lets_the_disc_slip_away():
    made = Reach("push_right", {})
    made.reset(0)
    ox, oy = made._discs[0]
    _hover(made, ox - 0.25, oy - 0.1)
    made.step(np.array([[0, 0, 1], *[[1, 0, 1]] * 5], np.float32))
    assert made._discs[0][1] > oy + 0.05


def test_the_gripper_cannot_be_lowered_on_a_disc():
    made = Reach("push_right", {})
    made.reset(0)
    _hover(made, *made._discs[0])
    assert made.step(-STILL).observation.state[2] == -1
    _hover(made, made._discs[0][0] - 0.25, made._discs[0][1])
    assert made.step(-STILL).observation.state[2] == 1


def test_things_stay_apart_and_on_the_table():
    made = Reach("push_left", {"max_steps": 400})
    for trial in range(5):
        made.reset(trial)
        generator = np.random.default_rng(trial)
        way = np.zeros(2)
        for _ in range(400):
            way = 0.9 * way + generator.normal(0, 0.4, 2)
            outcome = made.step(np.array([[*way, 1]], np.float32))
            (ax, ay), (bx, by) = made._discs
            assert math.hypot(ax - bx, ay - by) > 2 * DISC - 0.03
            assert max(map(abs, (ax, ay, bx, by))) <= 1 - DISC + 0.03
            if outcome.observation.state[2] == 1:
                for x, y in made._discs:
                    assert math.hypot(made._x - x, made._y - y) > DISC + GRIPPER - 0.03
            if outcome.over:
                assert outcome.success == (made._discs[0][0] <= -EDGE)
                break


@pytest.mark.parametrize("size", [32, 64])
def test_shapes_have_their_areas_and_colours(size):
    made = Reach("push_left", {"size": size})
    made.reset(0)
    made._discs = [[0.013, -0.021], [0.031, 0.487]]
    made._x = made._y = -0.9
    frame = made._observation().frames["top"].astype(float)
    row, column = int((1 + 0.021) / 2 * size), int((1 + 0.013) / 2 * size)
    assert frame[row, column].tolist() == [240, 138, 24]
    assert frame[int((1 - 0.487) / 2 * size), column].tolist() == [128, 128, 136]
    # Blue of the table is 222, of the disc 24: what is missing in between is the disc's area,
    # but for what a straight rim in every pixel gets wrong: 5% of the disc at 32 pixels.
    missing = (222 - frame[size // 3 : size * 2 // 3, size // 3 : size * 2 // 3, 2]).sum() / (222 - 24)
    assert missing * (2 / size) ** 2 == pytest.approx(math.pi * DISC**2, rel=0.06)
    made._lowered = True
    lowered = made._observation().frames["top"].astype(float)
    assert np.abs(lowered - frame).max() > 50  # a ring becomes a disc


def test_what_does_not_exist_is_refused_with_what_does():
    with pytest.raises(ValueError, match="Reach has no task 'reach_pink'; allowed: reach_red, reach_green"):
        Reach("reach_pink", {})
    for wrong in ({"size": 8}, {"max_steps": 0}, {"trials": 0}, {"speed": 0.5}):
        with pytest.raises(ValueError, match=f"reach: invalid value of `{next(iter(wrong))}`: .*; allowed: "):
            Reach.tasks(wrong)
