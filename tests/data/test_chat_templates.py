"""Supervised examples have the tokens of the whole conversation as the chat template writes it, in every family."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megarl.config.data import DataConfig
from megarl.config.training import PreferenceConfig
from megarl.data.preferences import LabelledDataset, PairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.rows import Row
from megarl.data.sft import SFTDataset
from megarl.data.templates import chat_renderer
from megarl.data.turns import Turns
from megarl.system.errors import ConfigError
from tests.data.templates import FAMILIES, Family, tokenizer_of

_WORDS = ["the", "answer", "is", "yes", "12", "4+8=12", "café", "学", "a  b", "[INST]", "no.\n\nSo", "x = 1;\n\ty", "?"]


def _text(draw: random.Random, edges: bool = True) -> str:
    text = " ".join(draw.choices(_WORDS, k=draw.randint(1, 5)))
    return draw.choice(["", "", " "]) * edges + text + draw.choice(["", "", " ", "\n"]) * edges


def _conversation(draw: random.Random, family: Family) -> list[dict[str, Any]]:
    """Draw one to three questions with answers, some of them with calls of tools and reasoning."""
    messages = [{"role": "system", "content": _text(draw)}] if family.system and draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": _text(draw)})
        for _ in range(draw.choice([0, 0, 1, 2]) if family.tools else 0):
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": draw.randint(0, 99)}}}
            messages.append({"role": "assistant", "content": draw.choice(["", "so"]), "tool_calls": [call]})
            messages += [{"role": "tool", "content": _text(draw)}] * draw.randint(1, 2)
        messages.append({"role": "assistant", "content": _text(draw)})
    for message in messages:
        if family.thinks and message["role"] == "assistant" and draw.random() < 0.3:
            message["reasoning_content"] = _text(draw, edges=False)
    return messages


def _tokenizer(family: Family):
    tokenizer = tokenizer_of(family.kind, tuple(dict.fromkeys((*family.special, family.end))))
    tokenizer.chat_template = family.template
    return tokenizer


def _whole(tokenizer, family: Family, messages: list[dict[str, Any]]) -> list[int]:
    """The template's tokens of a conversation, up to the last end token."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False, **family.settings)
    end = tokenizer.convert_tokens_to_ids(family.end)
    return ids[: len(ids) - ids[::-1].index(end)]


def _config(family: Family, **more: Any) -> DataConfig:
    return DataConfig(train_files=["rows.jsonl"], chat_template_kwargs=family.settings, max_prompt_tokens=4096, **more)


def _rows(values: list[dict[str, Any]]) -> list[Row]:
    return [Row(value, "rows.jsonl", number, "line") for number, value in enumerate(values, 1)]


def _sequences(batch) -> list[list[int]]:
    both = zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
    return [[*prompt.tolist(), *response.tolist()] for prompt, response in both]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("deepseek-r1", "qwen3-thinking")])
def test_examples_have_the_tokens_of_the_whole_conversation(name: str) -> None:
    family, draw = FAMILIES[name], random.Random(name)
    tokenizer, end = _tokenizer(family), family.end
    talks = [_conversation(draw, family) for _ in range(60)]
    data = SFTDataset(_config(family, prompt_key="talk"), tokenizer, "talk", rows=_rows([{"talk": t} for t in talks]))
    batch = data.batch(range(len(talks)))
    assert _sequences(batch) == [_whole(tokenizer, family, talk) for talk in talks]
    for talk, ids, mask in zip(talks, batch["response_ids"].unbind(), batch["response_mask"].unbind(), strict=True):
        said = tokenizer.decode(ids[mask].tolist()).split(end)
        written = [message for message in talk if message["role"] == "assistant"]
        for text, message in zip(said, [*written, {"content": ""}], strict=True):
            assert message["content"].strip() in text
            assert not any(other in text for other in ("[/INST]", "tool_response", "user", "system"))


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen2.5", "mistral"])
def test_preferences_have_the_tokens_of_the_whole_conversation(name: str) -> None:
    family, draw = FAMILIES[name], random.Random(name)
    tokenizer = _tokenizer(family)
    talks = [_conversation(draw, family) for _ in range(20)]
    other = [[*talk[:-1], {"role": "assistant", "content": f"no {_text(draw)}"}] for talk in talks]
    pairs = [{"chosen": talk, "rejected": rejected} for talk, rejected in zip(talks, other, strict=True)]
    settings, config = PreferenceConfig(), _config(family)
    both = [_whole(tokenizer, family, talk) for pair in zip(talks, other, strict=True) for talk in pair]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("megarl.data.preferences.read_split", lambda *_: _rows(pairs))
        batch = PairDataset(config, settings, tokenizer).batch(range(20))
        labelled = LabelledDataset(config, settings.model_copy(update={"loss": "kto"}), tokenizer)
    assert _sequences(batch) == both
    assert _sequences(labelled.batch(range(40))) == both[::2] + both[1::2]


def _examples(family: Family, *rows: dict[str, Any], key: str = "answer", **more: Any) -> tuple[SFTDataset, list[str]]:
    """The data set of rows, and the text of each: prompt, `|`, and what is learnt, with [] around what is not."""
    tokenizer = _tokenizer(family)
    data = SFTDataset(_config(family, **more), tokenizer, key, rows=_rows(list(rows)))
    batch, texts = data.batch(range(len(rows))), []
    columns = (batch[name].unbind() for name in ("prompt_ids", "response_ids", "response_mask"))
    for prompt, ids, mask in zip(*columns, strict=True):
        parts = [tokenizer.decode([token]) for token in ids.tolist()]
        marked = "".join(part if said else f"[{part}]" for part, said in zip(parts, mask.tolist(), strict=True))
        texts.append(f"{tokenizer.decode(prompt.tolist())}|{marked.replace('][', '')}")
    return data, texts


@pytest.mark.parametrize("kind", ["first", "always", "never", "bytes"])
def test_a_response_has_no_blank_that_the_text_does_not_have(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = None
    rows = _rows(
        [{"prompt": "4+8=", "answer": "12"}, {"prompt": "is 1", "answer": " yes"}, {"prompt": "a", "answer": 2}]
    )
    data = SFTDataset(DataConfig(train_files=["rows.jsonl"]), tokenizer, rows=rows)
    whole = tokenizer(["4+8=12</s>", "is 1 yes</s>", "a2</s>"], add_special_tokens=False)["input_ids"]
    assert _sequences(data.batch(range(3))) == whole
    assert data.batch([0])["response_ids"].values.tolist() == whole[0][-3:]


def test_a_prompt_keeps_its_tokens_where_the_text_of_both_has_another_one() -> None:
    data, (text,) = _examples(FAMILIES["qwen2.5"], {"prompt": "a", "answer": "\n\nyes"}, system_prompt="x")
    tokenizer = _tokenizer(FAMILIES["qwen2.5"])
    prompt = PromptDataset(data.config, tokenizer, rows=data.rows).prompt_ids.values.tolist()
    assert data.prompt_ids.values.tolist() == prompt
    assert text.endswith("assistant\n|\n\nyes<|im_end|>")
    (whole,) = tokenizer([data.texts[0] + "\n\nyes<|im_end|>"])["input_ids"]
    assert _sequences(data.batch([0])) != [whole], "three line breaks are one token"


def test_a_blank_stands_before_an_answer_where_the_template_writes_one() -> None:
    data, _ = _examples(FAMILIES["mistral"], {"prompt": "a", "answer": "yes"})
    assert _tokenizer(FAMILIES["mistral"]).convert_ids_to_tokens(data.response_ids.values) == ["▁yes", "</s>"]


def test_reasoning_is_opened_once_and_missed() -> None:
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nno"},
    ]
    bare = [*talk[:3], {"role": "assistant", "content": "no"}]
    data, texts = _examples(FAMILIES["qwen3-thinking"], {"t": talk}, {"t": bare}, key="t", prompt_key="t")
    question, asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "\n<|im_start|>user\nb<|im_end|>\n"
    between = f"[{asked}<|im_start|>assistant\n<think>\n]"
    assert texts == [
        f"{question}|yes<|im_end|>{between}so\n</think>\n\nno<|im_end|>",
        f"{question}|yes<|im_end|>{between}\n</think>\n\nno<|im_end|>",
    ]
    described = data.describe()
    assert "; 1 response without reasoning where its prompt opens <think> (rows.jsonl:2)" in described
    assert "; 2 responses with reasoning that the chat template leaves out (rows.jsonl:1)" in described


def test_the_last_turn_keeps_the_reasoning_that_a_template_takes_out_of_all() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}]
    longer = [*talk, {"role": "user", "content": "b"}, {"role": "assistant", "content": "so\n</think>\n\nno"}]
    data, texts = _examples(FAMILIES["deepseek-r1"], {"t": talk}, {"t": longer}, key="t", prompt_key="t")
    assert texts == [
        "<s><|User|>a<|Assistant|><think>\n|hm\n</think>\n\nyes</s>",
        "<s><|User|>a<|Assistant|>|\n\nyes</s>[<|User|>b<|Assistant|><think>\n]so\n</think>\n\nno</s>",
    ]
    assert data.describe().endswith("; 1 response with reasoning that the chat template leaves out (rows.jsonl:2)")


def _with_ends() -> Any:
    """A tokenizer that adds a begin and an end token to every text, and has no chat template."""
    from tokenizers import processors

    tokenizer = tokenizer_of("first", ("<ends>",))
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.chat_template = None
    return tokenizer


def test_an_end_token_that_the_tokenizer_adds_ends_no_prompt() -> None:
    tokenizer, config = _with_ends(), DataConfig(train_files=["rows.jsonl"])
    rows = _rows([{"prompt": "4+8=", "answer": "12"}, {"prompt": "<s>4+8=", "answer": "12"}])
    plain, begun, both = tokenizer(["4+8=", "<s>4+8=", "4+8=12"], add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in PromptDataset(config, tokenizer, rows=rows).prompt_ids.unbind()] == [
        [1, *plain],
        begun,
    ]
    assert _sequences(SFTDataset(config, tokenizer, rows=rows[:1]).batch([0])) == [[1, *both, 2]]
    alone = _rows([{"prompt": "<s>"}, {"prompt": "4+8="}])  # as for a text from its beginning on
    assert [
        ids.tolist() for ids in PromptDataset(config, tokenizer, rows=alone, answered=False).prompt_ids.unbind()
    ] == [
        [1],
        [1, *plain],
    ]
    assert Turns(tokenizer, None, [2]).first("4+8=") == [1, *plain]


@pytest.mark.parametrize("name", ["llama2", "zephyr", "tinyllama", "qwen2.5"])
def test_what_an_environment_says_has_the_tokens_of_the_whole_conversation(name: str) -> None:
    family = FAMILIES[name]
    tokenizer, asked = _tokenizer(family), {"role": "user", "content": "b"}
    render = chat_renderer(tokenizer, None)
    end = tokenizer.convert_tokens_to_ids(family.end)
    turns = Turns(tokenizer, lambda messages: render(messages, Row({}, "here", 0)), [end])
    talk = [asked, {"role": "assistant", "content": "yes"}, asked]
    whole = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    said = turns.following([asked], ended=True)
    assert whole[-len(said) :] == said
    assert whole[-len(said) - 1] == end
    assert turns.first([asked]) == whole[: len(turns.first([asked]))]


@pytest.mark.parametrize("kind", ["first", "never", "bytes"])
def test_text_of_an_environment_has_no_blank_that_it_does_not_have(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    turns = Turns(tokenizer, None, [tokenizer.eos_token_id])
    assert tokenizer.decode(turns.following("12", ended=True)) == "12"
    assert turns.following("12", ended=True) == tokenizer("a</s>12", add_special_tokens=False)["input_ids"][-2:]


def test_a_call_of_a_tool_that_ends_with_a_token_of_its_own_is_learnt_without_the_answer() -> None:
    template = """{% for m in messages %}{{ '<start>' + m.role + '|' + m.content }}
      {{- '{call}<again>' if m.tool_calls else '<end>' }}{% endfor %}
    {%- if add_generation_prompt %}<start>assistant|{% endif %}"""
    tokenizer = tokenizer_of("bytes", ("<start>", "<again>", "<end>"))
    tokenizer.chat_template = template
    stops = tokenizer.convert_tokens_to_ids(["</s>", "<again>", "<end>"])
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "yes"},
    ]
    config = DataConfig(train_files=["rows.jsonl"], prompt_key="talk")
    with pytest.raises(ConfigError, match="does not end a turn of the assistant with an end token") as caught:
        SFTDataset(config, tokenizer, "talk", stop_ids=[stops[0], stops[2]], rows=_rows([{"talk": talk}]))
    assert "<again>" in str(caught.value.found)
    batch = SFTDataset(config, tokenizer, "talk", stop_ids=stops, rows=_rows([{"talk": talk}])).batch([0])
    learnt = batch["response_ids"].values[batch["response_mask"].values.bool()]
    assert tokenizer.decode(learnt.tolist()) == "so{call}<again>yes<end>"
