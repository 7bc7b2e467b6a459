"""Interpreters with packages that need other versions of megarl's packages; `make connectors-env` makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def interpreter(package: str) -> str:
    """The interpreter of an environment in the cache folder with `NAME==VERSION`; without it the test is skipped."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"
    python = cache / package.replace("==", "-") / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{package} is not installed: make connectors-env")
    return str(python)
