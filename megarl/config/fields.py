"""Questions about the configuration models: which keys exist, what each accepts, what a misspelt key meant."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types
from pydantic.fields import FieldInfo

from megarl.config.base import Section
from megarl.config.run import RunConfig
from megarl.errors import close_matches

_SCALARS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {
    annotated_types.Gt: (">", "gt"),
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Lt: ("<", "lt"),
    annotated_types.Le: ("<=", "le"),
}


@dataclass(frozen=True)
class Key:
    """One configuration key. `section` is its model when the key holds a section, else None."""

    path: str
    info: FieldInfo
    section: type[Section] | None


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, with Annotated unwrapped; a one-element tuple for any other type."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in alternatives(part))
    return (annotation,)


def section_of(info: FieldInfo) -> type[Section] | None:
    """The section model of a field (of one that may be null, too), None when the field holds a value."""
    (kind, *others) = (member for member in alternatives(info.annotation) if member is not type(None))
    return kind if not others and isinstance(kind, type) and issubclass(kind, Section) else None


def is_free_form(info: FieldInfo) -> bool:
    """True for a mapping whose keys are the user's own (keyword arguments, a Hugging Face config)."""
    return any(typing.get_origin(kind) is dict for kind in alternatives(info.annotation))


def iter_keys(model: type[Section] = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every key below `model`, sections before their contents, in the order of the models."""
    for name, info in model.model_fields.items():
        section = section_of(info)
        yield Key(prefix + name, info, section)
        if section is not None:
            yield from iter_keys(section, f"{prefix}{name}.")


def find_key(path: tuple[str, ...]) -> Key | None:
    """The key at `path`, or the one that holds a value on the way there; None when a part is unknown."""
    model: type[Section] = RunConfig
    for depth, name in enumerate(path):
        info = model.model_fields.get(name)
        if info is None:
            return None
        section = section_of(info)
        if section is None or depth == len(path) - 1:
            return Key(".".join(path[: depth + 1]), info, section)
        model = section
    return None


def nearest_keys(path: tuple[str, ...]) -> list[str]:
    """Known dotted keys that a misspelt `path` may have meant, best first: among its siblings, else anywhere."""
    parent = find_key(path[:-1]).section if len(path) > 1 else RunConfig  # type: ignore[union-attr]
    prefix = "".join(f"{part}." for part in path[:-1])
    siblings = close_matches(path[-1], list(parent.model_fields if parent else ()))
    if siblings:
        return [prefix + siblings[0]]
    by_name: dict[str, list[str]] = {}
    for key in iter_keys():
        by_name.setdefault(key.path.rpartition(".")[2], []).append(key.path)
    close = close_matches(path[-1], list(by_name), cutoff=0.8)
    return by_name[close[0]][:4] if close else []


def describe_allowed(info: FieldInfo) -> str:
    """What a field accepts, in words: `number > 0, or null`."""
    return _describe(info.annotation, list(info.metadata))


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _describe(args[0], [*metadata, *args[1:]])
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_describe(part, metadata) for part in args)
    if origin is Literal:
        return ", ".join(str(value) for value in args)
    if origin is list:
        return f"list of {_describe(args[0], [])} values"
    if origin is dict:
        return "mapping"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section with the keys " + ", ".join(annotation.model_fields)
    name = _SCALARS.get(annotation, "anything")
    return " ".join([name, *([_bounds(metadata)] if annotation in (int, float) and _bounds(metadata) else [])])


def _bounds(metadata: list[Any]) -> str:
    words = [
        f"{sign} {getattr(item, attribute)}"
        for item in metadata
        for kind, (sign, attribute) in _BOUNDS.items()
        if isinstance(item, kind)
    ]
    return " and ".join(words)
