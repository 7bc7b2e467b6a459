"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata

from megarl.imports import installed_version


def test_a_version_is_that_of_the_packages_metadata() -> None:
    names = {found.metadata["Name"] for found in metadata.distributions()}
    assert "torch" in names
    assert {name: installed_version(name) for name in names} == {name: metadata.version(name) for name in names}


def test_a_package_that_is_missing_has_no_version() -> None:
    assert installed_version("no-such-package") is None
