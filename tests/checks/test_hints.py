"""The fix that an error names for what users of other trainers, and those who mistype, write."""

import pytest

from megarl.artifacts.trained import check_holds_run, overrides_for_model
from megarl.checks.checklist import Checklist
from megarl.checks.files import check_source
from megarl.cli import main
from megarl.commands.keys import show_keys
from megarl.config.other_values import VALUES, value_fix
from megarl.data.sources import load_rows
from megarl.envs.registry import load_environment
from megarl.system.errors import DataError, UserError
from tests.checks.test_other_names import is_a_key, message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.engine=vllm", "vLLM is not supported: set rollout.engine=sglang"),
        ("model.lora={targets: [q_proj, v_proj]}", "write [attention]"),
        ("model.lora={targets: [q_proj, up_proj]}", "write [attention, mlp]"),
        ("model.lora={targets: all-linear}", "write null"),
        ("model.lora={r: 16}", "here this is model.lora.rank"),
        ("model.lora.r=16", "here this is model.lora.rank"),
        ("model.dtype=bfloat16", "write bf16"),
        ("model.revision=main", "revisions cannot be chosen here: run hf download NAME --revision REVISION"),
        ("preference.loss=simpo", "this method does not exist here; preference methods are DPO"),
        ("preference.loss=dpo", "write sigmoid"),
        ("actor.optim.name=muon", "the optimizer is always AdamW"),
        ("actor.optim.schedule=constant_with_warmup", "write constant"),
        ("max_length=512", "here this is preference.max_tokens"),
        ("multi_turn.format=hermes", "here this is env.parser"),
        ("actor_rollout_ref.rollout.multi_turn.format=hermes", "here this is env.parser"),
        ("multi_turn.tool_config_path=t.yaml", "here this is env.tools"),
    ],
)
def test_a_key_or_value_of_another_trainer_is_answered_with_the_one_here(write, override, words):
    assert f"fix:     {words}" in message(write, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.loss.name=dapo", "set algorithm.pipeline=dapo, and algorithm.loss.clip_high"),
        ("tracking.loggers=[mlflow]", "tracking.mlflow"),
        ("tracking.loggers=[console]", "remove it: the console always shows the steps"),
        ("data.train_files=[nope.jsonl]", "relative paths"),
    ],
)
def test_a_check_before_the_start_names_the_fix(failures, tmp_path, override, words):
    (tmp_path / "none.py").write_text("")
    assert [check.fix for check in failures(override) if words in (check.fix or "")]


def test_values_of_other_trainers_belong_to_keys_that_exist_and_become_values_that_are_taken():
    assert [key for key in VALUES if not is_a_key(key) and key != "env.parser"] == []
    assert value_fix("rollout.engine", "embedded") is None


@pytest.mark.parametrize("model_type", ["qwen3_5_omni", "ministral", "qwen4"])
def test_another_architecture_is_no_typing_error(failures, model_type):
    [problem] = [
        check for check in failures(f"model.hf_config.model_type={model_type}") if "architecture" in check.message
    ]
    assert problem.fix == "choose a model of one of these architectures"


@pytest.mark.parametrize("word", ["vllm", "gspo", "orpo", "simpo", "qlora", "dora", "muon", "max_length", "hermes"])
def test_a_word_of_another_trainer_is_found_among_the_keys(word):
    assert show_keys(word)


def test_a_data_file_that_is_missing_is_not_taken_for_one_of_another_kind(tmp_path):
    (tmp_path / "none.py").write_text("")
    checks = Checklist(name="data")
    check_source(str(tmp_path / "nope.jsonl"), "data.train_files", checks)
    assert "none.py" not in str(checks.items[0].fix)
    with pytest.raises(DataError) as caught:
        load_rows(str(tmp_path / "nope.jsonl"))
    assert "none.py" not in str(caught.value)


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_a_csv_with_another_separator_is_named(tmp_path, sign, name):
    file = tmp_path / "t.csv"
    file.write_text(f"prompt{sign}answer\n1+1={sign}2\n")
    with pytest.raises(DataError, match=f"separated by {name}"):
        load_rows(str(file))


def test_a_table_of_one_column_is_no_other_separator(tmp_path):
    (tmp_path / "t.csv").write_text('prompt\n"a;b"\n')
    assert load_rows(str(tmp_path / "t.csv"))[0]["prompt"] == "a;b"


def test_the_parser_of_another_trainer_is_answered_with_the_one_here(tmp_path):
    with pytest.raises(UserError) as caught:
        load_environment({"name": "tools", "parser": "hermes", "tools": ["x.py:f"]})
    text = str(caught.value)
    assert "allowed: qwen, qwen25, llama3" in text
    assert "write qwen25" in text


def test_a_class_that_is_no_environment_is_told_what_to_derive_from(tmp_path):
    (tmp_path / "mine.py").write_text("class Gym:\n    pass\n")
    with pytest.raises(UserError, match=r"class Gym\(megarl.envs.Environment\)"):
        load_environment({"name": f"{tmp_path / 'mine.py'}:Gym"})


def test_an_exported_model_in_place_of_a_run_is_named_in_a_recipe(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"RECIPE model.path={tmp_path}"):
        check_holds_run(tmp_path)


def test_a_folder_of_something_else_is_not_told_to_let_its_run_finish(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(UserError, match="this folder has no run"):
        overrides_for_model(tmp_path, "best")


@pytest.fixture
def init(tmp_path, monkeypatch, capsys):
    """init(options...) -> exit code and what `megarl init` writes to the terminal."""
    monkeypatch.chdir(tmp_path)

    def run(*options):
        code = main(["init", "mine", *options])
        return code, capsys.readouterr().err

    return run


def test_init_says_that_a_file_is_missing(init):
    code, text = init("--data", "nope.jsonl")
    assert code == 2
    assert "file or folder not found" in text


def test_init_takes_columns_with_unusual_names(init, tmp_path):
    (tmp_path / "my.csv").write_text("frage,result\n1+1=,2\n2+2=,4\n")
    code, text = init("--data", "my.csv")
    assert code == 2
    assert "columns here: frage, result" in text
    assert "--answer-key COLUMN" in text
    code, text = init("--data", "my.csv", "--prompt-key", "frage", "--answer-key", "result")
    assert code == 0, text
    written = (tmp_path / "mine.yaml").read_text()
    assert "prompt_key: frage" in written
    assert "answer_key: result" in written
