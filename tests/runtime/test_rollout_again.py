"""The rollout's team dies and begins again while the run goes on, which has the numbers of an undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl import phase
from megarl.processes import FINISHED, RESTARTS, free_port
from tests.runtime import harness, test_ahead

#: Two ranks of the actor have to agree on when they push again.
TWO = (
    "cluster.nproc=3",
    "placement.teams.train={roles: [actor, reference], devices: 2}",
    "placement.teams.draw={roles: [rollout], devices: 1}",
    "sft.steps=0",
    "validation.every=1",
    "trainer.save_every=1",
)

#: PPO, drawn by two replicas.
THREE = (
    *harness.PPO,
    "cluster.nproc=5",
    "placement.teams.train={roles: [actor, reference], devices: 2}",
    "placement.teams.value={roles: [critic], devices: 1}",
    "placement.teams.draw={roles: [rollout], devices: 2}",
    "trainer.steps=8",
    "trainer.save_every=2",
    "validation.every=2",
)
DEATHS = 4
#: Of a life that ends by chance.
WITHIN_S = 2.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.procs
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ahead", [0, 2])
def test_wherever_it_dies_the_run_goes_on_as_if_nothing_had_happened(recipe, tmp_path, ahead):
    """Once in every step, each time at another place."""
    settings = (*TWO, f"trainer.steps={len(PLACES)}", *lag(ahead))
    undisturbed = harness.train(recipe, tmp_path / "whole", *settings)
    assert same(harness.train(recipe, tmp_path / "again", *settings, work=dying)) == same(undisturbed)
    lives = (tmp_path / "again" / "lives").read_text().splitlines()
    assert lives == [f"died {place.__name__.replace('_', ' ')}" for place in PLACES]


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, dict[str, float]]]:
    """Numbers by staleness."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {ahead: same(harness.train(recipe, folder / f"{ahead}", *THREE, *lag(ahead))) for ahead in (0, 1, 2)}


@pytest.mark.procs
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_whenever_one_of_its_processes_dies_the_numbers_are_those_of_an_undisturbed_run(
    recipe, undisturbed, tmp_path, ahead, seed
):
    (tmp_path / "seed").write_text(f"{seed}")
    assert same(harness.train(recipe, tmp_path, *THREE, *lag(ahead), work=dying)) == undisturbed[ahead]
    assert 0 < deaths(tmp_path) <= DEATHS


@pytest.fixture(scope="module")
def killed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run whose actor was killed, and whose checkpoint of step 4 holds steps 5 and 6."""
    run_dir = tmp_path_factory.mktemp("killed")
    with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
        harness.train(recipe, run_dir, *THREE, *lag(2), work=killed_in_step_5)
    assert (run_dir / "checkpoints" / "step_4" / "drawn_0_2.safetensors").exists()
    return run_dir


@pytest.mark.procs
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("seed", range(5))
def test_so_are_those_of_a_run_that_goes_on_from_a_checkpoint_with_samples(recipe, undisturbed, killed, tmp_path, seed):
    run_dir = shutil.copytree(killed, tmp_path / "run")
    (run_dir / "seed").write_text(f"on {seed}")
    assert same(harness.train(recipe, run_dir, *THREE, *lag(2), work=dying)) == undisturbed[2]
    assert 0 < deaths(run_dir) <= DEATHS


def killed_in_step_5(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run, whose actor is killed when it trains step 5, after the checkpoint of step 4."""

    def training(c: Any, samples: Any) -> None:
        if c.step == 5:
            test_ahead.wait_for(Path(run_dir) / "checkpoints" / "step_4" / "meta.json")
            os.kill(os.getpid(), signal.SIGKILL)

    test_ahead.before_training(training)
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def lag(ahead: int) -> tuple[str, ...]:
    return (f"async.max_staleness={ahead}",)


def same(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Without what depends on how often the team began."""
    return {
        step: {name: value for name, value in numbers.items() if not name.startswith(("team/", "sync/", "store/"))}
        for step, numbers in steps.items()
    }


# -- a team that begins again -----------------------------------------------------------------------------------------


def dying(
    recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]], places: list[Any] | None = None
) -> None:
    """The run; the processes of the rollout's team are children of its first rank, which starts them as they die.

    Args:
        places: where it dies, life by life; None: `PLACES`. With a file `seed` it does so at moments that are drawn;
            if that says `steps`, most of them in any step, else all of them soon after its beginning.
    """
    import torch.distributed as dist

    mine = teams[dist.get_rank()]
    dist.barrier()  # all have met: who leaves the group of the test early is missed by none
    if mine["MEGARL_TEAM"] != "draw":
        harness.work_of_rank(recipe, run_dir, overrides, teams)
        return
    dist.destroy_process_group()
    own, number = [environment for environment in teams if environment["MEGARL_TEAM"] == "draw"], 0
    while mine["RANK"] == "0" and not _live(recipe, run_dir, overrides, own, PLACES if places is None else places):
        from tests.store.served import restart_team

        number += 1
        over = restart_team(mine["MEGARL_STORE"], "draw", number)
        new = {"MASTER_PORT": str(free_port()), RESTARTS: str(number), FINISHED: str(over or 0)}
        own = [environment | new for environment in own]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _live(recipe: str, run_dir: str, overrides: list[str], own: list[dict[str, str]], places: list[Any]) -> bool:
    """From the beginning of the team to its end; whether it came to that of the run."""
    before, pids = deaths(Path(run_dir)), []
    for environment in own:
        pid = os.fork()
        if pid == 0:
            _be_worker(recipe, run_dir, overrides, environment, places)
        pids.append(pid)
    left, good = {*pids}, True
    while left:
        pid, status = os.waitpid(-1, 0)
        left.discard(pid)
        if status and good:
            good = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    assert good or deaths(Path(run_dir)) > before, (Path(run_dir) / "error").read_text()
    return good


def deaths(run_dir: Path) -> int:
    """How many there have been."""
    lives = run_dir / "lives"
    return len(lives.read_text().splitlines()) if lives.exists() else 0


def _be_worker(recipe: str, run_dir: str, overrides: list[str], environment: dict[str, str], places: list[Any]) -> None:
    from megarl.config.load import load_config
    from megarl.recipes import entry
    from tests.store.served import enter

    try:
        enter(environment)
        _die_in(Path(run_dir), int(environment["RANK"]), places)
        os.chdir(Path(recipe).parent)
        entry.train(load_config(Path(recipe), overrides), Path(run_dir))
    except BaseException:
        (Path(run_dir) / "error").write_text(traceback.format_exc())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _die_in(run_dir: Path, rank: int, places: list[Any]) -> None:
    """This life ends at the place that is next, or at a moment that is drawn."""
    number, seed = deaths(run_dir), run_dir / "seed"
    place = by_chance if seed.exists() else places[number] if number < len(places) else None

    def die() -> None:
        where = f" in step {phase.step_now}, {phase.current()}" if place is by_chance else ""
        with (run_dir / "lives").open("a") as file:
            file.write(f"died {place.__name__.replace('_', ' ')}{where}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    if place is by_chance:
        text = seed.read_text()
        chance = random.Random(f"{text} {number}")
        if number < DEATHS and rank == chance.randrange(2):
            delay_s = chance.uniform(0.0, WITHIN_S)
            if "steps" in text and chance.random() < 0.75:  # else it may not live to see one
                by_chance(delay_s / 4, die, sorted(random.Random(text).choices(range(1, 9), k=DEATHS))[number])
            else:
                by_chance(delay_s, die)
    elif place is not None and rank == 0:
        place(number + 1, die)


def by_chance(delay_s: float, die: Callable[[], None], step: int = 0) -> None:
    """So long after it has come to `step`, of 8."""

    def strike() -> None:
        while phase.step_now < step:
            time.sleep(0.005)
        time.sleep(delay_s)
        die()

    threading.Thread(target=strike, daemon=True).start()


def before(owner: Any, name: str, step: int, die: Callable[[], None], when: Callable[..., bool]) -> None:
    call = getattr(owner, name)

    def calling(*arguments: Any, **settings: Any) -> Any:
        if when(*arguments):
            die()
        return call(*arguments, **settings)

    setattr(owner, name, calling)


def before_drawing(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime.stages import rollout

    before(rollout, "generate", step, die, lambda c, *_: c.step == step)


def before_rewards_are_given(step: int, die: Callable[[], None]) -> None:
    """Responses are: others may have read them."""
    from megarl.store.crossing import TeamCrossing

    before(TeamCrossing, "give", step, die, lambda self, c, node, board: c.step == step and node.id == "reward")


def when_all_is_given(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime.ahead import RolloutSteps

    before(RolloutSteps, "_tell", step, die, lambda self: self.c.context.step == step)


def before_the_last_word_of_it(step: int, die: Callable[[], None]) -> None:
    """What was measured of it is told."""
    from tests.store.served import FarClient

    before(FarClient, "arrive", step, die, lambda self, name: name == f"drawn/{step}")


def when_it_has_said_so(step: int, die: Callable[[], None]) -> None:
    """The actor learns, and pushes to engines that are gone."""
    from megarl.runtime.ahead import RolloutSteps

    before(RolloutSteps, "_follow", step, die, lambda self, version: version == step)


def in_the_middle_of_a_push(step: int, die: Callable[[], None]) -> None:
    from megarl.rollout.embedded.inbox import WeightInbox

    took: list[Any] = []

    def second(self: Any, *_: Any) -> bool:
        took.append(1)
        return self.version.startswith(f"{step - 1}@") and len(took) > 1

    before(WeightInbox, "take_flat", step, die, second)


def before_it_validates(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime import ahead

    before(ahead, "evaluate_drawn", step, die, lambda c, recorder, version: version == step)


def before_its_numbers(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime.recorder import Recorder

    before(Recorder, "end_step", step, die, lambda self, now: now >= step)


def before_its_part_of_a_checkpoint(step: int, die: Callable[[], None]) -> None:
    from megarl.runtime.ahead import RolloutSteps

    before(RolloutSteps, "_save", step, die, lambda self, version: version == step)


def while_it_writes_that(step: int, die: Callable[[], None]) -> None:
    from megarl.training import saving

    before(saving, "_write", step, die, lambda folder, *_: folder.name.startswith(f"step_{step}."))


PLACES: list[Any] = [
    before_drawing,
    before_rewards_are_given,
    when_all_is_given,
    before_the_last_word_of_it,
    when_it_has_said_so,
    in_the_middle_of_a_push,
    before_it_validates,
    before_its_numbers,
    before_its_part_of_a_checkpoint,
    while_it_writes_that,
]
