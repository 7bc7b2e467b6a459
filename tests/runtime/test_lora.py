"""Runs that train low-rank adapters: resumed bit for bit after kill -9, their files, and their reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist import no_parallel
from tests.forked import Command
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def settings(recipe: Path, tmp_path: Path) -> tuple[str, ...]:
    """Of a run with adapters on a model that is in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megarl.config.load import load_config

    config = dict(load_config(recipe).model.hf_config or {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path / "base")
    lora = "model.lora={rank: 4, dropout: 0.1}"
    return (
        f"model.path={tmp_path / 'base'}",
        "model.hf_config=null",
        lora,
        "sft.steps=0",
        "actor.optim.lr=1.0e-2",
        "cluster.nproc=1",
        "trainer.steps=3",
    )


def test_a_killed_run_resumes_to_the_same_numbers_and_its_files_are_the_adapters(recipe, settings, tmp_path):
    from safetensors import safe_open

    from megarl.commands.convert import convert

    whole = harness.train(recipe, tmp_path / "whole", *settings)
    assert whole[1]["actor/grad_norm"] > 0
    killed = tmp_path / "killed"
    with harness.held_at(recipe, killed / "checkpoints/step_2/meta.json"):
        process = harness.start(recipe, killed, *settings)
        harness.wait_for((killed / "checkpoints/step_2/meta.json").exists, process)
        harness.kill(harness.workers(killed)[0])
    harness.finish(process)
    assert harness.train(recipe, killed, *settings) == whole

    names = set()
    for file in (killed / "checkpoints/step_3").glob("rank_*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    assert names
    assert all(".lora_A.weight@" in name or ".lora_B.weight@" in name for name in names)
    no_parallel()  # of another test
    convert(killed / "checkpoints/step_3", tmp_path / "from checkpoint")
    convert(killed / "hf_adapter", tmp_path / "from adapter")
    merged = (killed / "hf/model.safetensors").read_bytes()
    assert merged != (tmp_path / "base/model.safetensors").read_bytes()
    assert (tmp_path / "from checkpoint/model.safetensors").read_bytes() == merged
    assert (tmp_path / "from adapter/model.safetensors").read_bytes() == merged

    weights = tmp_path / "base/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(AssertionError, match="the model's files have changed since the run began"):
        harness.train(recipe, killed, *settings, "trainer.steps=4")


def test_the_reference_is_the_model_without_adapters(recipe, settings, tmp_path):
    settings = (*settings, "trainer.steps=2")
    off = harness.train(recipe, tmp_path / "off", *settings)
    named = harness.train(recipe, tmp_path / "named", *settings, f"reference.path={tmp_path / 'base'}")
    assert off == named
    assert any(value > 0 for name, value in off[2].items() if name.rpartition("/")[2].startswith("kl"))
    assert not (tmp_path / "off/reference").exists()
    state = json.loads((tmp_path / "off/checkpoints/step_2/state.json").read_text())
    assert state["frozen"]["reference"]["key"] == "model.lora"


@pytest.mark.campaign("lora")
@pytest.mark.timeout(3600)
def test_rank_16_learns_what_full_training_does(tmp_path):
    """Greedy accuracy after 100 steps of GRPO from one supervised model, within five points; 15 minutes."""
    quiet = ("tracking.mlflow=false", "tracking.report=false")

    def run(*arguments: object) -> None:
        command = Command(arguments, tmp_path)
        output = harness.finish(command, 1200)
        assert command.returncode == 0, output[-3000:]

    run("sft", "grpo_quickstart", *quiet, "--run-dir", tmp_path / "sft")
    start = (f"model.path={tmp_path / 'sft/hf'}", "model.hf_config=null", "sft.steps=0")
    found = {}
    for name, settings in {"full": (), "rank 16": ("model.lora.rank=16", "actor.optim.lr=1.5e-3")}.items():
        steps = (*quiet, *start, *settings, "trainer.steps=100", "validation.every=100")
        run("train", "grpo_quickstart", *steps, "--run-dir", tmp_path / name)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = [line["val/acc"] for line in lines if "val/acc" in line][-1]
    print(found)
    assert found["rank 16"] > found["full"] - 0.05
