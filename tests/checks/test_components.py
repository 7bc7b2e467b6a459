"""The own keys of components: which a recipe may give, where they come from, and what becomes of them."""

from pathlib import Path

import pytest

from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.registry import Registry, Spec
from megarl.config.algorithm import PolicyLossConfig
from megarl.config.load import dump_config, load_config
from megarl.envs import registry as of_envs
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.recipes.components import REGISTRIES as BY_SECTION
from megarl.rewards import REWARDS
from megarl.rewards import preflight as of_rewards
from megarl.system.errors import ConfigError, UserError
from megarl.system.imports import import_callable
from tests.config.conftest import RECIPE
from tests.forked import forked_scorers
from tests.house.test_docs import code_with

#: Registries by name, and the module that has each.
WHERE = {
    "ADVANTAGES": "megarl.algorithms.advantages",
    "POLICY_LOSSES": "megarl.algorithms.losses",
    "KL": "megarl.algorithms.kl",
    "FILTERS": "megarl.algorithms.group_filter",
    "REWARDS": "megarl.rewards",
}
GUESS = f"{Path(__file__).parents[1] / 'envs' / 'guess.py'}:Guess"


@pytest.fixture(autouse=True)
def forked():
    """Users' files are imported in forks, in a tenth of the CPU time; programs: tests/rewards/test_preflight.py."""
    with forked_scorers():
        yield


def load(file, *overrides):
    return load_config(file, overrides, components=COMPONENTS)


def test_defaults_are_filled_in_and_the_resolved_recipe_loads_back_equal(config_of, write):
    config = config_of("algorithm.loss={name: sapo, tau_pos: 2}")
    assert config.algorithm.loss.own == {"tau_pos": 2.0, "tau_neg": 1.05}
    file = write(dump_config(config), "config.yaml")
    assert load(file) == load_config(file) == config


def test_an_unknown_key_names_its_line_the_loss_and_what_it_reads(write):
    file = write(RECIPE + "algorithm:\n  loss:\n    clip_lo: 0.1\n")
    with pytest.raises(ConfigError) as caught:
        load(file, "algorithm.loss.tau_pos=2")
    text = str(caught.value)
    assert f"recipe.yaml:{file.read_text().count(chr(10))}: unknown key algorithm.loss.clip_lo: ppo does not" in text
    assert "did you mean algorithm.loss.clip_low?" in text
    assert "override 'algorithm.loss.tau_pos=2': unknown key algorithm.loss.tau_pos" in text
    assert "set algorithm.loss.name to one that reads it: sapo" in text
    assert "allowed: clip_low, clip_high, dual_clip, name, aggregation" in text


def test_a_wrong_value_of_an_own_key_says_what_is_allowed(config_of):
    with pytest.raises(ConfigError, match=r"override(?s:.*)clip_low is out of range(?s:.*)-1(?s:.*)number >= 0"):
        config_of("algorithm.loss.clip_low=-1")


def test_another_loss_keeps_the_inherited_keys_that_it_has_and_drops_the_others(write):
    write(RECIPE + "algorithm: {loss: {clip_high: 0.28, dual_clip: 5, entropy_coef: 0.1}}", "parent.yaml")
    child = write("extends: parent.yaml\nalgorithm: {loss: {name: cispo, clip_low: 1}}", "child.yaml")
    loss = load(child).algorithm.loss
    assert (loss.own, loss.entropy_coef) == ({"clip_low": 1.0, "clip_high": 0.28}, 0.1)
    assert load(child, "algorithm.loss.name=gpg").algorithm.loss.own == {}
    assert load(child, "algorithm.loss.name=ppo").algorithm.loss.own["dual_clip"] == 5


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("numeric", {"extract": "last", "evaluated": True}),
        ("math", {}),
        ("rewards.py:plain", {"extract": "last"}),
        ("rewards.py:nearness", {"evaluated": True}),
        ("rewards.py:anything", {"extract": "last", "evaluated": True}),
        ("rewards.py:wrapped", {"extract": "last", "evaluated": True}),
        ("rewards.py:missing", {"extract": "last", "evaluated": True}),  # refused by its name
    ],
)
def test_another_reward_drops_the_inherited_arguments_that_only_the_last_one_has(write, capfd, name, kept):
    write(
        "print('imported')\n"
        "from megarl.algorithms.registry import Settings\n"
        "from megarl.rewards import REWARDS\n"
        "def plain(samples, extract): ...\n"
        "class Own(Settings):\n"
        "    evaluated: bool = False\n"
        "@REWARDS.register(settings=Own)\n"
        "def nearness(samples, *, evaluated): ...\n"
        "def anything(samples, **options): ...\n"
        "wrapped = (lambda function: lambda *args, **kwargs: function(*args, **kwargs))(plain)\n",
        "rewards.py",
    )
    file = write(RECIPE + "reward: {name: numeric, workers: 2, kwargs: {extract: last, evaluated: true}}")
    reward = load(file, f"reward.name={name}").reward
    assert (reward.name, reward.workers, reward.kwargs) == (name, 2, kept)
    dropped = ", ".join(f"reward.kwargs.{key}" for key in ("extract", "evaluated") if key not in kept)
    said = f"megarl: dropped inherited keys that {name} does not have: {dropped}\n" if dropped else ""
    assert capfd.readouterr() == ("", said)
    given = load(file, f"reward.name={name}", "reward.kwargs.extract=first").reward.kwargs
    assert given == {**kept, "extract": "first"}  # what the layer itself gives stays, right or wrong


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("tools", {"tools": ["a.py:f"]}),
        ("single_turn", {}),
        (GUESS, {}),
    ],
)
def test_another_environment_drops_the_inherited_keys_that_only_the_last_one_has(write, name, kept):
    file = write(RECIPE + "env: {name: tools, on_error: mark, tools: ['a.py:f']}")
    assert load(file, f"env.name={name}").env == {"name": name, "on_error": "mark", **kept}
    assert load(file, "env.name=nosuch").env == {"name": "nosuch", "on_error": "mark", "tools": ["a.py:f"]}
    assert load(file, f"env={{name: {name}, turns: 2}}").env["turns"] == 2


@pytest.mark.parametrize("key", ["reward.name", "env.name"])
def test_inherited_keys_stay_when_a_file_takes_too_long_to_import(write, monkeypatch, key):
    monkeypatch.setattr(of_rewards.find_own_keys, "__defaults__", (0.2,))
    monkeypatch.setattr(of_envs.find_own_keys, "__defaults__", (0.2,))
    write("import time\ntime.sleep(600)\n", "slow.py")
    file = write(RECIPE + "reward: {name: numeric, kwargs: {extract: last}}\nenv: {name: tools, tools: ['a.py:f']}")
    config = load(file, f"{key}=slow.py:Slow")
    assert (config.reward.kwargs, config.env["tools"]) == ({"extract": "last"}, ["a.py:f"])


@pytest.mark.parametrize(
    ("section", "name", "page", "wrong", "allowed", "meant"),
    [
        ("kl", "capped", "algorithms.md", "mots: 1", "most, use, estimator, coef", "kl.most"),
        ("distillation", "capped", "algorithms.md", "mots: 1", "most, coef, estimator", "distillation.most"),
        ("filter", "long_enough", "algorithms.md", "shortst: 2", "shortest, name", "filter.shortest"),
    ],
)
def test_a_misspelt_setting_of_a_users_component_is_refused(write, section, name, page, wrong, allowed, meant):
    write(code_with(f"def {name}(", page), "own_parts.py")
    key = "name" if section == "filter" else "estimator"
    file = write(RECIPE)
    with pytest.raises(ConfigError) as caught:
        load(file, f"algorithm.{section}={{{key}: 'own_parts.py:{name}', {wrong}}}")
    text = str(caught.value)
    assert f"allowed: {allowed}" in text
    assert f"did you mean algorithm.{meant}?" in text


@pytest.mark.parametrize("pipeline", ["grpo", "dapo"])
@pytest.mark.parametrize("field", ["old_logp", "sum_pi_squared", "ref_logp", "greedy_score"])
def test_a_filter_reads_what_models_say_of_the_samples(write, failures, config_of, pipeline, field):
    module = f"reads_{field}_in_{pipeline}"
    write(
        "from megarl.algorithms.group_filter import FILTERS\n"
        f"@FILTERS.register(reads=('{field}',))\ndef kept(score, uid, *, {field}): ...\n",
        f"{module}.py",
    )
    overrides = f"algorithm.pipeline={pipeline}", f"algorithm.filter.name={module}.py:kept"
    assert not failures(*overrides)
    order = build_task_graph(config_of(*overrides)).order()
    assert order.index("filter") > order.index("greedy_rollout" if field == "greedy_score" else field)


def test_the_filter_of_bounds_comes_before_what_dapo_measures(config_of):
    settings = "algorithm.filter.high=0.9", "data.batch_size=8", "actor.mini_batch_size=4"
    order = build_task_graph(config_of("algorithm.pipeline=dapo", *settings)).order()
    assert order.index("filter") < order.index("old_logp") < order.index("rollout_gap")


def test_a_plain_filter_has_the_settings_that_its_parameters_name(write, config_of):
    write("def kept(score, uid, *, low=None, **more): ...", "plain_filter.py")
    section = "algorithm.filter={name: 'plain_filter.py:kept', low: 0.5%s}"
    assert config_of(section % "").algorithm.filter.own == {"low": 0.5}
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.filter\.high(?s:.*)allowed: low, name"):
        config_of(section % ", high: 0.9")


def test_a_filter_is_off_until_a_key_of_it_is_set(write, config_of):
    write("def keeps_all(score, uid):\n    return score == score\n", "own_parts.py")
    assert not config_of().algorithm.filter.active
    assert config_of("algorithm.filter.low=0").algorithm.filter.active
    assert config_of("algorithm.filter.truncated=true").algorithm.filter.active
    assert config_of("algorithm.filter.name=own_parts.py:keeps_all").algorithm.filter.active


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.kl={use: loss, estimator: 'own_parts.py:two'}"], "algorithm.kl.estimator"),
        (["algorithm.distillation={estimator: 'own_parts.py:two'}"], "algorithm.distillation.estimator"),
        (["algorithm.filter.name=own_parts.py:two"], "algorithm.filter.name"),
    ],
)
def test_a_function_that_takes_something_else_is_refused_before_a_run(write, failures, overrides, key):
    write("def two(a, b, c): ...", "own_parts.py")
    (check,) = failures(*overrides)
    assert (check.key, "does not accept the arguments" in check.message) == (key, True)


@pytest.mark.parametrize(
    ("section", "registry", "declared", "parameters", "lacks"),
    [
        ("filter", "FILTERS", "settings=Own", "score, uid, *, mask", "most"),
        ("filter", "FILTERS", "reads=('old_logp',)", "score, uid, *, mask", "old_logp"),
        ("advantage", "ADVANTAGES", "settings=Own", "token_rewards, mask", "most"),
    ],
)
def test_a_component_that_does_not_take_what_it_declares_is_refused(
    write, failures, section, registry, declared, parameters, lacks
):
    module = f"lacks_{lacks}_in_{section}"
    write(
        f"from {WHERE[registry]} import {registry}\n"
        "from megarl.algorithms.registry import Settings\n"
        "class Own(Settings):\n    most: float = 1.0\n"
        f"@{registry}.register({declared})\ndef mine({parameters}): ...\n"
        f"@{registry}.register({declared})\ndef any_of_them({parameters}, **more): ...\n",
        f"{module}.py",
    )
    (check,) = failures(f"algorithm.{section}.name={module}.py:mine")
    assert check.key == f"algorithm.{section}.name"
    assert f"{lacks})" in check.allowed
    assert not failures(f"algorithm.{section}.name={module}.py:any_of_them")


@pytest.mark.parametrize("section", ["filter", "advantage"])
def test_a_function_that_does_not_say_what_it_takes_is_refused(failures, section):
    checks = failures(f"algorithm.{section}.name=builtins:max")
    assert [(check.key, check.found) for check in checks] == [(f"algorithm.{section}.name", "max")]
    assert "cannot read the signature" in checks[0].message


REGISTRIES = {registry.key: registry for registry in BY_SECTION.values()}


@pytest.mark.parametrize("key", [*REGISTRIES, "algorithm.distillation.estimator"])
def test_a_component_of_another_kind_is_refused(write, failures, key):
    lines = [f"from {registry_file} import {name}\n" for name, registry_file in WHERE.items()]
    lines += [f"@{name}.register()\ndef of_{name.lower()}(*args, **kwargs): ...\n" for name in WHERE]
    write("".join(lines), "own_kinds.py")
    registry = BY_SECTION[key.rpartition(".")[0]]
    for name in WHERE:
        other = import_callable(f"own_kinds.py:of_{name.lower()}", where="").__registry__
        chosen = f"own_kinds.py:of_{name.lower()}"
        if other is registry:
            registry.spec(chosen)
            continue
        with pytest.raises(UserError, match=f"a component for {other.key} cannot be used for {registry.key}"):
            registry.spec(chosen)
        if registry is not REWARDS:  # of rewards a process of its own asks
            (check,) = failures("algorithm.kl.use=loss", f"{key}={chosen}")
            assert f"{other.key}" in check.fix


def test_overrides_are_one_layer_whatever_their_order(config_of):
    mine = "algorithm.loss.tau_pos=2", "algorithm.loss.name=sapo"
    assert config_of(*mine) == config_of(*reversed(mine))
    with pytest.raises(ConfigError, match="gpg does not read it"):
        config_of("algorithm.loss.clip_low=0.1", "algorithm.loss.name=gpg")


def test_a_resolved_recipe_of_an_earlier_version_lists_the_keys_of_all_losses(config_of):
    assert config_of("algorithm.loss={name: gpg, clip_low: 0.2, tau_pos: 1.0}").algorithm.loss.own == {}


def test_without_the_components_keys_stay_as_given_and_the_choice_refuses_them(write):
    loss = load_config(write(RECIPE + "algorithm: {loss: {name: gpg, clip_lo: 0.1}}")).algorithm.loss
    assert loss.own == {"clip_lo": 0.1}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.clip_lo: unknown key"):
        POLICY_LOSSES.choose(loss)
    assert loss.of("ppo").own == {}


MINE = """
from pydantic import Field
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.registry import Settings

class MySettings(Settings):
    pull: float = Field(0.5, ge=0, description="pull")

@POLICY_LOSSES.register(settings=MySettings)
def mine(logp, old_logp, advantages, mask, cfg, *, offsets): ...

@POLICY_LOSSES.register(reads=("sum_pi_squared",))
def squares(logp, old_logp, advantages, mask, cfg, *, offsets, sum_pi_squared): ...

def plain(logp, old_logp, advantages, mask, cfg, *, offsets): ...
"""


def test_a_loss_of_a_users_file_has_settings_of_its_own(write, config_of, failures):
    write(MINE, "my_own_losses.py")
    chosen = POLICY_LOSSES.choose(config_of("algorithm.loss={name: 'my_own_losses.py:mine', pull: 2}").algorithm.loss)
    assert (chosen.function.__name__, chosen.settings.pull) == ("mine", 2.0)
    assert not failures("algorithm.loss.name=my_own_losses.py:mine")
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.loss\.pul(?s:.*)mean algorithm\.loss\.pull\?"):
        config_of("algorithm.loss={name: 'my_own_losses:mine', pul: 2}")
    (missing,) = failures("algorithm.loss.name=my_own_losses.py:mien")
    assert "did you mean my_own_losses.py:mine?" in str(missing.problem())


def test_a_plain_function_reads_the_keys_of_every_loss(write, config_of):
    write(MINE, "my_own_losses.py")
    own = config_of("algorithm.loss={name: 'my_own_losses.py:plain', clip_low: 0.1, tau_pos: 3}").algorithm.loss.own
    assert (own["clip_low"], own["tau_pos"], own["quadratic_coef"]) == (0.1, 3.0, 0.05)


def test_a_plain_function_finds_the_shared_keys_too_in_a_model_that_is_built_once(write, config_of):
    write(MINE, "my_own_losses.py")
    section = "algorithm.loss={name: 'my_own_losses.py:plain', entropy_coef: 0.1, tau_pos: 3}"
    config = config_of(section)
    first, second = (POLICY_LOSSES.choose(config.algorithm.loss).settings for _ in range(2))
    assert type(first) is type(second)
    assert (first.aggregation, first.sum_norm, first.entropy_coef, first.tau_pos) == ("token-mean", None, 0.1, 3.0)
    losses: Registry[Spec] = Registry("loss", "algorithm.loss.name", Spec)
    empty = losses.every_setting()
    losses.register("other", settings=POLICY_LOSSES.spec("sapo").settings)(lambda: None)
    assert not empty.model_fields
    assert "tau_pos" in losses.every_setting().model_fields


def test_a_loss_that_reads_squares_gets_its_scoring_pass_and_none_in_bypass(write, config_of, failures):
    """Even where one update uses every sample once, and old log-probs are not needed."""
    write(MINE, "my_own_losses.py")
    name = "algorithm.loss.name=my_own_losses.py:squares"
    assert {"old_logp", "sum_pi_squared"} <= set(build_task_graph(config_of(name)).order())
    assert "old_logp" not in build_task_graph(config_of()).order()
    (refused,) = failures(name, "rollout_correction.mode=bypass")
    assert refused.key == "rollout_correction.mode"
    assert "squares weighs tokens" in str(refused.problem())
    assert "algorithm.loss.name=ppo" in str(refused.problem())


HEAD = "from megarl.algorithms.losses import POLICY_LOSSES\n"
FIVE = "logp, old_logp, advantages, mask, cfg"


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("def loss(logp, old_logp, advantages, mask): ...", f"loss({FIVE}, *, offsets)"),
        (f"def loss({FIVE}): ...", f"loss({FIVE}, *, offsets)"),
        (f"def loss({FIVE}, *, offsets, ref_logp): ...", f"loss({FIVE}, *, offsets)"),
        (f"@REG(reads=('ref_logp',))\ndef loss({FIVE}, *, offsets): ...", f"loss({FIVE}, *, offsets, ref_logp)"),
        (
            f"def look(old_logp, mask): ...\n@REG(prepare=look)\ndef loss({FIVE}, *, offsets, chosen): ...",
            "look(old_logp, advantages, mask, cfg, *, keys, all_sum)",
        ),
        (f"@REG(prepare=lambda *a, keys, all_sum: 0)\ndef loss({FIVE}, *, offsets, chosen): ...", None),
        (f"def loss({FIVE}, **fields): ...", None),
        ("def loss(*inputs, offsets, scale=1.0): ...", None),
    ],
)
def test_the_parameters_of_a_loss_are_checked_before_the_run(write, failures, request, source, takes):
    module = f"taken_{request.node.callspec.indices['source']}"
    write(HEAD + source.replace("REG", "POLICY_LOSSES.register"), f"{module}.py")
    failed = failures(f"algorithm.loss.name={module}.py:loss")
    assert [(check.key, check.allowed) for check in failed] == [("algorithm.loss.name", takes)] * (takes is not None)


@pytest.mark.parametrize(
    ("section", "source", "meant"),
    [
        ("advantage", "def mine(rewards, mask): ...", "token_rewards"),
        ("advantage", "def mine(token_rewards, mask, norm_by_sdt): ...", "norm_by_std"),
        (
            "loss",
            f"@POLICY_LOSSES.register(reads=('ref_logps',))\ndef mine({FIVE}, *, offsets, ref_logps): ...",
            "ref_logp",
        ),
    ],
)
def test_a_field_that_no_stage_writes_is_blamed_on_the_users_function(write, failures, section, source, meant):
    file = write(HEAD + source, f"asks_{meant}.py")
    (failed,) = failures(f"algorithm.{section}.name=asks_{meant}.py:mine")
    assert (failed.key, failed.found) == (f"algorithm.{section}.name", f"{file}:2")
    assert failed.fix == f"did you mean {meant!r}?"


def test_the_included_losses_take_what_they_are_given(failures):
    for name in POLICY_LOSSES.names():
        assert not [check for check in failures(f"algorithm.loss.name={name}") if "does not accept" in check.message]


def test_a_file_that_does_not_import_is_a_user_error(write, failures):
    write("import no_such_thing_at_all\ndef loss(): ...", "broken_loss.py")
    (broken,) = failures("algorithm.loss.name=broken_loss.py:loss")
    assert "file 'broken_loss.py' does not import: ModuleNotFoundError" in str(broken.problem())
    with pytest.raises(UserError, match="does not import"):
        POLICY_LOSSES.choose(PolicyLossConfig(name="broken_loss.py:loss"))


@pytest.mark.parametrize(
    ("section", "file", "function", "key", "field"),
    [
        ("algorithm.loss", "my_losses.py", "leash", "pull", "ref_logp"),
        ("algorithm.advantage", "my_estimators.py", "above_the_batch", "share", None),
    ],
)
def test_the_files_of_the_documentation(write, config_of, failures, section, file, function, key, field):
    """One file and one line of recipe; a misspelt setting is refused, and the graph writes what the loss reads."""
    write(code_with(f"def {function}(", "algorithms.md"), file)
    one_line = f"{section}={{name: '{file}:{function}', {key}: 0.5}}"
    assert not failures(one_line)
    with pytest.raises(ConfigError, match=rf"unknown key {section}\.{key}s(?s:.*)mean {section}\.{key}\?"):
        config_of(f"{section}={{name: '{file}:{function}', {key}s: 0.5}}")
    graph = build_task_graph(config_of(one_line))
    assert (field is None) or field in graph.order()
