"""YAML input and output: plain data, YAML 1.2 scalars, no duplicate keys, and the line of every key.

Surprises of YAML 1.1 are off: `1e-6` is a number; `on`, `no`, dates and `1:30` are text; `010` is ten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.system.errors import ConfigError, encoding_fix

_DEEPEST = 64  # maximum number of levels of nested mappings and lists
# Maximum number of values in a document with its aliases expanded: a few lines of aliases can stand for billions of
# values.
_MOST = 1_000_000
NO_MAPPING = "the file must be a mapping, from keys to values"
_OPEN = (-1, -1)
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = [
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
]


class _Located(yaml.SafeLoader):
    """A YAML loader in Python that reads plain text by `_RESOLVERS` only. Its errors name the line to change."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """`_Located` with PyYAML's C parser where it is installed, which takes a tenth of the time."""


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 16 if node.value.lower().startswith("0x") else 10)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes text that YAML 1.1 or 1.2 would read otherwise."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Represent text. Text with line breaks other than `\\n` is quoted, so that they are written as escapes."""
    breaks = any(letter in text for letter in "\r\x85\u2028\u2029\ufeff")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)


for _class in (_Located, _Loader):
    _class.yaml_implicit_resolvers = {}
    _class.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Located, _Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, _first)
_Dumper.add_representer(str, _represent_text)


@dataclass
class Document:
    """A mapping read from YAML, with `file:line` of each key path in `origins`.

    `replaced` holds the paths of mappings tagged `!replace`, which replace inherited mappings. `inherited` holds the
    paths of keys that were given for a component that a later layer replaces.
    """

    data: dict[str, Any]
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    replaced: set[tuple[str, ...]] = field(default_factory=set)
    inherited: set[tuple[str, ...]] = field(default_factory=set)


def read_yaml(path: Path) -> Document:
    """Read a file that holds one mapping; otherwise, or if a key is repeated, raise ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        fix = encoding_fix(error.object[:2] + error.object[error.start : error.start + 80], str(path))
        raise ConfigError("the file is not UTF-8 text", where=f"{path}:{line}", found=error.reason, fix=fix) from error
    except OSError as error:
        raise ConfigError(
            "the file cannot be read", where=str(path), found=error.strerror or str(error), fix="check the path"
        ) from error
    try:
        document = _read(text, (), str(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        written = text[: mark.index + 1].rstrip("\r\n").rpartition("\n")[2] if mark else ""
        tab = "\t" in written[: len(written) - len(written.lstrip())]
        fix = "indent with spaces; YAML does not allow tabs there" if tab else "correct the line named above"
        raise ConfigError("this is not valid YAML", where=where, found=problem, fix=fix) from error
    if not isinstance(document.data, dict):
        raise ConfigError(
            NO_MAPPING,
            where=str(path),
            found=document.data,
            fix="start with lines such as `name: my_run`",
        )
    return document


def _read(text: str, path: tuple[str, ...], file: str) -> Document:
    """Read YAML text, the value of the key at `path`, as a document, whose data is None when the text is empty."""
    try:
        return _read_by(_Loader, text, path, file)
    except _TooLargeError:
        raise
    except yaml.YAMLError:
        return _read_by(_Located, text, path, file)


def _read_by(kind: type[Any], text: str, path: tuple[str, ...], file: str) -> Document:
    document = Document({})

    def walk(node: yaml.Node) -> None:
        _walk(node, path, file, document, ())

    document.data = _load(kind, text, walk)
    return document


def _load(kind: type[Any], text: str, walk: Callable[[yaml.Node], None]) -> Any:
    """Return the value in `text`, or None when it is empty. After a check of its size, `walk` gets the root node."""
    loader = None
    try:
        loader = kind(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {}, 0)
        walk(node)
        return loader.construct_document(node)
    except RecursionError:
        problem = f"the file nests mappings and lists more than {_DEEPEST} levels deep"
        raise _TooLargeError(problem=problem) from None
    finally:
        if loader is not None:
            loader.dispose()


class _TooLargeError(yaml.MarkedYAMLError):
    """A document is nested too deeply, or its aliases make it too large."""


def _measure(node: yaml.Node, sizes: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Return the number of values and of nested levels below a node, which is itself `depth` levels deep; refuse too
    many of either. `sizes` has the results of measured nodes by id, and `_OPEN` for the nodes that contain this one.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1, 0
    size, levels = sizes.get(id(node), (0, 0))
    if (size, levels) == _OPEN:
        kind = "mapping" if isinstance(node, yaml.MappingNode) else "list"
        raise _too_large(f"an alias leads back to the {kind} that contains it", node)
    if not size and depth < _DEEPEST:
        sizes[id(node)] = _OPEN
        inside = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        parts = [_measure(part, sizes, depth + 1) for part in inside]
        size, levels = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
        sizes[id(node)] = size, levels
    if not size or depth + levels > _DEEPEST:
        raise _too_large(f"the file nests mappings and lists more than {_DEEPEST} levels deep", node)
    if size > _MOST:
        raise _too_large(f"the file with its aliases written out has more than {_MOST:,} values", node)
    return size, levels


def _too_large(problem: str, node: yaml.Node) -> _TooLargeError:
    return _TooLargeError(problem=problem, problem_mark=node.start_mark)


def _walk(node: yaml.Node, path: tuple[str, ...], file: str, document: Document, open_nodes: tuple[int, ...]) -> None:
    """Record the line of each key below a YAML node. Refuse duplicate keys, and an alias to a mapping that contains it.

    `open_nodes` are the ids of the mappings around `node`.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    if node.tag == "!replace":
        node.tag = "tag:yaml.org,2002:map"
        document.replaced.add(path)
    if id(node) in open_nodes:
        raise ConfigError(
            "an alias leads back to the mapping that contains it",
            where=f"{file}:{node.start_mark.line + 1}",
            fix="write the values in place of the alias",
        )
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        here = (*path, key)
        if key in seen and key != "<<":
            raise ConfigError(
                f"the key {'.'.join(here)} is given twice",
                where=f"{file}:{line}",
                found="both are on this line" if seen[key] == line else f"first given on line {seen[key]}",
                fix="keep one of the two",
            )
        seen[key] = line
        document.origins[here] = f"{file}:{line}"
        _walk(value_node, here, file, document, (*open_nodes, id(node)))


def parse_value(text: str) -> Any:
    """Read one YAML value, such as the right-hand side of an override. Malformed text raises yaml.YAMLError."""
    return _load(_Located, text, lambda node: None)


def parse_tagged(text: str, path: tuple[str, ...], where: str) -> tuple[Any, set[tuple[str, ...]]]:
    """Read one YAML value that may hold mappings tagged `!replace`; return it and the paths of the tagged mappings.
    Raise yaml.YAMLError for malformed text, and ConfigError for a repeated key.
    """
    document = _read(text, path, where)
    return document.data, document.replaced


def parse_texts(text: str) -> Any:
    """Read one YAML value in which every scalar stays text."""
    return _load(yaml.BaseLoader, text, lambda node: None)


def to_yaml(data: dict[str, Any]) -> str:
    """Return block-style YAML of plain data with keys in the given order; `parse_value` reads back equal data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, leaf) pairs of nested mappings; an empty mapping and a list are leaves.

    >>> list(flatten({"a": {"b": 1, "c": [2]}}))
    [('a.b', 1), ('a.c', [2])]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
