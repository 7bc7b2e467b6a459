"""Look-ups in the configuration models: keys, accepted values, and suggestions for misspelt keys."""

from __future__ import annotations

import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megarl.config.base import LARGEST, ComponentSection, Section
from megarl.config.other_values import value_fix
from megarl.config.run import RunConfig
from megarl.system.errors import ConfigError, close_matches, count

#: Pattern of an integer written as text.
INTEGER = re.compile(r"[-+]?[0-9]+")
#: Pattern of text that needs no quotes inside a YAML list or mapping on one line.
_BARE = re.compile(r"[\w./~@+-][\w./~@+:-]*(?<!:)")
#: Keys that a plain value written in place of a section is probably meant for; the first one that the section has is
#: suggested.
_MAIN_KEYS = ("name", "path", "train_files")
_SCALARS = {int: "integer", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {
    annotated_types.Gt: (">", "gt"),
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Lt: ("<", "lt"),
    annotated_types.Le: ("<=", "le"),
}


@dataclass(frozen=True)
class Key:
    """One configuration key; `section` is its model when the key holds a section, else None."""

    path: str
    info: FieldInfo
    section: type[Section] | None

    @property
    def free_form(self) -> bool:
        """Whether keys that the configuration models do not name may stand below this key."""
        return names_component(self.section) or is_free_form(self.info)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, with Annotated unwrapped; a one-element tuple for any other type."""
    return _members(annotation)


@functools.cache  # cached: reading a recipe looks up each key several times
def _members(annotation: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in _members(part))
    return (annotation,)


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section model of a field (also of a nullable one), None when the field holds a value."""
    (kind, *others) = (member for member in alternatives(info.annotation) if member is not type(None))
    return kind if not others and isinstance(kind, type) and issubclass(kind, Section) else None


def entries_of(info: FieldInfo) -> type[Section] | None:
    """Return the section model of the entries of a mapping with user-chosen names; None for any other field."""
    for kind in alternatives(info.annotation):
        arguments = typing.get_args(kind)
        if typing.get_origin(kind) is dict and isinstance(arguments[1], type) and issubclass(arguments[1], Section):
            return arguments[1]
    return None


def names_component(section: type[Section] | None) -> bool:
    """Return whether a section names a component and therefore also holds that component's keys."""
    return section is not None and issubclass(section, ComponentSection)


def is_free_form(info: FieldInfo) -> bool:
    """Return whether the field is a mapping whose keys the user chooses (keyword arguments, a Hugging Face config)."""
    return any(typing.get_origin(kind) is dict for kind in alternatives(info.annotation))


def fields_of(model: type[Section]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their names in a recipe."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def iter_keys(model: type[Section] = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Yield every key below `model`, each section before its contents, in the order of the models."""
    for name, info in fields_of(model).items():
        section = section_of(info)
        yield Key(prefix + name, info, section)
        if section is not None:
            yield from iter_keys(section, f"{prefix}{name}.")


def find_key(path: tuple[str, ...]) -> Key | None:
    """Return the key at `path`; below a free-form mapping the mapping's key; None for an unknown path.

    Keys below a plain value, and the own keys of a component, are not in the models.
    """
    model: type[Section] = RunConfig
    # the section type of the entries, if the previous name in the path is a mapping of sections
    entries: type[Section] | None = None
    above: Key | None = None
    for depth, name in enumerate(path):
        info = fields_of(model).get(name) if entries is None else FieldInfo(annotation=entries)
        if info is None:
            return above if names_component(model) else None
        above = Key(".".join(path[: depth + 1]), info, section_of(info))
        entries = entries_of(info)
        if (above.section is None and entries is None) or depth == len(path) - 1:
            return above
        model = above.section or model
    return None


def nearest_keys(path: tuple[str, ...]) -> list[str]:
    """Return known dotted keys that a misspelt `path` may stand for, best first. Sibling keys with the same beginning
    (tp for tp_size) come first, then close spellings, then keys of other sections.
    """
    parent = find_key(path[:-1]).section if len(path) > 1 else RunConfig  # type: ignore[union-attr]
    prefix = "".join(f"{part}." for part in path[:-1])
    names = list(fields_of(parent) if parent else ())
    longer = [name for name in names if len(path[-1]) > 1 and name.startswith(path[-1])]
    siblings = longer[:4] or close_matches(path[-1], names)
    if siblings:
        return [prefix + name for name in siblings]
    by_name: dict[str, list[str]] = {}
    for key in iter_keys():
        by_name.setdefault(key.path.rpartition(".")[2], []).append(key.path)
    close = close_matches(path[-1], list(by_name), cutoff=0.8)
    return by_name[close[0]][:4] if close else []


def describe_allowed(info: FieldInfo) -> str:
    """Describe the values that a field accepts, as in `number > 0, or null`."""
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
        item = _describe(args[0], [])
        if item.startswith("integer"):
            return f"list of integers{item.removeprefix('integer')}"
        return (
            f"list of sections{item.removeprefix('section')}"
            if item.startswith("section")
            else f"list of {item} values"
        )
    if origin is dict:
        if isinstance(args[1], type) and issubclass(args[1], Section):
            return f"mapping of names to sections with the keys {', '.join(args[1].model_fields)}"
        if args[1] is str:
            return "mapping of names to text"
        return "mapping"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section with the keys " + ", ".join(annotation.model_fields)
    if examples := [example for item in metadata for example in getattr(item, "examples", None) or ()]:
        return ", ".join(examples)
    name = _SCALARS.get(annotation, "anything")
    return " ".join([name, *([_bounds(metadata)] if annotation in (int, float) and _bounds(metadata) else [])])


def _bounds(metadata: list[Any]) -> str:
    """Describe the bounds of a number; of several bounds of one kind, name the strictest."""
    words = []
    for kind, (sign, attribute) in _BOUNDS.items():
        if bounds := [getattr(item, attribute) for item in metadata if isinstance(item, kind)]:
            words.append(f"{sign} {max(bounds) if sign.startswith('>') else min(bounds)}")
    return " and ".join(words)


def wrong_value(detail: ErrorDetails, path: str, info: FieldInfo, value: Any, *, where: str) -> ConfigError:
    """Return the error for a value that pydantic refused: what is wrong, the allowed values, and a suggestion."""
    out_of_range = detail["type"].startswith(("greater_than", "less_than", "finite"))
    allowed, form = describe_allowed(info), _form(detail)
    if detail["type"] == "less_than_largest":
        negative = isinstance(value, int) and value < 0
        allowed += f", at least {-LARGEST:,}" if negative else f", at most {LARGEST:,}"
    fix: str | None
    if value is None and section_of(info):
        problem, fix = f"the section {path} is empty", "give it keys, or remove the line to use the defaults"
    elif isinstance(value, str) and _fits_unquoted(value, alternatives(info.annotation)):
        problem, fix = f"{path} has a wrong type", f"write {value} without quotes"
    else:
        problem = f"{path} is out of range" if out_of_range else f"{path} has a wrong type"
        if form is not None:
            problem, allowed = f"{path} cannot be read", f"{allowed}: {form}"
        elif (length := _length(detail)) is not None:
            problem, allowed = f"{path} is too {detail['type'].rpartition('_')[2]}", f"{allowed}, {length}"
        literal = any(typing.get_origin(kind) is Literal for kind in alternatives(info.annotation))
        if literal and isinstance(value, str):
            problem = f"{path} has an unknown value"
        fix = value_fix(path, value) or _suggest(value, info) or _other_form(path, value, info)
    # ConfigError leaves out `found=None`, so null is given as text.
    shown = "null" if value is None else value
    return ConfigError(problem, where=where, found=shown, allowed=allowed, fix=fix)


def _form(detail: ErrorDetails) -> str | None:
    """Describe the form that a value of the right type must have; return None when the error is not about the form."""
    context = detail.get("ctx", {})
    if detail["type"] == "string_pattern_mismatch":
        return f"it has to match {context['pattern']}"
    return str(context["error"]) if detail["type"] == "value_error" and "error" in context else None


def _length(detail: ErrorDetails) -> str | None:
    """Describe the length that a text or list must have; return None when the error is not about the length."""
    context = detail.get("ctx", {})
    unit = "character" if detail["type"].startswith("string") else "value"
    if detail["type"].endswith("too_short"):
        return f"with at least {count(context['min_length'], unit)}"
    return f"with at most {count(context['max_length'], unit)}" if detail["type"].endswith("too_long") else None


def _fits_unquoted(text: str, kinds: tuple[Any, ...]) -> bool:
    if int in kinds and INTEGER.fullmatch(text):
        return True
    try:
        return float in kinds and math.isfinite(float(text))
    except ValueError:
        return False


def _suggest(value: Any, info: FieldInfo) -> str | None:
    """Suggest the fixed value (Literal) of the field that is closest in spelling; None when none is close."""
    values = [
        option
        for kind in alternatives(info.annotation)
        if typing.get_origin(kind) is Literal
        for option in typing.get_args(kind)
    ]
    close = close_matches(str(value), values)
    return f"did you mean {close[0]}?" if close else None


def _other_form(path: str, value: Any, info: FieldInfo) -> str | None:
    """Suggest the list or section to write in place of a single value; return None when neither fits."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    written = value if not isinstance(value, str) or _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    for kind in alternatives(info.annotation):
        if typing.get_origin(kind) is list and type(value) in alternatives(typing.get_args(kind)[0]):
            return f"write [{written}]"
    section = section_of(info)
    inside = fields_of(section) if section is not None else info.get_default(call_default_factory=True)
    main = next((key for key in _MAIN_KEYS if isinstance(inside, dict) and key in inside), None)
    if main is None or not isinstance(value, str):
        return None
    written = f"[{written}]" if main == "train_files" else written
    return f"write {path.rpartition('.')[2]}: {{{main}: {written}}}, on the command line {path}.{main}={value}"
