"""Whole runs of a robot policy: experts, cloning, episodes in simulators' processes, updates, checkpoints."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import transformers

from megarl.artifacts.action_statistics import read_statistics
from megarl.config.load import load_config
from megarl.runtime.export import trial_command
from tests.robots.models.episodes.test_vjepa2 import SMALL
from tests.robots.recipes import write_flow_recipe, write_robots_recipe
from tests.runtime import harness
from tests.runtime.test_durability import at_step

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]
STEPS = 3
TWO_LAYERS = "model.hf_config.text_config.num_hidden_layers=2"  # where layers are split into stages


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_robots_recipe(tmp_path_factory.mktemp("recipe"), workers=1)


@pytest.fixture(scope="module")
def run_dir(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    harness.train(recipe, folder)
    return folder


def test_a_run_clones_plays_updates_and_measures(run_dir: Path) -> None:
    numbers = harness.metrics(run_dir)
    assert sorted(numbers) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        found = numbers[step]
        assert found["env/errors"] == 0
        assert 0 < found["env/success"] == found["critic/score/mean"] <= 1
        assert 1 <= found["env/calls/mean"] <= 3
        assert found["env/steps/total"] == found["env/steps/mean"] * 16
        assert found["actor/grad_norm"] >= 0
    assert [step for step in numbers if "val/acc" in numbers[step]] == [0, 2, 3], "every second step and the last one"
    stages = [json.loads(line)["stage"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert stages[:3] == ["sft"] * 3
    assert len(list((run_dir / "demonstrations").glob("*.safetensors"))) == 6, "start states that are trained on"
    assert "Line" in next(iter(read_statistics(run_dir / "hf" / "dataset_statistics.json")))


@pytest.mark.campaign("kills")  # with cloning and with refills, below
def test_a_killed_rank_leaves_the_same_run_after_it_is_resumed(recipe, run_dir, tmp_path) -> None:
    process = harness.start(recipe, tmp_path)
    harness.wait_for(lambda: at_step(tmp_path, 2), process)
    harness.kill(harness.workers(tmp_path)[1])
    harness.finish(process)
    assert harness.train(recipe, tmp_path) == harness.metrics(run_dir)


@pytest.mark.campaign("kills")  # the episodes themselves: tests/robots/envs/test_batched_pool.py
def test_environments_of_one_process_give_the_run_of_a_pool_and_its_last_step_again(recipe, run_dir, tmp_path) -> None:
    lines = Path(__file__).parent / "simulators" / "lines.py"
    both = ("robot.halves=false", "robot.simulator.workers=2")
    settings = (f"robot.simulator.name={lines}:Lines", "robot.simulator.batched=true", *both)
    expected = harness.train(recipe, tmp_path, *settings)
    single = harness.train(recipe, tmp_path / "single", *both)
    assert expected == single
    assert without_its_last_step(recipe, tmp_path, *settings) == expected


#: Groups that all fail or all succeed are drawn again, and what is left over waits.
REFILLS = "algorithm.dynamic_sampling={enabled: true, metric: success, max_rounds: 6, short: fill}"


def test_scores_by_progress_refills_and_kept_successes_go_on_from_a_checkpoint(recipe, tmp_path) -> None:
    """Of two replicas, with the encoder that learns; a checkpoint brings back encoder, leftovers and successes."""
    reward = "robot.reward={name: progress, embedding: {name: own}, srpo: {bank: 4}}"
    settings = (reward, REFILLS, "validation.before_train=false")
    expected = harness.train(recipe, tmp_path, *settings)
    assert max(found["sampling/rounds"] for found in expected.values()) > 1, "nothing was drawn again"
    assert all(0 < expected[step]["critic/score/mean"] <= 1 for step in range(1, STEPS + 1))
    shaped = [found for found in expected.values() if found.get("srpo/shaped_share")]
    assert shaped, "no failure was scored by its distance"
    assert all(0 < found["srpo/failure_score/mean"] < 1 for found in shaped)
    assert without_its_last_step(recipe, tmp_path, *settings) == expected


@pytest.mark.campaign("kills")  # with the encoder that learns: above
def test_refills_and_kept_successes_go_on_from_a_checkpoint(recipe, tmp_path) -> None:
    settings = ("robot.reward={name: progress, srpo: {bank: 4}}", REFILLS, "validation.before_train=false")
    expected = harness.train(recipe, tmp_path, *settings)
    assert max(found["sampling/rounds"] for found in expected.values()) > 1, "nothing was drawn again"
    # Written out, the default embedding is the same one.
    assert without_its_last_step(recipe, tmp_path, *settings, "robot.reward.embedding.points=8") == expected


PPO = (
    *("algorithm.advantage={name: gae, gamma: 0.9, lam: 0.8}", "robot.reward.per_call=0.5", "rollout.sampling.n=2"),
    *("critic.optim={lr: 1.0e-2}", "critic.engine.micro_batch_tokens=200", "critic.mini_batch_size=2"),
    *("validation.before_train=false", "validation.every=0", "trainer.epochs=2", "sft.steps=0", "cluster.nproc=1"),
)


def test_a_critic_learns_the_values_of_policy_calls_and_goes_on_from_a_checkpoint(recipe, tmp_path) -> None:
    expected = harness.train(recipe, tmp_path, *PPO)
    assert sorted(expected) == list(range(1, STEPS + 1)), "two epochs of six start states in batches of four"
    assert all(found["critic/vf_loss"] > 0 and found["critic/grad_norm"] > 0 for found in expected.values() if found)
    # The first values are zero. A return of a call is at most the score and half of the progress after it.
    assert expected[1]["critic/vpred_mean"] == pytest.approx(0, abs=0.3)  # the second of two optimizer steps
    assert 0 < expected[1]["critic/returns/mean"] < 1.5
    assert without_its_last_step(recipe, tmp_path, *PPO) == expected
    start = (f"critic.path={tmp_path / 'hf_critic'}", "trainer.steps=1")
    again = harness.train(recipe, tmp_path / "again", *PPO, *start)
    assert again[1]["critic/vpred_mean"] > 0.1, "the values of the first critic, not those of a new one"


@pytest.mark.campaign("teams")  # the model's layouts: tests/robots/models/vla/test_layouts.py
@pytest.mark.parametrize("layout", ["pp: 2", "tp: 2", "tp: 2, sp: true"])
def test_the_layout_changes_no_value_of_a_policy_call(layout, recipe, tmp_path) -> None:
    settings = (*PPO, "trainer.steps=2", TWO_LAYERS)
    expected = harness.train(recipe, tmp_path / "one", *settings)
    settings = (*settings, "cluster.nproc=2")
    replicas = harness.train(recipe, tmp_path / "replicas", *settings)
    found = harness.train(recipe, tmp_path / "layout", *settings, f"actor.parallel={{{layout}}}")
    for numbers in (found, replicas):
        for step in (1, 2):
            assert numbers[step]["env/steps/total"] == expected[step]["env/steps/total"]
            for name in ("vf_loss", "returns/mean", "vpred_mean", "grad_norm", "advantages/max"):
                name = f"critic/{name}"
                # fp32 sums in another order, after an optimizer step whose first moments are signs
                assert numbers[step][name] == pytest.approx(expected[step][name], rel=2e-3, abs=2e-4), name


@pytest.mark.campaign("teams")
@pytest.mark.parametrize("parts", ["[gradients]", "[optimizer]", "[parameters]", "true"])
def test_parts_that_leave_the_device_change_no_number(parts, recipe, tmp_path) -> None:
    settings = ("algorithm.kl={use: loss, coef: 0.1}", "trainer.steps=2", "cluster.nproc=1")
    expected = harness.train(recipe, tmp_path / "staying", *settings)
    assert harness.train(recipe, tmp_path / "leaving", *settings, f"actor.engine.offload={parts}") == expected


def test_a_policy_that_denoises_learns_and_goes_on_from_a_checkpoint(tmp_path) -> None:
    """Cloning by flow matching, episodes, updates by the chains' log-probs, an export; the last step is done again."""
    recipe, run_dir = write_flow_recipe(tmp_path), tmp_path / "run"
    settings = ("validation.every=0", "validation.before_train=false", "actor.mini_batch_size=2", "cluster.nproc=1")
    expected = harness.train(recipe, run_dir, *settings)
    losses = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in losses][:3] == ["sft"] * 3
    for step in range(1, STEPS + 1):
        numbers = expected[step]
        assert numbers["env/errors"] == 0
        assert numbers["rollout_corr/logp_diff_max"] < 1e-3, "the trainer's log-probs are the rollout's"
    assert any(numbers["actor/grad_norm"] > 0 for numbers in expected.values())
    config = json.loads((run_dir / "hf" / "config.json").read_text())
    assert config["action_expert"]["action_dim"] == 2
    assert without_its_last_step(recipe, run_dir, *settings) == expected


@pytest.mark.campaign("teams")  # a critic of tokens: above
def test_a_critic_learns_the_values_of_a_policy_that_denoises(tmp_path) -> None:
    expected = harness.train(write_flow_recipe(tmp_path), tmp_path / "run", *PPO)
    assert all(found["critic/vf_loss"] > 0 and found["critic/grad_norm"] > 0 for found in expected.values() if found)


def without_its_last_step(recipe: Path, run_dir: Path, *settings: str) -> dict[int, dict[str, float]]:
    """Metrics of a run of which the last step is done again, from the checkpoint before it."""
    shutil.rmtree(run_dir / "checkpoints" / f"step_{STEPS}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["stage"] == "sft" or json.loads(line)["step"] < STEPS]
    (run_dir / "metrics.jsonl").write_text("".join(kept))
    return harness.train(recipe, run_dir, *settings)


@pytest.mark.campaign("teams")  # the model's layouts: tests/robots/models/vla/test_layouts.py
@pytest.mark.parametrize("layout", ["pp: 2", "tp: 2, sp: true"])
def test_the_layout_changes_no_episode(layout, recipe, tmp_path) -> None:
    """The same seeds draw the same actions; what is summed in another order differs by fp32 rounding."""
    settings = ("trainer.steps=2", TWO_LAYERS)
    expected = harness.train(recipe, tmp_path / "replicas", *settings)
    numbers = harness.train(recipe, tmp_path / "layout", *settings, f"actor.parallel={{{layout}}}")
    assert sorted(numbers) == [0, 1, 2]
    for step, found in numbers.items():
        for name in ("env/success", "env/steps/total", "val/acc"):
            assert found.get(name) == expected[step].get(name)
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert found.get(name, 0.0) == pytest.approx(expected[step].get(name, 0.0), abs=2e-4)


def test_the_reference_sees_what_the_policy_sees(recipe, tmp_path) -> None:
    """It is the policy that RL starts from: in the first step they agree, in later ones they differ.

    Scores are those of videos of every environment step, which nobody reads after them.
    """
    transformers.VJEPA2Model(SMALL).save_pretrained(tmp_path / "vjepa2")
    more = ["algorithm.kl={use: loss, coef: 0.1}", "trainer.steps=2", "actor.mini_batch_size=2", "validation.every=0"]
    more += ["cluster.nproc=1", "validation.before_train=false"]
    more += [f"robot.reward={{name: progress, embedding: {{name: vjepa2, path: {tmp_path / 'vjepa2'}}}}}"]
    numbers = harness.train(recipe, tmp_path, *more)
    assert numbers[2]["actor/kl_loss"] > numbers[1]["actor/kl_loss"] >= 0
    assert numbers[1]["actor/kl_loss"] < 0.05
    assert all(numbers[step]["srpo/invalid"] == 0 for step in (1, 2))


def test_an_episode_whose_simulator_dies_is_left_out_and_counted(recipe, tmp_path) -> None:
    once = tmp_path / "once"
    numbers = harness.train(
        recipe,
        tmp_path / "run",
        "sft.steps=0",
        "trainer.steps=2",
        "validation.before_train=false",
        "cluster.nproc=1",
        "robot.simulator.wrong=exit",
        f"robot.simulator.once={once}",
        # a family that predicts one token after another, whose prompt ends with token 29871, scores that are not 1,
        # a distance in the reward, and gradients that leave while the policy acts
        *("robot.family=openvla", "model.hf_config.text_config.vocab_size=29900"),
        "model.tokenizer=chars:abcdefghijklmnopqrstuvwxyz INOW:?\n",
        *("robot.reward.coef=2", "algorithm.kl={use: reward, coef: 0.1}"),
        "actor.engine.offload=[gradients, optimizer]",
    )
    assert sum(numbers[step]["env/errors"] for step in (1, 2)) == 1
    assert sum(numbers[step].get("env/errors/crash", 0) for step in (1, 2)) == 1
    for step in (1, 2):
        successes = numbers[step]["env/success"] * (16 - numbers[step]["env/errors"])
        assert successes == pytest.approx(round(successes)), "a share of those that were played"
        assert numbers[step]["critic/score/mean"] == pytest.approx(2 * numbers[step]["env/success"])
        assert (numbers[step]["actor/reward_kl"] != 0) == (step == 2), "the reference is the first policy"


def test_simulators_that_all_fail_end_the_run_with_what_they_said(recipe, tmp_path) -> None:
    wrong = ("robot.simulator.wrong=raise", "robot.simulator.at=0")
    process = harness.start(recipe, tmp_path, "sft.steps=0", "cluster.nproc=1", *wrong)
    output = harness.finish(process)
    assert process.returncode == 1
    assert "a joint is out of range" in output
    assert "Line" in output


@pytest.mark.campaign("kills")  # episodes that end the run: tests/robots/rollout/test_play.py; its message: above
def test_with_on_error_fail_an_episode_that_could_not_be_played_ends_the_run(recipe, tmp_path) -> None:
    once = f"robot.simulator.once={tmp_path / 'once'}"
    wrong = ("robot.simulator.wrong=exit", once, "robot.on_error=fail")
    process = harness.start(recipe, tmp_path / "run", "sft.steps=0", "cluster.nproc=1", *wrong)
    output = harness.finish(process)
    assert process.returncode == 1
    assert "the physics engine gives up" in output


def test_cloning_with_statistics_of_its_demonstrations_goes_on_after_a_kill(recipe, run_dir, tmp_path) -> None:
    """Actions are scaled by what the files do; exports and converted checkpoints bring that."""
    from tests.forked import Command, run

    settings = (
        f"sft.train_files=[{run_dir / 'demonstrations'}]",
        "robot.statistics=demonstrations",
        "robot.bounds=minmax",
        "sft.steps=5",
        "cluster.nproc=1",
    )
    for name in ("undisturbed", "killed"):
        command = Command(["sft", recipe, *settings, "--run-dir", tmp_path / name], recipe.parent)
        if name == "killed":
            harness.wait_for(lambda: (tmp_path / "killed" / "checkpoints" / "step_2").is_dir(), command)
            harness.kill(harness.workers(tmp_path / "killed")[0])
            harness.finish(command)
            command = Command(["sft", recipe, *settings, "--run-dir", tmp_path / name], recipe.parent)
        output = harness.finish(command)
        assert command.returncode == 0, output[-3000:]
    expected = harness.metrics(tmp_path / "undisturbed")
    assert harness.metrics(tmp_path / "killed") == expected
    found = next(iter(read_statistics(tmp_path / "killed" / "hf" / "dataset_statistics.json").values()))
    assert found.trajectories == 6
    assert found.action.max[0] == pytest.approx(0.25), "what the expert does"
    assert found.action.mask.all()
    ended = run(["convert", tmp_path / "killed" / "checkpoints" / "step_5", tmp_path / "converted"], recipe.parent)
    assert ended.code == 0, ended.output[-2000:]
    files = [tmp_path / name / "dataset_statistics.json" for name in ("killed/hf", "converted")]
    assert files[0].read_text() == files[1].read_text()
    for more in ("robot.bounds=q99", "robot.statistics=model"):  # q99: 1% and 99% quantiles of what hardly varies
        ended = run(["sft", recipe, *settings, more, "sft.steps=6", "--run-dir", tmp_path / "killed"], recipe.parent)
        assert ended.code == 2
        assert "statistics" in ended.output


def test_the_exported_policy_is_measured_again(recipe, run_dir, tmp_path) -> None:
    from tests.forked import Command

    settings = (f"model.path={run_dir / 'hf'}", "model.hf_config=null", "model.tokenizer=null", "sft.steps=0")
    settings += ("robot.held_out_tasks=[right]",)  # the same start states are measured, by their split
    command = Command(["eval", recipe, *settings, "--run-dir", tmp_path], recipe.parent)
    output = harness.finish(command)
    assert command.returncode == 0, output[-3000:]
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    table = {row.split()[1]: row.split()[3:] for row in output.splitlines() if row.startswith("│")}
    assert table["all"] == [f"{found['val/acc']:.1%}", "│", f"{found['val/prompts']:.0f}", "│"]
    assert table["left_iid"] == table["iid"] == [f"{found['val/left_iid/acc']:.1%}", "│", "2", "│"]
    assert table["right_ood"] == table["ood"] == [f"{found['val/ood/acc']:.1%}", "│", "2", "│"]
    assert found["val/acc"] == harness.metrics(run_dir)[STEPS]["val/acc"]


def test_what_is_said_to_try_the_policy_plays_episodes(recipe, run_dir) -> None:
    """The command that the log of a run ends with is one that a robot's recipe can do."""
    config = load_config(recipe)
    words = shlex.split(trial_command(config, run_dir))
    assert words == ["megarl", "eval", str(run_dir)]
    text = config.model_copy(update={"robot": None})
    assert shlex.split(trial_command(text, run_dir))[1] == "generate"
    rows = text.data.model_copy(update={"val_files": ["levels.jsonl"]})
    episodes = text.model_copy(update={"env": {"name": "game.py:Game"}, "data": rows})
    assert shlex.split(trial_command(episodes, run_dir)) == words
