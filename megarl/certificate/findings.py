"""The findings of a section, written line by line, so that a process that dies leaves what it had found."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import read_jsonl


class Skipped(Exception):
    """A section, or a part of it, cannot run here; the message is the reason."""


def worst(errors: Iterable[float]) -> float:
    """Return the largest of `errors`; NaN, which `max` may skip, counts as larger than any number."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


class Findings:
    """Checks with a verdict, measured figures with their expected values, and facts; each is a JSON line of a file.

    Args:
        path: file of the lines; its previous content is lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        path.write_text("")

    def check(self, name: str, passed: bool, detail: str = "") -> bool:
        """Record a check and return its verdict."""
        self._write("check", name, passed=bool(passed), detail=detail)
        return bool(passed)

    def within(self, name: str, error: float, limit: float) -> bool:
        """Record a check that a difference is at most `limit`; NaN fails."""
        return self.check(name, error <= limit, f"{error:.2g}, at most {limit:g}")

    def skip(self, name: str, why: object) -> None:
        """Record that a part of the section cannot run here."""
        self._write("skip", name, detail=str(why))

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Run `work`, one part of a section of checks of this machine; if it raises `Skipped`, record that."""
        try:
            work()
        except Skipped as why:
            self.skip(name, why)

    def fact(self, name: str, value: Any) -> None:
        """Record information that can neither pass nor fail."""
        self._write("fact", name, detail=str(value))

    def figure(self, name: str, value: float, unit: str, expected: float | None = None, source: str = "") -> None:
        """Record a measured number; `expected` is the value to compare it with, `source` where this value is from."""
        self._write("figure", name, value=value, unit=unit, expected=expected, source=source)

    def _write(self, kind: str, name: str, **values: Any) -> None:
        details = "; ".join(str(value) for key, value in values.items() if value not in ("", None) and key != "passed")
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[key] = None  # JSON has neither NaN nor infinity
        line = {"kind": kind, "name": name, **values, "at_s": round(time.monotonic() - self._began, 2)}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"[{kind}{'' if values.get('passed', True) else ' FAILED'}] {name}: {details}", flush=True)


def read_findings(path: Path) -> list[dict[str, Any]]:
    """Return the lines that a section has written so far."""
    return list(read_jsonl(path)) if path.is_file() else []
