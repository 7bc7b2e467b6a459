"""Imports tensordict and torch's optimizers without `torch._dynamo`, the tracer of torch.compile.

They only register their functions with the tracer, and nothing here compiles them. Importing the tracer takes over a
second of CPU time per process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo

_TRACER = "torch._dynamo"
_MARKED = _disable_dynamo(lambda: None).__code__  # code object of every function that this decorator returns


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """In this block, imports register no functions with torch.compile's tracer, unless it is already imported."""
    if _TRACER in sys.modules:
        yield
        return
    registering = {name: getattr(torch.compiler, name) for name in ("allow_in_graph", "assume_constant_result")}
    for name in registering:
        setattr(torch.compiler, name, lambda function: function)
    try:
        yield
    finally:
        for name, function in registering.items():
            setattr(torch.compiler, name, function)


def install() -> None:
    """Change torch's Adam and its base class so that only processes that compile import torch.compile's tracer.

    Call it once.
    """
    for name, method in list(vars(torch.optim.Optimizer).items()):
        if getattr(method, "__code__", None) is _MARKED:
            setattr(torch.optim.Optimizer, name, _either(method, method.__wrapped__))
    step: Any = torch.optim.Adam.step
    if step.__code__.co_name == "_use_grad":
        torch.optim.Adam.step = _either(step, _in_grad_mode(step.__wrapped__))  # type: ignore[method-assign]


def _either(traced: Callable[..., Any], direct: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `direct` until torch.compile's tracer is imported, and `traced` from then on."""

    @functools.wraps(traced)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (traced if _TRACER in sys.modules else direct)(*args, **kwargs)

    return method


def _in_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's `step` as torch runs it: gradients are enabled only if the optimizer is differentiable."""

    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return method
