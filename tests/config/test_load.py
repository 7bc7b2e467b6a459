import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.base import ConfigErrors
from megarl.config.load import changed_keys, dump_config, find_recipe, load_config, recipe_names
from megarl.config.run import RunConfig
from megarl.recipes.components import COMPONENTS
from megarl.system.errors import ConfigError

TEAMS = ["placement.teams.train={roles: [actor], devices: 1}", "placement.teams.draw={roles: [rollout], devices: 1}"]


def message(file, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, components=COMPONENTS)
    assert caught.value.exit_code == 2
    return str(caught.value)


# -- what is accepted ------------------------------------------------------------------------------------------------


def test_scientific_notation_is_a_number(write):
    assert load_config(write("actor: {optim: {lr: 1e-6}}")).actor.optim.lr == 1e-6


def test_words_of_old_yaml_stay_text(write):
    config = load_config(write("name: no\nreward: {kwargs: {a: on, b: 2024-01-01, c: 1:30, d: 010}}"))
    assert config.name == "no"
    assert config.reward.kwargs == {"a": "on", "b": "2024-01-01", "c": "1:30", "d": 10}


def test_one_key_of_a_section_keeps_the_defaults_of_that_section(write):
    config = load_config(write("rollout: {sampling: {temperature: 0.7}}\ncritic: {optim: {beta1: 0.8}}"))
    assert (config.rollout.sampling.n, config.rollout.sampling.temperature) == (8, 0.7)
    assert config.critic.optim.lr == 1e-5


def test_held_out_responses_are_drawn_as_in_training_but_for_what_is_said(write):
    training = "rollout: {sampling: {n: 4, max_new_tokens: 2048, top_p: 0.9, stop_token_ids: [7]}}"
    held_out = load_config(write(training)).validation_sampling
    assert (held_out.n, held_out.temperature, held_out.max_new_tokens, held_out.top_p) == (1, 0.0, 2048, 0.9)
    said = load_config(write(training), ["validation.sampling={max_new_tokens: 64, top_p: 1, stop_token_ids: [9]}"])
    held_out = said.validation_sampling
    assert (held_out.max_new_tokens, held_out.top_p, held_out.stop_token_ids) == (64, 1.0, [9, 7])
    assert said.longest_sequence() == said.data.max_prompt_tokens + 2048


def test_a_resolved_recipe_keeps_what_validation_inherits(write):
    config = load_config(write(dump_config(load_config(write("rollout: {sampling: {max_new_tokens: 99}}")))))
    assert config.validation_sampling.max_new_tokens == 99


@pytest.mark.parametrize(
    ("path", "chat"),
    [
        ("Qwen/Qwen3-8B", "auto"),
        ("Qwen/Qwen3-8B-Base", False),
        ("/hub/models--Qwen--Qwen3-8B-Base/snapshots/0d1f", False),
        ("models/mistral_base.v1", False),
        ("database/qwen", "auto"),
        ("base/Qwen3-8B", "auto"),
    ],
)
def test_a_base_model_is_not_asked_in_a_chat_template_unless_the_recipe_says_so(write, path, chat):
    file = write(f"model: {{path: {path}}}")
    assert load_config(file).data.chat_template == chat
    assert load_config(file, ["data.chat_template=true"]).data.chat_template is True


def test_name_defaults_to_the_file(write):
    assert load_config(write("trainer: {steps: 3}", "my_run.yaml")).name == "my_run"


def test_shipped_recipe_by_bare_name(write):
    write("", "unrelated.yaml")
    assert load_config("grpo_quickstart").name == "grpo_quickstart"
    assert "grpo_gsm8k_calc" in recipe_names()


def test_suffix_may_be_left_out(write):
    file = write("trainer: {steps: 3}", "mine.yaml")
    assert find_recipe(file.with_suffix("")) == file


# -- extends ---------------------------------------------------------------------------------------------------------


def test_extends_merges_mappings_and_replaces_lists(write):
    write("data: {train_files: [a, b], batch_size: 8}\nactor: {optim: {lr: 0.5, eps: 0.25}}", "base/base.yaml")
    child = write("extends: base/base.yaml\ndata: {train_files: [c]}\nactor: {optim: {lr: 0.125}}", "child.yaml")
    config = load_config(child)
    assert (config.data.train_files, config.data.batch_size) == (["c"], 8)
    assert (config.actor.optim.lr, config.actor.optim.eps) == (0.125, 0.25)


def test_later_parents_win_and_paths_are_relative_to_the_file(write):
    write("trainer: {steps: 1, seed: 1}", "base/one.yaml")
    write("extends: one.yaml\ntrainer: {steps: 2}", "base/two.yaml")
    write("trainer: {steps: 3}", "three.yaml")
    config = load_config(write("extends: [base/two.yaml, three.yaml]", "child.yaml"))
    assert (config.trainer.steps, config.trainer.seed) == (3, 1)


def test_of_steps_and_epochs_the_later_layer_counts(write):
    file = write("trainer: {epochs: 1, steps: 7}", "base.yaml")
    child = write("extends: base.yaml\ntrainer: {steps: 2}", "child.yaml")

    def length(path, *overrides):
        trainer = load_config(path, overrides).trainer
        return trainer.steps, trainer.epochs

    assert length(file) == (7, 1.0), "a layer with both, as a resolved recipe is, counts epochs"
    assert length(child) == length(file, "trainer.steps=2") == (2, None)
    assert length(child, "trainer.epochs=3") == (2, 3.0)
    assert length(file, "trainer.epochs=3", "trainer.steps=2") == (2, None)


def test_name_is_not_inherited(write):
    write("name: parent", "parent.yaml")
    assert load_config(write("extends: parent.yaml", "child.yaml")).name == "child"


def test_replace_takes_the_place_of_an_inherited_mapping(write):
    write("reward: {kwargs: {a: 1, b: 2}}", "parent.yaml")
    child = write("extends: parent.yaml\nreward:\n  kwargs: !replace {c: 3}", "child.yaml")
    assert load_config(child).reward.kwargs == {"c": 3}
    assert load_config(child, ["reward.kwargs.d=4"]).reward.kwargs == {"c": 3, "d": 4}


@pytest.mark.parametrize(
    ("override", "kwargs"),
    [
        ("reward=!replace {name: gsm8k}", {}),
        ("reward={name: gsm8k, kwargs: !replace {d: 4}}", {"d": 4}),
        ("reward.kwargs=!replace {}", {}),
        ("reward={name: gsm8k}", {"a": 1}),
    ],
)
def test_replace_in_an_override(write, override, kwargs):
    file = write("reward: {name: numeric, kwargs: {a: 1}}")
    assert load_config(file, [override]).reward.kwargs == kwargs


def test_replace_is_for_mappings(write):
    assert "the value of reward.kwargs cannot be read" in message(write("{}"), "reward.kwargs=!replace 3")
    assert "the key reward.name is given twice" in message(write("{}"), "reward={name: a, name: b}")


def test_cycle_is_named(write):
    write("extends: b.yaml", "a.yaml")
    write("extends: c.yaml", "b.yaml")
    write("extends: a.yaml", "c.yaml")
    assert "a.yaml -> b.yaml -> c.yaml -> a.yaml" in message("a.yaml")


def test_missing_parent_names_the_line_and_the_nearest_file(write):
    write("{}", "parent.yaml")
    text = message(write("name: x\nextends: parnt.yaml", "child.yaml"))
    assert "child.yaml:2: extends: recipe not found" in text
    assert "did you mean parent.yaml?" in text


# -- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("actor.optim.lr=1e-6", "actor.optim.lr", 1e-6),
        ("actor.optim.lr=1", "actor.optim.lr", 1.0),
        ("name=a=b", "name", "a=b"),
        ("name=12", "name", "12"),
        ("name=null", "name", "null"),
        ("model.path=null", "model.path", None),
        ("actor.parallel.sp=true", "actor.parallel.sp", True),
        ("actor.parallel.vpp=2", "actor.parallel.vpp", 2),
        ("data.train_files=[a.jsonl, 12, pkg.mod:fn]", "data.train_files", ["a.jsonl", "12", "pkg.mod:fn"]),
        ("data.train_files=a.jsonl", "data.train_files", ["a.jsonl"]),
        ("rollout.sampling.stop_token_ids=[1, 2]", "rollout.sampling.stop_token_ids", [1, 2]),
        ("rollout.sampling.stop_token_ids=1", "rollout.sampling.stop_token_ids", [1]),
        ("reward.on_error=0.5", "reward.on_error", 0.5),
        ("reward.on_error=raise", "reward.on_error", "raise"),
        ("reward.kwargs.deep.x=1e-3", "reward.kwargs", {"deep": {"x": 1e-3}}),
        ("reward.kwargs={a: [1, x]}", "reward.kwargs", {"a": [1, "x"]}),
        ("trainer.resume=some/folder", "trainer.resume", "some/folder"),
        ("actor.parallel={tp: 2, sp: true}", "actor.parallel.tp", 2),
    ],
)
def test_override_is_read_by_the_type_of_its_field(write, override, path, value):
    found = load_config(write("{}", "x.yaml"), [override])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_overrides_apply_in_order_over_the_file(write):
    assert load_config(write("trainer: {steps: 1}"), ["trainer.steps=2", "trainer.steps=3"]).trainer.steps == 3


def test_override_mends_a_value_that_is_wrong_in_the_file(write):
    assert load_config(write("actor: 3"), ["actor.optim.lr=0.5"]).actor.optim.lr == 0.5


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.optim.lrr=3", ["unknown key actor.optim.lrr", "did you mean actor.optim.lr?"]),
        ("name=a\ntouch b", ["name", "one line of text without control characters"]),
        ("name=a\u202eb", ["name", "one line of text without control characters"]),
        ("actr.optim.lr=3", ["unknown key actr", "did you mean actor?"]),
        ("rollout.sglang.tp=2", ["did you mean rollout.sglang.tp_size?"]),
        ("rollout.sglang.pp=2", ["did you mean", "actor.parallel.pp"]),
        ("rollout.sglang.max=2", ["did you mean rollout.sglang.max_total_tokens or rollout.sglang.max_concurrency"]),
        ("actor.optim.lr", ["key.path=value"]),
        ("trainer.steps.x=3", ["trainer.steps is a single value"]),
        ("trainer.steps=many", ["trainer.steps has a wrong type", "'many'", "integer > 0"]),
        ("trainer.steps=0", ["trainer.steps is out of range", "integer > 0"]),
        ("reward.kwargs={a: ", ["cannot be read"]),
        ("actor.parallel.sp=yes", ["true or false"]),
        ("actor.optim.lr=nan", ["actor.optim.lr"]),
        ("actor.optim.lr=inf", ["actor.optim.lr"]),
    ],
)
def test_bad_override_is_quoted(write, override, parts):
    text = message(write("{}"), override)
    assert f"override {override!r}" in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize("given", [["10"], ["=10"], ["=", "10"]])
def test_a_key_and_its_value_as_two_arguments_are_told_how_to_join_them(write, given):
    text = message(write("{}"), "trainer.seed=1", "trainer.steps", *given, "data.shuffle=true")
    assert text.startswith("override 'trainer.steps': an override has the form key.path=value")
    assert "fix:     write trainer.steps=10" in text
    assert "problems" not in text


@pytest.mark.parametrize(("encoding", "kind"), [("latin-1", "Latin-1"), ("utf-16", "UTF-16")])
def test_a_recipe_in_another_encoding_says_which_and_how_to_convert_it(write, tmp_path, encoding, kind):
    (tmp_path / "odd.yaml").write_bytes("name: x\ntracking: {dir: l\xe4ufe}\n".encode(encoding))
    text = message(tmp_path / "odd.yaml")
    assert "odd.yaml:2" in text or encoding == "utf-16"
    assert "the file is not UTF-8 text" in text
    assert f"it looks like {kind}" in text
    assert "iconv -f" in text


# -- bad files -------------------------------------------------------------------------------------------------------


def test_misspelt_key_names_file_line_path_and_nearest(write):
    text = message(write("name: x\nactor:\n  optim:\n    lr: 0.5\n    weigth_decay: 0.1\n"))
    assert "recipe.yaml:5: unknown key actor.optim.weigth_decay" in text
    assert "did you mean actor.optim.weight_decay?" in text


def test_key_in_the_wrong_section_is_found_elsewhere(write):
    text = message(write("min_new_tokens: 3"))
    assert "did you mean rollout.sampling.min_new_tokens or validation.sampling.min_new_tokens?" in text


@pytest.mark.parametrize(("name", "meant"), [("darw", "did you mean placement.teams.draw? Otherwise "), ("frozen", "")])
def test_misspelt_team_is_told_the_one_that_may_be_meant(write, name, meant):
    file = write(
        "placement:\n  teams:\n    train: {roles: [actor], devices: 1}\n    draw: {roles: [rollout], devices: 1}\n"
    )
    text = message(file, f"placement.teams.{name}.devices=16")
    assert f"override 'placement.teams.{name}.devices=16'" in text
    assert f"placement.teams.{name}.roles is missing" in text
    assert f"fix:     {meant}add roles" in text


def test_a_role_beside_the_teams_is_shown_in_a_team(write):
    text = message(write("placement: {rollout: 1}"))
    assert "fix:     give the role to a team: placement: {teams: {NAME: {roles: [rollout], devices: 1}}}" in text


def test_misspelt_key_of_a_parent_names_the_parent(write):
    write("name: x\nactr: {}", "parent.yaml")
    assert "parent.yaml:2: unknown key actr" in message(write("extends: parent.yaml", "child.yaml"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trainer: {steps: many}", ["recipe.yaml:1: trainer.steps has a wrong type", "'many'", "integer > 0"]),
        ("trainer: {steps: '5'}", ["write 5 without quotes"]),
        ("trainer: {steps: 5.5}", ["trainer.steps has a wrong type"]),
        ("trainer: {steps: true}", ["trainer.steps has a wrong type"]),
        ("\nactor:\n", ["recipe.yaml:2: the section actor is empty"]),
        ("actor: [1]", ["actor has a wrong type"]),
        ("algorithm: {kl: {use: lose}}", ["algorithm.kl.use has an unknown value", "did you mean loss?"]),
        ("algorithm: {advantage: {name: gae, gamma: 1.5}}", ["out of range", ">= 0 and <= 1"]),
        ("data: {train_files: a.jsonl}", ["data.train_files has a wrong type", "list of text values"]),
        ("data: {train_files: /d/train.parquet}", ["fix:     write [/d/train.parquet]"]),
        ("data: {train_files: 'a, b'}", ['fix:     write ["a, b"]']),
        ("rollout: {sampling: {stop_token_ids: 5}}", ["fix:     write [5]"]),
        ("model: Qwen/Q", ["fix:     write model: {path: Qwen/Q}, on the command line model.path=Qwen/Q"]),
        ("reward: my.py:f", ["fix:     write reward: {name: my.py:f}, on the command line reward.name=my.py:f"]),
        ("env: calculator", ["fix:     write env: {name: calculator}"]),
        ("data: a.jsonl", ["fix:     write data: {train_files: [a.jsonl]}"]),
        ("algorithm: {loss: gspo}", ["write loss: {name: gspo}, on the command line algorithm.loss.name=gspo"]),
        ("data: {train_files: [a, 3]}", ["data.train_files has a wrong type"]),
        ("reward: {on_error: stop}", ["number >= -1000000000000000.0 and <= 1000000000000000.0, or raise"]),
        ("actor: {optim: {lr: .nan}}", ["actor.optim.lr"]),
    ],
)
def test_wrong_value_says_found_and_allowed_and_repeats_neither(write, text, parts):
    found = message(write(text))
    for part in [*parts, "found:", "allowed:"]:
        assert part in found
    allowed, _, fix = found.partition("allowed: ")[2].partition("\n")
    assert allowed not in fix


def test_all_problems_come_at_once(write):
    file = write("nmae: x\ntrainer: {steps: 0, sed: 1}\nactor: {optim: {lr: -1}}")
    with pytest.raises(ConfigErrors) as caught:
        load_config(file, ["actor.parallel.tq=2"])
    assert len(caught.value.problems) == 5
    assert str(caught.value).startswith("5 problems")
    assert "\n5. " in str(caught.value)


def test_a_list_of_problems_shows_what_is_allowed_once_and_not_beside_a_known_name(write):
    with pytest.raises(ConfigErrors) as caught:
        load_config(write("name: x"), ["foo=1", "bar=1", "trainer.total_epochs=2"])
    text = str(caught.value)
    assert text.count("allowed: name, model, algorithm") == 1
    assert "2. override 'bar=1': unknown key bar\n  allowed: as in problem 1\n" in text
    assert "unknown key trainer.total_epochs\n  fix:     here this is trainer.epochs" in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: a\ndata: {}\nname: b", "recipe.yaml:3: the key name is given twice"),
        ("a: [1", "recipe.yaml:1: this is not valid YAML"),
        ("name: x\n\tdata: {}", "recipe.yaml:2"),
        ("trainer:\n\tsteps: 1", "fix:     indent with spaces"),
        ("name: [x\n", "fix:     correct the line named above"),
        ("trainer:\n  steps: 1\n\tseed: 1", "fix:     indent with spaces"),
        ("trainer:\n  seed: 1\n  steps: 1\n  seed: 2", "found:   'first given on line 2'"),
        ("name: x\ntrainer: {steps: 1, steps: 2}", "found:   'both are on this line'"),
        ("- a\n- b", "the file must be a mapping"),
        ("", "the file must be a mapping"),
        ("name: !!python/object/apply:os.getcwd []", "this is not valid YAML"),
        ("reward: &x\n  kwargs: *x", "alias"),
        ("extends: 3", "extends has a wrong type"),
    ],
)
def test_broken_file(write, text, part):
    assert part in message(write(text))


def test_missing_recipe_names_the_nearest(write):
    write("{}", "my_recipe.yaml")
    assert "did you mean my_recipe.yaml" in message("my_recipy.yaml")
    assert "did you mean grpo_quickstart?" in message("grpo_quickstrat")
    assert "this is a folder" in message(".")


# -- round trip ------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
no_home = lambda text: not text.startswith("~")  # noqa: E731  (paths that start so are expanded when they are read)
awkward = texts | st.sampled_from(
    ["null", "~", "1e-6", "010", "0x1f", "yes", "on", "1:30", "2024-01-01", ".inf", "<<", "=", ""]
)


@settings(max_examples=15, deadline=None)
@given(
    name=awkward.filter(str.isprintable),
    files=st.lists(awkward.filter(no_home), max_size=3),
    kwargs=st.dictionaries(awkward, plain),
    lr=st.floats(1e-30, 1),
)
def test_dump_loads_back_equal(tmp_path_factory, name, files, kwargs, lr):
    config = RunConfig(
        name=name,
        data={"train_files": files},
        reward={"kwargs": kwargs},
        actor={"optim": {"lr": lr}, "parallel": {"vpp": None, "sp": True}},
    )
    text = dump_config(config)
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_config(file) == config
    assert RunConfig.model_validate(yaml.safe_load(text)) == config  # other YAML readers agree


def test_home_is_expanded_in_paths_and_nowhere_else(write, monkeypatch):
    monkeypatch.setenv("HOME", "/elsewhere/me")
    text = "model: {path: ~/m}\ndata: {train_files: [~/t.jsonl@train, 'text:~/x']}\nreward: {name: '~/r.py:fn'}\n"
    text += "critic: {path: ~/c}\nteacher: {path: ~/t, models: {a: {path: ~/a}}}\n"
    config = load_config(write(text), ["trainer.resume=~/run/checkpoints/step_1", "name=~x"])
    models = [config.critic, config.teacher, config.teacher.models["a"]]
    assert [model.path for model in models] == [f"/elsewhere/me/{name}" for name in "cta"]
    assert config.model.path == "/elsewhere/me/m"
    assert config.data.train_files == ["/elsewhere/me/t.jsonl@train", "text:~/x"]
    assert config.reward.name == "/elsewhere/me/r.py:fn"
    assert config.trainer.resume == "/elsewhere/me/run/checkpoints/step_1"
    assert config.name == "~x"


def test_a_section_named_like_a_word_of_python_is_written_as_it_is_read(write, tmp_path):
    config = load_config(write("async: {max_staleness: 1}"))
    assert config.async_.max_staleness == 1
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert "\nasync:\n" in copy.read_text()
    assert load_config(copy) == config
    assert load_config(copy, ["async.max_staleness=0"]).async_.max_staleness == 0
    assert "did you mean async?" in message(write("asyn: {max_staleness: 1}"))


def test_all_keys_of_async_are_read_written_and_overridden(write, tmp_path):
    config = load_config(write("async: {max_staleness: 3, order: as_ready, partial: true}"))
    section = config.async_
    assert (section.max_staleness, section.order, section.partial) == (3, "as_ready", True)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config
    others = ["async.max_staleness=2", "async.order=in_order", "async.partial=false"]
    section = load_config(copy, others).async_
    assert (section.max_staleness, section.order, section.partial) == (2, "in_order", False)
    assert "did you mean as_ready?" in message(write("async: {order: asready}"))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ([], 0),
        (["placement.teams.all={roles: [actor, rollout, reference], devices: 1}"], 0),
        (["cluster.max_restarts=1"], 1),
        (TEAMS, 3),
        (["placement.auto=even"], 3),
        ([*TEAMS, "cluster={nproc: 2}"], 3),
        ([*TEAMS, "cluster.max_restarts=0"], 0),
    ],
)
def test_several_teams_start_again_unless_the_recipe_says_otherwise_and_the_resolved_recipe_says_it(
    write, tmp_path, settings, found
):
    config = load_config(write("name: run"), settings, components=COMPONENTS)
    assert config.cluster.max_restarts == found
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config))
    assert f"max_restarts: {found}" in file.read_text()
    assert load_config(file, components=COMPONENTS) == config


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("reward.extract=last", "did you mean reward.kwargs.extract?"),
        ("reward.mine=1", "if it is an argument of the function, write reward.kwargs.mine; otherwise remove it"),
        ("reward.parts={a: {name: numeric, extract: last}}", "did you mean reward.parts.a.kwargs.extract?"),
        ("reward.nmae=gsm8k", "did you mean reward.name?"),
        ("data.low=3", "if it is an argument of a pkg.mod:fn source, write data.loader_kwargs.low; otherwise"),
        ("model.hidden_size=8", "if it is a key of the model's config.json, write model.hf_config.hidden_size"),
        ("algorithm.clip_low=0.1", "did you mean algorithm.loss.clip_low?"),
    ],
)
def test_a_key_beside_its_mapping_or_section_is_told_its_place(override, fix, write):
    with pytest.raises(ConfigError) as caught:
        load_config(write("name: mine"), [override], components=COMPONENTS)
    assert fix in str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
def test_what_differs_from_the_defaults_is_the_recipe(name, write):
    config = load_config(name, components=COMPONENTS)
    changed, others = changed_keys(config, COMPONENTS)
    assert others > 200
    assert load_config(write(yaml.safe_dump(changed)), components=COMPONENTS) == config


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        ([], 1e-3),  # a fresh model
        (["model.path=trained"], 1e-5),
        (["model.path=trained", "model.lora.rank=4"], 1e-4),
        (["model.path=trained", "sft.optim.warmup_steps=3"], 1e-5),
        (["model.path=trained", "sft.optim.lr=2e-4"], 2e-4),
    ],
)
def test_fine_tuning_takes_small_steps_where_the_model_is_trained(config_of, overrides, lr):
    assert config_of(*overrides).sft.optim.lr == lr


def test_steps_of_fine_tuning_win_over_epochs_of_a_layer_below(config_of):
    config = config_of("sft.epochs=2", "sft.steps=5")
    assert (config.sft.epochs, config.sft.steps) == (None, 5)
