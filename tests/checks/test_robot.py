"""Recipes of robots: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from tests.runtime.robots import write_robots_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_robots_recipe(tmp_path)


def test_the_tiny_recipe_passes(recipe: Path) -> None:
    assert [check.key for check in check_config(load_config(recipe)).items if check.status == "fail"] == []


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("algorithm.pipeline=grpo", "algorithm.pipeline", "scored by its episodes"),
        ("rollout.engine=sglang", "rollout.engine", "servers write texts"),
        ("rollout.stale_steps=1", "rollout.stale_steps", "own weights"),
        ("actor.parallel.cp=2", "actor.parallel.cp", "see all of it"),
        ("algorithm.loss.name=gspo", "algorithm.loss.name", "whole responses"),
        ("data.train_files=[rows.jsonl]", "data.train_files", "start states of its simulator"),
        ("sft.train_files=null", "sft.train_files", "learns from demonstrations"),
        ("robot.simulator.name=reech", "robot.simulator.name", "unknown simulator"),
        ("robot.simulator.workers=0", "robot.simulator.workers", "workers"),
        ("robot.simulator.answer_s=70", "robot.simulator.answer_s", "cluster.timeout_s"),
        ("robot.reward.srpo={raduis: fixed}", "robot.reward.srpo.raduis", "raduis"),
        ("robot.reward.embedding={name: states}", "robot.reward.embedding.name", "states"),
        ("robot.reward.embedding={point: 4}", "robot.reward.embedding.point", "points"),
        ("robot.reward.embedding={name: state, lr: 0.1}", "robot.reward.embedding.lr", "does not read"),
        ("robot.reward.embedding={name: vjepa2}", "robot.reward.embedding.path", "no default"),
        (
            "robot.reward={name: progress, embedding: {name: own}, srpo: {bank: 4}}",
            "robot.reward.srpo.bank",
            "cannot be compared",
        ),
        ("rollout.sampling.top_p=0.9", "rollout.sampling.top_p", "drawn from all of their values"),
        ("validation.sampling={top_k: 5}", "validation.sampling.top_k", "drawn from all of their values"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(recipe: Path, override: str, key: str, text: str) -> None:
    failed = [check for check in check_config(load_config(recipe, [override])).items if check.status == "fail"]
    assert key in [check.key for check in failed]
    assert any(text in str(check.problem()) for check in failed)


def test_a_simulators_rows_need_a_simulator(recipe: Path) -> None:
    checks = check_config(load_config(recipe, ["robot=null"])).items
    assert "robot" in [check.key for check in checks if check.status == "fail"]
