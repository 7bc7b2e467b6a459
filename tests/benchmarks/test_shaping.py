"""What SRPO's scores add: what the comparison makes of the lines of runs, and that its arms are valid recipes."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megarl.benchmarks import shaping
from megarl.config.load import load_config


def lines(*accuracy, correlation=None):
    told = {} if correlation is None else {"srpo/rank_correlation": correlation}
    return [
        {"step": step, "val/acc": value, **({"env/steps/total": 500, **told} if step else {})}
        for step, value in enumerate(accuracy)
    ]


def test_a_run_in_numbers():
    found = shaping.summary(lines(0.1, 0.5, 0.9, correlation=0.25))
    assert found["accuracy"] == [(0, 0.1), (1, 0.5), (2, 0.9)]
    assert found["env_steps"] == 1000
    assert (found["correlation"], found["correlation/in_group"]) == (0.25, None)
    assert found["played"] == [(0, 0.1), (0.5, 0.5), (1.0, 0.9)]
    assert [shaping.first_of(found["accuracy"], goal) for goal in (0.5, 0.95)] == ["1", "-"]


def test_the_table_shows_every_seed():
    runs = [shaping.summary(lines(0.1, end)) for end in (0.75, 0.85)]
    row = "| outcome | 10.0%, 10.0% | 75.0%, 85.0% | 45.0% | -, 1 | -, 0k | 0k, 0k | - | - |"
    assert row in shaping.table({"outcome": runs}, 0.8)


@pytest.mark.parametrize("recipe", ["srpo_reach_quickstart", "srpo_metaworld"])
def test_arms_differ_in_the_scores_only(recipe):
    configs = {
        name: load_config(recipe, [*shaping.COMMON, *keys, "model.path=somewhere"])
        for name, keys in shaping.ARMS.items()
    }
    for config in configs.values():
        assert not config.algorithm.dynamic_sampling.enabled
        assert config.sft.steps == 0
    assert [config.robot.reward.name for config in configs.values()] == ["success", "progress", "progress"]
    assert configs["shuffled"].robot.reward.srpo == {"shuffled": True}
    configs["shuffled"].robot.reward.srpo.clear()
    assert configs["shuffled"] == configs["srpo"]


def test_what_is_no_setting_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        shaping.main([str(tmp_path), "--stesp", "3"])
    assert "is no setting" in capsys.readouterr().err


def test_what_is_over_is_not_run_again_and_what_was_interrupted_goes_on(tmp_path, monkeypatch):
    started = []

    def run(arguments):
        place = Path(arguments[arguments.index("--run-dir") + 1])
        started.append(place.name)
        (place / "checkpoints").mkdir(parents=True, exist_ok=True)
        told = [json.dumps({"stage": "train", **line}) + "\n" for line in lines(0.1, 0.9)]
        (place / "metrics.jsonl").write_text("".join(told))
        if started.count(place.name) == 1 and place.name == "srpo-0":
            raise KeyboardInterrupt
        (place / "hf").mkdir()

    monkeypatch.setattr(shaping, "run_megarl", run)
    given = [str(tmp_path), "--seeds", "0", "--arms", "srpo", "outcome"]
    with pytest.raises(KeyboardInterrupt):
        shaping.main(given)
    shaping.main(given)
    shaping.main(given)
    assert started == ["cloned-0", "srpo-0", "srpo-0", "outcome-0"]
    assert list(json.loads((tmp_path / "result.json").read_text())["arms"]) == ["srpo", "outcome"]
    ElementTree.parse(tmp_path / "curves.svg")
