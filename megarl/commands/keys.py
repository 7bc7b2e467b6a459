"""`megarl keys`: keys of a recipe by a part of their name, with their defaults, allowed values and meaning."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.commands.describe import as_yaml, default_values
from megarl.config.base import ComponentSection
from megarl.config.fields import alternatives, describe_allowed, entries_of, find_key, iter_keys, section_of
from megarl.config.other_names import METHODS, meaning_of
from megarl.config.other_values import values_elsewhere
from megarl.envs.registry import ENVIRONMENTS, environment_class
from megarl.recipes.build import PIPELINES
from megarl.recipes.components import COMPONENTS, REGISTRIES
from megarl.system.errors import UserError, close_matches

_WIDEST = 100  # columns


@dataclass(frozen=True)
class KeyEntry:
    """One key for display.

    Attributes:
        path: dotted key; NAME stands for a name of the user's.
        info: its field.
        default: its default.
        is_section: it holds keys.
        readers: the components that read it; empty for keys of the recipe itself.
        components: those of this package that it may name; empty for most keys.
    """

    path: str
    info: FieldInfo
    default: Any
    is_section: bool = False
    readers: tuple[str, ...] = ()
    components: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """The description of the key, on one line."""
        return self.info.description or ""

    @property
    def shown_default(self) -> str:
        """Its default as a recipe writes it."""
        if self.default is PydanticUndefined:
            return "the file's name" if self.path == "name" else "required"
        return as_yaml(self.default) or '""'

    @property
    def choices(self) -> list[str]:
        """The values that can be listed; there may be others."""
        found = list(self.components)
        for kind in alternatives(self.info.annotation):
            found += map(str, get_args(kind)) if get_origin(kind) is Literal else []
            found += ["true", "false"] if kind is bool else []
        return found

    @property
    def values(self) -> str:
        """The allowed values, in words."""
        return ", ".join([*self.components, "file.py:fn"]) if self.components else describe_allowed(self.info)

    def lines(self, width: int) -> list[str]:
        """Return the text of this key: its default and values, and what it means."""
        if self.is_section:
            return [f"{self.path}: {self.meaning}"]
        first = f"{self.path} = {self.shown_default}"
        below = [self.meaning] + ([f"read by {', '.join(self.readers)}"] if self.readers else [])
        if len(first) + len(self.values) + 4 <= width:
            first = f"{first}  ({self.values})"
        else:
            below.insert(0, f"values: {self.values}")
        wrapped = [line for text in below for line in textwrap.wrap(text, width - 4)]
        return [first, *(f"    {line}" for line in wrapped)]


def all_entries() -> list[KeyEntry]:
    """Return every key of a recipe in the order of its sections, with the own keys of the package's components."""
    found: list[KeyEntry] = []
    flat, named = default_values(), _component_names()
    for key in iter_keys():
        names = named.get(key.path, ())
        found.append(KeyEntry(key.path, key.info, flat[key.path], key.section is not None, components=names))
        if key.section is not None and (issubclass(key.section, ComponentSection) or key.path == "reward"):
            found += _own_entries(key.path)
        elif key.path == "env":
            models = {name: environment_class(name).Settings for name in ENVIRONMENTS}
            found += _merged("env", ((name, field, info) for name in models for field, info in _fields(models[name])))
        elif (entries := entries_of(key.info)) is not None:
            found += [KeyEntry(f"{key.path}.NAME.{name}", info, _default(info)) for name, info in _fields(entries)]
    return found


def _component_names() -> dict[str, tuple[str, ...]]:
    """Return the components of this package by the key that names one."""
    named = {"env.name": tuple(ENVIRONMENTS), "algorithm.pipeline": tuple(PIPELINES)}
    for path, registry in REGISTRIES.items():
        section = section_of(find_key(tuple(path.split("."))).info)  # type: ignore[union-attr]
        key = section.named_by if section is not None and issubclass(section, ComponentSection) else "name"
        named[f"{path}.{key}"] = tuple(registry.names())
    return named


def _own_entries(path: str) -> list[KeyEntry]:
    models = {name: COMPONENTS.settings_of(path, name) for name in REGISTRIES[path].names()}
    own = ((name, field, info) for name, model in models.items() if model for field, info in _fields(model))
    return _merged("reward.kwargs" if path == "reward" else path, own)


def _merged(place: str, own: Iterable[tuple[str, str, FieldInfo]]) -> list[KeyEntry]:
    """Return one entry for each key of (component, key, field), with all the components that read it alike."""
    merged: dict[tuple[str, str], KeyEntry] = {}
    for name, field, info in own:
        which = (field, repr(info))
        before = merged[which].readers if which in merged else ()
        merged[which] = KeyEntry(f"{place}.{field}", info, _default(info), readers=(*before, name))
    return list(merged.values())


def _fields(model: Any) -> list[tuple[str, FieldInfo]]:
    return list(model.model_fields.items())


def _default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def find_entries(pattern: str, entries: Sequence[KeyEntry]) -> tuple[list[KeyEntry], str]:
    """Return the keys that `pattern` means, and a note about it, mostly empty.

    These are the key or section of that name with all below it, else the keys whose name ends with it or has it, else
    those that have its meaning in another project, else those that take it as a value, else those whose description
    has it.

    Raises:
        UserError: there is none.
    """
    asked = pattern.lower().strip(".")
    exact = [one for one in entries if _is_within(one.path, asked)]
    ending = [one for one in entries if not one.is_section and one.path.lower().endswith(f".{asked}")]
    named = [one for one in entries if not one.is_section and asked in one.path.lower()]
    if exact or named:
        return exact or ending or named, ""
    elsewhere = meaning_of(tuple(asked.split(".")))
    if elsewhere is not None:
        words = re.findall(r"\w+(?:\.\w+)+", elsewhere)
        meant = [one for one in entries if any(f"{one.path}.".startswith(f"{word}.") for word in words)]
        return meant, f"{asked}: {elsewhere}"
    described = [one for one in entries if not one.is_section and asked in one.meaning.lower()]
    valued = [entry for entry in entries if asked in entry.choices]
    note = METHODS.get(asked) or values_elsewhere(asked)
    if valued or note:
        return valued, f"{asked}: {note}" if note else ""
    if described:
        return described, ""
    close = close_matches(asked, [one.path for one in entries])
    last_words = {one.path.rpartition(".")[2]: one.path for one in entries}
    close += [last_words[name] for name in close_matches(asked.rpartition(".")[2], list(last_words))]
    near = " or ".join(dict.fromkeys(close))
    raise UserError(
        "no key has this in its name or description",
        where="megarl keys",
        found=pattern,
        fix=f"did you mean {near}?" if near else "megarl keys lists the sections",
    )


def _is_within(path: str, asked: str) -> bool:
    """Tell whether a key is the one that is asked for, or below it; NAME in its path stands for any name."""
    own, parts = path.split("."), asked.split(".")
    return len(own) >= len(parts) and all(a in (b, "NAME") for a, b in zip(own, parts, strict=False))


def show_keys(pattern: str | None) -> str:
    """Return the text of the keys that `pattern` means; None: of the sections."""
    entries = all_entries()
    width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
    if pattern is None:
        top = [f"{one.path}: {one.meaning}" for one in entries if "." not in one.path]
        lines = [line for text in top for line in textwrap.wrap(text, width, subsequent_indent="    ")]
        return "\n".join([*lines, "", "The keys of a section: megarl keys actor.optim; by a word: megarl keys clip"])
    found, note = find_entries(pattern, entries)
    return "\n".join([*textwrap.wrap(note, width), *(line for one in found for line in one.lines(width))])
