"""Environments by name, and what is refused before a run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from megarl.config.data import RewardConfig
from megarl.config.run import RunConfig
from megarl.envs.registry import check_environment, load_environment
from megarl.system.errors import ConfigError

JUDGED = "\n\nclass Judged(Guess):\n    scores = False\n"
GUESS = f"{Path(__file__).parent / 'guess.py'}:Guess"


def test_an_environment_from_a_file_has_settings_of_its_own():
    kind, settings = load_environment({"name": GUESS, "on_error": "mark", "turns": 2})
    assert kind.__name__ == "Guess"
    assert settings.turns == 2
    assert settings.highest == 9


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"name": GUESS, "turn": 2},
            r"env.turn: .*no setting 'turn'[\s\S]*name, on_error, highest, turns[\s\S]*'turns'",
        ),
        ({"name": GUESS, "turns": 0}, r"env.turns is out of range[\s\S]*integer >= 1"),
        ({"name": GUESS, "on_error": "skip"}, r"env.on_error: [\s\S]*'skip'[\s\S]*fail, mark"),
        ({"name": GUESS + "es"}, r"does not define an environment 'Guesses'[\s\S]*allowed: Guess"),
        ({"name": "single-turn"}, r"this environment does not exist[\s\S]*did you mean 'single_turn'"),
        ({"name": "chess"}, r"this environment does not exist[\s\S]*set env\.name to one of these"),
        ({"name": "nowhere.py:Guess"}, r"env.name: this file does not exist"),
        (
            {"name": "json:Guess"},
            r"json does not define an environment 'Guess'[\s\S]*derived from megarl.envs.Environment",
        ),
        ({"name": "single_turn", "turns": 3}, r"'single_turn' has no setting 'turns'"),
    ],
)
def test_what_is_wrong_is_said_with_what_is_allowed(env, message):
    with pytest.raises(ConfigError, match=message):
        load_environment(env)


def test_a_file_that_does_not_import_is_named(tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match=r"importing .*bad.py failed: ModuleNotFoundError"):
        load_environment({"name": f"{tmp_path / 'bad.py'}:Env"})


@pytest.mark.parametrize(
    ("env", "reward", "ignored"),
    [
        ({"name": GUESS}, {}, None),
        ({"name": GUESS}, {"name": "numeric", "workers": 2}, {"name": "numeric", "workers": 2}),
        ({"name": f"{GUESS.replace('Guess', 'Judged')}"}, {"name": "numeric"}, None),
        ({"name": "single_turn"}, {"name": "numeric"}, None),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_reward_beside_an_environment_that_scores_is_told(tmp_path, env, reward, ignored):
    (tmp_path / "guess.py").write_text(Path(GUESS.rpartition(":")[0]).read_text() + JUDGED)
    env = {"name": env["name"].replace(str(Path(__file__).parent), str(tmp_path))}
    found = check_environment(RunConfig(name="run", env=env, reward=RewardConfig(**reward)), limit_s=60)
    assert (found.found if found else None) == ignored
    assert found is None or "scores its episodes itself" in found.what


def test_the_documentation_shows_the_environments_that_are_tested(monkeypatch):
    root = Path(__file__).parents[2]
    shown = (root / "docs/environments.md").read_text()
    monkeypatch.syspath_prepend(root / "tests/envs")
    (by_hand,) = re.findall(r"```\n(>>>.*?)```", shown, re.S)
    examples = doctest.DocTestParser().get_doctest(by_hand, {}, "by hand", None, 0)
    assert doctest.DocTestRunner().run(examples).failed == 0
    assert all((root / "tests/envs" / name).read_text() in shown for name in ("guess.py", "look.py"))


@pytest.mark.parametrize(
    ("methods", "allowed"),
    [
        ("def reset(self): ...\n    def step(self, action): ...", r"reset\(self, row, seed\)"),
        ("def step(self, action, turn): ...", r"step\(self, action\)"),
    ],
)
def test_a_method_with_other_parameters_is_refused(methods, allowed, tmp_path):
    file = tmp_path / "other.py"
    file.write_text(f"from megarl.envs import Environment\nclass Other(Environment):\n    {methods}\n")
    with pytest.raises(ConfigError, match=rf"does not accept the arguments[\s\S]*allowed: {allowed}"):
        load_environment({"name": f"{file}:Other"})


def test_an_environment_that_answers_no_turn_is_refused(tmp_path):
    file = tmp_path / "silent.py"
    file.write_text(
        "from megarl.envs import Environment\nclass Silent(Environment):\n    def reset(self, row, seed): ...\n"
    )
    with pytest.raises(ConfigError, match=r"the environment Silent in .*silent.py has no method step"):
        load_environment({"name": f"{file}:Silent"})
