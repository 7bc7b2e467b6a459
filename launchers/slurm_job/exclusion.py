"""Nodes that sbatch excludes, in its script: command-line options count for the first component only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_OPTION = re.compile(r"(?:--exclude(?:=|\s+)|-x\s*)(\S+)")


def excluded_by(options: Iterable[str]) -> list[str]:
    """Return the nodes that options of sbatch exclude: `--exclude=NODES`, `--exclude NODES` or `-x NODES`."""
    return [found[1] for option in options if (found := _OPTION.fullmatch(option.strip()))]


def with_exclusion(script: str, nodes: Iterable[str]) -> str:
    """Return a batch script that excludes these nodes in all its components.

    The last `--exclude` of a component counts, so the nodes must include those of the script's own options.
    """
    text = ",".join(dict.fromkeys(nodes))
    if not text:
        return script
    value = text if shlex.quote(text) == text else '"' + text + '"'
    option = f"#SBATCH --exclude={value}"
    lines = script.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    found = list[str]()
    for number, line in enumerate(lines):
        found += [option] if line == "#SBATCH hetjob" else []
        found += [line, option] if number == last else [line]
    return "\n".join(found) + "\n"
