"""Several rewards of one recipe: the score is their weighted sum, and each is measured and located by its name."""

import textwrap
from contextlib import closing

import pytest

from megarl.checks.checklist import Checklist
from megarl.checks.files import check_reward
from megarl.config.data import RewardConfig
from megarl.config.load import dump_config, load_config
from megarl.recipes.components import COMPONENTS
from megarl.rewards import Rewards, reward_metrics
from megarl.rewards.parts import with_model_scores
from megarl.rewards.references import check_answers
from megarl.rewards.runner import reward_processes
from megarl.system.errors import ConfigError, DataError

CODE = """
def short(samples, most=5):
    return [{"overall": float(len(s["response"]) <= most), "length": len(s["response"])} for s in samples]

def refuses(samples):
    return [1 / (s["response"] != "bad") for s in samples]
"""
SAMPLES = [
    {"uid": "a", "prompt": "2+3=", "response": "5", "answer": "5"},
    {"uid": "b", "prompt": "2+3=", "response": "five or so", "answer": "5"},
]
BAD = {"uid": "c", "prompt": "2+3=", "response": "bad", "answer": "5"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(textwrap.dedent(CODE))
    return path


def section(parts, **more):
    return RewardConfig(parts=parts, timeout_s=60, **more)


def scored(cfg, samples):
    with closing(Rewards(cfg)) as rewards:
        handle = rewards.submit(samples)
        results = rewards.result(handle)
        assert handle.done()
        assert {handle: results}[handle] is results, "steps keep results by handle"
        return results


def test_the_score_is_the_weighted_sum_and_every_part_is_a_metric(file):
    cfg = section(
        {
            "right": {"name": "numeric", "weight": 0.75},
            "short": {"name": f"{file}:short", "weight": 0.5, "kwargs": {"most": 8}},
            "same": {"name": "exact_match", "weight": 0.0},
        }
    )
    results = scored(cfg, SAMPLES)
    parts = {"right": 1.0, "short": 1.0, "short/length": 1.0, "same": 1.0}
    assert results[0] == {"overall": 1.25, "acc": 1.0, "extracted": "5", **parts}
    assert (results[1]["overall"], results[1]["acc"], results[1]["short/length"]) == (0.0, 0.0, 10.0)
    means = reward_metrics(results).result()
    assert (means["reward/right"], means["reward/short"], means["reward/overall"]) == (0.5, 0.5, 0.625)
    assert reward_processes(cfg) == 1, "the user's function; the built-in ones are threads"


def test_a_sample_of_which_a_part_fails_has_the_score_of_failures_and_others_keep_theirs(file):
    parts = {"right": {"name": "numeric"}, "other": {"name": f"{file}:refuses"}}
    good, bad = scored(section(parts, on_error=-2.0), [SAMPLES[0], BAD])
    assert (good["overall"], bad["overall"], bad["_error"]) == (2.0, -2.0, 1.0)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"a": {"name": "numeric", "kwargs": {"tolerence": 1}}}, "reward.parts.a.kwargs.tolerence"),
        ({"a": {"name": "numeric"}, "b": {"name": "numbric"}}, "reward.parts.b.name"),
        ({"a": {"name": "FILE:short", "kwargs": {"least": 1}}}, "reward.parts.a.kwargs"),
        ({"a": {"name": "FILE:shorter"}}, "reward.parts.a.name"),
        ({"overall": {"name": "numeric"}}, "cannot have this name"),
        ({"a/b": {"name": "numeric"}}, "cannot have this name"),
    ],
)
def test_what_is_wrong_with_a_part_is_found_before_a_start_at_its_key(file, parts, words):
    for part in parts.values():
        part["name"] = part["name"].replace("FILE", str(file))
    checks, config = Checklist(), load_config("grpo_quickstart", ["reward=!replace {}"])
    check_reward(config.model_copy(update={"reward": section(parts)}), checks)
    problems = [str(check.problem()) for check in checks.items if check.status == "fail"]
    assert words in "\n".join(problems)
    if not any(":" in part["name"] for part in parts.values()):
        with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
            Rewards(section(parts))


def test_a_reward_beside_parts_is_refused():
    with pytest.raises(ConfigError, match=r"both reward\.name and reward\.parts"):
        Rewards(section({"a": {"name": "numeric"}}, name="math"))


def test_parts_are_keys_of_a_recipe():
    parts = "{right: {name: numeric, weight: 0.9}, form: {name: format, kwargs: {think: false}}}"
    given = [f"reward=!replace {{parts: {parts}}}", "reward.parts.form.weight=0.1"]
    config = load_config("grpo_quickstart", given, components=COMPONENTS)
    assert config.reward.parts["form"].weight == 0.1
    assert config.reward.described == "numeric + format"
    with pytest.raises(ConfigError, match=r"reward\.parts\.form\.wieght"):
        load_config("grpo_quickstart", [*given, "reward.parts.form.wieght=0.1"], components=COMPONENTS)
    assert "weight: 0.9" in dump_config(config)


def test_answers_are_checked_for_every_part(file):
    cfg = section({"own": {"name": f"{file}:short"}, "right": {"name": "numeric"}})
    with pytest.raises(DataError, match="the reward numeric cannot use the answer"):
        check_answers(cfg.functions, "answer", [(_Row(), "four")])


class _Row:
    where = "rows:1"


def test_a_models_score_is_added_to_the_functions_and_a_sample_without_one_has_failed():
    parts = {"model": {"name": "reward_model", "weight": 0.5}, "right": {"name": "exact_match"}}
    config = section(parts, on_error=-2)
    with closing(Rewards(config)) as rewards:
        results = rewards.result(rewards.submit([*SAMPLES, SAMPLES[0]]))
    found = with_model_scores(config, results, [3.0, 1.0, float("nan")])
    assert found[0] == {"overall": 2.5, "acc": 3.0, "right": 1.0, "model": 3.0, "extracted": "5"}
    assert found[1]["overall"] == 0.5
    assert (found[2]["overall"], reward_metrics(found).result()["reward/errors"]) == (-2.0, 1.0)
    alone = RewardConfig(name="reward_model")
    with closing(Rewards(alone)) as rewards:
        results = rewards.result(rewards.submit(SAMPLES))
    assert with_model_scores(alone, results, [3.0, 1.0]) == [{"overall": 3.0}, {"overall": 1.0}]


def test_two_parts_of_one_reward_model_are_refused():
    both = {"a": {"name": "reward_model"}, "b": {"name": "reward_model"}}
    with pytest.raises(ConfigError, match="several parts name the reward model"):
        Rewards(section(both))
