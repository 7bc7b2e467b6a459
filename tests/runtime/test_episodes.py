"""Runs with an environment of several turns from a file of the user's."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]

GUESS, LOOK = (Path(__file__).parents[1] / "envs" / name for name in ("guess.py", "look.py"))
SETTINGS = (
    f"env.name={GUESS}:Guess",
    "rollout.sampling={n: 4, max_new_tokens: 4, stop_token_ids: [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}",
    "rollout.limits.tokens=20",
    "algorithm.kl.use=none",
    "sft.steps=0",
    "trainer.steps=3",
    "validation={sampling: {max_new_tokens: 4}, every: 3, before_train: false}",
)
#: Stops for ever in its 20th answer, once: a run that is killed there is killed in the middle of an episode.
STALLING = f"""
import sys, time
from pathlib import Path
from pydantic import Field
sys.path.append({str(GUESS.parent)!r})
from guess import Guess, GuessSettings

class StallSettings(GuessSettings):
    marker: str = Field(description="file that says that it has stopped once")

class Stall(Guess):
    Settings = StallSettings

    @classmethod
    def open(cls, settings):
        return []

    async def step(self, action):
        self.shared.append(action.turn)
        marker = Path(self.settings.marker)
        if len(self.shared) > 20 and action.turn == 1 and not marker.exists():
            marker.touch()
            time.sleep(600)
        return await super().step(action)
"""
#: Begins with an observation that is made of the data's prompt, writes down what it begins with, and cannot begin for
#: the fifth time with an odd seed. Four samples come first: the fifth is the greedy episode.
FRAGILE = f"""
import json, sys, threading
from collections import Counter
from pydantic import Field
sys.path.append({str(GUESS.parent)!r})
from guess import Guess, GuessSettings

class FragileSettings(GuessSettings):
    log: str = Field(description="file of seeds and prompts")

class Shared:
    def __init__(self):
        self.lock, self.seen = threading.Lock(), Counter()

class Fragile(Guess):
    Settings = FragileSettings

    @classmethod
    def open(cls, settings):
        return Shared()

    def reset(self, row, seed):
        with self.shared.lock:
            self.shared.seen[seed] += 1
            times = self.shared.seen[seed]
            with open(self.settings.log, "a") as log:
                log.write(json.dumps([seed, row["prompt"]]) + "\\n")
        if times == 5 and seed % 2:
            raise RuntimeError("no state")
        return row["prompt"] + super().reset(row, seed)
"""
GREEDY = ("algorithm.advantage.name=remax", "data.val_files=[]", "validation.every=0", "trainer.best_metric=null")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return harness.train(recipe, tmp_path_factory.mktemp("run"), *SETTINGS, "cluster.nproc=1")


def test_episodes_of_three_turns_are_played_trained_on_and_reported(undisturbed):
    assert [numbers["env/turns/max"] for numbers in undisturbed.values()] == [3.0] * 3
    assert all(1 < numbers["env/turns/mean"] <= 3 and numbers["env/errors"] == 0 for numbers in undisturbed.values())
    assert all(numbers["actor/grad_norm"] > 0 for numbers in undisturbed.values())
    assert undisturbed[3]["val/env_errors"] == 0
    assert "val/acc" in undisturbed[3]


def test_two_replicas_play_the_same_episodes(recipe, undisturbed, tmp_path):
    two = harness.train(recipe, tmp_path, *SETTINGS, "validation.every=0", "trainer.steps=1")
    for name, value in undisturbed[1].items():
        assert two[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def compared_with_greedy_episodes(recipe: Path, folder: Path, *overrides: str):
    """Metrics of a run with ReMax, and the prompts that the environment of each seed began with."""
    (folder / "fragile.py").write_text(FRAGILE)
    env = f"env={{name: '{folder}/fragile.py:Fragile', log: '{folder}/log', on_error: mark}}"
    numbers = harness.train(recipe, folder / "run", *SETTINGS, *GREEDY, env, *overrides)
    began = defaultdict(list)
    for line in (folder / "log").read_text().splitlines():
        seed, prompt = json.loads(line)
        began[seed].append(prompt)
    return numbers, began


def test_remax_plays_one_greedy_episode_of_the_same_task_per_prompt(recipe, tmp_path_factory):
    one, began = compared_with_greedy_episodes(recipe, tmp_path_factory.mktemp("one"), "cluster.nproc=1")
    assert len(one) == 3
    assert len(began) == 12
    assert all(len(prompts) == 5 and len(set(prompts)) == 1 for prompts in began.values()), "same seed, same prompt"
    failed = sum(seed % 2 for seed in began)
    assert 0 < failed < 12
    assert sum(numbers["env/greedy_errors"] for numbers in one.values()) == failed
    assert all(numbers["env/errors"] == 0 and numbers["env/turns/max"] == 3 for numbers in one.values())
    assert all(numbers["actor/grad_norm"] > 0 and numbers["critic/greedy_score/mean"] > 0 for numbers in one.values())


@pytest.mark.campaign("teams")  # without greedy episodes: above
def test_two_replicas_play_the_same_greedy_episodes(recipe, tmp_path_factory):
    one, began = compared_with_greedy_episodes(recipe, tmp_path_factory.mktemp("one"), "cluster.nproc=1")
    two, again = compared_with_greedy_episodes(recipe, tmp_path_factory.mktemp("two"), "trainer.steps=1")
    assert again.items() <= began.items()
    for name, value in one[1].items():
        assert two[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_run_that_is_killed_in_the_middle_of_an_episode_goes_on_as_if_it_were_not(recipe, undisturbed, tmp_path):
    (tmp_path / "stall.py").write_text(STALLING)
    marker, run_dir = tmp_path / "marker", tmp_path / "run"
    stalling = (*SETTINGS, f"env={{name: '{tmp_path}/stall.py:Stall', marker: '{marker}'}}", "cluster.nproc=1")
    process = harness.start(recipe, run_dir, *stalling)
    harness.wait_for(marker.exists, process)
    for pid in harness.workers(run_dir).values():
        harness.kill(pid)
    harness.finish(process)
    assert process.returncode != 0
    assert harness.train(recipe, run_dir, *stalling) == undisturbed


def test_a_misspelt_setting_is_refused_before_a_process_starts(recipe, tmp_path):
    process = harness.start(recipe, tmp_path, *SETTINGS, "env.turn=2")
    output = harness.finish(process)
    assert process.returncode == 2, output
    assert "has no setting 'turn'" in output
    assert "allowed: name, on_error, highest, turns" in output
    assert not list(tmp_path.glob("logs*"))


def test_an_environment_shows_images_that_are_trained_on_scored_and_reported(tmp_path):
    """Of two steps with a tiny model that has learnt nothing: it looks because it knows no better."""
    numbers = harness.train(
        Path(__file__).parents[2] / "recipes" / "grpo_shapes_quickstart.yaml",
        tmp_path,
        f"env={{name: '{LOOK}:Look', looks: 3}}",
        "rollout={limits: {turns: 4, tokens: 40}, sampling: {n: 4, max_new_tokens: 1, stop_token_ids: [19, 20]}}",
        "data={batch_size: 8, loader_kwargs: {count: 16, held_out: 32}, limit_images: 4}",
        "validation={every: 2, before_train: false, log_samples: 32, sampling: {max_new_tokens: 1, temperature: 1.0}}",
        "sft.steps=0",
        "algorithm.advantage.name=remax",
        "trainer={steps: 2, save_every: 0}",
        "cluster.nproc=1",
    )
    for step in numbers.values():
        assert step["env/looks"] > 0
        assert step["images/per_sample"] == pytest.approx(1 + step["env/looks"])
        assert step["actor/grad_norm"] > 0
        assert step["env/errors"] == step["env/greedy_errors"] == 0
    shown = [json.loads(line)["images"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert max(map(len, shown)) > 1
