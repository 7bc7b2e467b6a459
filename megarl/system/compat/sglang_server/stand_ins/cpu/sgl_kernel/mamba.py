"""Stand-in for the kernels of gated delta nets; every name exists and raises when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_kernel import __getattr__ as _missing


def __getattr__(name: str) -> Callable[..., Any]:
    return _missing(name)
