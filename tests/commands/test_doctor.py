"""Versions that `megarl doctor` and setup.py name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megarl.commands import doctor
from megarl.models import layer_forms
from tests.te_double.signatures import stored_signatures

ROOT = Path(__file__).resolve().parents[2]


def required(package: str) -> SpecifierSet:
    """Versions of a package in setup.py."""
    (text,) = re.findall(rf'"({re.escape(package)}[\[<>=][^"]*)"', (ROOT / "setup.py").read_text())
    return Requirement(text).specifier


def pinned(package: str, file: str) -> str:
    (version,) = re.findall(rf"^{re.escape(package)}==(.*)$", (ROOT / file).read_text(), re.MULTILINE)
    return version


def test_pip_takes_a_torch_from_the_first_tested_series_to_the_last() -> None:
    allowed, first, last = required("torch"), doctor.TESTED_TORCH[0], doctor.TESTED_TORCH[-1]
    after = f"{last.partition('.')[0]}.{int(last.partition('.')[2]) + 1}"
    assert all(allowed.contains(f"{series}.0") for series in doctor.TESTED_TORCH)
    assert not allowed.contains(after)
    assert not allowed.contains(f"{first.partition('.')[0]}.{int(first.partition('.')[2]) - 1}.9")
    for file in ("constraints.txt", "constraints-gpu.txt"):
        assert pinned("torch", file).startswith(tuple(f"{series}." for series in doctor.TESTED_TORCH))


def test_transformer_engine_for_gpus_is_a_version_whose_arguments_are_stored() -> None:
    version = pinned("transformer-engine", "constraints-gpu.txt")
    assert version in stored_signatures()
    assert required("transformer-engine").contains(version)
    assert {pinned(f"transformer-engine-{part}", "constraints-gpu.txt") for part in ("cu13", "torch")} == {version}


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("torch", "2.13.0+cpu", "  (tested: "),
        ("torch", "2.12.1", "  NOT TESTED: "),
        ("torch", "2.110.0", "  NOT TESTED: "),
        ("megatron-core", "0.16.1", ""),
    ],
)
def test_a_torch_that_no_test_was_run_with_is_named(monkeypatch, package, version, said) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: version)
    assert doctor._tested(package).startswith(said)
    assert bool(doctor._tested(package)) is bool(said)


def test_a_transformer_engine_that_does_not_fit_is_named(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.20.2")
    for problem in (None, "Linear has no parameter x"):
        monkeypatch.setattr(layer_forms, "te_problem", lambda problem=problem: problem)
        assert doctor._unfit("transformer-engine") == (f"; NOT USED: {problem}" if problem else "")
        assert not doctor._unfit("flash-attn")
