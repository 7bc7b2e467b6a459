"""Folders that users name as a model, and that are something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.artifacts.facts import model_facts
from megarl.config.model import ModelConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.system.errors import ConfigError


@pytest.mark.parametrize(
    ("files", "what", "fix"),
    [
        (
            {"adapter_config.json": json.dumps({"base_model_name_or_path": "org/base"})},
            "an adapter of org/base",
            "merge",
        ),
        ({"adapter_config.json": "{"}, "it has an adapter, not a whole model", "merge"),
        (
            {"config.yaml": "", "hf/config.json": "{}"},
            "is the folder of a run",
            "use the model that the run has exported: HERE/hf",
        ),
        ({"config.yaml": "", "hf/config.json": "", "hf_best/config.json": ""}, "the folder of a run", "HERE/hf_best"),
        (
            {"config.yaml": "", "checkpoints/step_2/meta.json": "", "checkpoints/step_10/meta.json": ""},
            "is the folder of a run",
            "megarl convert HERE/checkpoints/step_10 TARGET",
        ),
        ({"config.yaml": ""}, "is the folder of a run", "let the run finish: it has exported no model yet"),
        ({"meta.json": ""}, "is a checkpoint of a run", "megarl convert HERE TARGET"),
        ({"step_3/meta.json": "", "step_x/meta.json": ""}, "has the checkpoints of a run", "HERE/step_3 TARGET"),
        ({"model-q4.gguf": ""}, "it has weights in GGUF", "convert them"),
        ({"sub/config.json": ""}, "has a model in a subfolder", "did you mean HERE/sub?"),
        ({}, "has no config.json", "use the folder that save_pretrained or a hub download wrote"),
    ],
)
def test_a_folder_without_a_model_is_named_by_what_it_is(
    tmp_path: Path, files: dict[str, str], what: str, fix: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        model_facts(ModelConfig(path=str(tmp_path)))
    assert what in caught.value.what
    assert fix.replace("HERE", str(tmp_path)) in str(caught.value.fix)


def test_a_folder_without_a_tokenizer_is_refused_and_not_given_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for model in (ModelConfig(path=str(tmp_path)), ModelConfig(path="org/other", tokenizer=str(tmp_path))):
        with pytest.raises(ConfigError, match=r"model\.(path|tokenizer): this folder has no tokenizer files"):
            load_tokenizer(model)


def test_a_tokenizer_of_sentencepiece_alone_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, **options: object) -> None:
        raise ValueError("`tiktoken` is required to read a `tiktoken` file")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", failing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "pip install sentencepiece" in str(caught.value.fix)
