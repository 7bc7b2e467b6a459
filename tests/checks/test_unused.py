"""Keys that a user wrote and that nothing reads are warned of; what parents set and defaults are not."""

import pytest

from megarl.checks.recipe import check_config
from megarl.checks.unused import OWNERS
from megarl.config.fields import find_key
from megarl.config.load import load_config, recipe_names
from megarl.recipes.components import COMPONENTS
from tests.config.conftest import RECIPE


def unused(config):
    return [check for check in check_config(config).items if check.name == "unused keys"]


@pytest.mark.parametrize(
    ("overrides", "key", "lacks"),
    [
        (["algorithm.kl.coef=0.1"], "algorithm.kl.coef", "KL is off"),
        (["critic.optim.lr=1e-4"], "critic.optim.lr", "trains no critic"),
        (["critic={optim: {lr: 1e-4}, ppo_epochs: 2}"], "critic.optim.lr", "critic.ppo_epochs"),
        (["reference.parallel.tp=2"], "reference.parallel.tp", "compares the policy with a reference"),
        (["algorithm.dynamic_sampling.max_rounds=3"], "algorithm.dynamic_sampling.max_rounds", "is off"),
        (["algorithm.overlong.factor=2"], "algorithm.overlong.factor", "penalty"),
        (["rollout.sglang.tp_size=2"], "rollout.sglang.tp_size", "engine is another"),
        (["sync.transport=disk"], "sync.transport", "own weights"),
        (["validation.sampling.max_new_tokens=4"], "validation.sampling.max_new_tokens", "no held-out prompts"),
        (["data.image_dir=pictures"], "data.image_dir", "no images"),
        (["data.min_pixels=784", "data.max_pixels=1568"], "data.min_pixels", "data.max_pixels"),
        (["tracking={mlflow: false, mlflow_uri: 'sqlite:///a.db'}"], "tracking.mlflow_uri", "MLflow is off"),
        (["tracking={mlflow: false, project: other}"], "tracking.project", "no tracker"),
        (["sft.optim.lr=1e-4"], "sft.optim.lr", "no supervised steps"),
    ],
)
def test_a_key_without_a_reader_is_warned_of(config_of, overrides, key, lacks):
    (check,) = unused(config_of(*overrides))
    assert (check.status, check.key, lacks in check.message) == ("warn", key, True)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl={use: loss, coef: 0.1}"],
        ["algorithm.kl.coef=0.001"],
        ["algorithm.pipeline=ppo", "algorithm.advantage.name=gae", "critic.optim.lr=1e-4"],
        ["sft={steps: 2, optim: {lr: 1e-4}}"],
        ["sft={epochs: 2, optim: {lr: 1e-4}}"],
        ["tracking={mlflow_uri: 'sqlite:///a.db', project: other}"],
        ["tracking={mlflow: false, project: other, loggers: [tensorboard]}"],
        ["algorithm.pipeline=file.py:missing", "critic.optim.lr=1e-4"],
    ],
)
def test_a_key_that_is_read_or_has_its_default_is_not(config_of, overrides):
    assert not unused(config_of(*overrides))


def test_keys_of_a_parent_are_not_the_users(write):
    write(RECIPE + "algorithm: {kl: {coef: 0.2}}\n", "parent.yaml")
    child = write("extends: parent.yaml\nname: child\ncritic: {ppo_epochs: 2}\n", "child.yaml")
    config = load_config(child, components=COMPONENTS)
    assert {check.key for check in unused(config)} == {"critic.ppo_epochs"}
    assert config == load_config(child, ["critic.ppo_epochs=2"], components=COMPONENTS)


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_of_the_package_are_not_warned_of(name):
    assert not load_config(name, components=COMPONENTS).written


def test_owners_are_sections_of_recipes():
    for owner in OWNERS:
        key = find_key(tuple(owner.prefix.split(".")))
        assert key is not None
        assert key.section is not None
        assert {*owner.but, *owner.only} <= set(key.section.model_fields)
