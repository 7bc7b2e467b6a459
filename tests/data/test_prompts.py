"""From row to prompt tokens: templates, chat, limits, and what each error says."""

import json

import pytest

from megarl.config.data import DataConfig
from megarl.data.prompts import PromptDataset
from megarl.data.rows import Row
from megarl.data.sources import as_prompts
from megarl.data.templates import chat_renderer, prompt_formatter
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import ConfigError, DataError

CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer():
    return character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789[]+= ")


def dataset(tmp_path, tokenizer, rows, split="train", **config) -> PromptDataset:
    path = tmp_path / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset(DataConfig(**{f"{split}_files": [str(path)]}, **config), tokenizer, split)


def test_batch_holds_tokens_and_columns(tmp_path, tokenizer):
    data = dataset(tmp_path, tokenizer, [{"prompt": "1+1=", "answer": "2", "level": 3}, {"prompt": "a", "answer": "b"}])
    batch = data.batch([1, 0], epoch=4)
    assert [tokenizer.decode(ids) for ids in batch["prompt_ids"].unbind()] == ["a", "1+1="]
    assert batch["uid"] == ["train-4-1", "train-4-0"]
    assert batch["prompt_text"] == ["a", "1+1="]
    assert batch["answer"] == ["b", "2"]
    assert batch["data_source"] == [f"{tmp_path.name}/train"] * 2
    assert batch["row"] == [{}, {"level": 3}]


def test_no_indices_give_an_empty_batch_of_the_same_names(tmp_path, tokenizer):
    data = dataset(tmp_path, tokenizer, [{"prompt": "a", "answer": "b"}])
    assert len(data.batch([])) == 0
    assert data.batch([]).names() == data.batch([0]).names()


def test_column_data_source_wins_over_the_file_name(tmp_path, tokenizer):
    data = dataset(tmp_path, tokenizer, [{"prompt": "a", "answer": "b", "data_source": "mine"}])
    assert data.batch([0])["data_source"] == ["mine"]
    assert data.batch([0])["row"] == [{}]


@pytest.mark.parametrize(
    ("path", "name"),
    [("test.jsonl", "test"), ("./test.jsonl", "test"), ("../test.jsonl", "test"), ("in/t.jsonl", "in/t")],
)
def test_a_file_without_a_folder_is_called_by_its_own_name(tmp_path, monkeypatch, tokenizer, path, name):
    here = tmp_path / "here"
    (here / "in").mkdir(parents=True)
    monkeypatch.chdir(here)
    (here / path).write_text('{"prompt": "a", "answer": "b"}\n')
    data = PromptDataset(DataConfig(val_files=[path]), tokenizer, "val")
    assert data.batch([0])["data_source"] == [name]


def test_half_a_character_from_a_template_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl:1: the text contains half of a surrogate pair"):
        dataset(tmp_path, tokenizer, [{"prompt": "a", "answer": "b"}], format_prompt="{{ content }}\ud83d")


def test_answer_key_null_needs_no_answers(tmp_path, tokenizer):
    data = dataset(tmp_path, tokenizer, [{"prompt": "a"}], answer_key=None)
    assert data.batch([0])["answer"] == [None]


@pytest.mark.parametrize("as_file", [False, True])
def test_format_prompt_sees_content_columns_and_row(tmp_path, tokenizer, as_file):
    template = "{{ content | trim }} {{ unit }} {{ row['odd name'] }}"
    if as_file:
        (tmp_path / "prompt.jinja").write_text(template + "\n")
        template = str(tmp_path / "prompt.jinja")
    row = {"prompt": "  how far ", "answer": "", "unit": "km", "odd name": 7}
    assert dataset(tmp_path, tokenizer, [row], format_prompt=template).texts == ["how far km 7"]


def test_inline_templates_keep_their_final_line_break():
    assert prompt_formatter("{{ content }}\n")("a", Row({}, "d", 1)) == "a\n"


def test_templates_run_in_a_sandbox():
    escape = "{{ content.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(DataError, match="access to attribute '__class__'"):
        prompt_formatter(escape)("a", Row({}, "d", 1))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ content", "data.format_prompt, line 1: broken template"),
        ("missing.jinja", "data.format_prompt: the template file does not exist"),
        ("just words", "data.format_prompt: the value is neither Jinja text nor the name of a file"),
    ],
)
def test_bad_templates_are_told(template, message):
    with pytest.raises(ConfigError, match=message):
        prompt_formatter(template)


def test_a_template_that_wants_a_missing_column_names_the_row(tmp_path, tokenizer):
    rows = [{"prompt": "a", "answer": "b", "unit": "km"}, {"prompt": "a", "answer": "b"}]
    with pytest.raises(DataError, match=r"train.jsonl:2: data.format_prompt fails on this row: 'unit' is undefined"):
        dataset(tmp_path, tokenizer, rows, format_prompt="{{ content }} {{ unit }}")


def test_text_becomes_a_user_message(tmp_path, tokenizer):
    tokenizer.chat_template = CHAT
    data = dataset(
        tmp_path, tokenizer, [{"prompt": "hi", "answer": ""}], chat_template=True, format_prompt="{{content}} x"
    )
    assert data.texts == ["[user]hi x[assistant]"]
    data = PromptDataset(data.config, tokenizer, keeps_given=True)
    assert (data.batch([0])["prompt_text"], data.batch([0])["row"][0]["prompt"]) == (data.texts, "hi x")


def test_messages_keep_their_roles_and_format_only_the_last_user_turn(tmp_path, tokenizer):
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    data = dataset(
        tmp_path,
        tokenizer,
        [{"prompt": messages, "answer": ""}],
        override_chat_template=CHAT,
        format_prompt="{{ content }}0",
    )
    assert data.texts == ["[system]be kind[user]a[assistant]b[user]c0[assistant]"]


def test_an_overriding_chat_template_may_be_a_file_and_wins(tmp_path, tokenizer):
    tokenizer.chat_template = CHAT
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}=")
    data = dataset(
        tmp_path, tokenizer, [{"prompt": "1", "answer": ""}], override_chat_template=str(tmp_path / "chat.jinja")
    )
    assert data.texts == ["1="]


def test_chat_without_a_template_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        dataset(tmp_path, tokenizer, [{"prompt": "a", "answer": ""}], chat_template=True)


def test_a_chat_template_that_refuses_names_the_row(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl:1: the chat template fails on this row: no system"):
        dataset(
            tmp_path,
            tokenizer,
            [{"prompt": "a", "answer": ""}],
            override_chat_template="{{ raise_exception('no system') }}",
        )


def test_a_begin_token_is_added_once(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer("ab")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    rows = [{"prompt": "ab", "answer": ""}, {"prompt": "<bos>ab", "answer": ""}]
    data = dataset(tmp_path, tokenizer, rows)
    assert [ids.tolist() for ids in data.prompt_ids.unbind()] == [[1, 4, 5], [1, 4, 5]]
    chat = dataset(tmp_path, tokenizer, rows[:1], override_chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert chat.prompt_ids.values.tolist() == [1, 4, 5]


# -- limits ------------------------------------------------------------------------------------------------------

LONG = [{"prompt": "aaaa", "answer": ""}, {"prompt": "aaaaa", "answer": ""}, {"prompt": "a", "answer": ""}]


def test_overlong_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    data = dataset(tmp_path, tokenizer, LONG, max_prompt_tokens=4)
    assert (len(data), data.overlong) == (2, 1)
    assert data.texts == ["aaaa", "a"]
    assert data.describe() == "train: 2 prompts of 1-4 tokens; 1 longer than 4 dropped"


def test_overlong_prompts_can_be_an_error(tmp_path, tokenizer):
    with pytest.raises(DataError) as error:
        dataset(tmp_path, tokenizer, LONG, max_prompt_tokens=4, overlong="error")
    text = str(error.value)
    assert f"{tmp_path}/train.jsonl:2: the prompt is longer than the limit (1 such prompts in all)" in text
    assert "5 tokens" in text
    assert "raise the limit to 5" in text


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"no prompt is left: all 1 (?s:.*)shortest prompt: 4 tokens"):
        dataset(tmp_path, tokenizer, LONG[:1], max_prompt_tokens=3)


def test_validation_takes_the_first_prompts(tmp_path, tokenizer):
    data = dataset(tmp_path, tokenizer, LONG, split="val", max_val_samples=2, max_prompt_tokens=4)
    assert data.texts == ["aaaa", "a"]
    assert data.batch([0])["uid"] == ["val-0-0"]


# -- errors ------------------------------------------------------------------------------------------------------


def test_no_files_for_a_split(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.val_files: the recipe names no data"):
        PromptDataset(DataConfig(), tokenizer, "val")


@pytest.mark.parametrize("key", ["prompt", "answer"])
def test_missing_column_names_the_row(tmp_path, tokenizer, key):
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b"}]
    rows[1][f"{key}s"] = rows[1].pop(key)
    with pytest.raises(DataError, match=rf"train.jsonl:2: no column '{key}'(?s:.*)set data.{key}_key to '{key}s'"):
        dataset(tmp_path, tokenizer, rows)


@pytest.mark.parametrize("value", [3, None, [], ["a"], [{"role": "user"}], [{"role": "user", "content": ["x"]}]])
def test_a_prompt_of_the_wrong_type_names_the_row(tmp_path, tokenizer, value):
    with pytest.raises(DataError, match=r"train.jsonl:1: column 'prompt' holds neither text nor valid chat messages"):
        dataset(tmp_path, tokenizer, [{"prompt": value, "answer": ""}])


def test_a_tokenizers_chat_template_is_used_unless_it_is_turned_off(tmp_path, tokenizer):
    rows = [{"prompt": "hi", "answer": ""}]
    assert dataset(tmp_path, tokenizer, rows).describe() == "train: 1 prompt of 2 tokens"
    tokenizer.chat_template = CHAT
    chat, plain = dataset(tmp_path, tokenizer, rows), dataset(tmp_path, tokenizer, rows, chat_template=False)
    assert (chat.texts, plain.texts) == (["[user]hi[assistant]"], ["hi"])
    assert chat.describe() == "train: 1 prompt of 19 tokens in the chat template"
    assert plain.describe() == "train: 1 prompt of 2 tokens without the tokenizer's chat template"


def test_a_tokenizer_may_have_several_chat_templates(tmp_path, tokenizer):
    tokenizer.chat_template = {"default": CHAT, "tool_use": "tools"}
    assert dataset(tmp_path, tokenizer, [{"prompt": "hi", "answer": ""}]).texts == ["[user]hi[assistant]"]


def test_a_role_that_the_template_does_not_write_is_refused(tmp_path, tokenizer):
    template = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role in ('system', 'user') %}")
    good = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert dataset(tmp_path, tokenizer, [{"prompt": good, "answer": ""}], override_chat_template=template).texts
    bad = [{"role": "usr", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(
        DataError, match=r"train.jsonl:2: the chat template leaves out 'content' of message 1, the usr's"
    ):
        dataset(
            tmp_path,
            tokenizer,
            [{"prompt": good, "answer": ""}, {"prompt": bad, "answer": ""}],
            override_chat_template=template,
        )


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_text_that_holds_a_token_of_the_model_is_refused(tmp_path, tokenizer, role):
    prompt = [{"role": role, "content": "a<eos>b"}, {"role": "user", "content": "b"}]
    with pytest.raises(
        DataError, match=rf"train.jsonl:1: message 1, the {role}'s, contains '<eos>'(?s:.*)chat_template: false"
    ):
        dataset(tmp_path, tokenizer, [{"prompt": prompt, "answer": ""}], override_chat_template=CHAT)


def test_text_may_hold_special_tokens_that_are_no_end_of_a_turn(tmp_path, tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<file>", "\n"]})
    template = "{% for m in messages %}{{ m.content }}<|turn|>\n{% endfor %}"
    made = lambda text: dataset(  # noqa: E731
        tmp_path,
        tokenizer,
        [{"prompt": [{"role": "user", "content": text}], "answer": ""}],
        override_chat_template=template,
    )
    assert made("a\n<file>").texts == ["a\n<file><|turn|>\n"]
    with pytest.raises(DataError, match=r"contains '<\|turn\|>', a token that begins or ends turns"):
        made("a<|turn|>")


def test_an_environment_may_quote_the_tokens_of_the_model(tmp_path, tokenizer):
    chat = chat_renderer(tokenizer, CHAT)
    messages, row = [{"role": "user", "content": "a<eos>b"}], Row({}, "messages of the environment", 0)
    with pytest.raises(DataError, match="a token that begins or ends turns"):
        chat(messages, row)
    assert "a<eos>b" in chat.observed(messages, row)


def test_messages_without_a_chat_template_in_use(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": ""}]
    with pytest.raises(DataError, match=r"chat messages(?s:.*)set data.override_chat_template"):
        dataset(tmp_path, tokenizer, rows)
    with pytest.raises(DataError, match=r"chat messages(?s:.*)set data.chat_template: true"):
        dataset(tmp_path, tokenizer, rows, chat_template=False)


def test_a_character_without_a_token_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl:2: the tokenizer has no token for 'ß'"):
        dataset(tmp_path, tokenizer, [{"prompt": "a", "answer": ""}, {"prompt": "aß", "answer": ""}])


def test_a_prompt_of_the_command_line_is_no_row(tokenizer):
    data = as_prompts(DataConfig(), ["aß"])
    said = r"the prompt 'aß': the tokenizer has no token for 'ß'(?s:.*), or write the prompt in another way"
    with pytest.raises(DataError, match=said):
        PromptDataset(data, tokenizer, "val")


def test_an_empty_prompt_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl:1: the text has no tokens"):
        dataset(tmp_path, tokenizer, [{"prompt": "", "answer": ""}])
