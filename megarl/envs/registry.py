"""Environments by name, and the keys of a recipe that each of them takes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megarl.config.rollout import ON_ERROR, env_section
from megarl.envs.protocol import Environment
from megarl.errors import ConfigError, close_matches
from megarl.imports import import_file, import_module

#: The included environments.
ENVIRONMENTS = {
    "single_turn": "megarl.envs.protocol:SingleTurn",
    "tools": "megarl.envs.tools:Tools",
}
_FORMS = ("file.py:Class", "pkg.mod:Class")


def load_environment(env: Mapping[str, Any]) -> tuple[type[Environment], Any]:
    """Return the class that section `env` names, and its settings.

    Raises:
        ConfigError: the name is unknown, the class cannot be imported or is no environment, or a key or value is
            invalid.
    """
    name, on_error, own = env_section(env)
    if on_error not in ON_ERROR:
        raise ConfigError("an unknown value", where="env.on_error", found=on_error, allowed=ON_ERROR)
    kind = environment_class(name)
    return kind, _settings(name, kind, own)


def environment_class(name: Any) -> type[Environment]:
    """Return the class that `env.name` names; a user's own is imported.

    Raises:
        ConfigError: the name is unknown, or the class cannot be imported or is no environment.
    """
    path = ENVIRONMENTS.get(name, name) if isinstance(name, str) else ""
    if ":" not in path:
        near = close_matches(str(name), ENVIRONMENTS)
        raise ConfigError(
            "unknown environment",
            where="env.name",
            found=name,
            allowed=[*ENVIRONMENTS, *_FORMS],
            fix=f"did you mean {near[0]!r}?" if near else "set env.name to one of these",
        )
    module_name, _, class_name = path.rpartition(":")
    module = import_source(module_name, "env.name")
    kind = getattr(module, class_name, None)
    if not (inspect.isclass(kind) and issubclass(kind, Environment)):
        there = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Environment) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{module_name} has no environment {class_name!r}",
            where="env.name",
            found=name,
            allowed=there or "a class derived from megarl.envs.Environment",
        )
    return kind


def check_longest(longest_s: float | None, answer_s: float) -> None:
    """Refuse a deadline of an environment that exceeds the run's.

    Args:
        longest_s: see `EnvSettings`.
        answer_s: seconds that a run waits for an answer, half of `cluster.timeout_s`.

    Raises:
        ConfigError: it exceeds the run's.
    """
    if longest_s is not None and longest_s > answer_s:
        raise ConfigError(
            f"a turn of the environment may take {longest_s:g} s, and the run waits {answer_s:g} s for it",
            where="cluster.timeout_s",
            found=2 * answer_s,
            allowed=f"at least {2 * longest_s:g}",
            fix="raise it, or lower the deadlines in the section env",
        )


def import_source(source: str, key: str) -> Any:
    """Import and return the module `pkg.mod`, or that of a file `path/to/file.py`.

    Raises:
        ConfigError: at `key`: the file is missing, or its import fails; the message names the line.
    """
    try:
        return import_file(_existing(source, key)) if source.endswith(".py") else import_module(source)
    except ConfigError:
        raise
    except Exception as error:  # any exception of the user's module
        raise ConfigError(
            f"importing {source} failed: {type(error).__name__}: {error}", where=key, fix="correct the file"
        ) from error


def _existing(source: str, key: str) -> Path:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            "there is no such file",
            where=key,
            found=source,
            fix=f"relative paths start at the current folder, {os.getcwd()}",
        )
    return path


def _settings(name: str, kind: type[Environment], own: dict[str, Any]) -> Any:
    known = kind.Settings.model_fields
    for key in own:
        if key not in known:
            near = close_matches(key, known)
            raise ConfigError(
                f"environment {name!r} has no setting {key!r}",
                where=f"env.{key}",
                found=own[key],
                allowed=["name", "on_error", *known],
                fix=f"did you mean {near[0]!r}?"
                if near
                else f"remove it; env='!replace {{name: {name}}}' drops those of another one in the recipe",
            )
    try:
        return kind.Settings.model_validate(own)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            first["msg"], where=".".join(["env", *map(str, first["loc"])]), found=first.get("input")
        ) from error
