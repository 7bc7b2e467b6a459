"""report.html: one self-contained page about a run, or about several side by side."""

from __future__ import annotations

import datetime
import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import megarl
from megarl.artifacts.records import set_aside
from megarl.tracking.report_data import load_run, report_data


def write_report(run_dir: str | os.PathLike[str], compare: Sequence[str | os.PathLike[str]] = ()) -> Path:
    """Write RUN_DIR/report.html from the current files of the run folder; the run may still be going.

    Args:
        run_dir: run folder with metrics.jsonl.
        compare: more run folders whose curves are plotted with it; the page is then `compare.html`.

    Raises:
        DataError: a folder has no metrics.jsonl.
    """
    runs = [load_run(Path(folder)) for folder in (run_dir, *compare)]
    page = render(runs[0].name, report_data(runs))
    target = Path(run_dir) / ("compare.html" if compare else "report.html")
    if target.is_dir():
        set_aside(target, "a folder")
    temporary = target.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, target)
    return target


def render(title: str, data: dict[str, Any]) -> str:
    """Return the page. Text of users reaches it as JSON whose `<` are escaped, and through `textContent` only."""
    assets = files("megarl.tracking")
    parts = {
        "TITLE": html.escape(f"{title} · megarl"),
        "VERSION": html.escape(megarl.__version__),
        "DATE": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "CSS": (assets / "report.css").read_text(encoding="utf-8"),
        "JS": (assets / "report.js").read_text(encoding="utf-8"),
        "DATA": _script_safe(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
    }
    page = (assets / "report.html").read_text(encoding="utf-8")
    pieces = page.split("__")
    return "".join(parts.get(piece, piece) if i % 2 else piece for i, piece in enumerate(pieces))


def _script_safe(text: str) -> str:
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
