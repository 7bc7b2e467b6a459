"""Whole runs whose models are in several teams give what one team gives: bit for bit under the same layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime import harness
from tests.runtime.harness import of_training

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    *(pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("forked_ray"),
]

STEPS = 3
GRPO = ("sft.steps=0", f"trainer.steps={STEPS}", "trainer.export_hf=false", "model.hf_config.num_hidden_layers=1")
PPO = (*harness.PPO, "trainer.steps=2")
COLD = "sft.steps=1"  # a critic, too, begins where the cold start ends
#: Another layout sums in another order; metrics of the first steps differ by so little, or by so much of their value.
ROUNDING = {"abs": 1e-5, "rel": 1e-4}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("teams"), layers=2)


@pytest.fixture(scope="module")
def grpo(recipe: Path) -> dict[int, dict[str, float]]:
    """GRPO, all models in two processes."""
    return harness.train(recipe, recipe.parent / "grpo", *GRPO, "cluster.nproc=2")


@pytest.fixture(scope="module")
def ppo(recipe: Path) -> dict[int, dict[str, float]]:
    """PPO with KL in the reward, all models in one process."""
    return harness.train(recipe, recipe.parent / "ppo", *PPO, COLD, "cluster.nproc=1")


def apart(recipe: Path, name: str, settings: tuple[str, ...], **teams: tuple[list[str], int]) -> dict[int, Any]:
    """Metrics of a run whose models are in these teams."""
    return harness.train(recipe, recipe.parent / name, *settings, *placed(teams))


def placed(teams: dict[str, tuple[list[str], int]]) -> list[str]:
    """Settings of these teams."""
    workers = f"cluster.nproc={sum(n for _, n in teams.values())}"
    return [
        workers,
        *(f"placement.teams.{team}={{roles: {roles}, devices: {n}}}" for team, (roles, n) in teams.items()),
    ]


def assert_near(steps: dict[int, dict[str, float]], others: dict[int, dict[str, float]]) -> None:
    assert steps.keys() == others.keys()
    for step, numbers in steps.items():
        assert others[step] == pytest.approx(numbers, **ROUNDING, nan_ok=True), f"step {step}"


@pytest.mark.campaign("teams")  # as where it is killed, below
def test_grpo_with_its_reference_in_a_team_of_the_same_layout_is_the_same_run(recipe, grpo):
    steps = apart(recipe, "grpo-apart", GRPO, train=(["actor", "rollout"], 2), frozen=(["reference"], 2))
    assert of_training(steps) == grpo
    assert grpo[STEPS]["actor/kl_loss"] > 0
    for numbers in list(steps.values())[1:]:
        assert 0 < numbers["team/frozen/busy"] < 1
        assert numbers["team/frozen/wait_s"] > 0
        assert numbers["store/read_gb"] == pytest.approx(numbers["store/given_gb"]), "every group is read once"


def test_a_run_whose_reference_is_killed_starts_it_again_and_is_the_same_run(recipe, grpo):
    teams = {"train": (["actor", "rollout"], 2), "frozen": (["reference"], 2)}
    run_dir = recipe.parent / "grpo-killed"

    def after(step: int) -> None:
        harness.wait_for(
            lambda: (run_dir / "metrics.jsonl").is_file() and step in harness.metrics(run_dir), process, every_s=0.05
        )

    with harness.held_at(recipe, run_dir / "checkpoints" / "step_2"):
        process = harness.start(recipe, run_dir, *GRPO, *placed(teams), "cluster.timeout_s=240")
        after(2)
        harness.kill(harness.workers(run_dir)[3])
    output = harness.finish(process)
    assert process.returncode == 0, output[-4000:]
    steps = harness.metrics(run_dir)
    assert of_training(steps) == grpo
    assert steps[STEPS]["actor/kl_loss"] > 0
    assert steps[STEPS]["team/frozen/restarts"] == 1
    for numbers in list(steps.values())[1:]:
        assert 0 < numbers["team/frozen/busy"] < 1
        assert numbers["team/frozen/wait_s"] > 0
    log = (run_dir / "log.txt").read_text()
    assert re.search(
        r"megarl: worker 3 \(frozen, rank 1\) on .* died .* at step \d: team 'frozen' starts again \(1 of 3\)", log
    )
    assert re.search(r"megarl: team 'frozen' goes on after step [123], \d", log)


def test_ppo_with_a_team_per_model_is_the_same_run_and_goes_on_from_a_checkpoint(recipe, ppo):
    def run(*settings: str) -> dict[int, dict[str, float]]:
        teams = {"train": (["actor", "rollout"], 1), "value": (["critic"], 1), "frozen": (["reference"], 1)}
        return apart(recipe, "ppo-apart", (*PPO, COLD, *settings), **teams)

    first = run()
    assert of_training(first) == ppo
    assert {"critic/vf_loss", "critic/vf_explained_var", "actor/reward_kl"} <= first[2].keys()
    run_dir = recipe.parent / "ppo-apart"
    assert (run_dir / "hf_critic" / "config.json").is_file()
    assert "team frozen" in (run_dir / "graph.svg").read_text()
    assert not list(run_dir.glob("*.next")), "what passes from team to team at the start is gone"
    again = run(f"trainer.resume={run_dir / 'checkpoints' / 'step_1'}")
    assert of_training(again) == ppo
    assert (run_dir / "checkpoints.old-1" / "step_2").is_dir(), "it is trained again"


def test_ppo_whose_critic_and_reference_have_other_layouts_is_the_same_up_to_rounding(recipe, ppo):
    layouts = ("critic.parallel={tp: 2, sp: true}", "reference.parallel={pp: 2}")
    teams = {"train": (["actor", "rollout"], 1), "value": (["critic"], 2), "frozen": (["reference"], 2)}
    steps = apart(recipe, "ppo-layouts", (*PPO, COLD, *layouts), **teams)
    assert_near(ppo, of_training(steps))


@pytest.mark.campaign("teams")
def test_a_run_that_ends_before_the_limit_of_its_job_ends_all_its_teams_and_goes_on(recipe, ppo):
    teams = {"train": (["actor"], 1), "value": (["critic"], 1), "frozen": (["reference"], 1), "draw": (["rollout"], 1)}
    settings = (*PPO, COLD, *placed(teams), "cluster.timeout_s=240")
    run_dir = recipe.parent / "ppo-saved-by"
    assert max(harness.run(recipe, run_dir, *settings, "trainer.save_by_s=0.001")) == 1
    assert json.loads((run_dir / "run.json").read_text())["status"] == "stopped"
    assert of_training(harness.run(recipe, run_dir, *settings)) == ppo


@pytest.mark.campaign("teams")
def test_a_run_that_ends_early_ends_all_its_teams_and_is_finished(recipe):
    teams = {"train": (["actor"], 1), "value": (["critic"], 1), "frozen": (["reference"], 1), "draw": (["rollout"], 1)}
    stop = "trainer.early_stop={metric: critic/score/mean, patience: 1, min_delta: 5.0}"
    run_dir = recipe.parent / "ppo-early"
    for _ in range(2):
        steps = harness.run(recipe, run_dir, *PPO, "trainer.steps=3", *placed(teams), "cluster.timeout_s=240", stop)
        assert max(steps) == 2
        assert json.loads((run_dir / "run.json").read_text())["status"] == "finished"
        assert (run_dir / "hf").is_dir()


# -- many layouts: a campaign -----------------------------------------------------------------------------------------

#: Recipes, by what models they work with. The cold start of GRPO is trained before other teams have models.
RECIPES = {
    "grpo": ("trainer.steps=3",),
    "ppo": PPO,
    "dapo": (*harness.DAPO, "trainer.steps=3", "algorithm.kl={use: loss, coef: 0.01}"),
    "distill": ("sft.steps=0", "trainer.steps=3", "algorithm.distillation.coef=0.5"),
    "replay": ("sft.steps=0", "trainer.steps=4", "data.replay={share: 0.5}", "rollout_correction.preset=ppo_is_bypass"),
}
A_R, A, C, F, R, T = ["actor", "rollout"], ["actor"], ["critic"], ["reference"], ["rollout"], ["teacher"]
#: Recipe, whether it is the same bit for bit, teams with their workers, further settings.
LAYOUTS: list[tuple[str, bool, list[tuple[list[str], int]], tuple[str, ...]]] = [
    ("grpo", True, [(A_R, 1), (F, 1)], ()),
    ("grpo", False, [(A_R, 1), (F, 2)], ()),
    ("grpo", False, [(A_R, 1), (F, 2)], ("placement.share=tokens",)),
    ("grpo", False, [(A_R, 1), (F, 3)], ()),
    ("grpo", False, [([*A, *F], 1), (R, 3)], ()),
    ("grpo", False, [(A_R, 1), (F, 2)], ("reference.parallel={tp: 2, sp: true}",)),
    ("grpo", False, [(A_R, 1), (F, 2)], ("reference.parallel={pp: 2}",)),
    ("grpo", False, [(A_R, 2), (F, 1)], ("actor.parallel={tp: 2}", "reference.parallel={}")),
    ("grpo", False, [(A_R, 2), (F, 2)], ("actor.parallel={pp: 2}", "reference.parallel={tp: 2}")),
    ("grpo", True, [(A, 1), (F, 1), (R, 1)], ()),
    ("grpo", True, [([*A, *F], 1), (R, 1)], ()),
    (
        "grpo",
        False,
        [(A, 2), (F, 1), (R, 1)],
        ("actor.parallel={tp: 2}", "reference.parallel={}", "rollout.parallel={}"),
    ),
    ("ppo", True, [(A_R, 1), (C, 1), (F, 1)], ()),
    ("ppo", True, [([*A_R, *C], 1), (F, 1)], ()),
    ("ppo", True, [([*A_R, *F], 1), (C, 1)], ()),
    ("ppo", True, [(A_R, 1), ([*C, *F], 1)], ()),
    ("ppo", True, [(A, 1), (C, 1), (F, 1), (R, 1)], ()),
    ("ppo", True, [(A, 1), ([*C, *R], 1), (F, 1)], ()),
    ("ppo", False, [(A_R, 1), (C, 2), (F, 1)], ()),
    ("ppo", False, [(A_R, 1), (C, 2), (F, 1)], ("critic.parallel={pp: 2}",)),
    (
        "ppo",
        False,
        [(A_R, 2), (C, 1), (F, 1)],
        ("actor.parallel={tp: 2}", "critic.parallel={}", "reference.parallel={}"),
    ),
    ("dapo", True, [(A_R, 1), (F, 1)], ()),
    ("dapo", False, [(A_R, 1), (F, 2)], ("reference.parallel={tp: 2}",)),
    ("replay", True, [(A_R, 1), (F, 1)], ()),
    ("replay", True, [([*A, *F], 1), (R, 1)], ()),
    ("replay", False, [(A, 2), (F, 1), (R, 1)], ("actor.parallel={}", "reference.parallel={}")),
    ("distill", True, [(A_R, 1), (F, 1), (T, 1)], ()),
    ("distill", False, [(A_R, 1), ([*F, *T], 2)], ("reference.parallel={tp: 2}", "teacher.parallel={tp: 2}")),
]


@pytest.fixture(scope="module")
def colocated(recipe: Path) -> Callable[[str], tuple[tuple[str, ...], dict[int, dict[str, float]]]]:
    """Settings of a recipe, and metrics of its run in one process."""
    done: dict[str, tuple[tuple[str, ...], dict[int, dict[str, float]]]] = {}

    def run(name: str) -> tuple[tuple[str, ...], dict[int, dict[str, float]]]:
        if name not in done:
            settings = RECIPES[name]
            if name == "distill":
                run("grpo")  # the model that it leaves is the teacher
                settings = (*settings, f"teacher.path={recipe.parent / 'one-grpo' / 'hf'}")
            done[name] = settings, harness.train(recipe, recipe.parent / f"one-{name}", *settings, "cluster.nproc=1")
        return done[name]

    return run


def _id(case: tuple[str, bool, list[tuple[list[str], int]], tuple[str, ...]]) -> str:
    name, _, teams, more = case
    return "_".join([name, *("+".join(roles) + str(n) for roles, n in teams), *(m.partition(".")[0] for m in more)])


@pytest.mark.campaign("teams")
@pytest.mark.parametrize("case", LAYOUTS, ids=_id)
def test_every_placement_is_the_run_of_one_process(recipe, colocated, case):
    name, same, teams, more = case
    settings, together = colocated(name)
    named = {f"team{number}": team for number, team in enumerate(teams)}
    steps = of_training(apart(recipe, f"apart-{_id(case)}", (*settings, *more), **named))
    if same:
        assert steps == together
    else:
        assert_near(together, steps)
