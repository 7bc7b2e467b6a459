"""A critic in a team of its own, over kills and changes of placement: the numbers of one team, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megarl.artifacts.trained import steps_in
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]

RUN = (*harness.PPO, "trainer.keep_last=9", "trainer.steps=3")
TWO_TEAMS = (
    "cluster.nproc=2",
    "placement.teams.train={roles: [actor, reference, rollout], devices: 1}",
    "placement.teams.value={roles: [critic], devices: 1}",
)


def _killed_while_the_critic_is_written(recipe: str, run_dir: str, overrides: list[str], teams: list) -> None:
    """As a rank does, until the critic's team writes its part of step 3; then it is killed, and all others are."""
    from megarl.training import shards

    write_file = shards.write_file

    def write(path: Path, *rest):
        if path.name == "rank_1.safetensors" and "step_3" in path.parent.name:
            path.write_bytes(b"the first bytes")
            while not (path.parent / "state.json").exists():  # the other team has all but finished
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return write_file(path, *rest)

    shards.write_file = write
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def numbers_from(first: int, found: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Of these steps, without what only several teams have."""
    return {
        step: {name: value for name, value in numbers.items() if not name.startswith(("team/", "store/"))}
        for step, numbers in found.items()
        if step >= first
    }


def test_runs_that_change_their_placement_and_are_killed_have_the_numbers_of_one_that_is_not(tmp_path):
    recipe = harness.write_recipe(tmp_path)
    one, two, again = (tmp_path / name for name in ("one", "two", "again"))
    undisturbed = harness.train(recipe, one, *RUN, "cluster.nproc=1")
    assert "critic/grad_norm" in undisturbed[3]

    # From one team to two, all of which is killed when one team's part of step 3 is there.
    resume = f"trainer.resume={one / 'checkpoints' / 'step_1'}"
    with pytest.raises(AssertionError, match="exit codes without a traceback"):
        harness.train(recipe, two, *RUN, *TWO_TEAMS, resume, work=_killed_while_the_critic_is_written)
    killed = harness.metrics(two)
    assert list(killed) == [2, 3]
    assert steps_in(two / "checkpoints") == [2]
    assert len(list((two / "checkpoints").glob("step_3.tmp-*/rank_0.safetensors"))) == 1

    # Two teams go on from the last step that both have saved.
    resumed = harness.train(recipe, two, *RUN, *TWO_TEAMS)
    assert list(resumed) == [2, 3]
    assert numbers_from(2, resumed) == numbers_from(2, undisturbed)

    # And one team goes on from what two have saved.
    resume = f"trainer.resume={two / 'checkpoints' / 'step_2'}"
    assert numbers_from(3, harness.train(recipe, again, *RUN, "cluster.nproc=1", resume)) == numbers_from(
        3, undisturbed
    )
