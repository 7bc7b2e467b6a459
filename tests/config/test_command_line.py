"""Bad recipes end with exit code 2 and a message on stderr, before any process starts."""

import subprocess
import sys

import pytest

from megarl.cli import main
from tests.config.conftest import RECIPE


@pytest.fixture
def megarl(write, capsys):
    """megarl(overrides..., text=, options=) -> (exit code, stdout, stderr) of `megarl train recipe.yaml ...`."""

    def run(*overrides, text=RECIPE, options=()):
        code = main(["train", str(write(text)), *overrides, *options])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (RECIPE + "actr: {}", [], ["recipe.yaml:11: unknown key actr", "did you mean actor?"]),
        (RECIPE + "trainer: {steps: many}", [], ["recipe.yaml:11: trainer.steps has a wrong type"]),
        (RECIPE, ["data.train_files=missing.jsonl"], ["data.train_files: file or folder not found"]),
        (RECIPE, ["cluster.nproc=4", "data.batch_size=30"], ["a multiple of 4", "to 28 or 32"]),
        (RECIPE, ["algorithm.advantage.name=gpro"], ["unknown advantage estimator", "did you mean grpo?"]),
        (RECIPE, ["cluster.nproc=4", "actor.parallel.tp=4"], ["tp 4 does not divide", "allowed: 1, 2"]),
        (RECIPE, ["model.hf_config.model_type=gpt2"], ["architecture is not supported", "qwen3"]),
        (RECIPE, ["model.hf_config.model_type=gpt2"], ["choose a model of one of these architectures"]),
        (RECIPE, ["algorithm.pipeline=nosuch"], ["unknown pipeline", "set algorithm.pipeline to one of these"]),
        (RECIPE, ["reward.name=nosuch"], ["unknown reward", "set reward.name to one of these"]),
        (RECIPE, ["reward.name=nope.py:f"], ["file not found: nope.py"]),
        (RECIPE, ["reward.name=nope", "rollout.sampling.n=1"], ["2 problems", "1. ", "2. "]),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_bad_recipe(megarl, tmp_path, text, overrides, words, options):
    code, _, err = megarl(*overrides, text=text, options=options)
    assert code == 2
    for word in words:
        assert word in err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_tells_every_problem_and_every_warning_once(megarl):
    _, out, err = megarl("cluster.nproc=3", "rollout.sampling.top_k=1", options=["--dry-run"])
    for told in ("is not divisible by 3", "from a truncated distribution"):
        assert (out + err).count(told) == 1


def test_a_missing_reward_file_is_told_once_and_with_its_name_where_one_is_close(megarl, write):
    write("def score(samples): ...", "my_reward.py")
    code, out, err = megarl("reward.name=my_rewrad.py:score", options=["--dry-run"])
    assert code == 2
    assert (err.count("file not found"), out.count("[fail]")) == (1, 1)
    assert "did you mean my_reward.py?" in err
    assert ", 1 fail, " in out


@pytest.mark.parametrize("missing", ["sft.response_key", "data.answer_key"])
def test_a_dry_run_agrees_with_itself_about_columns(megarl, write, missing):
    write('{"prompt": "1+1=", "answer": "2"}\n', "rows.jsonl")
    given = ["data.train_files=rows.jsonl", "sft.steps=3"]
    code, out, err = megarl(*given, f"{missing}=nope", options=["--dry-run"])
    assert code == 2
    assert f"set {missing} to the column" in err
    assert "[fail] rows: rows.jsonl:1, see the end" in out
    assert ", 1 fail, " in out
    code, out, _ = megarl(*given, options=["--dry-run"])
    assert code == 0
    assert "[  ok] rows: " in out


def test_a_broken_config_of_a_model_says_what_to_do(megarl, write):
    write("{", "model/config.json")
    code, _, err = megarl("model.path=model", "model.hf_config=null")
    assert code == 2
    assert "cannot read the model's config" in err
    assert "copy or download the model again" in err


def test_a_run_folder_in_the_place_of_a_recipe(write, tmp_path, capsys):
    write(RECIPE, "run/config.yaml")
    assert main(["train", str(tmp_path / "run")]) == 2
    assert f"{tmp_path}/run/config.yaml --run-dir {tmp_path}/run" in capsys.readouterr().err


def test_eval_of_a_run_does_not_mind_keys_of_training_that_are_wrong_now(write, tmp_path, capsys):
    write('{"prompt": "1+1=", "answer": "2"}\n', "rows.jsonl")
    text = RECIPE.replace("data:", "data:\n  val_files: [rows.jsonl]") + "algorithm: {loss: {name: gpg, clip_low: 0.5}}"
    write(text, "run/config.yaml")
    write("{}", "run/checkpoints/step_1/meta.json")
    assert main(["eval", "run", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"model: {tmp_path}/run/checkpoints/step_1 (last; no best model is known)\n"), "a whole path"
    assert "not used by megarl eval: " in err
    assert "unknown key algorithm.loss.clip_low: gpg does not read it" in err
    assert main(["eval", str(tmp_path / "run" / "config.yaml"), "--dry-run"]) == 2
    write(text.replace("data:", "dat:"), "run/config.yaml")
    assert main(["eval", str(tmp_path / "run"), "--dry-run"]) == 2


def test_eval_of_a_run_with_another_reward_drops_its_arguments_whatever_its_keys_of_training(write, tmp_path, capsys):
    write('{"prompt": "1+1=", "answer": "2"}\n', "rows.jsonl")
    reward = "reward: {name: numeric, kwargs: {extract: last}}\n"
    loss = "algorithm: {loss: {name: gpg, clip_low: 0.5}}"
    write(RECIPE.replace("data:", "data:\n  val_files: [rows.jsonl]") + reward + loss, "run/config.yaml")
    write("{}", "run/checkpoints/step_1/meta.json")
    assert main(["eval", str(tmp_path / "run"), "--dry-run", "reward.name=math"]) == 0
    err = capsys.readouterr().err
    assert err.count("inherited keys that math does not have: reward.kwargs.extract") == 1


@pytest.mark.parametrize(("command", "takes_runs"), [("eval", True), ("generate", True), ("train", False)])
def test_commands_that_take_a_run_folder_say_so(capsys, command, takes_runs):
    assert main([command, "nosuch"]) == 2
    assert ("the folder of a run" in capsys.readouterr().err) == takes_runs
    with pytest.raises(SystemExit):
        main([command])
    assert ("the folder of a run" in capsys.readouterr().err) == takes_runs


def test_missing_recipe(capsys):
    assert main(["train", "no_such_recipe.yaml"]) == 2
    assert "recipe not found" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train"], ["sft", "--dry-run"]])
def test_no_recipe(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert f"megarl {arguments[0]}: the recipe is missing" in err
    assert "grpo_quickstart," in err
    assert "usage" not in err


def test_an_override_in_the_place_of_the_recipe(capsys):
    assert main(["train", "trainer.steps=3"]) == 2
    err = capsys.readouterr().err
    assert "name the recipe first" in err
    assert "grpo_quickstart," in err


def test_unsound_user_pipeline(megarl, write, monkeypatch, tmp_path):
    write(
        "from megarl.dag.pipeline import Pipeline\ndef same(worker, batch): return batch\n"
        "def build(config):\n    p = Pipeline('mine').add(same, 'a', deps=['b']).add(same, 'b', deps=['a'])\n"
        "    return p.build()\n",
        "cyclic_pipeline.py",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = megarl("algorithm.pipeline=cyclic_pipeline:build")
    assert code == 2
    assert "cycle" in err
    assert not (tmp_path / "runs").exists()


def test_dry_run_of_a_good_recipe(megarl, tmp_path):
    code, out, err = megarl(options=["--dry-run"])
    assert (code, err) == (0, "")
    assert "Nothing was started." in out
    assert not (tmp_path / "runs").exists()


def test_exit_code_of_the_process(write):
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "train", str(write(RECIPE)), "actor.optim.lrr=1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "did you mean actor.optim.lr?" in done.stderr


@pytest.mark.parametrize("key", ["epochs", "steps"])
def test_fine_tuning_refuses_the_length_of_rl(write, capsys, key):
    write(RECIPE)
    assert main(["sft", "recipe.yaml", "sft.steps=3", f"trainer.{key}=2", "--dry-run"]) == 2
    assert f"write sft.{key}=2" in capsys.readouterr().err
