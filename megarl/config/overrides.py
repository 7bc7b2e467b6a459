"""Command-line overrides that are not written as `key.path=value`."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.fields import find_key
from megarl.errors import ConfigError

FORM = "an override has the form key.path=value"


def take_apart(overrides: Sequence[str]) -> tuple[list[str], list[ConfigError]]:
    """Return the overrides without keys whose value is a separate argument, as in `trainer.steps 10`, and errors for
    these.

    >>> take_apart(["trainer.steps", "10", "data.shuffle=true"])[0]
    ['data.shuffle=true']
    """
    kept, problems, waiting = [], [], list(overrides)
    while waiting:
        key = waiting.pop(0)
        if "=" in key or find_key(tuple(key.split("."))) is None or not waiting or "=" in waiting[0].lstrip("="):
            kept.append(key)
            continue
        value = waiting.pop(0)
        if value == "=" and waiting:
            value = waiting.pop(0)
        fix = f"write {key}={value.removeprefix('=')}, without spaces"
        problems.append(ConfigError(FORM, where=f"override {key!r}", fix=fix))
    return kept, problems
