"""Recipes of robots: what is refused before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megarl.artifacts.action_statistics import FILE, ActionStatistics, DatasetStatistics, write_statistics
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from tests.robots.recipes import write_flow_recipe, write_robots_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_robots_recipe(tmp_path)


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("robot.family=small", "robot.family", "come from an action expert"),
        ("robot.dim=3", "robot.dim", "another number of values"),
        ("robot.block_only=true", "robot.block_only", "has no action tokens"),
        ("rollout.sampling.temperature=0.7", "rollout.sampling.temperature", "robot.flow.noise"),
        ("validation.sampling={temperature: 0.5}", "validation.sampling.temperature", "robot.flow.noise"),
        ("algorithm.loss.entropy_coef=0.01", "algorithm.loss.entropy_coef", "robot.flow.noise"),
        ("robot.chunk=60", "robot.chunk", "max_position_embeddings = 64"),
        ("actor.parallel.tp=2", "actor.parallel.tp", "on one device"),
        ("reference.parallel={tp: 2}", "reference.parallel.tp", "on one device"),
        ("actor.engine.recompute=full", "actor.engine.recompute", "keys"),
        ("model.hf_config.state_dim=3", "state_dim", "different sizes"),
        ("model.hf_config.action_expert.action_dim=0", "action_expert.action_dim", "positive integer"),
    ],
)
def test_what_a_policy_that_denoises_cannot_have_is_refused(override: str, key: str, text: str, tmp_path: Path) -> None:
    flow = write_flow_recipe(tmp_path)
    assert [check.key for check in check_config(load_config(flow)).items if check.status == "fail"] == []
    failed = [check for check in check_config(load_config(flow, [override])).items if check.status == "fail"]
    assert any(key in check.key and text in check.message for check in failed), failed


def test_denoising_steps_take_no_further_positions(tmp_path: Path) -> None:
    config = load_config(write_flow_recipe(tmp_path), ["robot.flow.steps=30"])
    assert [check.key for check in check_config(config).items if check.status == "fail"] == []


def test_keys_of_denoising_are_refused_for_a_policy_of_tokens(recipe: Path) -> None:
    failed = [
        check for check in check_config(load_config(recipe, ["robot.flow.steps=2"])).items if check.status == "fail"
    ]
    assert [check.key for check in failed] == ["robot.flow"]
    expert = "robot.family=pi0"
    failed = [check for check in check_config(load_config(recipe, [expert])).items if check.status == "fail"]
    assert "robot.family" in [check.key for check in failed]


def test_the_tiny_recipe_passes(recipe: Path) -> None:
    assert [check.key for check in check_config(load_config(recipe)).items if check.status == "fail"] == []


def test_a_missing_interpreter_of_the_simulator_is_refused_where_the_run_starts(recipe: Path) -> None:
    config = load_config(recipe, ["robot.simulator.python=/nowhere/bin/python"])
    [check] = [check for check in check_config(config, starts=True).items if check.status == "fail"]
    assert (check.key, check.found) == ("robot.simulator.python", "/nowhere/bin/python")
    assert [check for check in check_config(config).items if check.status == "fail"] == []
    for python in ("python3", sys.executable):
        named = load_config(recipe, [f"robot.simulator.python={python}"])
        assert [
            check for check in check_config(named, starts=True).items if check.key == "robot.simulator.python"
        ] == []


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("algorithm.pipeline=grpo", "algorithm.pipeline", "scores texts"),
        ("rollout.engine=sglang", "rollout.engine", "servers generate only text"),
        ("rollout.stale_steps=1", "rollout.stale_steps", "own weights"),
        ("actor.parallel.cp=2", "actor.parallel.cp", "attend in both directions"),
        ("algorithm.loss.name=gspo", "algorithm.loss.name", "depend on other tokens"),
        ("data.val_files=['text:hello']", "data.val_files", "megarl eval"),
        ("data.train_files=[rows.jsonl]", "data.train_files", "start states"),
        ("sft.train_files=null", "sft.train_files", "needs demonstrations"),
        ("robot.simulator.name=reech", "robot.simulator.name", "unknown simulator"),
        ("robot.simulator.workers=0", "robot.simulator.workers", "workers"),
        (
            "robot={simulator: {tasks: [left]}, held_out_tasks: [right]}",
            "robot.held_out_tasks",
            "not among the simulator's tasks",
        ),
        (
            "robot={simulator: {tasks: [left]}, held_out_tasks: [left]}",
            "robot.held_out_tasks",
            "there is none to train on",
        ),
        ("robot.simulator={name: metaworld, batched: true}", "robot.simulator.batched", "has no batched form"),
        ("robot.simulator.answer_s=210", "robot.simulator.answer_s", "cluster.timeout_s"),
        ("robot.reward.srpo={raduis: fixed}", "robot.reward.srpo.raduis", "raduis"),
        ("robot.reward.embedding={name: states}", "robot.reward.embedding.name", "states"),
        ("robot.reward.embedding={point: 4}", "robot.reward.embedding.point", "points"),
        ("robot.reward.embedding={name: state, lr: 0.1}", "robot.reward.embedding.lr", "does not read"),
        ("robot.reward.embedding={name: vjepa2}", "robot.reward.embedding.path", "needs a path"),
        (
            "robot.reward={name: progress, embedding: {name: own}, srpo: {bank: 4}}",
            "robot.reward.srpo.bank",
            "cannot be compared",
        ),
        ("robot.reward.per_call=1", "robot.reward.per_call", "credits rewards"),
        ("robot={simulator: {name: robotwin}, reward: {per_call: 1}}", "robot.reward.per_call", "does not measure"),
        ("robot.statistics=demonstrations", "sft.train_files", "no experts"),
        ("rollout.sampling.top_p=0.9", "rollout.sampling.top_p", "sampled from all action tokens"),
        ("robot.chunk=30", "robot.chunk", "max_position_embeddings = 64"),
        ("validation.sampling={top_k: 5}", "validation.sampling.top_k", "sampled from all action tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(recipe: Path, override: str, key: str, text: str) -> None:
    failed = [check for check in check_config(load_config(recipe, [override])).items if check.status == "fail"]
    assert key in [check.key for check in failed]
    assert any(text in str(check.problem()) for check in failed)


def test_a_simulators_rows_need_a_simulator(recipe: Path) -> None:
    checks = check_config(load_config(recipe, ["robot=null"])).items
    assert "robot" in [check.key for check in checks if check.status == "fail"]


@pytest.mark.parametrize(
    ("sizes", "override", "key", "text"),
    [
        ({}, "robot.chunk=2", "model.path", "folder has no action statistics"),
        ({"line": 3}, "robot.chunk=2", "robot.dim", "a different number of action values"),
        ({"line": 2, "other": 2}, "robot.chunk=2", "robot.unnorm_key", "none is chosen"),
        ({"line": 2}, "robot.unnorm_key=lime", "robot.unnorm_key", "no such data set"),
        ({"line": 2, "other": 3}, "robot.unnorm_key=line", None, ""),
    ],
)
def test_the_statistics_beside_a_local_policy_must_fit(
    recipe: Path, tmp_path: Path, sizes: dict[str, int], override: str, key: str | None, text: str
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_config(recipe).model.hf_config))
    if sizes:
        known = {name: DatasetStatistics(ActionStatistics.plain(dim)) for name, dim in sizes.items()}
        write_statistics(folder / FILE, known)
    config = load_config(recipe, ["model.hf_config=null", f"model.path={folder}", override])
    found = [(check.key, check.message) for check in check_config(config).items if check.status == "fail"]
    found = [(where, message) for where, message in found if check_is_of_statistics(where, message)]
    assert [where for where, _ in found] == ([] if key is None else [key])
    assert all(text in message for _, message in found)


def check_is_of_statistics(where: str | None, message: str) -> bool:
    """The folder has no weights, of which other checks complain."""
    return where in ("robot.dim", "robot.unnorm_key") or "statistics" in message
