"""The rollout's team dies while samples go to training as they get ready, and begins again: nothing is lost by that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import harness, test_flow
from tests.runtime.test_rollout_again import DEATHS, before, deaths, dying

pytestmark = [pytest.mark.procs, pytest.mark.alone, pytest.mark.timeout(900)]

#: Two ranks of the actor have to agree on when they push again.
TWO = (
    "cluster.nproc=3",
    "placement.teams.train={roles: [actor, reference], devices: 2}",
    "validation.every=2",
    "trainer.save_every=1",
    "trainer.keep_last=20",
)
PARTIAL = (test_flow.PARTIAL, *test_flow.LONG)
THREE = (
    "cluster.nproc=4",
    "placement.teams.train={roles: [actor, reference], devices: 2}",
    "placement.teams.draw={roles: [rollout], devices: 2}",
    "trainer.steps=8",
    "validation.every=3",
    "trainer.save_every=2",
    "trainer.keep_last=20",
)
CAMPAIGN = pytest.mark.campaign("kills")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.parametrize("more", [(), PARTIAL], ids=["whole", "partial"])
def test_wherever_it_dies_every_prompt_is_trained_on_once_and_nothing_is_too_old(recipe, tmp_path, more):
    """And a run goes on from a checkpoint of which another process made a part."""
    steps = len(PLACES) + 1
    settings = (*TWO, f"trainer.steps={steps}", *more)
    numbers = test_flow.train(recipe, tmp_path, *settings, work=dying_at_places)
    lives = (tmp_path / "lives").read_text().splitlines()
    assert lives == [f"died {place.__name__.replace('_', ' ')}" for place in PLACES]
    test_flow.check(tmp_path, steps)
    assert [step for step in numbers if "val/acc" in numbers[step]] == [0, *range(2, steps, 2), steps]
    assert all("critic/score/mean" in numbers[step] for step in range(1, steps + 1))
    assert numbers[steps]["store/abandoned"] > 0
    go_on_from(steps - 4, recipe, tmp_path, *settings)
    test_flow.check(tmp_path, steps)


@pytest.mark.parametrize("more", [(), PARTIAL], ids=["whole", "partial"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=CAMPAIGN) for seed in range(1, 20))])
def test_whenever_one_of_its_processes_dies_nothing_is_lost(recipe, tmp_path, more, seed):
    (tmp_path / "seed").write_text(f"as ready, in steps {seed}")
    test_flow.train(recipe, tmp_path, *THREE, *more, work=dying_by_chance)
    assert 0 < deaths(tmp_path) <= DEATHS
    test_flow.check(tmp_path, 8)
    go_on_from(2 + 2 * (seed % 3), recipe, tmp_path, *THREE, *more)
    test_flow.check(tmp_path, 8)


def go_on_from(step: int, recipe: Path, run_dir: Path, *settings: str) -> None:
    """The run as it would be, had it been killed after the checkpoint of `step`, goes on, and nothing dies."""
    for folder in (run_dir / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    test_flow.forget_after(run_dir, step)
    test_flow.train(recipe, run_dir, *settings)


def dying_at_places(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    test_flow.before_training(lambda c, samples: test_flow.note(Path(run_dir), c.step, samples))
    dying(recipe, run_dir, overrides, teams, PLACES)


def dying_by_chance(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    test_flow.before_training(lambda c, samples: test_flow.note(Path(run_dir), c.step, samples))
    dying(recipe, run_dir, overrides, teams)


# -- places -----------------------------------------------------------------------------------------------------------


def mail_is_posted(name: str, step: int, die: Callable[[], None]) -> None:
    """Before it is."""
    from tests.store.served import FarClient

    before(FarClient, "post", step, die, lambda self, to, *_: to.startswith(name))


def when_prompts_are_handed_out(step: int, die: Callable[[], None]) -> None:
    mail_is_posted("flow_opened", step, die)


def before_it_validates_the_start(step: int, die: Callable[[], None]) -> None:
    mail_is_posted("validation/0", step, die)


def before_anything_is_put(step: int, die: Callable[[], None]) -> None:
    from megarl.store.pool import PoolCrossing

    before(PoolCrossing, "swap", step, die, lambda self, c, ready, *_: bool(ready))


def when_something_is_put(step: int, die: Callable[[], None]) -> None:
    from megarl.store.pool import PoolCrossing

    puts: list[Any] = []
    before(PoolCrossing, "swap", step, die, lambda self, c, ready, *_: (puts.extend(ready), len(puts) > len(ready))[1])


def before_it_comes_to_a_gate(step: int, die: Callable[[], None]) -> None:
    from tests.store.served import FarClient

    before(FarClient, "arrive", step, die, lambda *_: True)


def when_it_has_come_to_a_gate(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime import flow

    before(flow, "publish", step, die, lambda *_: True)


def in_the_middle_of_a_push(step: int, die: Callable[[], None]) -> None:
    """The second one of this life."""
    from megarl.rollout.embedded.inbox import WeightInbox

    took: set[str] = set()
    before(WeightInbox, "take_flat", step, die, lambda self, *_: (took.add(self.version), len(took) > 1)[1])


def before_its_numbers(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime.recorder import Recorder

    before(Recorder, "end_step", step, die, lambda self, now: True)


def before_it_validates(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime import flow

    before(flow, "evaluate_drawn", step, die, lambda *_: True)


def before_its_part_of_a_checkpoint(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime.flow import FlowSteps

    before(FlowSteps, "_save", step, die, lambda *_: True)


def before_that_is_copied(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime import flow

    before(flow, "files_of_flow", step, die, lambda *_: True)


def when_that_is_copied(step: int, die: Callable[[], None]) -> None:
    mail_is_posted("checkpoint/draw/", step, die)


def while_it_writes_that(step: int, die: Callable[[], None]) -> None:
    from megarl.training import saving

    before(saving, "_write", step, die, lambda *_: True)


PLACES: list[Any] = [
    before_it_validates_the_start,
    when_prompts_are_handed_out,
    before_anything_is_put,
    when_something_is_put,
    before_it_comes_to_a_gate,
    when_it_has_come_to_a_gate,
    in_the_middle_of_a_push,
    before_its_numbers,
    before_it_validates,
    before_its_part_of_a_checkpoint,
    before_that_is_copied,
    when_that_is_copied,
    while_it_writes_that,
]
