"""Imports transformers' configurations without its modelling code, which a check in some classes (Llama's) would load.

The check looks up `hidden_act` in the table of activation functions. The table's module imports `torch._dynamo`,
DTensors and sympy, and searches all installed packages: 2.6 seconds of CPU time per process. megarl/architectures
checks which activations this trainer can compute.
"""

from __future__ import annotations

import sys
from types import ModuleType

_CHECKS, _TABLE = "transformers.utils.type_validators", "transformers.activations"


def install() -> None:
    """Import transformers' config checks with an empty table of activations, so that they accept any activation. Does
    nothing if called before, or if the checks or the table are already imported.
    """
    if _CHECKS in sys.modules or _TABLE in sys.modules:
        return
    empty = ModuleType(_TABLE)
    empty.ACT2FN = {}  # type: ignore[attr-defined]
    sys.modules[_TABLE] = empty
    try:
        import transformers.utils.type_validators  # noqa: F401
    finally:
        del sys.modules[_TABLE]
