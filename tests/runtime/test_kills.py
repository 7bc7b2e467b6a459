"""kill -9 of one process of a run of several teams, at a moment that is drawn: nothing is lost, nothing trained twice.

In order the resumed run has the numbers of an undisturbed one, bit for bit; as samples get ready it trains on every
prompt once, and on nothing that is too old. With `cluster.max_restarts` a run that lost a worker or its buffer goes on
by itself, and has these numbers.

Of each kind the suite has one case: the actor in test_ahead.py and test_flow.py, the rollout in test_ahead.py, the
critic in test_critic_apart.py, the launcher and a run that starts again by itself in test_durability.py. All of them
take about an hour on two cores: 180 of 3 to 5 s, and 60 of 15 to 70 s in a Ray of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.disaggregated import test_as_ready_loop as test_flow
from tests.disaggregated import test_in_order_loop as test_ahead
from tests.runtime import harness, test_algorithms
from tests.runtime.harness import of_training

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900), pytest.mark.campaign("kills")]

SEEDS = range(20)
STEPS = 5
PPO = (*test_ahead.PPO, f"trainer.steps={STEPS}")
PARTIAL = {False: (), True: (test_flow.PARTIAL, *test_flow.LONG)}
#: Until nothing is left of a run whose launcher was killed: Ray's processes notice it within a minute. One that goes on
#: trying to reach another of them may meet a rank of the next run at its port.
GONE_S = 90.0
MARK = "MEGARL_TEST_RUN"  # in the environment of all processes of a command


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return test_ahead.train(recipe, tmp_path_factory.mktemp("undisturbed"), *PPO)


@pytest.fixture(scope="module")
def in_order_s(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long the ranks of an undisturbed run take without Ray."""
    run_dir = tmp_path_factory.mktemp("timed")
    test_ahead.train(recipe, run_dir, *PPO, work=timed)
    return seconds_of(run_dir)


@pytest.fixture(scope="module")
def as_ready_s(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, float]:
    """The same of runs whose samples are used as they get ready, by whether they are interrupted."""
    seconds = {}
    for partial, more in PARTIAL.items():
        run_dir = tmp_path_factory.mktemp("timed")
        test_flow.train(recipe, run_dir, *more, work=timed)
        seconds[partial] = seconds_of(run_dir)
    return seconds


class Lasts(NamedTuple):
    """How long an undisturbed run takes in a Ray of its own."""

    seconds: float
    seconds_with_buffer: float


@pytest.fixture(scope="module")
def ray(recipe: Path, undisturbed: Any, tmp_path_factory: pytest.TempPathFactory) -> Lasts:
    run_dir, began = tmp_path_factory.mktemp("ray"), time.monotonic()
    process = test_ahead.start(recipe, run_dir, *PPO)
    harness.wait_for(harness.buffer_of_run, process)
    buffer = time.monotonic()
    output = harness.finish(process)
    assert process.returncode == 0, output[-4000:]
    assert test_ahead.without_times(harness.metrics(run_dir)) == undisturbed
    return Lasts(time.monotonic() - began, time.monotonic() - buffer)


@pytest.mark.parametrize("team", ["train", "value", "draw"])
@pytest.mark.parametrize("seed", SEEDS)
def test_in_order_the_numbers_are_those_of_an_undisturbed_run(recipe, undisturbed, in_order_s, tmp_path, team, seed):
    kill_one(lambda work: test_ahead.train(recipe, tmp_path, *PPO, work=work), tmp_path, team, seed, in_order_s)
    assert test_ahead.train(recipe, tmp_path, *PPO) == undisturbed


@pytest.mark.parametrize("team", ["train", "draw"])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_as_samples_get_ready_every_prompt_is_trained_on_once(recipe, as_ready_s, tmp_path, team, partial, seed):
    more, within = PARTIAL[partial], as_ready_s[partial]
    kill_one(lambda work: test_flow.train(recipe, tmp_path, *more, work=work), tmp_path, team, seed, within)
    forget_steps_after_the_checkpoint(tmp_path)
    test_flow.train(recipe, tmp_path, *more)
    test_flow.check(tmp_path, test_flow.STEPS)


@pytest.fixture(scope="module")
def self_play(recipe: Path) -> tuple[str, ...]:
    """Two policies with weights of their own."""
    (recipe.parent / "proposing.py").write_text(test_algorithms.AGENT)
    policies = [text.replace("FOLDER", str(recipe.parent)) for text in test_algorithms.POLICIES]
    return (*policies, *test_algorithms.OWN_WEIGHTS, "algorithm.kl.use=none", f"trainer.steps={STEPS}", "sft.steps=0")


@pytest.fixture(scope="module")
def self_play_s(recipe: Path, self_play: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Any]:
    run_dir = tmp_path_factory.mktemp("timed")
    whole = harness.train(recipe, run_dir, *self_play, work=timed)
    return seconds_of(run_dir), whole


@pytest.mark.parametrize("seed", SEEDS)
def test_policies_with_weights_of_their_own_go_on_as_if_nothing_had_happened(
    recipe, self_play, self_play_s, tmp_path, seed
):
    seconds, whole = self_play_s
    rng = random.Random(f"policies {seed}")
    step, after_s = rng.randrange(STEPS), rng.uniform(0.0, seconds / STEPS)
    process = harness.start(recipe, tmp_path, *self_play)
    harness.wait_for(lambda: len(harness.workers(tmp_path)) == 2, process)
    begun = harness.workers(tmp_path)
    # From a step on: the run whose time was taken was the first one, which starts more slowly.
    harness.wait_for(lambda: steps_done(tmp_path) >= step, process)
    time.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(begun[seed % 2], signal.SIGKILL)
    print(f"seed {seed}: killed after step {steps_done(tmp_path)}, drawn {step} and {after_s:.1f} s")
    harness.finish(process)
    assert harness.train(recipe, tmp_path, *self_play) == whole


@pytest.fixture(scope="module")
def apart(recipe: Path, self_play: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, float, Any]:
    """Settings of teams of which `solver` generates for both policies and `proposer` only trains, and their run."""
    teams = {"solver": (["actor", "rollout"], 1), "proposer": (["proposer"], 1)}
    settings, run_dir = (*self_play, *test_algorithms.placed(teams)), tmp_path_factory.mktemp("timed")
    whole = harness.train(recipe, run_dir, *settings, work=timed)
    return settings, seconds_of(run_dir), whole


@pytest.mark.parametrize("team", ["solver", "proposer"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_s_own_team_may_die(recipe, apart, tmp_path, team, seed):
    settings, seconds, whole = apart
    kill_one(lambda work: harness.train(recipe, tmp_path, *settings, work=work), tmp_path, team, seed, seconds)
    assert of_training(harness.train(recipe, tmp_path, *settings)) == of_training(whole)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_whose_buffer_dies_has_the_numbers_of_an_undisturbed_one(recipe, undisturbed, ray, tmp_path, seed):
    process = test_ahead.start(recipe, tmp_path, *PPO, "cluster.max_restarts=1")
    buffer = harness.wait_for(harness.buffer_of_run, process)
    time.sleep(random.Random(f"buffer {seed}").uniform(0.0, ray.seconds_with_buffer))
    with contextlib.suppress(ProcessLookupError):  # it has ended with its run
        harness.kill(buffer)
    output = harness.finish(process)
    assert process.returncode == 0, output[-4000:]
    assert test_ahead.without_times(harness.metrics(tmp_path)) == undisturbed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_starts_again_by_itself_has_the_numbers_of_an_undisturbed_one(
    recipe, undisturbed, ray, tmp_path, seed
):
    worker = seed % 3  # each is a team
    process = test_ahead.start(recipe, tmp_path, *PPO, "cluster.max_restarts=1")
    pid = harness.wait_for(lambda: harness.workers(tmp_path).get(worker), process)
    time.sleep(random.Random(f"worker {worker} {seed}").uniform(0.0, ray.seconds_with_buffer))
    with contextlib.suppress(ProcessLookupError):
        harness.kill(pid)
    output = harness.finish(process)
    assert process.returncode == 0, output[-4000:]
    assert test_ahead.without_times(harness.metrics(tmp_path)) == undisturbed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_whose_launcher_dies_goes_on_to_the_numbers_of_an_undisturbed_one(
    recipe, undisturbed, ray, tmp_path, seed
):
    process = test_ahead.start(recipe, tmp_path, *PPO, **{MARK: str(tmp_path)})
    time.sleep(random.Random(f"launcher {seed}").uniform(0.0, ray.seconds))
    process.kill()
    process.wait(timeout=10)
    deadline = time.monotonic() + GONE_S
    while found := marked(str(tmp_path)):
        assert time.monotonic() < deadline, f"they outlive their launcher: {found}"
        time.sleep(0.5)
    assert test_ahead.train(recipe, tmp_path, *PPO) == undisturbed


# -- runs -------------------------------------------------------------------------------------------------------------


def kill_one(train: Any, run_dir: Path, team: str, seed: int, within_s: float) -> None:
    """A run of which a worker of `team` is killed within so many seconds from its start, unless it ends before."""
    delay = random.Random(f"{team} {seed}").uniform(0.0, within_s)
    (run_dir / "kill").write_text(json.dumps([team, delay]))
    with contextlib.suppress(AssertionError):  # of the ranks that are left: what counts is the run that goes on
        train(killed)
    (run_dir / "kill").unlink()
    struck = (run_dir / "struck").exists()
    print(f"{team} {seed}: {f'killed after {delay:.1f} s' if struck else 'the run ended before the kill'}")
    (run_dir / "struck").unlink(missing_ok=True)


def steps_done(run_dir: Path) -> int:
    """The number of the last step whose metrics the run has written; 0: none."""
    return max(harness.metrics(run_dir), default=0) if (run_dir / "metrics.jsonl").exists() else 0


def seconds_of(run_dir: Path) -> float:
    return float((run_dir / "seconds").read_text())


def timed(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run; the first rank writes how long it took from the moment at which the delay of a kill begins.

    A test would measure the start of the ranks, too. The first start of a process imports everything, which takes ten
    times as long as a run, so that most runs would end before their kill.
    """
    import torch.distributed as dist

    is_first, began = dist.get_rank() == 0, time.monotonic()
    test_flow.before_training(lambda c, samples: test_flow.note(Path(run_dir), c.step, samples))
    harness.work_of_rank(recipe, run_dir, overrides, teams)
    if is_first:
        (Path(run_dir) / "seconds").write_text(str(time.monotonic() - began))


def marked(run: str) -> list[str]:
    """Command lines of the processes of a command that was started with this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == run:
                found.append(" ".join(process.cmdline())[:100])
    return found


def killed(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run; a worker of the team that the file `kill` names kills itself after the seconds that it names."""
    import torch.distributed as dist

    team, delay = json.loads((Path(run_dir) / "kill").read_text())
    mine = teams[dist.get_rank()]
    if mine["MEGARL_TEAM"] == team and mine["RANK"] == "0":

        def strike() -> None:
            time.sleep(delay)
            (Path(run_dir) / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=strike, daemon=True).start()
    test_flow.before_training(lambda c, samples: test_flow.note(Path(run_dir), c.step, samples))
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def forget_steps_after_the_checkpoint(run_dir: Path) -> None:
    """Steps that no checkpoint has are trained again, on what is drawn for them then."""
    saved = [int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_?")]
    if (run_dir / "trained").exists():
        test_flow.forget_after(run_dir, max(saved, default=0))
