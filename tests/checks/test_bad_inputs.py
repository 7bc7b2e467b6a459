"""Two hundred bad inputs by kind: each is refused before a run starts, by a message that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.checks.recipe import check_config
from megarl.checks.references import check_arguments
from megarl.checks.rows import check_rows
from megarl.cli import main
from megarl.config.base import raise_problems
from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS
from megarl.rewards.registry import Scorer
from megarl.rewards.scoring import ScoringFailure, score
from megarl.system.errors import UserError
from megarl.system.machine import Machine
from tests.checks.bad_inputs import INPUTS, REWARDS, rows, write_files
from tests.config.conftest import RECIPE

LAPTOP = Machine(cores=2, memory=24e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("bad")
    (here / "recipe.yaml").write_text(RECIPE)
    write_files(here)
    return here


def start(overrides: list[str]) -> None:
    """What `megarl train` does before it starts a process."""
    config = load_config("recipe.yaml", overrides, components=COMPONENTS)
    checked = check_config(config, launcher="local", machine=LAPTOP, starts=True)
    raise_problems([check.problem() for check in checked.items if check.status == "fail"])
    check_rows(config, "train")
    check_arguments(config)


def test_there_are_two_hundred_of_them():
    assert sum(len(rows(kind)) for kind in INPUTS) + len(REWARDS) >= 200


@pytest.mark.parametrize("kind", INPUTS)
def test_every_bad_input_is_refused_at_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(folder)
    passed = []
    for overrides, place in rows(kind):
        try:
            start(overrides)
        except UserError as error:
            if place not in str(error) or error.exit_code != 2:
                passed.append((overrides, str(error)))
        else:
            passed.append((overrides, "accepted"))
    assert passed == []


@pytest.mark.parametrize("kind", INPUTS)
def test_the_command_ends_with_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(folder)
    overrides, _ = rows(kind)[-1]
    assert main(["train", "recipe.yaml", *overrides, "--dry-run"]) == 2
    assert "megarl: " in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "words"), REWARDS)
def test_what_is_no_reward_is_refused(returned: object, words: str) -> None:
    scorer = Scorer("rewards.py:score", lambda samples: returned, "batch", __file__, {})
    failures = [outcome for _, outcome in score(scorer, [{}, {}], False) if isinstance(outcome, ScoringFailure)]
    assert failures
    assert words in failures[0].reason
