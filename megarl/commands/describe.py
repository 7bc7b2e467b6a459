"""Writes the generated parts of pages: `python -m megarl.commands.describe docs/keys.md docs/models.md`.

keys.md has the reference of recipe keys, from the models of sections and components; models.md has the architectures.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.algorithms.kl import KL
from megarl.commands.describe_models import model_table
from megarl.config.base import ComponentSection, Section
from megarl.config.fields import Key, describe_allowed, entries_of, iter_keys, section_of
from megarl.config.run import RunConfig
from megarl.recipes.components import COMPONENTS

BEGIN = "<!-- {name}: written by python -m megarl.commands.describe docs/{name}.md, do not edit below -->"
END = "<!-- end of {name} -->"
#: Pattern of bounds in the text of `describe_allowed` that only catch mistakes, such as a deadline of over a year.
_FAR = re.compile(r"( and)? [<>]= -?\d{7,}(\.0)?")


def reference() -> str:
    """Return the markdown of all keys: a table per section, or one table for sections of the same class."""
    defaults, keys = default_values(), list(iter_keys())
    first = _first_of_a_class(keys)
    lines = _table("Run", "One recipe.", [key for key in keys if "." not in key.path], defaults, first)
    for key in keys:
        if key.section is not None and first[key.path] == key.path:
            inside = [other for other in keys if other.path.rpartition(".")[0] == key.path]
            lines += _table(f"`{key.path}`", _sentence(key.section), inside, defaults, first)
            if issubclass(key.section, ComponentSection):
                lines += _own_keys(key.path, key.path, key.section.named_by)
            elif key.path == "reward":
                lines += _own_keys(key.path, "reward.kwargs", "name")
        elif (entries := entries_of(key.info)) is not None:
            shown: dict[type[Section] | None, str] = {
                other.section: first[other.path] for other in keys if other.section is not None
            }
            lines += _entries(f"{key.path}.NAME", entries, shown)
    return "\n".join(lines).rstrip() + "\n"


def write_reference(file: Path) -> bool:
    """Write the generated tables of keys or models between the markers of a docs page; return whether it changed.

    Raises:
        ValueError: the page has no markers.
    """
    old, text = file.read_text(encoding="utf-8"), {"keys": reference, "models": model_table}[file.stem]()
    begin, end = (marker.format(name=file.stem) for marker in (BEGIN, END))
    if begin not in old or end not in old:
        raise ValueError(f"{file} needs the lines {begin!r} and {end!r}")
    head, _, rest = old.partition(begin)
    new = f"{head}{begin}\n\n{text}\n{end}{rest.partition(end)[2]}"
    if new != old:
        file.write_text(new, encoding="utf-8")
    return new != old


def _entries(path: str, section: type[Section], shown: dict[type[Section] | None, str]) -> list[str]:
    """Return the docs table of a recipe section that users name, and of the sections in it that have no table yet."""
    inside = [Key(f"{path}.{name}", info, section_of(info)) for name, info in section.model_fields.items()]
    values = {key.path: key.info.get_default(call_default_factory=True) for key in inside}
    of_class = {key.path: shown.get(key.section, key.path) for key in inside if key.section is not None}
    lines = _table(f"`{path}`", _sentence(section), inside, values, of_class)
    for key in inside:
        if key.section is not None and key.section not in shown:
            lines += _entries(key.path, key.section, shown)
    return lines


def default_values() -> dict[str, Any]:
    """Return the default of every key by its path; for a section a mapping of its keys."""
    flat: dict[str, Any] = {}

    def walk(values: dict[str, Any], prefix: str, model: type[Section]) -> None:
        for key in iter_keys(model):
            if "." in key.path:
                continue
            value = values[key.path]
            flat[prefix + key.path] = value
            if key.section is not None:
                value = key.section().model_dump() if value is None else value
                walk(value, f"{prefix}{key.path}.", key.section)

    walk(RunConfig(name="").model_dump(), "", RunConfig)
    flat["name"] = PydanticUndefined
    return flat


def _first_of_a_class(keys: list[Key]) -> dict[str, str]:
    """Map the path of each section to the section whose table shows its keys: the first of its class, or the
    actor's.
    """
    sections = sorted(
        (key for key in keys if key.section is not None), key=lambda key: not key.path.startswith("actor.")
    )
    first: dict[type[Section] | None, str] = {}
    return {key.path: first.setdefault(key.section, key.path) for key in sections}


def _table(title: str, sentence: str, keys: list[Key], defaults: dict[str, Any], first: dict[str, str]) -> list[str]:
    rows = [
        _row(key, defaults[key.path]) if key.section is None else _section_row(key, first[key.path], defaults)
        for key in keys
    ]
    return [f"## {title}", "", sentence, "", "| Key | Values | Default | Meaning |", "|---|---|---|---|", *rows, ""]


def _own_keys(path: str, place: str, named_by: str) -> list[str]:
    """Return the markdown of the keys that components of the section `path` have; components with equal keys share a
    row. `place` is the path at which the keys are written, `named_by` the key that names the component.
    """
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for name in COMPONENTS.names(path):
        model = COMPONENTS.settings_of(path, name)
        # these estimators work only in algorithm.distillation
        if path == "algorithm.kl" and KL.spec(name).distributions:
            continue
        for key, info in model.model_fields.items() if model else ():
            default = info.get_default(call_default_factory=True)
            shown = "required" if info.is_required() else f"`{as_yaml(default)}`"
            cells = f"`{key}`", _values(info, nullable=default is None), shown, info.description or ""
            rows.setdefault(cells, []).append(f"`{name}`")
    if not rows:
        return []
    lines = [_cells([key, ", ".join(names), *rest]) for (key, *rest), names in rows.items()]
    head = ["| Key | Read by | Values | Default | Meaning |", "|---|---|---|---|---|"]
    where = "" if place == path else f", in `{place}`"
    return [f"Keys of the components that `{path}.{named_by}` may choose{where}:", "", *head, *lines, ""]


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _row(key: Key, default: Any) -> str:
    name = key.path.rpartition(".")[2]
    shown = f"`{as_yaml(default)}`"
    if default is PydanticUndefined:
        shown = "file name" if key.path == "name" else "required"
    return _cells([f"`{name}`", _values(key.info, nullable=default is None), shown, key.info.description or ""])


def _values(info: FieldInfo, *, nullable: bool) -> str:
    """Return the allowed values in the words of error messages, without bounds that only catch mistakes. With
    `nullable` the default is null, and null is not listed.
    """
    text = _FAR.sub("", describe_allowed(info))
    return text.removesuffix(", or null") if nullable else text


def _section_row(key: Key, first: str, defaults: dict[str, Any]) -> str:
    """Return the documentation row of a section with the same keys as the section `first`: a link to that section's
    table, and the defaults that differ."""
    inside = [path for path in defaults if path.startswith(f"{key.path}.")]
    others = [path for path in inside if defaults[path] != defaults[first + path[len(key.path) :]]]
    differing = ", ".join(f"`{path.rpartition('.')[2]}` {as_yaml(defaults[path])}" for path in others)
    meaning = f"{key.info.description or ''}" + (f"; default of {differing}" if differing else "")
    return _cells([f"[`{key.path.rpartition('.')[2]}`](#{first.replace('.', '').lower()})", "section", "", meaning])


def as_yaml(value: Any) -> str:
    """Return a value in YAML, without quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sentence(section: type[Section]) -> str:
    first, _, _ = (section.__doc__ or "").strip().partition("\n\n")
    return " ".join(first.split())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {'changed' if write_reference(Path(name)) else 'up to date'}")
