"""Tests a node before a run starts on it: `python -m megarl.launchers.preflight node FOLDER ...`, on every node.

    node    by itself: run folder, disk, GPUs, their errors, versions                    -> FOLDER/NODE.json
    links   all nodes together: offsets of clocks, all-reduce with both neighbours       -> FOLDER/links.json

A Slurm job runs both (`megarl.launchers.slurm_job`) and evaluates the results. Each check is `{ok, reason}`. A check
that the machine does not allow, such as reading the kernel's log, passes with that reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.system.processes import write_atomically

_ANSWER_S = 30.0
#: Error counts of a GPU since its driver was loaded, and whether memory could not be repaired: fields of `nvidia-smi
#: --help-query-gpu` and `--help-query-remapped-rows`.
_GPU_FIELDS = "index,name,ecc.errors.uncorrected.volatile.total"
_ROW_FIELDS = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"
#: Xid errors after which the GPU or the machine must be reset (https://docs.nvidia.com/deploy/xid-errors): 48, 95
#: and 140 are memory errors that were not corrected, 64 is a failed memory repair, 74 an NVLink error, 79 a GPU that
#: fell off the bus, 119 and 120 are errors of the GPU's system processor. Others, such as 13 and 31, are mostly the
#: program's fault.
FATAL_XIDS = {48, 64, 74, 79, 95, 119, 120, 140}
_XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(([^)]*)\): (\d+)")
_XID_AGE_S = 24 * 3600.0
_NOT_KNOWN = ("[N/A]", "N/A", "[Not Supported]")


class NodeCheck(NamedTuple):
    """The result of a check: whether the node may be used, and the reason or the finding."""

    ok: bool
    reason: str


def node_name() -> str:
    """Return Slurm's name of this node, or else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_node(run_dir: Path, gpus: int, disk_gb: float) -> dict[str, NodeCheck]:
    """Run all checks of a single node; return the results by name. `disk_gb` must be free in the run folder, which all
    nodes share, and in the folder of temporary files.
    """
    results = {"run folder": check_run_folder(run_dir), "disk": check_disk(run_dir, disk_gb)}
    if gpus:
        listed = ask("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
        rows = ask("nvidia-smi", f"--query-remapped-rows={_ROW_FIELDS}", "--format=csv,noheader,nounits")
        results["gpus"] = check_gpus(listed, gpus)
        results["memory errors"] = check_ecc(listed, rows)
        results["xid"] = check_xids(ask("dmesg"), time.clock_gettime(time.CLOCK_BOOTTIME))
    return results


def check_run_folder(run_dir: Path) -> NodeCheck:
    """Check that the run folder can be read and written from here."""
    try:
        next(run_dir.iterdir(), None)
        with tempfile.TemporaryFile(dir=run_dir) as file:
            file.write(b"x")
    except OSError as error:
        return NodeCheck(False, f"{run_dir}: {error.strerror or error}")
    return NodeCheck(True, "readable and writable")


def check_disk(run_dir: Path, disk_gb: float) -> NodeCheck:
    """Check that `disk_gb` GB are free for the run folder and for temporary files."""
    free_texts = []
    for folder in (str(run_dir), os.environ.get("TMPDIR") or tempfile.gettempdir()):
        try:
            free = shutil.disk_usage(folder).free / 1e9
        except OSError as error:
            return NodeCheck(False, f"{folder}: {error.strerror or error}")
        if free < disk_gb:
            return NodeCheck(False, f"{folder}: {free:.1f} GB free, launch.preflight_disk_gb = {disk_gb:g}")
        free_texts.append(f"{free:.0f} GB")
    return NodeCheck(True, f"{' and '.join(free_texts)} free")


class CommandOutput(NamedTuple):
    """The output of a program; `error` is the reason why it printed nothing usable."""

    text: str
    error: str = ""


def ask(*command: str) -> CommandOutput:
    """Run a program for at most half a minute and return its output."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return CommandOutput("", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return CommandOutput("", f"{command[0]} did not finish within {_ANSWER_S:.0f} s")
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return CommandOutput("", f"{command[0]} ended with {done.returncode}: {lines[0] if lines else 'no message'}")
    return CommandOutput(done.stdout)


def check_gpus(listed: CommandOutput, wanted: int) -> NodeCheck:
    """Check that the required number of GPUs is visible; a driver that does not reply counts as no GPU."""
    if listed.error:
        return NodeCheck(False, listed.error)
    names = [row[1] for row in _rows(listed.text, 3)]
    if len(names) < wanted:
        return NodeCheck(False, f"{len(names)} of {wanted} GPUs are visible")
    return NodeCheck(True, f"{len(names)} x {names[0]}")


def check_ecc(listed: CommandOutput, remapped: CommandOutput) -> NodeCheck:
    """Check for uncorrected memory errors since the driver was loaded, and for failed repairs."""
    if listed.error:
        return NodeCheck(True, f"not known: {listed.error}")
    # A GPU without ECC prints [N/A]; other texts, such as [GPU requires reset], are errors.
    bad = [f"GPU {row[0]}: {row[2]} uncorrected ECC errors" for row in _rows(listed.text, 3) if _is_set(row[2])]
    if remapped.error:
        note = f"; remapped rows are unknown: {remapped.error}"
    else:
        rows = _rows(remapped.text, 3)
        bad += [f"{row[0]}: a memory row could not be remapped" for row in rows if _is_set(row[2])]
        waiting = sum(_is_set(row[1]) for row in rows)
        note = f"; {waiting} GPUs wait for a reset to remap a row" if waiting else ""
    return NodeCheck(not bad, "; ".join(bad) if bad else f"none{note}")


def check_xids(log: CommandOutput, uptime_s: float) -> NodeCheck:
    """Check the kernel's log (dmesg, in seconds since the machine's start; `uptime_s` is now) for errors in the last
    day that require a reset of a GPU.
    """
    if log.error:
        return NodeCheck(True, f"not known: {log.error}")
    errors = [(float(at), bus, int(number)) for at, bus, number in _XID.findall(log.text)]
    bad = [(bus, number) for at, bus, number in errors if number in FATAL_XIDS and uptime_s - at < _XID_AGE_S]
    if bad:
        return NodeCheck(False, ", ".join(dict.fromkeys(f"Xid {number} of {bus}" for bus, number in bad)))
    return NodeCheck(True, f"none of {len(errors)} in the log is the machine's fault" if errors else "none")


def _rows(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [row for row in rows if len(row) == columns]


def _is_set(cell: str) -> bool:
    return cell not in (*_NOT_KNOWN, "0", "No")


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes."""
    versions_here = {"python": platform.python_version()}
    for name in ("megarl", "torch"):
        try:
            versions_here[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions_here[name] = "none"
    return versions_here


def main(arguments: Sequence[str]) -> int:
    """Check this node, or its links to others; return 0 if the results were written, even if a check failed."""
    parser = argparse.ArgumentParser(prog="preflight", description="Test this node before a run starts on it.")
    parser.add_argument("part", choices=("node", "links"))
    parser.add_argument("folder", type=Path, help="folder for the results")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--disk-gb", type=float, default=0.0)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--local", type=int, default=0, help="number of this process on its node (links)")
    given = parser.parse_args(arguments)
    if given.part == "links":
        from megarl.launchers.preflight_links import measure

        return measure(given.folder, given.gpus, given.limit_s, given.local)
    checks = {name: check._asdict() for name, check in check_node(given.run_dir, given.gpus, given.disk_gb).items()}
    given.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        given.folder / f"{node_name()}.json",
        json.dumps({"node": node_name(), "time": time.time(), "checks": checks, "versions": versions()}, indent=1),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
