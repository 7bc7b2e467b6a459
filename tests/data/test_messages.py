"""Chat messages: forms that are read, keys that a template writes or that are refused, and what is learnt."""

from __future__ import annotations

import json

import pytest

from megarl.config.data import DataConfig
from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.data.messages import PromptColumn, read_messages
from megarl.data.prompts import PromptDataset
from megarl.data.rows import Row
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import ConfigError, DataError

# Writes thinking and calls, as Qwen3's does; leaves out what an assistant says beside a call, as Llama 3's does.
CHAT = """
{%- for t in tools or [] %}[tool {{ t.name }}]{% endfor %}
{%- for m in messages %}[{{ m.role }}]
  {%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
  {%- if m.tool_calls %}{{ m.tool_calls[0].function.name }}!{% else %}{{ m.content }}{% endif %}<eos>
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is false %}()#{% endif %}{% endif %}"""
USER = {"role": "user", "content": "1+1"}
CALL = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]


@pytest.fixture
def tokenizer():
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyzABC 0123456789+=[]()!#.,<>/_")
    made.chat_template = CHAT
    return made


@pytest.fixture
def prompts(tmp_path, tokenizer):
    """prompts(value, **settings) -> the dataset of one row whose prompt is `value`."""
    return lambda value, **more: PromptDataset(*written(tmp_path, tokenizer, {"prompt": value, "answer": "2"}, more))


@pytest.fixture
def examples(tmp_path, tokenizer):
    """examples(row, response_key, **settings) -> what is learnt of one row: text with [] around what is not."""

    def make(row: dict, key: str = "answer", stop_ids: tuple[int, ...] = (), **more) -> str:
        data = SFTDataset(*written(tmp_path, tokenizer, row, more), key, stop_ids=stop_ids)
        batch = data.batch([0])
        learnt = zip(batch["response_ids"].values.tolist(), batch["response_mask"].values.tolist(), strict=True)
        return "".join(tokenizer.decode([token]) if said else f"_{tokenizer.decode([token])}" for token, said in learnt)

    return make


def written(tmp_path, tokenizer, row: dict, more: dict) -> tuple:
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"chat_template": True, **more}
    return DataConfig(train_files=[str(tmp_path / "d.jsonl")], **settings), tokenizer


# -- forms -------------------------------------------------------------------------------------------------------


def test_parts_of_text_are_text_and_nulls_are_nothing(prompts):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1", "image_url": None}]
    assert prompts([{"role": "user", "content": parts, "name": None, "tool_calls": []}]).texts == [
        "[user]1+1<eos>[assistant]"
    ]


def test_messages_from_someone_are_messages(prompts):
    said = [{"from": "system", "value": "be kind"}, {"from": "human", "value": "1+1", "markdown": None}]
    assert prompts(said).texts == ["[system]be kind<eos>[user]1+1<eos>[assistant]"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "has content that is not text(?s:.*)image_url",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "message 1 (?s:.*)input_audio"),
        ({"role": "user", "content": []}, "column 'prompt' holds neither text nor valid chat messages"),
        ({"role": "user", "content": None}, "column 'prompt' holds neither text nor valid chat messages"),
        ({"from": "function_call", "value": "{}"}, "unknown sender(?s:.*)function_call(?s:.*)human"),
        ({**USER, "weight": 1}, "has an invalid weight"),
        ({**USER, "name": "Ann"}, "leaves out 'name' of message 1, the user's(?s:.*)Ann"),
        ({**USER, "audio": {"id": "x"}}, "leaves out 'audio'"),
    ],
)
def test_what_is_no_message_of_text_is_named(prompts, message, words):
    with pytest.raises(DataError, match=rf"d.jsonl:1: (?s:.*){words}"):
        prompts([message])


def test_messages_that_are_not_learnt_may_say_so(examples):
    talk = [{**USER, "weight": 0}, {"role": "assistant", "content": "2", "weight": 1}]
    more = [{"from": "human", "value": "3", "weight": 0.0}, {"from": "gpt", "value": "4", "weight": 1.0}]
    learnt = examples({"messages": [*talk, *more]}, "messages", prompt_key="messages")
    assert learnt == "2<eos>_[_u_s_e_r_]_3_<eos>_[_a_s_s_i_s_t_a_n_t_]4<eos>"


def test_a_final_message_of_the_assistant_is_no_prompt(prompts):
    with pytest.raises(
        DataError, match=r"d.jsonl:1: (?s:.*)the prompt holds the response(?s:.*)'2'(?s:.*)sft.response_key"
    ):
        prompts([USER, {"role": "assistant", "content": "2"}])


# -- what a template writes --------------------------------------------------------------------------------------


def test_keys_that_the_template_writes_stay_and_others_are_refused(prompts):
    thought = {"role": "assistant", "content": "b", "reasoning_content": "hm", "weight": 0}
    assert prompts([USER, thought, USER]).texts == ["[user]1+1<eos>[assistant](hm)b<eos>[user]1+1<eos>[assistant]"]
    silent = {"role": "assistant", "content": None, "tool_calls": CALL}
    told = {"role": "tool", "content": "2", "tool_call_id": "x1", "name": "add"}
    assert prompts([USER, silent, told]).texts == ["[user]1+1<eos>[assistant]add!<eos>[tool]2<eos>[assistant]"]
    with pytest.raises(DataError, match="leaves out 'content' of message 2, the assistant's"):
        prompts([USER, {**silent, "content": "let me see"}, told])


def test_variables_of_the_template_are_settings(prompts):
    assert prompts("1", chat_template_kwargs={"enable_thinking": False}).texts == ["[user]1<eos>[assistant]()#"]
    with pytest.raises(
        ConfigError, match=r"chat_template_kwargs.thinking: (?s:.*)does not read this(?s:.*)enable_thinking"
    ):
        prompts("1", chat_template_kwargs={"thinking": False})
    with pytest.raises(
        ConfigError, match=r"chat_template_kwargs.add_generation_prompt: (?s:.*)the run sets this variable"
    ):
        prompts("1", chat_template_kwargs={"add_generation_prompt": False})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: no chat template is used"):
        prompts("1", chat_template_kwargs={"enable_thinking": False}, chat_template=False)


def test_a_system_prompt_comes_before_messages_that_have_none(prompts):
    said = {"role": "system", "content": "own"}
    assert prompts("1", system_prompt="be brief").texts == ["[system]be brief<eos>[user]1<eos>[assistant]"]
    assert prompts([said, USER], system_prompt="be brief").texts == ["[system]own<eos>[user]1+1<eos>[assistant]"]
    whole = prompts("1", system_prompt="be brief", format_prompt="{{ content }}+")
    assert whole.texts == ["[system]be brief<eos>[user]1+<eos>[assistant]"]
    with pytest.raises(ConfigError, match=r"data\.system_prompt: no chat template is used"):
        prompts("1", system_prompt="be brief", chat_template=False)


def test_a_system_prompt_is_that_of_supervised_examples_and_is_not_learnt(tmp_path, tokenizer):
    row = {"prompt": "1", "answer": "2"}
    data = SFTDataset(*written(tmp_path, tokenizer, row, {"system_prompt": "be brief"}))
    assert data.texts == ["[system]be brief<eos>[user]1<eos>[assistant]"]
    assert tokenizer.decode(data.response_ids.values.tolist()).startswith("2")


def test_tools_of_a_row_are_announced(tmp_path, tokenizer):
    def texts(tools, run=NO_TOOLS, **more):
        row = {"prompt": "1", "answer": "2", "tools": tools}
        return PromptDataset(*written(tmp_path, tokenizer, row, more), "train", run).texts

    add = [{"name": "add", "strict": None}]
    assert texts(add) == texts(json.dumps(add)) == ["[tool add][user]1<eos>[assistant]"]
    assert texts([]) == texts(None) == ["[user]1<eos>[assistant]"]
    assert texts("a calculator", chat_template=False) == ["1"]
    with pytest.raises(DataError, match="the chat template does not write them"):
        texts(add, override_chat_template="{{ messages[0].content }}")
    with pytest.raises(DataError, match="column 'tools' is not a list of tools"):
        texts("a calculator")
    with pytest.raises(DataError, match="the environment has its own tools"):
        texts(add, run=Announcement(add))


# -- what is learnt ----------------------------------------------------------------------------------------------


def test_a_conversation_is_a_prompt_and_the_response_after_it(examples, prompts):
    talk = [
        USER,
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "b"},
    ]
    between = "_[_u_s_e_r_]_3_<eos>_[_a_s_s_i_s_t_a_n_t_]"
    assert examples({"talk": talk}, "talk", prompt_key="talk") == f"2<eos>{between}b<eos>"
    talk[1]["weight"] = 0
    assert examples({"talk": talk}, "talk", prompt_key="talk") == f"_2_<eos>{between}b<eos>"
    assert examples({"talk": [*talk, USER]}, "talk", prompt_key="talk") == f"_2_<eos>{between}b<eos>"
    talk[3]["weight"] = 0
    with pytest.raises(DataError, match="column 'talk' has no message to train on"):
        examples({"talk": talk}, "talk", prompt_key="talk")


def test_a_response_may_repeat_the_prompt(examples):
    chosen = [USER, {"role": "assistant", "content": "2"}]
    assert examples({"prompt": "1+1", "chosen": chosen}, "chosen") == "2<eos>"
    assert examples({"prompt": [USER], "chosen": chosen[1:]}, "chosen") == "2<eos>"
    with pytest.raises(
        DataError, match=r"not the prompt's(?s:.*)user: 1\+1(?s:.*)set data.prompt_key to 'chosen', too"
    ):
        examples({"prompt": "1+2", "chosen": chosen}, "chosen")
    shown = [USER, {"role": "assistant", "content": "2"}, USER]
    assert examples({"prompt": shown, "chosen": [*shown, {"role": "assistant", "content": "b"}]}, "chosen") == "b<eos>"


@pytest.mark.parametrize("row", [{"talk": "1+1"}, {"talk": [USER]}, {"talk": [{"role": "assistant", "content": "2"}]}])
def test_what_is_no_conversation_with_a_response_is_named(examples, row):
    with pytest.raises(DataError, match=r"d.jsonl:1: "):
        examples(row, "talk", prompt_key="talk")


def test_calls_and_thoughts_are_learnt_as_the_template_writes_them(examples):
    call = {"role": "assistant", "content": None, "tool_calls": CALL}
    talk = [
        USER,
        call,
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "assistant", "content": "2", "reasoning_content": "hm"},
    ]
    between = "_[_t_o_o_l_]_2_<eos>_[_a_s_s_i_s_t_a_n_t_]"
    assert examples({"prompt": talk}, "prompt") == f"add!<eos>{between}(hm)2<eos>"
    with pytest.raises(DataError, match="leaves out 'content' of message 2"):
        examples({"prompt": [USER, {**call, "content": "so"}]}, "prompt")
    with pytest.raises(DataError, match="leaves out 'refusal' of message 2"):
        examples({"prompt": [USER, {"role": "assistant", "content": "no", "refusal": "no"}]}, "prompt")
    plain = {"prompt": "1", "answer": [{"role": "assistant", "content": "2", "reasoning_content": "hm"}]}
    with pytest.raises(DataError, match="'reasoning_content', and no chat template is used"):
        examples(plain, chat_template=False)


def test_the_end_token_is_learnt_once(examples):
    assert examples({"prompt": "1", "answer": "2<eos>"}) == "2<eos>"
    assert examples({"prompt": [USER, {"role": "assistant", "content": "2<eos>"}]}, "prompt") == "2<eos>"
    two = [{"role": "assistant", "content": "2<eos>"}, USER, {"role": "assistant", "content": "b<eos>"}]
    assert examples({"prompt": "1", "answer": two}).endswith("b<eos>")
    assert examples({"prompt": "1", "answer": two}).startswith("2<eos>_[")
    with pytest.raises(DataError, match=r"d.jsonl:1: the response contains an end token before its end"):
        examples({"prompt": "1", "answer": "2<eos>[user]1"})


def test_a_response_says_something_and_the_assistant_one_message_at_a_time(examples):
    with pytest.raises(DataError, match=r"d.jsonl:1: the response consists of an end token only"):
        examples({"prompt": "1", "answer": "<eos>"})
    said = {"role": "assistant", "content": "2"}
    with pytest.raises(DataError, match=r"d.jsonl:1: two messages of the assistant follow each other in column 'talk'"):
        examples({"talk": [USER, said, said]}, "talk", prompt_key="talk")


def test_thinking_that_the_prompt_opens_is_opened_once(examples):
    thinking = {"override_chat_template": "{{ messages[0].content }}<think>", "format_prompt": None}
    assert examples({"prompt": "1", "answer": "<think>hm</think>2"}, **thinking) == "hm</think>2<eos>"
    assert examples({"prompt": "1", "answer": "hm</think>2"}, **thinking) == "hm</think>2<eos>"


# -- what rewards get --------------------------------------------------------------------------------------------


def test_the_messages_of_a_prompt_are_kept_for_the_reward(prompts, tmp_path, tokenizer):
    batch = prompts([{"from": "human", "value": "1+1"}]).batch([0])
    assert PromptColumn("prompt").messages(batch["row"][0]) == [USER]
    plain = prompts("1+1").batch([0])
    assert PromptColumn("prompt").messages(plain["row"][0]) is None
    assert plain["row"] == [{"prompt": "1+1"}], "the template changed it"
    talk = {"a": {"talk": [USER, {"role": "assistant", "content": "2"}]}}
    data = PromptDataset(
        *written(tmp_path, tokenizer, talk, {"prompt_key": "a.talk", "answer_key": "a.talk.-1.content"}), whole=True
    )
    assert data.answers == ["2"]
    assert PromptColumn("a.talk", whole=True).messages(data.batch([0])["row"][0]) == [USER]


def test_reading_leaves_the_row_as_it_is():
    row = Row({"prompt": [{**USER, "name": None}]}, "f", 1)
    read_messages(row["prompt"], row, "prompt")[0]["content"] = "x"
    assert row["prompt"] == [{**USER, "name": None}]
