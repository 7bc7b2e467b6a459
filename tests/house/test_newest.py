"""Whether tools/newest.py has newer versions to try than those of the tests."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def test_only_other_versions_of_bounded_packages_are_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import newest

    names = newest.bounded()
    assert {"torch", "ray"} <= set(names)
    assert not {"pytest", "packaging"} & set(names)
    assert newest.newer_versions(Path(sys.executable)) == {}
    other = tmp_path / "python"
    answer = ", ".join(f'"{name}": "{metadata.version(name)}"' for name in names if name != "torch")
    other.write_text(f'#!/bin/sh\necho \'{{{answer}, "torch": "99.0"}}\'\n')
    other.chmod(0o700)
    assert newest.newer_versions(other) == {"torch": "99.0"}
