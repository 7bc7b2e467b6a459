"""The double of Transformer Engine against the arguments of the real package, without importing either."""

import importlib.metadata
import importlib.util
import inspect
from pathlib import Path

import pytest

from megarl.system.compat.transformer_engine import CALLS, misfit
from tests.te_double import signatures

DOUBLE = Path(signatures.__file__).with_name("transformer_engine")
VERSIONS = signatures.stored_signatures()
NEWEST = list(VERSIONS)[-1]


def test_the_double_has_the_arguments_of_the_real_package(monkeypatch):
    calls = {}
    for place, (_, owner, functions) in signatures.CALLS.items():
        module, name = (place, None) if owner is None else place.rsplit(".", 1)
        file = module.replace(".", "/") + ".py"
        calls[place] = (file if (DOUBLE / file).is_file() else file.replace(".py", "/__init__.py"), name, functions)
    monkeypatch.setattr(signatures, "CALLS", calls)
    assert signatures.read_signatures(DOUBLE) == VERSIONS[NEWEST]
    assert DOUBLE.with_name(f"transformer_engine-{NEWEST}.dist-info").is_dir()


def test_the_installed_package_has_the_stored_arguments_of_its_version():
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("Transformer Engine is not installed")
    version = importlib.metadata.version("transformer_engine").partition("+")[0]
    if version not in VERSIONS:
        pytest.skip(f"the arguments of Transformer Engine {version} are not stored")
    assert signatures.read_signatures(Path(next(iter(spec.submodule_search_locations)))) == VERSIONS[version]


def signature_of(names: list[str]) -> inspect.Signature:
    """The signature that `signatures.arguments_of` wrote."""
    kinds, kind = inspect.Parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for name in names:
        if name.startswith("**"):
            parameters.append(kinds(name[2:], kinds.VAR_KEYWORD))
        elif name.startswith("*"):
            kind = kinds.KEYWORD_ONLY
            if name[1:]:
                parameters.append(kinds(name[1:], kinds.VAR_POSITIONAL))
        else:
            parameters.append(kinds(name.rstrip("="), kind, default=None if name.endswith("=") else kinds.empty))
    return inspect.Signature(parameters)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_accepts_what_it_is_called_with(version):
    stored, unknown = VERSIONS[version], []
    for (module, name), (count, keywords) in CALLS.items():
        # Classes of the package itself are stored under the modules that have them.
        places = ("module", "attention") if not module else ("quantization" if module == ".fp8" else module[1:],)
        known = [key for place in places for key in (f"pytorch.{place}.{name}", f"pytorch.{place}.{name}.__init__")]
        (key,) = [key for key in known if key in stored] or [None]
        if key is None:
            unknown.append(name)
        else:
            assert misfit(signature_of(stored[key]), count + key.endswith("__init__"), keywords) is None, key
    assert unknown == ["CudaRNGStatesTracker"]  # called without arguments


def test_a_misfit_names_the_parameters():
    signature = signature_of(["self", "hidden_size", "eps="])
    assert misfit(signature, 1, ("hidden_size", "eps")) is None
    assert misfit(signature, 1, ("hidden_size", "device", "dtype")) == "has no parameter device, dtype"
    assert misfit(signature, 1, ("eps",)) == "cannot be called: missing a required argument: 'hidden_size'"
