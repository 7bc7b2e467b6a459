"""Training steps in the published simulators: Meta-World, LIBERO with a policy in OpenVLA-OFT's layout."""

from __future__ import annotations

import json
import os
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megarl.artifacts.action_statistics import ActionStatistics, DatasetStatistics, write_statistics
from megarl.data.tokenizer import character_tokenizer
from megarl.models.weight_table import WeightTable
from megarl.robots.models.vla.config import policy_config
from megarl.robots.simulators.libero import MESHES
from tests.forked import Command
from tests.robots.models.vla.small import DINO, SIGLIP
from tests.robots.simulators import stand_in_libero
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
FEW = (
    *("data.batch_size=2", "rollout.sampling.n=2", "validation.before_train=false", "validation.every=0"),
    *("trainer.steps=2", "trainer.save_every=2", "tracking={mlflow: false, report: false}", "cluster.timeout_s=120"),
    *("algorithm.dynamic_sampling.enabled=false", "robot.simulator.workers=1", "robot.held_out=2"),
)


def check(numbers: dict[int, dict[str, float]], longest: int, episodes: int = 4, steps: int = 2) -> None:
    """Steps in which every episode was played and the policy got a gradient, if any episode succeeded."""
    assert sorted(numbers) == list(range(1, steps + 1))
    for found in numbers.values():
        assert found["env/errors"] == 0
        assert found["env/steps/total"] == episodes * found["env/steps/mean"]
        assert 1 <= found["env/steps/mean"] <= longest
        assert found["critic/score/mean"] == found["env/success"]
        assert np.isfinite(found["actor/pg_loss"])


def meta_world() -> Path:
    """Meta-World's interpreter; the test is skipped without one."""
    (pinned,) = [line for line in (ROOT / "constraints-metaworld.txt").read_text().split() if "metaworld==" in line]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = cache / "megarl" / pinned.replace("==", "-") / "bin" / "python"
    if not (python.parents[1] / ".complete").is_file():
        pytest.skip(f"no {python}: `make metaworld-env` makes it")
    return python


@pytest.mark.campaign("libero")  # the simulator as of simulators/test_metaworld.py, cloning as of test_runs.py
def test_meta_world_is_cloned_and_trained_on(tmp_path) -> None:
    python = meta_world()
    few = (*FEW, f"robot.simulator.python={python}", "robot.simulator.max_steps=100", "robot.trials=4")
    cloning = ("robot.demonstrations=1", "robot.expert_noise=0", "sft.steps=2", "sft.batch_size=8")
    cloning += ("sft.eval_every=0", "sft.stop_at_accuracy=null")
    numbers = harness.train(ROOT / "recipes" / "srpo_metaworld.yaml", tmp_path, *few, *cloning)
    check(numbers, 100)
    assert len(list((tmp_path / "demonstrations").glob("*.safetensors"))) == 2
    assert (tmp_path / "hf" / "dataset_statistics.json").is_file()


@pytest.mark.campaign("libero")  # splits by task: rollout/test_policy.py, and their table: test_runs.py
def test_ml10_is_measured_by_task_and_by_split(tmp_path) -> None:
    python = meta_world()
    recipe = ROOT / "recipes" / "srpo_metaworld_ml10.yaml"
    short = ("robot.simulator.max_steps=16", f"robot.simulator.python={python}", "robot.trials=4", "cluster.nproc=1")
    numbers = harness.train(recipe, tmp_path / "run", *FEW, *short, "sft.steps=0", "trainer.steps=1")
    assert (numbers[1]["val/iid/prompts"], numbers[1]["val/ood/prompts"]) == (20, 10)
    trained = (f"model.path={tmp_path / 'run' / 'hf'}", "model.hf_config=null", "model.tokenizer=null")
    command = Command(["eval", recipe, *FEW, *short, *trained, "sft.steps=0", "--run-dir", tmp_path / "eval"], tmp_path)
    output = harness.finish(command)
    assert command.returncode == 0, output[-3000:]
    rows = [row.split("│") for row in output.splitlines() if row.startswith("│")]
    table = {cells[1].strip(): int(cells[3]) for cells in rows if len(cells) == 5}  # source, accuracy, prompts
    assert (table["iid"], table["ood"], table["all"]) == (20, 10, 30)
    assert table["reach-v3_iid"] == table["lever-pull-v3_ood"] == 2
    assert len(table) == 15 + 3


def save_oft(folder: Path) -> None:
    """A small random policy with the vocabulary, the two towers and the statistics of OpenVLA-OFT's checkpoints."""
    text = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 32064, "max_position_embeddings": 256}
    config = {"model_type": "openvla", "vision_towers": [DINO, SIGLIP], "pad_to_multiple_of": 64}
    config |= {"n_action_bins": 256, "text_config": {**text, "rms_norm_eps": 1e-6, "pad_token_id": 32000}}
    generator = torch.Generator().manual_seed(1)
    shapes = WeightTable.of(policy_config(config, "small")).shapes()
    save_file({name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = "abcdefghijklmnopqrstuvwxyzIOW :?\n"
    character_tokenizer(alphabet).save_pretrained(folder)
    actions = np.random.default_rng(0).uniform(-1, 1, (100, 7))
    action = ActionStatistics.of(actions, [True] * 6 + [False])
    statistics = DatasetStatistics(action, None, transitions=100, trajectories=1)
    write_statistics(folder / "dataset_statistics.json", {"libero_goal_no_noops": statistics})


def with_stand_in(folder: Path) -> tuple[Path, Path]:
    """An interpreter that has the stand-in for LIBERO, and the meshes that it looks for."""
    stand_in_libero.write(folder / "packages")
    meshes = folder / "meshes"
    for name in MESHES:
        (meshes / name).mkdir(parents=True)
    venv.create(folder / "env", symlinks=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    site.joinpath("here.pth").write_text(f"{folder / 'packages'}\n{Path(np.__file__).parents[1]}\n")
    return folder / "env" / "bin" / Path(sys.executable).name, meshes


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.campaign("libero"))])
def test_a_policy_in_the_layout_of_openvla_oft_is_trained_in_libero(real, tmp_path) -> None:
    """Real: MEGARL_LIBERO_PYTHON names the interpreter of `make libero-env`, MEGARL_LIBERO_ASSETS the meshes."""
    if real and "MEGARL_LIBERO_PYTHON" not in os.environ:
        pytest.skip("MEGARL_LIBERO_PYTHON is not set")
    python, meshes = (
        (os.environ["MEGARL_LIBERO_PYTHON"], os.environ["MEGARL_LIBERO_ASSETS"]) if real else with_stand_in(tmp_path)
    )
    policy = tmp_path / "policy"
    policy.mkdir()
    save_oft(policy)
    simulator = f"name: libero, suites: [libero_goal], tasks: [libero_goal/0], cameras: [agentview], python: {python}"
    numbers = harness.train(
        ROOT / "recipes" / "srpo_libero_openvla_oft_8gpu.yaml",
        tmp_path / "run",
        *FEW,
        f"trainer.steps={1 + real}",
        f"model={{path: {policy}, dtype: fp32}}",
        f"robot.simulator={{{simulator}, assets: {meshes}, limits: openvla, size: 16, construct_s: 200}}",
        "robot.reward.embedding=!replace {name: state}",
        "actor.parallel={tp: 2, sp: true}",
        "actor.engine={micro_batch_tokens: 8192}",
        "actor.mini_batch_size=null",
        "data.batch_size=1",
        "robot.chunk=25",
        "cluster={nproc: 2, threads: 1, timeout_s: 300}",
    )
    check(numbers, 300, episodes=2, steps=1 + real)
    assert (tmp_path / "run" / "hf" / "dataset_statistics.json").is_file()
