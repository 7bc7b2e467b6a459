"""Finds local files and folders that a recipe names by relative paths, which other folders do not have."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megarl.config.run import RunConfig
from megarl.data.sources import TEXT
from megarl.system.imports import is_file_reference, is_module_reference

#: Keys that are left out: most of their values describe the job or name libraries, and a folder may have the same
#: name by chance.
_OTHERS = ("name", "launch", "cluster", "tracking", "model.hf_config")
#: Keys of data sources; and all keys at which a single word, without a slash, may be the name of a folder.
_SOURCES = ("train_files", "val_files")
_FOLDERS = (*_SOURCES, "path", "tokenizer", "resume", "measured")


def relative_paths(config: RunConfig) -> dict[str, str]:
    """Return the recipe keys whose values name, relative to the current folder, a file, folder or module that exists,
    with these values.

    A value may be the path itself, or contain it as in `file.py:fn`, `folder@split` and `TASK=file`; a module in
    `pkg.mod:fn` counts if only the current folder has it. Several values of a key are numbered.
    """
    return {
        key: text
        for key, text in _texts(config.model_dump(mode="json", by_alias=True), "")
        if not text.startswith(TEXT) and _is_here(key, text)
    }


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if key in _OTHERS:
        return
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _texts(inner, f"{key}[{place}]")


def _is_here(key: str, text: str) -> bool:
    if is_module_reference(text):
        return _module_is_here(text.partition(":")[0])
    if is_file_reference(text):
        text = text.rpartition(":")[0]
    leaf, paths = key.rpartition(".")[2].partition("[")[0], [text]
    if leaf in _SOURCES:
        paths += [text.rpartition("@")[0], text.rpartition("=")[2]]
    for path in paths:
        # A single word such as `math` is taken for the folder `math` only at keys that name folders: elsewhere it may
        # be a reward's name.
        names_folder = os.path.isdir(path) and ("/" in path or leaf in _FOLDERS)
        if path and not os.path.isabs(path) and (os.path.isfile(path) or names_folder):
            return True
    return False


def _module_is_here(module: str) -> bool:
    here, file = Path.cwd(), Path(*module.split("."))
    if not (file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()):
        return False
    others = [place for place in sys.path if place and Path(place).resolve() != here.resolve()]
    package = module.partition(".")[0]
    return package != "megarl" and PathFinder.find_spec(package, others) is None
