"""Code that ships with a checkpoint runs only with `model.trust_remote_code`: neither a start nor a worker runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.config.model import ModelConfig
from megarl.data.tokenizer import character_tokenizer, load_tokenizer
from megarl.models.config import load_hf_config
from megarl.system.errors import ConfigError
from tests.config.conftest import RECIPE

CONFIG = '''
from pathlib import Path
from transformers import Qwen3Config

Path("MARKER").write_text("the configuration's code ran")


class OwnConfig(Qwen3Config):
    """Twice as many layers as the file says."""

    def __init__(self, num_hidden_layers=2, **values):
        super().__init__(num_hidden_layers=2 * num_hidden_layers, **values)
'''
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path("MARKER").write_text("the tokenizer's code ran")


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose config.json and tokenizer_config.json name classes in files of the folder."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    character_tokenizer("0123456789+=").save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 64, "vocab_size": 16}
    raw = {"model_type": "qwen3", "num_hidden_layers": 2, "num_key_value_heads": 2, **sizes}
    (folder / "config.json").write_text(json.dumps(raw | {"auto_map": {"AutoConfig": "own_config.OwnConfig"}}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokens.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, code in (("own_config.py", CONFIG), ("own_tokens.py", TOKENIZER)):
        (folder / name).write_text(code.replace("MARKER", str(tmp_path / "marker")))
    return folder


def test_code_of_a_checkpoint_runs_only_when_the_recipe_trusts_it(checkpoint, tmp_path):
    model, marker = ModelConfig(path=str(checkpoint)), tmp_path / "marker"
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    named = [f"model.path={checkpoint}", "model.hf_config=null", "model.tokenizer=null"]
    check_config(load_config(tmp_path / "recipe.yaml", [*named, "model.trust_remote_code=true"]))
    assert load_hf_config(model).num_hidden_layers == 2
    assert type(load_tokenizer(model)).__name__ != "OwnTokenizer"
    assert not marker.exists()

    trusted = model.model_copy(update={"trust_remote_code": True})
    assert load_hf_config(trusted).num_hidden_layers == 4
    assert marker.read_text() == "the configuration's code ran"
    assert type(load_tokenizer(trusted)).__name__ == "OwnTokenizer"
    assert marker.read_text() == "the tokenizer's code ran"


def test_what_only_code_of_the_checkpoint_can_read_is_refused_without_trust(checkpoint, tmp_path):
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(raw | {"model_type": "own"}))
    for load in (load_hf_config, load_tokenizer):
        with pytest.raises(ConfigError, match=r"custom code(?s:.*)set model.trust_remote_code: true"):
            load(ModelConfig(path=str(checkpoint)))
    assert not (tmp_path / "marker").exists()
