"""Versions of installed packages, and imports of users' files."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from megarl.system.errors import UserError
from megarl.system.imports import import_callable, installed_version


def test_a_version_is_that_of_the_packages_metadata() -> None:
    names = {found.metadata["Name"] for found in metadata.distributions()}
    assert "torch" in names
    assert {name: installed_version(name) for name in names} == {name: metadata.version(name) for name in names}


def test_a_package_that_is_missing_has_no_version() -> None:
    assert installed_version("no-such-package") is None


def test_a_file_that_imports_an_earlier_name_is_told_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("from megarl.metrics import Metrics\ndef loss(): ...\n")
    with pytest.raises(UserError) as caught:
        import_callable(f"{tmp_path / 'loss.py'}:loss", where="algorithm.loss.name")
    assert caught.value.fix == "import megarl.system.metrics, which was called megarl.metrics"
