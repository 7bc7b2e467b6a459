"""A model's configuration and tokenizer are loaded without transformers' modelling code, whatever its architecture."""

import json
import sys
from pathlib import Path

import pytest

from megarl.architectures import ARCHITECTURES
from tests.dist import run_distributed

pytestmark = pytest.mark.procs
HEAVY = ("transformers.activations", "transformers.modeling_utils", "torch.distributed.tensor", "torch._dynamo")


def _forget_heavy() -> None:
    """Remove what the process was forked with, so that another import of it shows."""
    for name in HEAVY:
        sys.modules.pop(name, None)


def _load_all() -> list[str]:
    from megarl.config.model import ModelConfig
    from megarl.models.hf import load_hf_config

    _forget_heavy()
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    for name in ARCHITECTURES:
        load_hf_config(ModelConfig(hf_config={"model_type": name, **sizes}))
    return [name for name in HEAVY if name in sys.modules]


def _load_tokenizer_of_a_llama(folder: str) -> list[str]:
    from megarl.config.model import ModelConfig
    from megarl.data.tokenizer import character_tokenizer, load_tokenizer

    character_tokenizer("0123").save_pretrained(folder)
    (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama"}))
    _forget_heavy()
    load_tokenizer(ModelConfig(path=folder))
    assert "transformers.models.llama.configuration_llama" in sys.modules, "nothing was to import"
    return [name for name in HEAVY if name in sys.modules]


def test_configurations_of_all_architectures_import_no_modelling_code() -> None:
    assert run_distributed(_load_all, 1) == [[]]


def test_a_tokenizer_beside_a_llama_imports_no_modelling_code(tmp_path: Path) -> None:
    assert run_distributed(_load_tokenizer_of_a_llama, 1, 240, str(tmp_path)) == [[]]
