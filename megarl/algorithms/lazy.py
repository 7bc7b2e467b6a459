"""`torch`, imported at its first use.

A component (a loss, an estimator, a KL) is one file with its function, settings and declaration. The dry run, the
checks and the reference of keys only read the settings, so these files and their imports must load without torch. They
use `from megarl.algorithms.lazy import Tensor, torch`; this `Tensor` is for annotations only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

__all__ = ["Tensor", "no_grad", "torch"]

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any

    class _Torch(ModuleType):
        """A proxy of torch; each attribute is resolved at its first use."""

        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)
            return value

    torch = _Torch("torch")


def no_grad(function: F) -> F:
    """Decorate with `torch.no_grad()`, without importing torch before the function is called."""

    @functools.wraps(function)
    def without_gradient(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return cast(F, without_gradient)
