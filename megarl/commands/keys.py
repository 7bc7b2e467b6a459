"""`megarl keys`: search recipe keys by a part of their name, with defaults, allowed values and meaning."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
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

_WIDEST = 100  # maximum width of the output in characters


@dataclass(frozen=True)
class KeyEntry:
    """One key for display.

    Attributes:
        path: dotted key; NAME stands for a name that the user chooses.
        info: the key's field.
        default: the key's default.
        is_section: whether the key holds other keys.
        readers: components that read the key; empty for keys of the recipe itself.
        components: built-in components that the key may name; empty for most keys.
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
        """The default in YAML, or text in its place for a key without one."""
        if self.default is PydanticUndefined:
            return "the file's name" if self.path == "name" else "required"
        return as_yaml(self.default) or '""'

    @property
    def choices(self) -> list[str]:
        """The values that can be listed; others may be allowed too."""
        values = list(self.components)
        for kind in alternatives(self.info.annotation):
            values += map(str, get_args(kind)) if get_origin(kind) is Literal else []
            values += ["true", "false"] if kind is bool else []
        return values

    @property
    def values(self) -> str:
        """The values that the key allows, as text."""
        return ", ".join([*self.components, "file.py:fn"]) if self.components else describe_allowed(self.info)

    def lines(self, width: int) -> list[str]:
        """Return the text of this key, wrapped to `width` columns: its default, values and meaning."""
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
    """Return every recipe key in the order of its sections, with the keys of built-in components."""
    listed: list[KeyEntry] = []
    flat, named = default_values(), _component_names()
    for key in iter_keys():
        names = named.get(key.path, ())
        listed.append(KeyEntry(key.path, key.info, flat[key.path], key.section is not None, components=names))
        if key.section is not None and (issubclass(key.section, ComponentSection) or key.path == "reward"):
            models = {name: COMPONENTS.settings_of(key.path, name) for name in REGISTRIES[key.path].names()}
            listed += _merged("reward.kwargs" if key.path == "reward" else key.path, models)
        elif key.path == "env":
            listed += _merged("env", {name: environment_class(name).Settings for name in ENVIRONMENTS})
        elif (entries := entries_of(key.info)) is not None:
            fields = entries.model_fields.items()
            listed += [KeyEntry(f"{key.path}.NAME.{name}", info, _default(info)) for name, info in fields]
    return listed


def _component_names() -> dict[str, tuple[str, ...]]:
    """Return the names of the components that megarl includes, by the recipe key that names a component."""
    named = {"env.name": tuple(ENVIRONMENTS), "algorithm.pipeline": tuple(PIPELINES)}
    for path, registry in REGISTRIES.items():
        section = section_of(find_key(tuple(path.split("."))).info)  # type: ignore[union-attr]
        key = section.named_by if section is not None and issubclass(section, ComponentSection) else "name"
        named[f"{path}.{key}"] = tuple(registry.names())
    return named


def _merged(place: str, models: Mapping[str, Any]) -> list[KeyEntry]:
    """Return the entries of all keys of some components; a key that several components define equally has one entry.
    `models` has the settings class of each component, None for one without keys.
    """
    merged: dict[tuple[str, str], KeyEntry] = {}
    for name, model in models.items():
        for field, info in model.model_fields.items() if model else ():
            which = (field, repr(info))
            before = merged[which].readers if which in merged else ()
            merged[which] = KeyEntry(f"{place}.{field}", info, _default(info), readers=(*before, name))
    return list(merged.values())


def _default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def find_entries(pattern: str, entries: Sequence[KeyEntry]) -> tuple[list[KeyEntry], str]:
    """Return the keys that match `pattern`, and a note that is usually empty.

    The first search with a result counts: a key or section with this name and all keys below it; keys whose name ends
    with or contains the pattern; keys that have this name in another project; keys that accept it as a value; keys
    whose description contains it, or whose name and description contain all of its words. Raise UserError if nothing
    matches.
    """
    wanted = pattern.lower().strip(".")
    keys = [entry for entry in entries if not entry.is_section]
    exact = [entry for entry in entries if _is_within(entry.path, wanted)]
    ending = [key for key in keys if key.path.lower().endswith(f".{wanted}")]
    named = [key for key in keys if wanted in key.path.lower()]
    if exact or named:
        return exact or ending or named, ""
    elsewhere = meaning_of(tuple(wanted.split(".")))
    if elsewhere is not None:
        words = re.findall(r"\w+(?:\.\w+)+", elsewhere)
        meant = [entry for entry in entries if any(f"{entry.path}.".startswith(f"{word}.") for word in words)]
        return meant, f"{wanted}: {elsewhere}"
    described = [key for key in keys if wanted in key.meaning.lower()]
    words = wanted.split()
    described = described or [key for key in keys if all(word in f"{key.path} {key.meaning}".lower() for word in words)]
    valued = [entry for entry in entries if wanted in entry.choices]
    note = METHODS.get(wanted) or values_elsewhere(wanted)
    if valued or note:
        return valued, f"{wanted}: {note}" if note else ""
    if described:
        return described, ""
    close = close_matches(wanted, [entry.path for entry in entries])
    last_words = {entry.path.rpartition(".")[2]: entry.path for entry in entries}
    close += [last_words[name] for name in close_matches(wanted.rpartition(".")[2], list(last_words))]
    near = " or ".join(dict.fromkeys(close))
    raise UserError(
        "no key has this text in its name or description",
        where="megarl keys",
        found=pattern,
        fix=f"did you mean {near}?" if near else "megarl keys lists the sections",
    )


def _is_within(path: str, wanted: str) -> bool:
    """Return whether the key `path` is the one called `wanted` or below it; NAME in the path matches any name."""
    parts_here, parts = path.split("."), wanted.split(".")
    return len(parts_here) >= len(parts) and all(a in (b, "NAME") for a, b in zip(parts_here, parts, strict=False))


def show_keys(pattern: str | None) -> str:
    """Return the text of the keys that match `pattern`, or for None a list of all sections."""
    entries = all_entries()
    width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
    if pattern is None:
        top = [f"{entry.path}: {entry.meaning}" for entry in entries if "." not in entry.path]
        lines = [line for text in top for line in textwrap.wrap(text, width, subsequent_indent="    ")]
        return "\n".join(
            [*lines, "", "megarl keys actor.optim lists the keys of a section, megarl keys clip all keys with a word"]
        )
    matches, note = find_entries(pattern, entries)
    return "\n".join([*textwrap.wrap(note, width), *(line for entry in matches for line in entry.lines(width))])
