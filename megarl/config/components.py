"""Sections that name a component: its own keys, held against the model of its settings.

This layer knows that there are components, not which: `Components` is given from above.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from megarl.config.base import ComponentSection, Section
from megarl.config.fields import wrong_value
from megarl.errors import ConfigError, close_matches

M = TypeVar("M", bound=Section)


class Components(Protocol):
    """The components that there are for each `ComponentSection`, by its dotted path."""

    def names(self, path: str) -> Sequence[str]:
        """Names that the section may give, a user's own left out."""

    def settings_of(self, path: str, name: str) -> type[Section] | None:
        """Model of the keys that a component has for itself; None when it cannot be found."""

    def readers(self, path: str, key: str) -> Mapping[str, type[Section]]:
        """The named components that have this key, with their settings."""


def settle(
    path: str,
    section: ComponentSection,
    model: type[M],
    readers: Callable[[str], Mapping[str, type[Section]]],
    *,
    where: Callable[[str], str] | None = None,
    inherited: Collection[str] = (),
) -> tuple[M | None, list[ConfigError]]:
    """The settings of the component that a section names, out of the section's keys.

    Args:
        path: dotted path of the section.
        section: name, shared keys and the component's own.
        model: what the component has for keys of its own.
        readers: the components that have a key, for the message, with their settings.
        where: says where a key of the section was given; None: its path.
        inherited: keys that were given for another component, in a layer below the one that names this one. Those
            that this one does not have are left out.

    Returns:
        The settings, None when there are problems, and these. A key that only other components have is no problem
        while it has their default: resolved recipes of earlier versions list the keys of all components.
    """
    where = where or (lambda key: f"{path}.{key}")
    problems, known = [], {}
    for key, value in section.own.items():
        if key in model.model_fields:
            known[key] = value
        elif key not in inherited and not _is_default(value, key, readers(key)):
            problems.append(_unknown(path, key, section, model, list(readers(key)), where(key)))
    try:
        return (None if problems else model.model_validate(known, strict=True)), problems
    except ValidationError as error:
        wrong = {str(detail["loc"][0]): detail for detail in error.errors(include_url=False) if detail["loc"]}
        for key, detail in wrong.items():
            problems.append(
                wrong_value(detail, f"{path}.{key}", model.model_fields[key], known.get(key), where=where(key))
            )
        return None, problems


def _is_default(value: Any, key: str, readers: Mapping[str, type[Section]]) -> bool:
    return any(value == model.model_fields[key].get_default(call_default_factory=True) for model in readers.values())


def _unknown(
    path: str, key: str, section: ComponentSection, model: type[Section], readers: list[str], where: str
) -> ConfigError:
    allowed = [*model.model_fields, *type(section).model_fields]
    near = close_matches(key, allowed)
    fix = "remove it, or use one of the keys above"
    if near:
        fix = f"did you mean {path}.{near[0]}?"
    elif readers:
        fix = f"remove it, or set {path}.name to one that reads it: {', '.join(readers)}"
    return ConfigError(
        f"unknown key {path}.{key}: {section.name} does not read it", where=where, allowed=allowed, fix=fix
    )
