"""`megarl completion`: commands, options, recipes, keys and their values, completed by argcomplete in bash and zsh.

The shell calls `megarl` with `_ARGCOMPLETE` set, and `complete` prints the candidates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import argcomplete
from argcomplete.completers import FilesCompleter

from megarl.commands.keys import all_entries
from megarl.config.load import recipe_names


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the candidates for the command line that a shell asks about, and exit."""
    for command in _with_subcommands(parser):
        for action in command._actions:
            if action.metavar == "RECIPE":
                action.completer = _recipes  # type: ignore[attr-defined]
            elif action.metavar in ("KEY.PATH=VALUE", "PATTERN"):
                action.completer = _overrides if action.dest == "overrides" else _keys  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def _with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _with_subcommands(command)


def _recipes(prefix: str, **_: Any) -> list[str]:
    return [*recipe_names(), *FilesCompleter(["yaml", "yml"])(prefix)]


def _keys(prefix: str, **_: Any) -> list[str]:
    return [key.removesuffix("=") for key in _overrides(prefix)]


def _overrides(prefix: str, **_: Any) -> list[str]:
    """Complete an override: return the keys that begin with `prefix`, each up to its next dot, or after `KEY=` the
    key's allowed values.
    """
    entries = [entry for entry in all_entries() if "NAME" not in entry.path]
    key, equals, _value = prefix.partition("=")
    if equals:
        return [f"{key}={value}" for entry in entries if entry.path == key for value in entry.choices]
    sections = {entry.path.rpartition(".")[0] for entry in entries}
    candidates: dict[str, None] = {}
    for path in (entry.path for entry in entries if entry.path.startswith(prefix) and entry.path not in sections):
        dot = path.find(".", len(prefix))
        candidates[f"{path}=" if dot < 0 else path[: dot + 1]] = None
    only = next(iter(candidates), "")
    # The shell completes a single candidate and adds a space, wrong after a section's dot: add the keys below it.
    return [only, *_overrides(only)] if len(candidates) == 1 and only.endswith(".") else [*candidates]
