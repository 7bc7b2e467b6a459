"""Registries of components by name or import path: each has a function, its settings, and its declaration.

    class LeashSettings(Settings):
        pull: float = Field(0.1, ge=0, description="weight of the penalty")

    @POLICY_LOSSES.register("leash", settings=LeashSettings, reads=("ref_logp",))
    def leash(logp, old_logp, advantages, mask, cfg, *, offsets, ref_logp): ...

A component of this package has a name; a component in a user's file has none and is found by its path. They do not
differ otherwise. The names that a recipe may choose, the reference of keys, the checks and the inputs of the task graph
all come from these registries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import create_model

from megarl.config.base import ComponentSection, Section, raise_problems
from megarl.config.components import settle
from megarl.system.errors import ConfigError, close_matches
from megarl.system.imports import import_callable

F = TypeVar("F", bound=Callable[..., Any])


class Settings(Section):
    """The settings of one component, in addition to its section's shared keys; this base class has none."""

    def problems(self, path: str) -> list[ConfigError]:
        """Return the conflicts between the section's keys, each of which is valid by itself; `path` is the section's
        path."""
        return []


@dataclass(frozen=True)
class Spec:
    """The declaration with which a loss, estimator or other component is registered."""

    settings: type[Settings] = Settings  # pydantic model of the component's recipe keys
    reads: tuple[str, ...] = ()  # batch fields that the component receives as keyword arguments of these names


S = TypeVar("S", bound=Spec)


@dataclass(frozen=True)
class Chosen(Generic[S]):
    """The component that a section names, with its settings from the section."""

    function: Callable[..., Any]
    spec: S
    settings: Any

    @property
    def own(self) -> dict[str, Any]:
        """The component's own settings by name, without the section's shared keys."""
        return {key: getattr(self.settings, key) for key in self.spec.settings.model_fields}


class Registry(Generic[S]):
    """A registry of components of one kind.

    >>> losses = Registry("policy loss", "algorithm.loss.name", Spec)
    >>> @losses.register("half")
    ... def half(x): return x / 2
    >>> losses.get("half")(4.0)
    2.0
    """

    def __init__(self, kind: str, key: str, spec: type[S], *, by_name: bool = False) -> None:
        """Create an empty registry.

        Args:
            kind: what a component is called in error messages.
            key: dotted configuration key that names the component, for error messages.
            spec: type of the components' declarations.
            by_name: pass the settings that the function's parameters name; otherwise pass one object with all settings.
        """
        self.kind, self.key, self._spec, self._by_name = kind, key, spec, by_name
        self._functions: dict[str, Callable[..., Any]] = {}
        self._every: type[Settings] | None = None
        self._named: dict[Callable[..., Any], type[Settings]] = {}

    def register(self, *names: str, **declared: Any) -> Callable[[F], F]:
        """Return a decorator that registers a function as a component under these names.

        Args:
            names: names in recipes; none for a function in a user's file.
            declared: attributes of the function's declaration, the registry's `spec` type.
        """
        spec = self._spec(**declared)

        def add(function: F) -> F:
            for name in names:
                if name in self._functions:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                self._functions[name] = function
            self._every = None
            self._named.clear()
            function.__component__, function.__registry__ = spec, self  # type: ignore[attr-defined]
            return function

        return add

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._functions)

    def get(self, name: str) -> Callable[..., Any]:
        """Return the function with this registered name or import path (`pkg.mod:fn` or `file.py:fn`)."""
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return import_callable(name, where=self.key)
        near = close_matches(name, self._functions)
        raise ConfigError(
            f"unknown {self.kind} {name!r}",
            where=self.key,
            allowed=[*self.names(), "file.py:fn", "pkg.mod:fn"],
            fix=f"did you mean {near[0]!r}?" if near else f"set {self.key} to one of these",
        )

    def spec(self, name: str) -> S:
        """Return the declaration of a component.

        A function that declares nothing may read the settings of every registered component, or, in a registry made
        with `by_name`, only the settings that its parameters are named after.
        """
        function = self.get(name)
        declared = self.declared(function)
        if declared is not None:
            return declared
        return self._spec(settings=self._settings_named(function) if self._by_name else self.every_setting())

    def _settings_named(self, function: Callable[..., Any]) -> type[Settings]:
        """Return a model of the settings that are parameters of `function`; cached, since every step needs it."""
        if function not in self._named:
            parameters = self._parameters(function)
            every = self.every_setting().model_fields
            fields: dict[str, Any] = {
                name: (info.annotation, info) for name, info in every.items() if name in parameters
            }
            self._named[function] = create_model("NamedSettings", __base__=Settings, **fields)
        return self._named[function]

    def declared(self, function: Callable[..., Any]) -> S | None:
        """Return a function's declaration as a component of this kind; None without one."""
        spec: S | None = getattr(function, "__component__", None)
        other: Registry[Any] | None = getattr(function, "__registry__", None)
        if other is not None and other is not self:
            raise ConfigError(
                f"a component for {other.key} cannot be used for {self.key}",
                where=self.key,
                found=getattr(function, "__name__", repr(function)),
                fix=f"set it as {other.key}, or choose a component for {self.key}",
            )
        return spec

    def every_setting(self) -> type[Settings]:
        """Return a settings class with the keys of all named components; cached until another one is registered."""
        if self._every is None:
            fields: dict[str, Any] = {}
            for name in self.names():
                for key, info in self.spec(name).settings.model_fields.items():
                    fields.setdefault(key, (info.annotation, info))
            self._every = create_model("EverySetting", __base__=Settings, **fields)
        return self._every

    def readers(self, key: str) -> dict[str, type[Settings]]:
        """Return the settings models of the named components that have the key `key`."""
        models = {name: self.spec(name).settings for name in self.names()}
        return {name: model for name, model in models.items() if key in model.model_fields}

    def choose(self, section: ComponentSection, path: str | None = None) -> Chosen[S]:
        """Return the component that `section` names, with its settings.

        `path` is the section's path if it is not the registry's. The settings of a function without a declaration
        include the section's shared keys.
        """
        name, named_by = section.component, section.named_by
        spec = self.spec(name)
        path = path or self.key.rpartition(".")[0]
        shared, key = list(type(section).model_fields), f"{path}.{named_by}"
        settings, problems = settle(path, name, section.own, spec.settings, self.readers, name_key=key, shared=shared)
        raise_problems(problems)
        function = self.get(name)
        if settings is not None and not hasattr(function, "__component__"):
            values = {key: getattr(section, key) for key in shared if key != named_by}
            settings = settings.model_copy(update=values)
        return Chosen(function, spec, settings)

    def required(self, name: str) -> list[str]:
        """Return the names of the function's parameters without a default, in order."""
        return [
            p.name
            for p in self.parameters(name).values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]

    def parameters(self, name: str) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the function with this name or path, in order."""
        return self._parameters(self.get(name))

    def _parameters(self, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(function).parameters
        except (TypeError, ValueError):
            raise ConfigError(
                f"cannot read the signature of this {self.kind}",
                where=self.key,
                found=getattr(function, "__name__", repr(function)),
                allowed="a function that is written in Python",
                fix=f"wrap it in a Python function, and set {self.key} to the wrapper",
            ) from None
