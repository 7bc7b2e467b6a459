"""What workers would refuse in the rows is refused before one starts, by the same words."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tokenizers

from megarl.checks.checklist import Checklist
from megarl.checks.files import check_chat_template
from megarl.checks.lora import check_lora
from megarl.checks.recipe import ConfigWarning
from megarl.checks.references import check_arguments
from megarl.checks.rows import check_rows
from megarl.config.base import ConfigErrors
from megarl.config.load import load_config
from megarl.data.light_tokenizer import FileTokenizer, WrittenTokenizer
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import ConfigError, DataError, UserError

RECIPE = """
name: case
model:
  hf_config: {model_type: qwen3, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
              head_dim: 16, intermediate_size: 128, vocab_size: 32, max_position_embeddings: 256}
  tokenizer: "chars:0123456789+="
data: {train_files: [train.jsonl], max_prompt_tokens: 4}
"""
GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check(rows, *overrides) -> what a start says about these rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def check_them(rows: list[dict], *overrides: str, job: str = "train", **more) -> None:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        check_rows(load_config(tmp_path / "recipe.yaml", overrides), job, **more)

    return check_them


def chat(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_split_without_rows_is_refused_and_examples_of_their_own_need_no_held_out_ones(check, tmp_path):
    rows = [{"prompt": f"{i}+{j}", "answer": "2"} for i in range(5) for j in range(5)]
    for job, words, split in (("train", "none is left to train on", 25), ("eval", "no prompt is held out", 1e-9)):
        with pytest.raises(DataError, match=rf"data\.val_split: .*{words}(?s:.*) of 25 different prompts"):
            check(rows, f"data.val_split={split}", job=job)
    (tmp_path / "own.jsonl").write_text(json.dumps(GOOD) + "\n")  # it is not in the share
    check(rows, "data.val_split=0.2", "sft.train_files=own.jsonl", "sft.steps=1")


def test_what_needs_no_rows_is_checked_without_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + "\n")
    function = "data.train_files=[megarl.recipes.arithmetic:make_rows]"
    assert check_rows(load_config(tmp_path / "recipe.yaml", []), "train")
    assert not check_rows(load_config(tmp_path / "recipe.yaml", [function]), "train")
    with pytest.raises(ConfigError, match="broken template"):
        check_rows(load_config(tmp_path / "recipe.yaml", [function, "data.format_prompt={{ content"]), "train")


def test_arguments_that_no_source_takes_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "my_rows.py").write_text("def rows(ops, low):\n    return []\n")
    function = "data.train_files=[my_rows:rows]"
    check_arguments(load_config(tmp_path / "recipe.yaml", []))
    with pytest.raises(ConfigError, match=r"data.loader_kwargs.foo(?s:.*)no source is a pkg.mod:fn"):
        check_arguments(load_config(tmp_path / "recipe.yaml", ["data.loader_kwargs.foo=1"]))
    with pytest.raises(ConfigError, match=r"data.loader_kwargs.opss(?s:.*)did you mean 'ops'"):
        check_arguments(load_config(tmp_path / "recipe.yaml", [function, "data.loader_kwargs.opss=[+]"]), limit_s=60)


def test_good_rows_pass(check):
    check([GOOD, {"prompt": "10+10=", "answer": "20"}])  # the second is too long, and is dropped by the workers
    check([{"prompt": chat("1+1="), "answer": "2"}], "data.override_chat_template={{ messages[0].content }}")


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        ([GOOD, {"prompt": "1-1=", "answer": "0"}], [], ["train.jsonl:2", "no token for '-'"]),
        ([{"prompt": "10+10=", "answer": "2"}], [], ["no prompt is left", "shortest prompt: 6 tokens"]),
        (
            [GOOD, {"prompt": "10+10=", "answer": "2"}],
            ["data.overlong=error"],
            ["train.jsonl:2", "longer than the limit", "raise the limit to 6"],
        ),
        ([{"prompt": chat("1+1="), "answer": "2"}], [], ["train.jsonl:1", "no chat template is used"]),
        (
            [{"prompt": 3, "answer": "2"}],
            [],
            ["train.jsonl:1", "column 'prompt' holds neither text nor valid chat messages"],
        ),
        ([{"prompt": "", "answer": "2"}], [], ["train.jsonl:1", "the text has no tokens"]),
        ([GOOD], ["data.chat_template=true"], ["data.chat_template", "has no chat template"]),
        ([GOOD], ["data.format_prompt={{ contant }}"], ["train.jsonl:1", "data.format_prompt fails on this row"]),
        ([{"prompt": "1+1=", "answer": "two"}], ["sft.steps=1"], ["train.jsonl:1", "no token for 't'"]),
        (
            [{"prompt": "1+1=", "answer": None}],
            ["sft.steps=1", "reward.name=format"],  # a reward that reads no answers
            [
                "column 'answer' does not hold a response to train on",
                "found:   'null'",
                "fix:     write the response into the column, or remove the row",
                "a cold start (sft.steps above 0) read the column of sft.response_key",
            ],
        ),
        (
            [{"prompt": "1+1=", "answer": 0.5}],
            ["sft.steps=1"],
            ["train.jsonl:1", "column 'answer' does not hold a response"],
        ),
        (
            [GOOD],
            ["data.val_files=[train.jsonl]", "data.max_prompt_tokens=3"],
            ["data.val_files", "all 1 are longer than the limit"],
        ),
    ],
)
def test_bad_rows_are_named(check, rows, overrides, words):
    with pytest.raises(UserError) as caught:
        check(rows, *overrides)
    for word in words:
        assert word in str(caught.value)


def test_answers_that_nothing_learns_need_no_tokens(check):
    check([{"prompt": "1+1=", "answer": "two"}])


def test_columns_that_a_reward_reads_are_looked_for(check, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def trl(completions, solution, **kwargs):\n    return [0.0 for c in completions]\n"
        "def own(samples):\n    return [0.0 for s in samples]\n"
    )
    with pytest.raises(DataError, match=r"train.jsonl:2: no column 'solution'(?s:.*)the parameter solution of rewards"):
        check([{**GOOD, "solution": "2"}, GOOD], "reward.name=rewards.py:trl")
    with pytest.raises(
        DataError, match=r"rename the parameter to the column(?s:.*)call the parameter answer: data.ans"
    ):
        check([{"prompt": chat("1+1="), "answer": "2"}], "reward.name=rewards.py:trl")
    check([GOOD], "reward={name: rewards.py:trl, kwargs: {solution: 2}}")
    with pytest.warns(
        ConfigWarning, match=r"reward.kwargs.solution: this is the name of a column, but(?s:.*)call the param"
    ):
        check([GOOD], "reward={name: rewards.py:trl, kwargs: {solution: answer}}")
    nested = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    with pytest.warns(
        ConfigWarning, match=r"solution reward_model, and read reward_model.ground_truth in it|solution of"
    ):
        check([nested], "reward={name: rewards.py:trl, kwargs: {solution: reward_model.ground_truth}}")
    check([{"prompt": "1+1="}], "reward.name=rewards.py:own")  # which reads no answer
    with pytest.warns(ConfigWarning, match=r"rewards.py:own: samples have their own values (?s:.*)uid, response"):
        check([{**GOOD, "uid": "x7", "response": "3"}], "reward.name=rewards.py:own")


@pytest.mark.parametrize(
    ("reward", "missing"),
    [
        (
            "{name: http, kwargs: {url: 'http://h', fields: [respnse, level]}}",
            "'respnse'(?s:.*)did you mean 'response'",
        ),
        ("{parts: {a: {name: http, kwargs: {url: 'http://h', fields: [x]}}}}", r"(?s)'x'.*reward\.parts\.a\.kwargs: x"),
        ("{name: http, kwargs: {url: 'http://h', fields: [response, row, level]}}", None),
        ("{name: http, kwargs: {url: 'http://h', fields: [x], protocol: sglang}}", None),
        ("{name: judge, kwargs: {url: 'http://h', model: m, prompt: '{{ respnse }}'}}", "'respnse'"),
        ("{name: judge, kwargs: {url: 'http://h', model: m}}", None),
        (
            "{name: judge, kwargs: {url: 'http://h', model: m, prompt: '{% for i in range(2) %}{{ level }}{{ low }}"
            '{% endfor %}{% if hint is defined %}{{ hint }}{% endif %}{{ note | default("") }}\'}}',
            None,
        ),
    ],
)
def test_names_that_an_included_reward_is_told_to_read_are_looked_for(check, reward, missing):
    expected = contextlib.nullcontext() if missing is None else pytest.raises(DataError, match=missing)
    with expected:
        check([{**GOOD, "level": 1}], f"reward=!replace {reward}")


def test_an_answer_in_an_object_is_named_for_functions_of_users(check, tmp_path):
    (tmp_path / "rewards.py").write_text("def verl(solution_str, ground_truth, **kwargs):\n    return 0.0\n")
    rows = [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}]
    with pytest.warns(ConfigWarning, match=r"data.answer_key: (?s:.*)set data.answer_key=reward_model.ground_truth"):
        check(rows, "reward.name=rewards.py:verl", "data.answer_key=reward_model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(rows, "reward.name=rewards.py:verl", "data.answer_key=reward_model.ground_truth")


def test_held_out_rows_of_supervised_runs_may_be_left_out(check):
    talk, keys = [{"prompt": "1+1=", "learn": "2"}], ["sft.response_key=learn", "data.val_files=[train.jsonl]"]
    with pytest.raises(
        DataError, match=r"no column 'answer'(?s:.*)scored by exact_match: without answers set reward\.name=format"
    ):
        check(talk, *keys, job="sft")
    check(talk, *keys, "reward.name=format", job="sft")
    with pytest.raises(DataError, match=r"no column 'answer'(?s:.*)with the value$"):
        check(talk, *keys, job="eval")


@pytest.mark.parametrize(
    ("row", "loss", "missing"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "sigmoid", "answer"),
        ({"chosen": chat("1+1="), "rejected": chat("1+1=")}, "sigmoid", "prompt"),
        ({"prompt": "1+1=", "completion": "2", "label": True}, "kto", "answer"),
    ],
)
def test_eval_of_a_run_of_preferences_asks_for_prompts_with_answers(check, tmp_path, row, loss, missing):
    recipe = ["algorithm.pipeline=dpo", f"preference.loss={loss}"]
    with pytest.raises(UserError) as caught:
        check([row], *recipe, "data.val_files=[train.jsonl]", job="eval")
    assert f"no column '{missing}'" in str(caught.value)
    assert "as in megarl eval, needs prompts with answers" in str(caught.value)
    assert "data.val_files=[prompts with answers]" in str(caught.value)
    assert "learns from it" not in str(caught.value)
    (tmp_path / "test.jsonl").write_text(json.dumps(GOOD) + "\n")
    check([row], *recipe, "data.val_files=[test.jsonl]", job="eval")


def test_problems_of_several_files_come_together(check, tmp_path):
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": "1+1="}) + "\n")
    with pytest.raises(ConfigErrors) as caught:
        check([{"prompt": "1+1="}, {}], "data.val_files=[val.jsonl, val.jsonl]")
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("train.jsonl:2", "no column 'prompt'"),
        ("train.jsonl:1", "no column 'answer'"),
        ("val.jsonl:1", "no column 'prompt'"),
        ("val.jsonl:1", "no column 'answer'"),
    ]


def test_files_that_the_recipes_checks_refuse_are_not_read(check, tmp_path):
    (tmp_path / "rows.py").write_text("")
    (tmp_path / "empty").mkdir()
    check([GOOD], "data.val_files=[rows.py, empty]")


def test_answers_are_those_that_the_reward_can_use(check):
    with pytest.raises(DataError, match=r"train.jsonl:2: the reward exact_match cannot use the answer in 'answer'"):
        check([GOOD, {"prompt": "1+1=", "answer": None}])
    check([{"prompt": "1+1=", "answer": ["2", "02"]}], "reward.kwargs={answers: any}")
    check([{"prompt": "1+1="}], "reward.name=format")
    check([{"prompt": "1+1=", "answer": None}], "data.val_files=[train.jsonl]", job="generate")
    check([{"prompt": "1+1=", "learn": "2"}], "sft.response_key=learn", job="sft")


def test_held_out_prompts_only_count_for_their_jobs(check):
    check([{"prompt": "1-1=", "answer": "0"}], job="eval")  # its train files are not read by the workers either
    with pytest.raises(DataError):
        check([{"prompt": "1-1=", "answer": "0"}], "data.val_files=[train.jsonl]", job="eval")


def test_a_prompt_of_the_command_line_is_no_row(check):
    with pytest.raises(DataError, match=r"^the prompt '1\?1=': the tokenizer has no token for '\?'(?s:.*)write the pr"):
        check([GOOD], "data.val_files=['text:1?1=']", job="generate")


def test_tokens_are_counted_for_two_seconds_at_most(check):
    rows = [GOOD] * 600 + [{"prompt": "1-1=", "answer": "0"}]
    with pytest.raises(DataError, match=r"train.jsonl:601"):
        check(rows)
    ticks = itertools.count(0, 0.9)
    check(rows, clock=lambda: next(ticks))  # two blocks of 256 rows, and the time is over


def test_character_tokens_are_those_of_the_real_tokenizer():
    real, light = character_tokenizer("abc+"), WrittenTokenizer("chars:abc+")
    texts = ["a+b", "", "c?"]
    assert light(texts)["input_ids"] == real(texts)["input_ids"]
    assert light("ca")["input_ids"] == real("ca")["input_ids"]
    assert (light.bos_token_id, light.unk_token_id) == (real.bos_token_id, real.unk_token_id)


def test_tokens_of_a_folder_are_those_of_the_real_tokenizer(tmp_path: Path):
    from transformers import AutoTokenizer

    character_tokenizer("abc+").save_pretrained(tmp_path)
    real, light = AutoTokenizer.from_pretrained(tmp_path), FileTokenizer(tmp_path)
    assert light(["a+b", "c?"])["input_ids"] == real(["a+b", "c?"])["input_ids"]
    assert light("ca")["input_ids"] == real("ca")["input_ids"]
    assert (light.bos_token_id, light.unk_token_id) == (real.bos_token_id, real.unk_token_id)
    assert not light.has_chat_template
    real.chat_template = "{{ messages }}"
    real.save_pretrained(tmp_path)
    assert FileTokenizer(tmp_path).has_chat_template


def test_padding_and_truncation_in_the_file_do_not_count(tmp_path: Path):
    from transformers import AutoTokenizer

    character_tokenizer("abc+").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    stored = tokenizers.Tokenizer.from_file(str(file))
    stored.enable_padding(length=8)
    stored.enable_truncation(max_length=2)
    stored.save(str(file))
    real, light = AutoTokenizer.from_pretrained(tmp_path), FileTokenizer(tmp_path)
    assert light("a+b")["input_ids"] == real("a+b")["input_ids"]
    assert light(["a+b", "c"])["input_ids"] == real(["a+b", "c"])["input_ids"] == [[4, 7, 5], [6]]


def test_what_a_chat_template_writes_is_left_to_the_workers(check, tmp_path):
    real = character_tokenizer("0123456789+=")
    real.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    real.save_pretrained(tmp_path / "tokenizer")
    chats = ["model.tokenizer=tokenizer", "data.chat_template=true", "data.overlong=error"]
    check([{"prompt": chat("<think>hm</think> 1+1="), "answer": "2"}], *chats)
    with pytest.raises(DataError, match="column 'prompt' holds neither text nor valid chat messages"):
        check([{"prompt": [{"role": "user"}], "answer": "2"}], *chats)


def test_a_folder_is_looked_at_as_well(check, tmp_path):
    character_tokenizer("0123456789+=").save_pretrained(tmp_path / "tokenizer")
    check([GOOD], "model.tokenizer=tokenizer")
    with pytest.raises(DataError, match="no token for '-'"):
        check([{"prompt": "1-1=", "answer": "0"}], "model.tokenizer=tokenizer")
    with pytest.raises(ConfigError, match="has no chat template"):
        check([GOOD], "model.tokenizer=tokenizer", "data.chat_template=true")


def test_nothing_heavy_is_imported():
    code = "import sys, megarl.checks.rows; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def checked_lengths(check, tmp_path):
    """checked_lengths(rows, *overrides) -> what the dry run says of lengths, as status and message."""
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}{{ more }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def lengths(rows, *overrides):
        checks = Checklist()
        check(rows, *overrides, checks=checks)
        return [f"{item.status} {item.name}: {item.message}" for item in checks.items if item.name == "lengths"]

    return lengths


_CHATS = ["model.tokenizer=tokenizer", "data.chat_template=true"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "ok lengths: training data: 2 prompts of 3 to 4 tokens"),
        (_CHATS, "ok lengths: training data: 2 prompts of 3 to 4 tokens without what the chat template adds"),
        (["model.tokenizer=some/where"], "skip lengths: training data: the tokenizer is known when the run starts"),
        (
            ["data.train_files=[train.jsonl, some/data]"],
            "skip lengths: training data: not all of its sources are read before the start",
        ),
    ],
)
def test_the_dry_run_says_how_far_lengths_were_checked(checked_lengths, overrides, expected):
    rows = [GOOD, {"prompt": "1+1", "answer": "2"}]
    assert checked_lengths(rows, *overrides) == [expected]


def test_prompts_that_are_too_long_for_any_chat_template_are_refused(checked_lengths, monkeypatch):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=" * 2, "answer": "2"}]
    with pytest.raises(DataError, match=r"train.jsonl:2: the prompt is longer(?s:.*)8 tokens without(?s:.*): filter"):
        checked_lengths(rows, *_CHATS, "data.overlong=error")
    with pytest.raises(DataError, match=r"all prompts are longer(?s:.*)4 to 8 tokens without"):
        checked_lengths(rows, *_CHATS, "data.max_prompt_tokens=2")
    monkeypatch.setattr("megarl.checks.rows._SAMPLE", 2)
    with pytest.raises(DataError, match=r"all prompts are longer(?s:.*)4 to 8 tokens without"):
        checked_lengths([*rows, *rows], *_CHATS, "data.max_prompt_tokens=2")
    [text] = checked_lengths([*rows, *rows], *_CHATS)
    assert "2 of 4 prompts of 4 to 8 tokens" in text


def test_pairs_that_are_all_equal_are_refused(check):
    pairs = ["algorithm.pipeline=dpo", "preference.loss=sigmoid"]
    equal, other = ({"prompt": "1+", "chosen": "1", "rejected": text} for text in "12")
    check([equal, other], *pairs)
    with pytest.raises(DataError, match=r"data\.train_files: no preference pair is left: the two responses are equal"):
        check([equal, equal], *pairs)


def test_a_variable_that_the_chat_template_does_not_read_is_refused(checked_lengths):
    def statuses(*overrides):
        checks = Checklist()
        check_chat_template(load_config("recipe.yaml", [*_CHATS, *overrides]), checks)
        return [(item.status, item.key) for item in checks.items]

    assert statuses("data.chat_template_kwargs={more: 1}") == [("ok", None)]
    key = "data.chat_template_kwargs.enable_thinking"
    assert statuses("data.chat_template_kwargs={enable_thinking: false}") == [("fail", key)]
    given = ["data.override_chat_template={{ messages }}", "data.chat_template_kwargs={enable_thinking: false}"]
    assert statuses(*given) == [("fail", key)]


@pytest.mark.parametrize(
    ("settings", "key"),
    [(None, "model.lora.path"), ({"r": 4, "lora_alpha": 32}, "model.lora.rank"), ({"r": 8, "lora_alpha": 32}, None)],
)
def test_an_adapter_to_start_from_is_looked_at(tmp_path, settings, key):
    if settings is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    given = [f"model.lora={{path: {tmp_path}, rank: 8, alpha: 32}}"]
    checks = Checklist()
    check_lora(load_config("grpo_quickstart", given), None, None, checks)
    assert [item.key for item in checks.items if item.status != "ok"] == ([key] if key else [])
