"""Validation of the keys that belong to a component named in a section, against the model of the component's settings.

This layer names no component: the caller passes a `Components` registry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from megarl.config.base import Section, raise_problems
from megarl.system.errors import ConfigError, close_matches

M = TypeVar("M", bound=Section)


class Components(Protocol):
    """A registry of the components that each section (given by its dotted path) may name."""

    def names(self, path: str) -> Sequence[str]:
        """Return the registered names that are allowed at `path`; a user's own functions are not listed."""

    def settings_of(self, path: str, name: str) -> type[Section] | None:
        """Return the settings class of the component's own keys, or None when the component cannot be found."""

    def own_keys(self, path: str, name: str) -> Collection[str] | None:
        """Return the keys that the reward (path `reward`) or environment (path `env`) called `name` accepts. Return
        None when it accepts any key, cannot be found, or is in a user's file whose import (in another process) takes
        too long.
        """

    def readers(self, path: str, key: str) -> Mapping[str, type[Section]]:
        """Return the settings classes of the components that have this key, by the component's name."""


def settle(
    path: str,
    name: str,
    own: Mapping[str, Any],
    model: type[M],
    readers: Callable[[str], Mapping[str, type[Section]]],
    *,
    name_key: str,
    shared: Collection[str] = (),
    where: Callable[[str], str] | None = None,
    inherited: Collection[str] = (),
) -> tuple[M | None, list[ConfigError]]:
    """Validate the keys given for a component and return its settings.

    Args:
        path: dotted path of the section that holds the keys.
        name: name of the component.
        own: the given keys, without those that all components share.
        model: model of the component's own keys.
        readers: returns the components that have a key, with their settings, for the message.
        name_key: dotted key that names the component.
        shared: keys of the section that all components have.
        where: returns the place at which a key of the section was given; None: the key's path.
        inherited: keys that a lower recipe layer gave for another component. Inherited keys that this component
            does not have are left out.

    Returns:
        The settings (None when there are problems) and the problems. A key that only other components have is accepted
        while it has their default, because recipes resolved by earlier versions list the keys of all components.
    """
    where = where or (lambda key: f"{path}.{key}")
    problems, known = [], {}
    for key, value in own.items():
        if key in model.model_fields:
            known[key] = value
        elif key not in inherited and not any(
            value == model.model_fields[key].get_default(call_default_factory=True) for model in readers(key).values()
        ):
            allowed, others = [*model.model_fields, *shared], list(readers(key))
            problems.append(_unknown(f"{path}.{key}", name, allowed, others, name_key, where(key)))
    try:
        return (None if problems else model.model_validate(known, strict=True)), problems
    except ValidationError as error:
        # imported late: it loads all sections, and scoring processes start without them
        from megarl.config.fields import wrong_value

        wrong = {str(detail["loc"][0]): detail for detail in error.errors(include_url=False) if detail["loc"]}
        for key, detail in wrong.items():
            problems.append(
                wrong_value(detail, f"{path}.{key}", model.model_fields[key], known.get(key), where=where(key))
            )
        return None, problems


def settings_at(where: str, own: Mapping[str, Any], model: type[Section]) -> Any:
    """Validate the settings in a mapping of a recipe as `model`. A model that allows extra keys accepts every key.
    Raise ConfigError if a key is unknown or missing, or a value is invalid.
    """
    known = {key: value for key, value in own.items() if key in model.model_fields}
    missing = [key for key, field in model.model_fields.items() if field.is_required() and key not in own]
    if missing:
        raise ConfigError(
            f"the required key {missing[0]!r} is missing",
            where=where,
            found=dict(own),
            allowed=list(model.model_fields),
        )
    checked = known if model.model_config.get("extra") == "allow" else own
    _, problems = settle(where, where, checked, model, lambda key: {}, name_key=where, shared=[])
    raise_problems(problems)
    return model.model_validate(dict(own))


def _unknown(path: str, name: str, allowed: list[str], readers: list[str], name_key: str, where: str) -> ConfigError:
    from megarl.config.other_names import meaning_of

    above, _, key = path.rpartition(".")
    near, elsewhere = close_matches(key, allowed), meaning_of(tuple(path.split(".")))
    fix = "remove it, or use one of the keys above" if allowed else "remove it"
    if elsewhere is not None:
        fix = elsewhere
    elif near:
        fix = f"did you mean {above}.{near[0]}?"
    elif readers:
        fix = f"remove it, or set {name_key} to one that reads it: {', '.join(readers)}"
    return ConfigError(f"unknown key {path}: {name} does not read it", where=where, allowed=allowed or "none", fix=fix)
