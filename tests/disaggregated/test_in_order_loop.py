"""Runs whose rollout generates a step while the one before it is trained: `async.max_staleness=1`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.artifacts.jsonl import read_jsonl
from megarl.config.run import RunConfig
from megarl.dag.messages import StepGenerated
from megarl.disaggregated import weight_updates
from megarl.tracking.close import complete_trace
from tests.forked import Command
from tests.runtime import harness

pytestmark = [
    *(pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900)),
    pytest.mark.usefixtures("forked_ray"),
]

AHEAD = (
    "async.max_staleness=1",
    "cluster.nproc=2",
    "placement.teams.train={roles: [actor, reference], devices: 1}",
    "placement.teams.draw={roles: [rollout], devices: 1}",
    "sft.steps=0",
    "trainer.steps=4",
    "validation.every=2",
)
PPO = (
    *harness.PPO,
    "cluster.nproc=3",
    "placement.teams.value={roles: [critic], devices: 1}",
)
_WAIT_S = 90.0

Numbers = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers]:
    """Folder and numbers of a run in which generating and training wait for each other, so that both go on at once."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return run_dir, train(recipe, run_dir, work=at_the_same_time)


@pytest.fixture(scope="module")
def killed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run whose actor was killed in step 3."""
    run_dir = tmp_path_factory.mktemp("killed")
    with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
        train(recipe, run_dir, work=killed_in_step_3)
    assert not (run_dir / "checkpoints" / "step_3").exists()
    return run_dir


def test_every_step_has_exactly_its_version(undisturbed):
    run_dir, numbers = undisturbed
    assert drawn_with(run_dir) == {1: {0}, 2: {0}, 3: {1}, 4: {2}}
    assert [numbers[step]["rollout_corr/staleness_mean"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert [step for step in numbers if "val/acc" in numbers[step]] == [0, 2, 4]


def test_a_step_is_drawn_while_the_one_before_it_is_trained(undisturbed):
    """Else one of the two would have timed out."""
    run_dir, _ = undisturbed
    assert {path.name for path in run_dir.glob("began-*")} == {
        *(f"began-generating-{step}" for step in (1, 2, 3, 4)),
        *(f"began-training-{step}" for step in (1, 2, 3, 4)),
    }


def test_what_teams_did_with_their_time_is_in_the_record(undisturbed):
    run_dir, _ = undisturbed
    lines = {line["step"]: line for line in read_jsonl(run_dir / "metrics.jsonl")}
    assert [step for step in lines if "timing_s/validate" in lines[step]] == [0, 2, 4], (
        "of the steps that were validated"
    )
    for step in (1, 2, 3, 4):
        line = lines[step]
        for name, other in (("train", "draw"), ("draw", "train")):
            assert line[f"team/{name}/wait_for/{other}_s"] == pytest.approx(line[f"team/{name}/wait_s"])
            waits = [line[key] for key in line if key.startswith(f"team/{name}/wait/") and "drawn" not in key]
            assert sum(waits) == pytest.approx(line[f"team/{name}/wait_s"])
            assert line[f"team/{name}/tokens_per_s"] > 0
        assert line["perf/bottleneck/train"] + line["perf/bottleneck/draw"] == 1
        assert line["store/queue/rollout/train"] >= 0
    complete_trace(run_dir)  # what a launcher does
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert list(rows.values()) == ["worker 0 (train, rank 0)", "worker 1 (draw, rank 0)"]
    arrows = {(event["ph"], event["pid"]) for event in trace if event["ph"] in "sf"}
    assert arrows == {("s", 0), ("f", 0), ("s", 1), ("f", 1)}


def test_the_same_run_again_that_is_killed_goes_on_as_if_nothing_had_happened(recipe, undisturbed, killed, tmp_path):
    """Its first steps, too, have the numbers of the run whose teams wait for each other."""
    run_dir = shutil.copytree(killed, tmp_path / "run")
    assert train(recipe, run_dir, work=noting_versions) == undisturbed[1]
    assert drawn_with(run_dir) == {3: {1}, 4: {2}}
    by_chance = drawn_by_chance(run_dir)
    assert by_chance == drawn_by_chance(undisturbed[0]), "what a stage of the recipe's own draws"
    assert len({*by_chance.values()}) == 4


@pytest.mark.campaign("teams")  # in the suite: of a run that is as ready, test_as_ready_loop.py
def test_a_checkpoint_that_is_asked_for_at_any_step_has_the_parts_of_all_teams(recipe, undisturbed, tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "save").touch()  # by a batch job
    train(recipe, tmp_path, "trainer.save_every=0")
    shutil.rmtree(tmp_path / "checkpoints" / "step_4")
    assert (tmp_path / "checkpoints" / "step_1" / "generated_0.safetensors").is_file()
    numbers = train(recipe, tmp_path, "trainer.save_every=0")
    assert {step: numbers[step] for step in (2, 3, 4)} == {step: undisturbed[1][step] for step in (2, 3, 4)}


def test_a_run_that_resumes_trains_on_what_was_drawn_ahead_and_may_stop_or_begin_to_draw_ahead(
    recipe, killed, tmp_path
):
    run_dir = shutil.copytree(killed, tmp_path / "run")
    train(recipe, run_dir, "async.max_staleness=0", work=noting_versions)
    assert drawn_with(run_dir) == {3: {1}, 4: {3}}
    train(recipe, run_dir, "trainer.steps=6", work=noting_versions)
    assert drawn_with(run_dir) == {3: {1}, 4: {3}, 5: {4}, 6: {4}}


def test_two_steps_ahead_every_step_has_exactly_its_version_and_a_killed_run_goes_on(recipe, tmp_path):
    two = ("async.max_staleness=2", "trainer.steps=6", "trainer.keep_last=6")  # training may go on for two steps more
    whole, run_dir = train(recipe, tmp_path / "whole", *two, work=noting_versions), tmp_path / "killed"
    assert drawn_with(tmp_path / "whole") == {1: {0}, 2: {0}, 3: {0}, 4: {1}, 5: {2}, 6: {3}}
    # Gradients are freed while copies of the weights wait (on a CPU nothing else is offloaded), and no number changes.
    two = (*two, "actor.engine.offload=true")
    with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
        train(recipe, run_dir, *two, work=killed_when_it_draws_step_5)
    assert sorted(path.name for path in (run_dir / "checkpoints" / "step_2").glob("generated*.safetensors")) == [
        "generated_0.safetensors",
        "generated_0_2.safetensors",
    ]
    assert train(recipe, run_dir, *two) == whole


def test_ppo_with_a_critic_in_a_third_team(recipe, tmp_path):
    numbers = train(recipe, tmp_path, *PPO, "trainer.steps=3", work=noting_versions)
    assert drawn_with(tmp_path) == {1: {0}, 2: {0}, 3: {1}}
    assert all("critic/vf_loss" in numbers[step] for step in (1, 2, 3))


@pytest.mark.parametrize(
    ("val_files", "end"),
    [
        (["rows.jsonl"], ["generated/5", 4, "train 5", "generated/5", 5]),
        ([], ["train 5", "generated/5", 5]),
    ],
)
def test_weights_go_as_soon_as_the_step_before_them_is_drawn_and_those_of_the_end_go_if_they_are_validated(
    monkeypatch, val_files, end
):
    """k = 2, five steps, validated every 4 if there is something to validate with: weights 2 are for step 5, weights 3
    for none."""
    said: list[Any] = []
    sections = {"async": {"max_staleness": 2}, "trainer": {"steps": 5}, "validation": {"every": 4}}
    config = RunConfig.model_validate({"name": "x", **sections, "data": {"val_files": val_files}})
    told: set[str] = set()
    buffer = SimpleNamespace(is_posted=lambda name: name in told)
    world = SimpleNamespace(broadcast_json=lambda value: value)
    c: Any = SimpleNamespace(
        config=config,
        team=SimpleNamespace(of=lambda role: "draw"),
        buffer=buffer,
        mail=SimpleNamespace(read_together=lambda name: said.append(name) or StepGenerated(int(name[-1])).encode()),
        layout=SimpleNamespace(rank=0, world=world),
        models={"actor": SimpleNamespace(chunks=[])},
    )
    monkeypatch.setattr(weight_updates, "publish", lambda c, version: said.append(version))
    pushes = weight_updates.InOrderUpdates(c)
    for step in range(1, 6):
        pushes.before_step(step)
        said.append(f"train {step}")
        pushes.after_step(step, saves=lambda step: step == 5)
    assert said == [
        *("train 1", "train 2"),
        *("generated/3", 1, "train 3"),  # before step 3 is trained: step 4 is drawn with them meanwhile
        *("generated/4", 2, "train 4"),
        *end,
    ]


# -- runs -------------------------------------------------------------------------------------------------------------


def train(recipe: Path, run_dir: Path, *overrides: str, work: Callable[..., None] | None = None) -> Numbers:
    """A run without Ray; its numbers without those that measure time."""
    return without_times(harness.train(recipe, run_dir, *AHEAD, *overrides, work=work))


def start(recipe: Path, run_dir: Path, *overrides: str, **environment: str) -> Command:
    """A run in a Ray of its own, begun."""
    return harness.start(recipe, run_dir, *AHEAD, *overrides, **environment)


def without_times(steps: Numbers) -> Numbers:
    """Numbers without those that measure what teams waited for."""
    return {
        step: {
            name: value for name, value in numbers.items() if not name.startswith(("team/", "sync/", "store/queue/"))
        }
        for step, numbers in steps.items()
    }


def drawn_with(run_dir: Path) -> dict[int, set[int]]:
    """Versions of the weights that the samples of each trained step were drawn with."""
    found: dict[int, set[int]] = {}
    for line in (run_dir / "versions").read_text().splitlines():
        step, version = map(int, line.split())
        found.setdefault(step, set()).add(version)
    return found


def noting_versions(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run; versions of each step's samples are noted where they are trained."""
    before_training(lambda c, samples: note_versions(Path(run_dir), c.step, samples))
    draw_by_chance(Path(run_dir))
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def at_the_same_time(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """`noting_versions`; step t + 1 is drawn to its end after step t begins to be trained, and the other way round."""
    from megarl.runtime.stages import rollout

    folder, last = Path(run_dir), 4
    generate = rollout.generate

    def generating(c: Any, *arguments: Any, **named: Any) -> Any:
        (folder / f"began-generating-{c.step}").touch()
        if c.step > 1:
            wait_for(folder / f"began-training-{c.step - 1}")
        return generate(c, *arguments, **named)

    def training(c: Any, samples: Any) -> None:
        note_versions(folder, c.step, samples)
        (folder / f"began-training-{c.step}").touch()
        if c.step < last:
            wait_for(folder / f"began-generating-{c.step + 1}")

    rollout.generate = generating
    before_training(training)
    draw_by_chance(folder)
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def killed_in_step_3(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run, whose actor is killed when it trains step 3, after the checkpoint of step 2."""

    def training(c: Any, samples: Any) -> None:
        if c.step == 3:
            wait_for(Path(run_dir) / "checkpoints" / "step_2" / "meta.json")
            os.kill(os.getpid(), signal.SIGKILL)

    before_training(training)
    draw_by_chance(Path(run_dir))
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def killed_when_it_draws_step_5(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run, whose rollout is killed when it generates step 5, after the checkpoint of step 2."""
    from megarl.runtime.stages import rollout

    generate = rollout.generate

    def generating(c: Any, *arguments: Any, **named: Any) -> Any:
        if c.step == 5:
            wait_for(Path(run_dir) / "checkpoints" / "step_2" / "meta.json")
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(c, *arguments, **named)

    rollout.generate = generating
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def before_training(call: Callable[[Any, Any], None]) -> None:
    """In a worker's process: `call(context, samples)` before an update."""
    from megarl.runtime.stages import correction

    ages = correction.ages

    def calling(c: Any, samples: Any) -> Any:
        call(c, samples)
        return ages(c, samples)

    correction.ages = calling


def draw_by_chance(run_dir: Path) -> None:
    """In a worker's process: a stage draws something with torch and numpy for every step, which is noted."""
    import numpy
    import torch

    from megarl.runtime.stages import rollout

    generate = rollout.generate

    def generating(c: Any, *arguments: Any, **named: Any) -> Any:
        with (run_dir / "by-chance").open("a") as file:
            file.write(f"{c.step} {torch.rand(()).item()} {numpy.random.rand()}\n")
        return generate(c, *arguments, **named)

    rollout.generate = generating


def drawn_by_chance(run_dir: Path) -> dict[int, tuple[str, ...]]:
    """What was last drawn for each step."""
    lines = (run_dir / "by-chance").read_text().splitlines()
    return {int(step): tuple(values) for step, *values in map(str.split, lines)}


def note_versions(run_dir: Path, step: int, samples: Any) -> None:
    with (run_dir / "versions").open("a") as file:
        file.writelines(f"{step} {version}\n" for version in samples["weight_versions"].values.tolist())


def wait_for(path: Path) -> None:
    end = time.monotonic() + _WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"timed out waiting for {path.name}"
        time.sleep(0.01)
