"""An engine that is one folder, tests/rollout/dice, trains with one team, with several, and as ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.checks.dry_run import make_plan
from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS
from tests.runtime import harness

ENGINE = f"rollout.engine={Path(__file__).parent / 'dice' / 'family.py'}:DiceFamily"
RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = (
    *("model.hf_config.num_hidden_layers=1", "model.hf_config.hidden_size=64", "data.batch_size=4", "sft.steps=0"),
    *("trainer.steps=2", "trainer.save_every=0", "trainer.export_hf=false", "validation.every=0"),
    *("tracking.mlflow=false", "tracking.report=false"),
)


def test_a_dry_run_knows_it() -> None:
    plan = make_plan(load_config(RECIPES / "grpo_quickstart.yaml", [ENGINE], components=COMPONENTS), "local")

    assert plan.problems == []
    assert "a server's" not in plan.text


@pytest.mark.procs
def test_the_quickstart_trains_with_it(tmp_path: Path) -> None:
    numbers = harness.train(RECIPES / "grpo_quickstart.yaml", tmp_path / "run", ENGINE, *SMALL, "cluster.nproc=1")

    assert set(numbers) >= {1, 2}


@pytest.mark.procs
def test_two_teams_train_with_it_as_ready(tmp_path: Path) -> None:
    numbers = harness.train(RECIPES / "grpo_async_quickstart.yaml", tmp_path / "run", ENGINE, *SMALL)

    assert set(numbers) >= {1, 2}
