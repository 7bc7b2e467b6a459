"""A worker of the rollout's team is killed at one place after another; each time the run goes on from its newest
checkpoint, and loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.artifacts.trained import steps_in
from tests.disaggregated import test_as_ready_loop as test_flow
from tests.disaggregated import test_in_order_loop as test_ahead
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900)]

SAVED = "trainer.save_every=1"
PARTIAL = (test_flow.PARTIAL, *test_flow.LONG)
IN_ORDER = (
    "before_rewards_are_given",
    "in_the_middle_of_a_push",
    "before_its_part_of_a_checkpoint",
    "while_it_writes_that",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.campaign("kills")  # while it draws: tests/disaggregated/test_in_order_loop.py
def test_in_order_the_numbers_are_those_of_an_undisturbed_run(recipe, tmp_path):
    settings = (SAVED, last_step(IN_ORDER), "async.max_staleness=2", "validation.every=2")
    run_dir = tmp_path / "killed"
    for number, place in enumerate(IN_ORDER):
        aim(run_dir, place, number + 3)
        with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
            test_ahead.train(recipe, run_dir, *settings, work=dying)
        assert (run_dir / "died").read_text() == place
    found = test_ahead.train(recipe, run_dir, *settings)
    assert found == test_ahead.train(recipe, tmp_path / "whole", *settings)


@pytest.mark.parametrize(
    ("more", "places"),
    [
        (PARTIAL, ["when_something_is_put", "in_the_middle_of_a_push"]),
        *(
            pytest.param(*case, marks=pytest.mark.campaign("kills"))
            for case in (
                ((), ["when_something_is_put", "while_it_writes_that"]),
                (PARTIAL, ["in_the_middle_of_a_push", "at_a_weight_update"]),
            )
        ),
    ],
    ids=["two places", "whole", "partial"],
)
def test_as_ready_every_prompt_is_trained_on_once_and_nothing_is_too_old(recipe, tmp_path, more, places):
    settings = (SAVED, last_step(places), *more)
    for number, place in enumerate(places):
        aim(tmp_path, place, number + 3)
        with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
            test_flow.train(recipe, tmp_path, *settings, work=dying)
        assert (tmp_path / "died").read_text() == place
        test_flow.forget_after(tmp_path, max(steps_in(tmp_path / "checkpoints"), default=0))
    test_flow.train(recipe, tmp_path, *settings)
    test_flow.check(tmp_path, len(places) + 3)


# -- places -----------------------------------------------------------------------------------------------------------


def last_step(places: Sequence[str]) -> str:
    """A worker dies in or after step 3, 4, ..., and one step more is left."""
    return f"trainer.steps={len(places) + 3}"


def aim(run_dir: Path, place: str, step: int) -> None:
    """The rollout's worker of the run that is next in this folder dies at this place, in or after a step."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "place").write_text(f"{place} {step}")


def dying(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run, which notes what it trains on."""
    import torch.distributed as dist

    place, step = (Path(run_dir) / "place").read_text().split()

    def die() -> None:
        (Path(run_dir) / "died").write_text(place)
        os.kill(os.getpid(), signal.SIGKILL)

    if teams[dist.get_rank()]["MEGARL_TEAM"] == "draw":
        globals()[place](int(step), die)
    test_flow.before_training(lambda c, samples: test_flow.note(Path(run_dir), c.step, samples))
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def before(owner: Any, name: str, die: Callable[[], None], when: Callable[..., bool]) -> None:
    call = getattr(owner, name)

    def calling(*arguments: Any, **settings: Any) -> Any:
        if when(*arguments):
            die()
        return call(*arguments, **settings)

    setattr(owner, name, calling)


def before_rewards_are_given(step: int, die: Callable[[], None]) -> None:
    """Responses are: others may have read them."""
    from megarl.disaggregated.buffer.channel import TeamChannel

    before(TeamChannel, "give", die, lambda self, c, node, batch: c.step == step and node.id == "reward")


def in_the_middle_of_a_push(step: int, die: Callable[[], None]) -> None:
    """The second one of this life, or a later one."""
    from megarl.rollout.embedded.inbox import WeightInbox

    took: list[str] = []

    def second(self: Any, *_: Any) -> bool:
        took.append(version := self.version.partition("@")[0])
        return bool(version) and int(version) >= step - 1 and len(took) > 1

    before(WeightInbox, "take_flat", die, second)


def before_its_part_of_a_checkpoint(step: int, die: Callable[[], None]) -> None:
    from megarl.disaggregated.in_order_loop import InOrderLoop

    before(InOrderLoop, "_save", die, lambda self, version: version == step)


def while_it_writes_that(step: int, die: Callable[[], None]) -> None:
    from megarl.training import saving

    before(saving, "_write", die, lambda folder, *_: int(folder.name.partition(".")[0].removeprefix("step_")) >= step)


def when_something_is_put(step: int, die: Callable[[], None]) -> None:
    from megarl.disaggregated.buffer.channel import GroupChannel

    puts: list[int] = []

    def enough(self: Any, c: Any, ready: Any, *_: Any) -> bool:
        puts.extend(number for some in ready for number in some.numbers)
        return len(puts) > 4 * step

    before(GroupChannel, "swap", die, enough)


def at_a_weight_update(step: int, die: Callable[[], None]) -> None:
    """It has come there, and gets no weights any more."""
    from megarl.disaggregated import as_ready_loop as flow

    before(flow, "publish", die, lambda c, version: version >= step)
