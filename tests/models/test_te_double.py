"""The double of Transformer Engine against the arguments of the real package, without importing either."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from megarl.system.compat.transformer_engine import BELOW, SINCE
from tests.te_double import signatures

DOUBLE = Path(signatures.__file__).with_name("transformer_engine")
STORED = json.loads(signatures.TABLE.read_text())


def test_the_double_has_the_arguments_of_the_real_package(monkeypatch):
    calls = {}
    for place, (_, owner, functions) in signatures.CALLS.items():
        module, name = (place, None) if owner is None else place.rsplit(".", 1)
        file = module.replace(".", "/") + ".py"
        calls[place] = (file if (DOUBLE / file).is_file() else file.replace(".py", "/__init__.py"), name, functions)
    monkeypatch.setattr(signatures, "CALLS", calls)
    assert signatures.read_signatures(DOUBLE) == STORED


def test_the_stored_arguments_are_those_of_the_installed_package():
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("Transformer Engine is not installed")
    assert signatures.read_signatures(Path(next(iter(spec.submodule_search_locations)))) == STORED


def test_the_versions_are_those_that_megatron_asks_for():
    (wanted,) = [line for line in importlib.metadata.requires("megatron-core") or () if "transformer-engine" in line]
    assert f"<{BELOW},>={SINCE};" in wanted
