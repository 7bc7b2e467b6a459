"""Many grippers at once: every row is bit for bit what the simulator of one gripper shows."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.robots.simulators.batched_reach import BatchedReach
from megarl.robots.simulators.reach import INSTRUCTIONS, Reach

ROWS = 6


@pytest.mark.parametrize("size", [32, 17])
@pytest.mark.parametrize("task", INSTRUCTIONS)
def test_states_pictures_and_results_are_those_of_single_environments(task, size) -> None:
    settings, random = {"size": size, "max_steps": 40}, np.random.default_rng(size)
    many, single = BatchedReach(task, settings, ROWS), [Reach(task, settings) for _ in range(ROWS)]
    trials = random.integers(0, 1000, ROWS)
    many.reset(np.arange(ROWS), trials)
    seen = [one.reset(int(trial)) for one, trial in zip(single, trials, strict=True)]
    rows, solved = np.arange(ROWS), 0
    for step in range(40):
        views, advice = many.observe(rows), many.expert(rows)
        wanted = np.stack([single[row].expert() for row in rows])
        assert views.states.tobytes() == np.stack([seen[row].state for row in rows]).tobytes()
        assert views.frames["top"].tobytes() == np.stack([seen[row].frames["top"] for row in rows]).tobytes()
        assert advice.tobytes() == wanted.tobytes()
        if step == 5:  # a row of its own begins again, and the others stay as they are
            many.reset(rows[:1], trials[:1] + 1)
            seen[rows[0]] = single[rows[0]].reset(int(trials[0]) + 1)
            continue
        # Around the expert's way, so that grippers push discs from all sides; numbers beyond 1 are clipped.
        actions = (wanted + random.normal(0, 0.5, wanted.shape)).astype(np.float32)
        result, progress = many.step(rows, actions), many.progress(rows)
        outcomes = [single[row].step(action[None]) for row, action in zip(rows, actions, strict=True)]
        assert result.success.tolist() == result.terminated.tolist() == [one.success for one in outcomes]
        assert progress.tolist() == [one.progress for one in outcomes]
        solved += sum(one.success for one in outcomes)
        for row, one in zip(rows, outcomes, strict=True):
            seen[row] = one.observation
        rows = rows[[not one.over for one in outcomes]]
        if not len(rows):
            break
    assert solved, "no row came to its end"


def test_a_start_state_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="push_down has no trial 1000; allowed: 0 to 999"):
        BatchedReach("push_down", {}, 2).reset(np.array([1]), np.array([1000]))
