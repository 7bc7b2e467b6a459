"""The trace: closed phases of every rank, merged into one trace.json for https://ui.perfetto.dev.

Every rank appends to `trace/rank_K.jsonl`; `merge_trace` writes the Chrome trace-event format with one process row per
rank. A rank's wait for another team gets an arrow from that team's work at the time when the wait ended.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megarl.artifacts.jsonl import JsonlWriter
from megarl.artifacts.records import Needs, parse_object, warn_once
from megarl.system.tracing import PhaseEvent
from megarl.tracking.close import read_restarts

#: Largest total size of the ranks' files that trace.json uses: about 300,000 phases, some seconds and 200 MB of memory.
MOST_BYTES = 64 << 20
_NEEDS: Needs = {"rank": int, "path": str, "start_ns": int, "end_ns": int, "step": int}
_TO_ITS_END = {"ph": "f", "bp": "e"}  # ends an arrow in the phase that contains its end (Chrome's trace format)
_INSIDE_NS = 1000  # nanoseconds by which an arrow ends earlier, because a slice does not contain the moment of its end

log = logging.getLogger(__name__)


class TraceWriter:
    """Writes the phases of one rank to a trace file.

    Args:
        run_dir: run folder.
        rank: global rank.
        label: name of the row in the viewer; None: `rank K`.
        team: the rank's team; empty when there is only one.
    """

    def __init__(self, run_dir: Path, rank: int, label: str | None = None, team: str = "") -> None:
        self._rank, self._label, self._team = rank, label or f"rank {rank}", team
        self._lost = False
        self._writer = JsonlWriter(Path(run_dir) / "trace" / f"rank_{rank}.jsonl", durable=False)

    def write(self, events: Iterable[PhaseEvent]) -> None:
        """Append phases that have ended. A full or failing disk ends the trace with a warning, but not the run."""
        if self._lost:
            return
        try:
            for event in events:
                self._writer.write({"rank": self._rank, "label": self._label, "team": self._team, **vars(event)})
        except OSError as error:
            self._lost = True
            log.warning("the trace of this rank ends here: %s", error)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # phases that could not be written are lost
            self._writer.close()


class _Slice(NamedTuple):
    """One phase of one rank, which a trace viewer draws as a slice."""

    rank: int
    path: str
    start_ns: int
    end_ns: int
    step: int
    team: str
    waits_for: str

    @property
    def of_step(self) -> tuple[str, int]:
        """The phase's stage and step; each stage of a run counts its own steps."""
        return self.path.split("/", 1)[0], self.step


def merge_trace(run_dir: Path, most_bytes: int = MOST_BYTES) -> Path | None:
    """Write RUN_DIR/trace.json from the ranks' files; return its path, or None when there are no files. If they are
    larger than `most_bytes` together, only the last steps are used, the same steps of every rank.
    """
    sources = [path for path in (run_dir / "trace").glob("rank_*.jsonl") if path.stem.removeprefix("rank_").isdecimal()]
    sources.sort(key=lambda path: int(path.stem.removeprefix("rank_")))
    total = sum(path.stat().st_size for path in sources)
    each = most_bytes // len(sources) if total > most_bytes else total
    labels: dict[int, str] = {}
    slices, begins = [], []
    for source in sources:
        of_rank, cut = _read(source, each, labels)
        slices += of_rank
        begins += [of_rank[0].start_ns] if cut and of_rank else []
    if begins:
        first = max(begins)
        slices = [phase for phase in slices if phase.start_ns >= first]
        log.warning(
            "trace.json shows the last %.0f s: the files of all ranks have %d MB, and are in %s",
            (max(phase.end_ns for phase in slices) - first) / 1e9,
            total >> 20,
            run_dir / "trace",
        )
    if not slices:
        return None
    target, temporary = run_dir / "trace.json", run_dir / "trace.json.tmp"
    with open(temporary, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(_events(slices, labels, read_restarts(run_dir))):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")
    os.replace(temporary, target)
    return target


def _read(source: Path, most_bytes: int, labels: dict[int, str]) -> tuple[list[_Slice], bool]:
    """Return the phases in the last `most_bytes` of a rank's file, beginning at the start of a step, and whether
    earlier phases exist. Fill `labels` with row names by rank; skip and log damaged lines.
    """
    slices: list[_Slice] = []
    damaged, reason = 0, ""
    with source.open("rb") as file:
        cut = file.seek(0, os.SEEK_END) > most_bytes
        file.seek(-most_bytes if cut else 0, os.SEEK_END if cut else os.SEEK_SET)
        if cut:
            file.readline()
        for line in file:
            if not line.endswith(b"\n"):
                break  # the rank was killed while it wrote this line, or is writing it now
            try:
                record = parse_object(line, _NEEDS)
            except ValueError as error:
                damaged, reason = damaged + 1, str(error)
                continue
            labels.setdefault(record["rank"], str(record.get("label", f"rank {record['rank']}")))
            path, team, waits_for = (sys.intern(str(record.get(name, ""))) for name in ("path", "team", "waits_for"))
            times = record["start_ns"], record["end_ns"], record["step"]
            slices.append(_Slice(record["rank"], path, *times, team, waits_for))
    if damaged:
        warn_once(source, f"{source}: {damaged} damaged lines are left out of trace.json: {reason}")
    if not cut:
        return slices, False
    whole_steps = itertools.dropwhile(lambda phase: phase.of_step == slices[0].of_step, slices)
    return sorted(whole_steps, key=lambda phase: phase.start_ns) or slices, True


def _events(slices: list[_Slice], labels: dict[int, str], restarts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the trace's events: metadata per rank, and one event per phase, step and restart. Times: microseconds."""
    origin = min(phase.start_ns for phase in slices)
    for rank, label in sorted(labels.items()):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": label}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "phases"}}
    steps: dict[tuple[str, int], int] = {}
    for phase in slices:
        names = {"name": phase.path.rsplit("/", 1)[-1], "cat": phase.path.split("/", 1)[0]}
        times = {"ts": (phase.start_ns - origin) / 1000, "dur": (phase.end_ns - phase.start_ns) / 1000}
        arguments: dict[str, Any] = {"path": phase.path, "step": phase.step}
        arguments |= {"waits_for": phase.waits_for} if phase.waits_for else {}
        yield {"ph": "X", "pid": phase.rank, "tid": 0, **times, **names, "args": arguments}
        steps[phase.of_step] = min(phase.start_ns, steps.get(phase.of_step, phase.start_ns))
    yield from _arrows(slices, origin)
    first_rank = min(phase.rank for phase in slices)
    marks = [(start, f"{stage} {step}", {"step": step}) for (stage, step), start in steps.items()]
    moments = [(int(restart["time"] * 1e9), restart) for restart in restarts]
    marks += [(at, f"restart {restart['restart']}", {"why": restart["why"]}) for at, restart in moments if at >= origin]
    for start, name, details in sorted(marks, key=lambda mark: mark[0]):
        place = {"ph": "i", "s": "g", "pid": first_rank, "tid": 0, "ts": (start - origin) / 1000}
        yield place | {"name": name, "args": details}


def _arrows(slices: list[_Slice], origin: int) -> Iterator[dict[str, Any]]:
    """Yield an arrow for every wait for another team: from that team's last work before the wait ended to the wait's
    end.

    This work is the likely cause of the wait: samples come from the phase `give`, weights and messages from later work.
    Arrows may be wrong if the clocks of machines differ.
    """
    # phases by (team, whether the list has only phases that hand over samples)
    works: dict[tuple[str, bool], list[_Slice]] = {}
    for phase in sorted(slices, key=lambda phase: phase.start_ns):
        if phase.team and not phase.waits_for:
            works.setdefault((phase.team, False), []).append(phase)
            if phase.path.endswith("/give"):
                works.setdefault((phase.team, True), []).append(phase)
    starts = {key: [phase.start_ns for phase in phases] for key, phases in works.items()}
    for number, wait in enumerate(phase for phase in slices if phase.waits_for):
        key = (wait.waits_for, wait.path.endswith("/wait"))
        place = bisect.bisect_right(starts.get(key, []), wait.end_ns)
        if place == 0:
            continue
        source = works[key][place - 1]
        for phase, kind in ((source, {"ph": "s"}), (wait, _TO_ITS_END)):
            moment = max(phase.start_ns, min(phase.end_ns, wait.end_ns) - _INSIDE_NS)
            at = {"pid": phase.rank, "tid": 0, "ts": (moment - origin) / 1000}
            yield kind | at | {"id": number, "name": "waited for", "cat": "wait"}
