import json
from pathlib import Path

import pytest

from megarl import artifacts
from megarl.artifacts.facts import facts_from_config
from megarl.checks.dry_run import make_plan
from megarl.cli import main
from megarl.commands.init import _COMMENTS, ALGORITHMS
from megarl.config.fields import find_key
from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS

KNOWN = json.loads((Path(artifacts.__file__).parent / "known_models.json").read_text())
SUMS = {"question": "2+2?", "answer": "4"}
STORY = {"problem": "Anna has two apples.", "solution": "She has two.\n#### 2"}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


@pytest.fixture
def init(tmp_path, monkeypatch, capsys):
    """init(options..., rows=) -> the recipe that `megarl init` writes, whose dry run has no problem."""
    monkeypatch.chdir(tmp_path)

    def run(*options, rows=None):
        if rows is not None:
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            options = (*options, "--data", "rows.jsonl")
        code = main(["init", "mine", *options])
        assert code == 0, capsys.readouterr().err
        config = load_config("mine.yaml", components=COMPONENTS)
        assert make_plan(config, config.launch.launcher).problems == []
        return config

    return run


@pytest.mark.parametrize(("number", "algorithm"), [*enumerate(ALGORITHMS)])
def test_a_recipe_of_each_algorithm_passes_its_dry_run(init, number, algorithm):
    config = init("--algorithm", algorithm, "--gpus", "08"[number % 2])
    assert config.algorithm.pipeline == ALGORITHMS[algorithm]["algorithm.pipeline"]


@pytest.mark.parametrize(
    ("row", "columns", "reward"),
    [
        (SUMS, ("question", "answer"), ("numeric", {"extract": "last"})),
        (STORY, ("problem", "solution"), ("gsm8k", {})),
        ({"prompt": "p", "answer": "yes"}, ("prompt", "answer"), ("exact_match", {})),
        ({"prompt": "p", "ground_truth": "$\\pi$"}, ("prompt", "ground_truth"), ("math", {})),
    ],
)
def test_columns_and_reward_are_those_of_the_rows(init, row, columns, reward):
    config = init(rows=[row, row])
    assert (config.data.prompt_key, config.data.answer_key) == columns
    given = {key: value for key, value in config.reward.kwargs.items() if key in reward[1]}
    assert (config.reward.name, given) == reward


def test_rows_without_answers_need_a_reward_of_the_users(init, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def score(samples): return [0.0 for _ in samples]\n")
    assert init("--reward", "mine.py:score", rows=[{"prompt": "p"}]).reward.name == "mine.py:score"
    (tmp_path / "mine.yaml").unlink()
    assert main(["init", "mine.yaml", "--data", "rows.jsonl"]) == 2
    assert "--reward my_reward.py:score" in capsys.readouterr().err


def test_pairs_have_no_reward_and_no_sampling(init, tmp_path):
    init("--algorithm", "dpo", rows=[PAIR, PAIR])
    text = (tmp_path / "mine.yaml").read_text()
    assert "reward:" not in text
    assert "rollout:" not in text


@pytest.mark.parametrize(
    ("algorithm", "samples", "key"),
    [
        ("dpo", "pairs", "preference.label_smoothing"),
        ("kto", "examples", "preference.desirable_weight"),
        ("reward_model", "pairs", "preference.margin_key"),
    ],
)
def test_comments_speak_of_what_the_algorithm_learns_from(init, tmp_path, algorithm, samples, key):
    init("--algorithm", algorithm, "--val", "rows.jsonl", rows=[PAIR, PAIR])
    text = (tmp_path / "mine.yaml").read_text()
    assert f"# {samples} per step" in text
    assert f"# maximum number of held-out {samples} per validation" in text
    _, _, following = text.partition("Often set next")
    assert key in following
    assert "algorithm.kl" not in following
    for line in following.splitlines()[1:]:
        assert find_key(tuple(line.split()[1].split("."))) is not None


def test_the_layout_is_the_first_that_fits(init):
    assert init("--gpus", "8").actor.parallel.tp == 1
    Path("mine.yaml").unlink()
    config = init("--model", "Qwen/Qwen3-30B-A3B", "--gpus", "16", "--engine", "sglang")
    assert config.actor.parallel.tp > 1
    assert (config.cluster.nnodes, config.launch.launcher, config.rollout.engine) == (2, "torchrun", "sglang")
    Path("mine.yaml").unlink()
    large = init("--model", "deepseek-ai/DeepSeek-V3", "--gpus", "256")
    assert (large.actor.parallel.tp, large.actor.parallel.pp, large.actor.parallel.ep) == (1, 16, 16)
    assert large.rollout.replay_routes


@pytest.mark.campaign("families")
@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_has_a_recipe(init, name):
    facts = facts_from_config(KNOWN[name], name)
    if facts.vision is not None or facts.only_in_training:  # a robot's policy; dropout, which is refused
        pytest.skip("not for init")
    gpus = next(gpus for gpus in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if facts.parameters * 22 < gpus * 70e9)
    assert init("--model", name, "--gpus", str(gpus)).rollout.replay_routes is facts.is_moe


def test_a_file_that_exists_stays(init, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("name: kept\n")
    assert main(["init", "mine"]) == 2
    assert "file already exists" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "name: kept\n"


@pytest.mark.parametrize("gpus", [9, 11])
def test_gpus_that_machines_cannot_share_evenly_are_refused_with_numbers_that_do(init, tmp_path, capsys, gpus):
    assert main(["init", "mine", "--gpus", str(gpus)]) == 2
    assert f"--gpus {8 if gpus == 9 else 10} or --gpus {gpus + 1}" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()
    assert init("--gpus", str(gpus + 1)).cluster.nproc == gpus + 1


@pytest.mark.parametrize("options", [[], ["--from", "settings.yaml"]])
def test_a_negative_number_of_gpus_is_refused(init, tmp_path, capsys, options):
    assert main(["init", "mine", "--gpus", "-1", *options]) == 2
    assert "--gpus: the number of GPUs is negative" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


def test_the_algorithm_of_pairs_is_named(init, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    assert main(["init", str(tmp_path / "r.yaml"), "--data", str(tmp_path / "pairs.jsonl")]) == 2
    assert "fix:     give --algorithm dpo, which learns from chosen and rejected; " in capsys.readouterr().err


def test_a_refused_reward_leaves_no_file(init, tmp_path, capsys):
    assert main(["init", "mine", "--reward", "nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()
    assert init("--reward", "numeric").reward.name == "numeric"


def test_comments_are_about_keys_that_exist():
    for path in _COMMENTS:
        assert find_key(tuple(path.split("."))) is not None, path


def test_the_time_of_a_step_is_said_and_a_small_model_for_a_slow_cpu(init, capsys, monkeypatch):
    monkeypatch.setattr("megarl.system.machine.processor_flags", lambda *_: frozenset({"avx2"}))
    init("--gpus", "0")
    shown = capsys.readouterr().out
    assert "min a step" in shown
    assert "make smollm2" in shown
    Path("mine.yaml").unlink()
    init("--gpus", "8")
    shown = capsys.readouterr().out
    assert "a step" in shown
    assert "make smollm2" not in shown
