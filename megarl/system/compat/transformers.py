"""Configurations of transformers without its modelling code, which a check of some classes (Llama's) would import.

They look up `hidden_act` in the table of activation functions. Its module imports `torch._dynamo`, DTensors and sympy,
and searches all installed packages, which takes a process 2.6 seconds of CPU time. Which activations this trainer
computes is checked in megarl/architectures.
"""

from __future__ import annotations

import sys
from types import ModuleType

_CHECKS, _TABLE = "transformers.utils.type_validators", "transformers.activations"


def install() -> None:
    """Import the checks with an empty table, with which they allow any activation. Idempotent.

    Where the checks or the table have been imported already, nothing is changed.
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
