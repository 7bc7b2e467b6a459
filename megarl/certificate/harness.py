"""Sections run one after the other, each in a process of its own with a deadline; results stay in a folder.

    FOLDER/certificate.json   all results               FOLDER/NAME/result.json   of one section
    FOLDER/certificate.html   the same as a page        FOLDER/NAME/log.txt       what its processes said
                                                        FOLDER/NAME/bug.txt       of one that failed, for a report

A section that has passed is not repeated as long as versions and devices are the same, unless it is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from megarl.benchmarks.sources import commit_now
from megarl.certificate.findings import read_findings
from megarl.system.imports import installed_version
from megarl.system.machine import visible_gpus
from megarl.system.processes import ending, has_nvidia_device, write_atomically

Status = Literal["passed", "failed", "skipped"]
_SECTION_OF = "MEGARL_SECTION_OF"  # environment variable of all processes of a section, with the section's folder
_GRACE_S = 20.0  # seconds in which a section may end itself and what it has started
_PACKAGES = (
    *("megarl", "torch", "triton", "megatron-core", "transformers", "transformer-engine", "flash-attn", "liger-kernel"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "ray"),
)


@dataclass(frozen=True)
class CertificateSection:
    """A section of the certificate.

    Attributes:
        name: name on the command line.
        title: what it tests.
        run: its work, `run(found, folder)`.
        deadline_s: seconds that it may take on GPUs.
        cpu_deadline_s: seconds that it may take without GPUs.
    """

    name: str
    title: str
    run: Callable[..., None]
    deadline_s: float
    cpu_deadline_s: float


@dataclass(frozen=True)
class Result:
    """The result of a section.

    Attributes:
        section: the section's name.
        status: `failed` if a check failed, or the section's process did.
        reason: why it was skipped or failed.
        seconds: seconds that it took.
        findings: its lines, see `Findings`.
        machine: versions and devices of the run, see `machine_key`.
    """

    section: str
    status: Status
    reason: str
    seconds: float
    findings: list[dict[str, Any]]
    machine: dict[str, Any] = field(default_factory=dict)


def machine_key() -> dict[str, Any]:
    """Return commit, versions and devices, for which results are valid. Does not load the GPU driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus: list[str] = []
    if has_nvidia_device():
        try:
            gpus = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            gpus = [f"nvidia-smi: {error}"]
    commit, changed = commit_now()
    return {
        "commit": commit + "+" * changed,
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
        "python": sys.version.split()[0],
        "gpus": gpus,
        "visible": visible_gpus(os.environ),
    }


def certify(
    sections: Sequence[CertificateSection], folder: Path, *, again: bool = False, tell: Callable[[str], None] = print
) -> list[Result]:
    """Run sections in turn and return their results, including kept ones; each result is saved in `folder` at once.
    `again` repeats sections that have passed; `tell` gets a line before and after each section.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine, results = machine_key(), []
    for one in sections:
        kept = read_result(folder / one.name)
        same = kept is not None and kept.machine == machine and not machine["commit"].endswith("+")
        if kept is not None and same and kept.status == "passed" and not again:
            tell(f"{one.name:<14} passed before, {kept.seconds:.0f} s")
            results.append(kept)
            continue
        tell(f"{one.name:<14} {one.title} ...")
        result = run_section(one, folder / one.name, machine)
        tell(f"{one.name:<14} {result.status}, {result.seconds:.0f} s{': ' * bool(result.reason)}{result.reason}")
        results.append(result)
    return results


def read_result(folder: Path) -> Result | None:
    """Return the result saved in a section's folder; None if there is none, or it cannot be read."""
    try:
        return Result(**json.loads((folder / "result.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def run_section(section: CertificateSection, folder: Path, machine: dict[str, Any]) -> Result:
    """Run a section in its own process until it ends or its deadline passes; return and save its result."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    deadline = section.deadline_s if has_nvidia_device() else section.cpu_deadline_s
    work = f"{section.run.__module__}:{section.run.__qualname__}"
    command = [sys.executable, "-u", "-m", "megarl.certificate.process", work, str(folder), str(deadline)]
    began = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, _SECTION_OF: str(folder)},
        )
        try:
            code: int | None = process.wait(deadline)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_family(process, folder)
    findings = read_findings(folder / "findings.jsonl")
    status, reason = verdict(findings, code, deadline)
    result = Result(section.name, status, reason, round(time.monotonic() - began, 1), findings, machine)
    write_atomically(folder / "result.json", json.dumps(asdict(result), indent=1) + "\n")
    return result


def verdict(findings: Sequence[dict[str, Any]], code: int | None, deadline_s: float) -> tuple[Status, str]:
    """Return status and reason from a section's findings and its process's exit code (None: it ran out of time)."""
    failed = [one["name"] for one in findings if one["kind"] == "check" and not one["passed"]]
    done = [one for one in findings if one["kind"] == "check"]
    if code is None:
        return "failed", f"not done within {deadline_s:g} s" + (f", after {done[-1]['name']}" if done else "")
    if code != 0:
        return "failed", f"its process ended with {ending(code)}" + (f", after {done[-1]['name']}" if done else "")
    if failed:
        return "failed", ", ".join(failed)
    skips = [f"{one['name']}: {one['detail']}" for one in findings if one["kind"] == "skip"]
    figures = [one for one in findings if one["kind"] == "figure"]
    return ("passed" if done or figures else "skipped"), "; ".join(skips)


def _section_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(_SECTION_OF)
    return None


def end_family(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill a section's process with everything that it started, also in other sessions; wait until all are gone. They
    are found by an environment variable with the section's `folder`, since a dead process has no children any more.
    """
    family = [one for one in psutil.process_iter() if one.pid != process.pid and _section_of(one) == str(folder)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived the process
    psutil.wait_procs(family, timeout=_GRACE_S)
