"""Versions that `megarl doctor` and setup.py name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megarl.commands import doctor

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


def test_transformer_engine_is_one_that_megatron_core_asks_for() -> None:
    assert pinned("megatron-core", "constraints.txt")
    wanted = SpecifierSet(doctor.wanted_by("megatron-core", "transformer-engine"))
    version = pinned("transformer-engine", "constraints-gpu.txt")
    assert wanted.contains(version)
    assert required("transformer-engine").contains(version)
    assert not required("transformer-engine").contains("2.12.0")
    assert not wanted.contains("2.12.0")


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


@pytest.mark.parametrize(("version", "named"), [("2.11.0", False), ("2.12.0", True), ("2.11.0+abc", False)])
def test_a_transformer_engine_that_does_not_fit_is_named(monkeypatch, version, named) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: version)
    assert ("; megatron-core requires" in doctor._unfit("transformer-engine")) is named
