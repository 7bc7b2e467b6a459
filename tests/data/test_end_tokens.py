"""Which tokens end a response."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.artifacts.model_files import end_token_ids
from megarl.config.data import DataConfig
from megarl.config.model import ModelConfig
from megarl.data.end_tokens import end_tokens, turn_end
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import character_tokenizer, load_tokenizer
from megarl.system.errors import ConfigError

EOS, TURN, LETTER = 2, 17, 5
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
    "{% if m.role == 'assistant' %}<|turn|>{% else %}+{% endif %}{% endfor %}"
)


def folder_of(tmp_path: Path, template: str | None, **generation: object) -> Path:
    """A model's folder with a tokenizer whose template ends a turn with another token than its end token."""
    tokenizer = character_tokenizer("0123456789+ua")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    assert tokenizer.convert_tokens_to_ids("<|turn|>") == TURN
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_those_of_the_tokenizer_the_generation_config_and_the_template_count(tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder_of(tmp_path, TEMPLATE, eos_token_id=[EOS, LETTER])))
    found = end_tokens(load_tokenizer(model), model, DataConfig())
    assert found.ids == [EOS, LETTER, TURN]
    assert found.sources[EOS] == ["the tokenizer", "generation_config.json"]
    assert found.describe(str) == (
        "a response ends at 2 (2: the tokenizer, generation_config.json) or 5 (5: generation_config.json) or "
        "17 (17: the chat template)"
    )


def test_a_template_that_is_not_in_use_ends_nothing(tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder_of(tmp_path, TEMPLATE, eos_token_id=EOS)))
    assert end_tokens(load_tokenizer(model), model, DataConfig(chat_template=False)).ids == [EOS]


def test_a_blank_may_stand_before_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder_of(tmp_path, TEMPLATE.replace("<|turn|>", " <|turn|>"))))
    found = end_tokens(load_tokenizer(model), model, DataConfig())
    assert (found.ids, found.notes) == ([EOS, TURN], ())


def test_a_turn_that_no_special_token_ends_is_said(tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder_of(tmp_path, TEMPLATE.replace("<|turn|>", "9+"))))
    found = end_tokens(load_tokenizer(model), model, DataConfig())
    assert found.ids == [EOS]
    assert "the chat template ends a turn with '9+" in found.notes[0]


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{% if messages[1] %}{{ raise_exception('no') }}{% endif %}"]
)
def test_a_template_for_one_question_ends_nothing(tmp_path: Path, template: str) -> None:
    model = ModelConfig(path=str(folder_of(tmp_path, template)))
    assert turn_end(load_tokenizer(model), DataConfig()) == (None, None)


def test_a_letter_of_another_tokenizer_ends_nothing(tmp_path: Path) -> None:
    path = str(folder_of(tmp_path, None, eos_token_id=[LETTER, 900]))
    model = ModelConfig(path=path, tokenizer="chars:0123456789+ua")
    found = end_tokens(load_tokenizer(model), model, DataConfig())
    assert found.ids == [EOS]
    assert [note.split("which ")[1] for note in found.notes] == [
        "is not special in model.tokenizer: the token is not used",
        "is not in the tokenizer: the token is not used",
    ]


@pytest.mark.parametrize("wrong", ["2", True, -1, [2, None], {"a": 1}])
def test_what_is_no_token_id_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="the end token is invalid"):
        end_token_ids(folder_of(tmp_path, None, eos_token_id=wrong))


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"cannot read the model's generation_config\.json"):
        end_token_ids(tmp_path)


def test_a_supervised_answer_ends_as_the_template_ends_a_turn(tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder_of(tmp_path / "model", TEMPLATE)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    for chat, end in ((True, TURN), (False, EOS)):
        data = SFTDataset(DataConfig(train_files=[str(rows)], chat_template=chat), load_tokenizer(model))
        assert data.batch([0])["response_ids"].values.tolist()[-1] == end


def test_a_hub_model_is_asked_for_its_file_unless_all_of_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    from megarl.data import end_tokens as module

    asked: list[str] = []

    def download(path: str, name: str) -> str:
        asked.append(f"{path} {name}")
        return str(folder_of(tmp_path / "fetched", None, eos_token_id=[EOS, LETTER]) / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(module, "local_folder", lambda path: None)
    assert module._of_generation_config("org/name") == [EOS, LETTER]
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(module, "local_folder", lambda path: tmp_path)
    assert module._of_generation_config("org/name") == []
    assert asked == ["org/name generation_config.json"]
