"""A model's configuration is loaded without transformers' modelling code, whichever architecture it has."""

import sys

import pytest

from megarl.architectures import ARCHITECTURES
from tests.dist import run_distributed

pytestmark = pytest.mark.procs
HEAVY = ("transformers.activations", "transformers.modeling_utils", "torch.distributed.tensor", "torch._dynamo")


def _load_all() -> list[str]:
    from megarl.config.model import ModelConfig
    from megarl.models.hf import load_hf_config

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    for name in ARCHITECTURES:
        load_hf_config(ModelConfig(hf_config={"model_type": name, **sizes}))
    return [name for name in HEAVY if name in sys.modules]


def test_configurations_of_all_architectures_import_no_modelling_code() -> None:
    assert run_distributed(_load_all, 1) == [[]]
