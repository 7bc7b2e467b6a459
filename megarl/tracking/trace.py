"""Where the time went: closed phases of every rank, merged into one trace.json that https://ui.perfetto.dev opens.

Every rank appends to `trace/rank_K.jsonl`; `merge_trace` writes the Chrome trace-event form, one process row per rank.
Where a rank waited for another team, an arrow comes from what that team did when the wait ended.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import JsonlWriter, read_jsonl
from megarl.phase import PhaseEvent
from megarl.tracking.restarts import read_restarts

_TO_ITS_END = {"ph": "f", "bp": "e"}  # an arrow ends at the slice around that moment
_INSIDE_NS = 1000  # a moment at which a slice ends is no more inside it


class TraceWriter:
    """Appends the phases of one rank; any rank may use it.

    Args:
        run_dir: run folder.
        rank: global rank.
        label: name of the row in the viewer; None: `rank K`.
        team: of the rank; empty: there is one.
    """

    def __init__(self, run_dir: Path, rank: int, label: str | None = None, team: str = "") -> None:
        self._rank, self._label, self._team = rank, label or f"rank {rank}", team
        self._writer = JsonlWriter(Path(run_dir) / "trace" / f"rank_{rank}.jsonl", durable=False)

    def write(self, events: Iterable[PhaseEvent]) -> None:
        """Append closed phases."""
        for event in events:
            self._writer.write(
                {
                    "rank": self._rank,
                    "label": self._label,
                    "path": event.path,
                    "start_ns": event.start_ns,
                    "end_ns": event.end_ns,
                    "step": event.step,
                    "team": self._team,
                    "waits_for": event.waits_for,
                }
            )

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def merge_trace(run_dir: Path) -> Path | None:
    """Write RUN_DIR/trace.json from the ranks' files; None when there are none."""
    sources = sorted((run_dir / "trace").glob("rank_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
    records = [record for source in sources for record in read_jsonl(source)]
    if not records:
        return None
    target, temporary = run_dir / "trace.json", run_dir / "trace.json.tmp"
    with open(temporary, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(_events(records, read_restarts(run_dir))):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")
    os.replace(temporary, target)
    return target


def _events(records: list[dict[str, Any]], restarts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Metadata per rank, a complete event per phase, an instant event per step of a stage and per restart.

    Times in microseconds.
    """
    origin = min(record["start_ns"] for record in records)
    for rank, label in sorted({record["rank"]: record["label"] for record in records}.items()):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": label}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "phases"}}
    steps: dict[tuple[str, int], int] = {}  # the stages of a run count their own steps
    for record in records:
        path, waited = record["path"], record.get("waits_for", "")
        yield {
            "ph": "X",
            "pid": record["rank"],
            "tid": 0,
            "ts": (record["start_ns"] - origin) / 1000,
            "dur": (record["end_ns"] - record["start_ns"]) / 1000,
            "name": path.rsplit("/", 1)[-1],
            "cat": path.split("/", 1)[0],
            "args": {"path": path, "step": record["step"]} | ({"waits_for": waited} if waited else {}),
        }
        key = (path.split("/", 1)[0], record["step"])
        steps[key] = min(record["start_ns"], steps.get(key, record["start_ns"]))
    yield from _arrows(records, origin)
    first_rank = min(record["rank"] for record in records)
    marks = [(start, f"{stage} {step}", {"step": step}) for (stage, step), start in steps.items()]
    marks += [(int(one["time"] * 1e9), f"restart {one['restart']}", {"why": one["why"]}) for one in restarts]
    for start, name, arguments in sorted(marks, key=lambda mark: mark[0]):
        yield {
            "ph": "i",
            "s": "g",
            "pid": first_rank,
            "tid": 0,
            "ts": (start - origin) / 1000,
            "name": name,
            "args": arguments,
        }


def _arrows(records: list[dict[str, Any]], origin: int) -> Iterator[dict[str, Any]]:
    """Of every wait for another team: from its work that began last before the wait ended, to the end of the wait.

    That is what the wait was for, as far as phases tell: samples come from `give`, weights and mail from what follows
    them. Clocks of several machines may differ, and the arrows with them.
    """
    works: dict[tuple[str, bool], list[dict[str, Any]]] = {}  # by team; True: only what hands over samples
    for record in sorted(records, key=lambda record: record["start_ns"]):
        if record.get("team") and not record.get("waits_for"):
            works.setdefault((record["team"], False), []).append(record)
            if record["path"].endswith("/give"):
                works.setdefault((record["team"], True), []).append(record)
    starts = {key: [one["start_ns"] for one in some] for key, some in works.items()}
    for number, wait in enumerate(record for record in records if record.get("waits_for")):
        key = (wait["waits_for"], wait["path"].endswith("/wait"))
        place = bisect.bisect_right(starts.get(key, []), wait["end_ns"])
        if place == 0:
            continue
        source = works[key][place - 1]
        for record, kind in ((source, {"ph": "s"}), (wait, _TO_ITS_END)):
            moment = max(record["start_ns"], min(record["end_ns"], wait["end_ns"]) - _INSIDE_NS)
            at = {"pid": record["rank"], "tid": 0, "ts": (moment - origin) / 1000}
            yield kind | at | {"id": number, "name": "waited for", "cat": "wait"}
