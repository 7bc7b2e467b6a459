"""Calls of components in a user's file; errors in what they raise or return name their file and line.

    with located(POLICY_LOSSES.kind, function):
        result = function(...)
    check_tokens(POLICY_LOSSES.kind, function, "token loss", result, mask)

Built-in components are called in the same way, but their errors are not converted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megarl.algorithms.lazy import torch
from megarl.system.errors import ConfigError, MegarlError, means_out_of_memory, shortened
from megarl.system.imports import location

#: Number of sample names that a message lists.
_SHOWN = 4


def from_users(function: Callable[..., Any]) -> bool:
    """Return whether a component (such as a reward or a loss) is the user's and not a part of megarl."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] != "megarl"


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return getattr(function, "__name__", type(function).__name__)


def place_of(function: Callable[..., Any]) -> str | None:
    """Return `file:line` of a function; None if it is not written in Python."""
    code = _code(function)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _code(function: Callable[..., Any]) -> Any:
    plain = inspect.unwrap(function)
    return getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)


@contextmanager
def located(kind: str, function: Callable[..., Any]) -> Iterator[None]:
    """Convert an exception of a user's component to a ConfigError that names its line.

    Running out of memory is not converted, nor is an exception from before the component's first line.

    Args:
        kind: kind of component, for the message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MegarlError) or means_out_of_memory(type(error).__name__, str(error)):
            raise
        code = _code(function)
        line = location(error, code.co_filename) if code is not None and from_users(function) else None
        if line is None or not line.startswith(code.co_filename):
            raise
        raise ConfigError(
            f"the {kind} {name_of(function)} raised {type(error).__name__}: {error}".rstrip(": "),
            where=place_of(function),
            found=line,
            fix="fix the error at this line",
        ) from error


@contextmanager
def naming_samples(names: Sequence[str]) -> Iterator[None]:
    """Add the names of the first samples of the micro-batch to a component's ConfigError."""
    try:
        yield
    except ConfigError as error:
        place = f"{error.found}, in the micro-batch with samples {', '.join(names[:_SHOWN])}, ..."
        raise ConfigError(error.what, where=error.where, found=place, allowed=error.allowed, fix=error.fix) from error


def misfit(kind: str, function: Callable[..., Any], problem: str, *, found: str, allowed: str, fix: str) -> ConfigError:
    """Return the ConfigError for a component that returns something wrong; `problem` continues "the KIND NAME ..."."""
    return ConfigError(
        f"the {kind} {name_of(function)} {problem}", where=place_of(function), found=found, allowed=allowed, fix=fix
    )


def form(value: object) -> str:
    """Describe a value's type, shape or content for an error message.

    >>> form({"loss": 1.0}), form(None)
    ("dict {'loss': 1.0}", 'None')
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}: {shortened(', '.join(map(form, value[:4])), 200)}"
    return "None" if value is None else shortened(f"{type(value).__name__} {value!r}", 80)


def check_tokens(
    kind: str,
    function: Callable[..., Any],
    noun: str,
    value: Any,
    like: Any,
    *,
    inputs: Iterable[Any] = (),
    per_sample: int | None = None,
) -> None:
    """Check that a component's result has one finite floating-point number for each entry of `like`.

    Results of megarl's own components are not checked for finiteness, nor results of inputs that are not finite.

    Args:
        kind, noun: what the component and its result are called in messages.
        like: tensor with the right shape, such as the mask.
        inputs: arguments of the component; if a floating tensor among them is not finite, the result may be, too.
        per_sample: number of samples, for a hint if the result has one number per sample.
    """
    allowed = f"a floating tensor of shape {list(like.shape)}, one finite number per token, 0 where the mask is False"
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or not value.is_floating_point():
        scalar = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        sampled = isinstance(value, torch.Tensor) and per_sample is not None and value.shape == (per_sample,)
        fix = "return one number per token in the shape of the mask"
        if sampled:
            fix = "spread the numbers over the tokens: Rows.of(mask, offsets).spread(values, mask)"
        elif scalar:
            fix = f"{fix}, not their mean or sum: megarl aggregates them as the recipe says"
        elif isinstance(value, torch.Tensor) and value.shape == like.shape:
            fix = "convert the result with .float()"
        raise misfit(
            kind,
            function,
            f"does not return one floating-point number per token ({noun})",
            found=form(value),
            allowed=allowed,
            fix=fix,
        )
    if not from_users(function) or bool(value.isfinite().all()):
        return
    if all(bool(x.isfinite().all()) for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()):
        bad = (~value.detach().isfinite()).nonzero()[0].tolist()
        raise misfit(
            kind,
            function,
            f"returns a value that is not finite ({noun})",
            found=f"{float(value.detach()[tuple(bad)])} at {bad}, of {form(value)}",
            allowed=allowed,
            fix="guard log(0), 0/0 and overflow; hide tokens with torch.where(mask, x, 0), since NaN * 0 is NaN",
        )
