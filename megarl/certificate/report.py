"""The certificate as a table, as JSON and as a page; and the text of a bug report."""

from __future__ import annotations

import html
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.certificate.harness import Result
from megarl.system.credentials import CREDENTIAL, mask
from megarl.system.processes import write_atomically

if TYPE_CHECKING:
    from rich.table import Table

_LAST = 40  # number of last log lines that a bug report contains
_VARIABLES = re.compile(
    r"CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|SGLANG|MEGARL|OMP_|MASTER_|LD_LIBRARY_PATH$|LD_PRELOAD$|PATH$|PYTHON|UCX|GLOO"
)
_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:72em}table{border-collapse:collapse;margin-bottom:1em}"
    "td,th{padding:2px 10px;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}"
    ".failed{color:#c0392b;font-weight:bold}.passed{color:#1e8449}.skipped{color:#888}pre{background:#f4f4f4;padding:1em}"
)


def as_table(results: Sequence[Result]) -> Table:
    """Return a table with a row per section: its status, seconds, failed checks, figures and skipped parts."""
    from rich.table import Table

    table = Table("section", "", "s", "found", title="megarl doctor gpu", title_justify="left")
    for result in results:
        table.add_row(result.section, result.status, f"{result.seconds:.0f}", "\n".join(_notable(result)))
    return table


def _notable(result: Result) -> list[str]:
    checks = [line for line in result.findings if line["kind"] == "check"]
    lines = [f"{sum(line['passed'] for line in checks)} of {len(checks)} checks passed"] if checks else []
    lines += [f"FAILED {line['name']}: {line['detail']}" for line in checks if not line["passed"]]
    lines += [figure_text(line) for line in result.findings if line["kind"] == "figure"]
    lines += [f"not run, {line['name']}: {line['detail']}" for line in result.findings if line["kind"] == "skip"]
    return lines + ([result.reason] if result.status == "failed" and result.reason not in "".join(lines) else [])


def figure_text(line: dict[str, Any]) -> str:
    """Return a measured value as text, followed by its expected value.

    >>> figure_text({"name": "copy", "value": 2.0, "unit": "GB/s", "expected": 4.0, "source": "data sheet"})
    'copy: 2 GB/s, 50% of 4 (data sheet)'
    """
    value = "none" if line["value"] is None else f"{line['value']:,.4g}"
    text = f"{line['name']}: {value} {line['unit']}"
    if line["expected"] and line["value"] is not None:
        return f"{text}, {line['value'] / line['expected']:.0%} of {line['expected']:,.4g} ({line['source']})"
    return f"{text} ({line['source']})" if line["source"] else text


def write_reports(results: Sequence[Result], folder: Path) -> None:
    """Write certificate.json and certificate.html."""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    data = {"made": made, "platform": platform.platform(), "sections": [asdict(result) for result in results]}
    write_atomically(folder / "certificate.json", json.dumps(data, indent=1) + "\n")
    write_atomically(folder / "certificate.html", page(results, folder, made))


def page(results: Sequence[Result], folder: Path, made: str) -> str:
    """Return the HTML page: a summary, all findings by section, and for failed sections the text of a bug report."""
    e = html.escape
    machine = results[0].machine if results else {}
    parts = ["<!doctype html><meta charset='utf-8'><title>megarl doctor gpu</title>", f"<style>{_STYLE}</style>"]
    parts += [f"<h1>megarl doctor gpu</h1><p>{e(made)}, {e(platform.platform())}</p><table>"]
    parts += [f"<tr><th>{e(key)}<td>{e(_plain(value))}</tr>" for key, value in machine.items()]
    parts.append("</table><table><tr><th>section<th><th>seconds<th></tr>")
    for result in results:
        name, status = result.section, result.status
        cells = f"<td><a href='#{name}'>{name}</a><td class='{status}'>{status}<td>{result.seconds:.0f}"
        parts.append(f"<tr>{cells}<td>{e(result.reason)}</tr>")
    parts.append("</table>")
    for result in results:
        parts.append(f"<h2 id='{result.section}'>{result.section}</h2><table>")
        for line in result.findings:
            verdict = {True: "passed", False: "failed", None: line["kind"]}[line.get("passed")]
            detail = figure_text(line).partition(": ")[2] if line["kind"] == "figure" else str(line["detail"])
            parts.append(f"<tr><td class='{verdict}'>{verdict}<td>{e(line['name'])}<td>{e(mask(detail))}</tr>")
        parts.append("</table>")
        report = folder / result.section / "bug.txt"
        if result.status == "failed" and report.is_file():
            parts.append(f"<pre>{e(report.read_text())}</pre>")
    return "\n".join(parts) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def bug_report(result: Result, folder: Path) -> str:
    """Return the text of a bug report: versions, command, failed checks, last log lines, environment."""
    log = folder / result.section / "log.txt"
    last = log.read_text(errors="replace").splitlines()[-_LAST:] if log.is_file() else []
    failed = [line for line in result.findings if line["kind"] == "check" and not line["passed"]]
    variables = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.search(name)}
    lines = [
        f"section      {result.section}: {result.reason}",
        f"command      megarl doctor gpu --only {result.section} --out {folder}",
        *(f"{key:<12} {_plain(value)}" for key, value in result.machine.items()),
        f"platform     {platform.platform()}",
        *(f"failed       {line['name']}: {line['detail']}" for line in failed),
        "environment",
        *(f"  {name}={'***' if CREDENTIAL.search(name) else value}" for name, value in variables.items()),
        f"last lines of {log}",
        *(f"  {line}" for line in last),
    ]
    return mask("\n".join(lines)) + "\n"
