"""Functions by name, or by the import path of a user's own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from megarl.errors import ConfigError
from megarl.imports import import_callable

F = TypeVar("F", bound=Callable[..., Any])


class Registry:
    """Named functions of one kind.

    >>> losses = Registry("policy loss", "algorithm.loss.name")
    >>> @losses.register("half")
    ... def half(x): return x / 2
    >>> losses.get("half")(4.0)
    2.0
    """

    def __init__(self, kind: str, key: str) -> None:
        """`kind` and `key` (a dotted configuration key) are for error messages."""
        self.kind, self.key = kind, key
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator: make the function known under these names."""

        def add(function: F) -> F:
            for name in names:
                if name in self._functions:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                self._functions[name] = function
            return function

        return add

    def names(self) -> list[str]:
        """All registered names."""
        return list(self._functions)

    def get(self, name: str) -> Callable[..., Any]:
        """The function of that name, or the one behind `pkg.mod:fn`.

        Raises:
            ConfigError: no such name; the message has the nearest one.
            UserError: an import path that does not import.
        """
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return import_callable(name, where=self.key)
        near = difflib.get_close_matches(name, self._functions, 1)
        raise ConfigError(
            f"unknown {self.kind} {name!r}",
            where=self.key,
            allowed=[*self._functions, "pkg.mod:fn"],
            fix=f"did you mean {near[0]!r}?" if near else None,
        )

    def required(self, name: str) -> list[str]:
        """Names of the parameters without a default, in order."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        return [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
