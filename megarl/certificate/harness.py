"""Sections run one after the other, each in a process of its own with a deadline; results stay in a folder.

    FOLDER/certificate.json   all results               FOLDER/NAME/result.json   of one section
    FOLDER/certificate.html   the same as a page        FOLDER/NAME/log.txt       output of its processes
                                                        FOLDER/NAME/bug.txt       of one that failed, for a report

A section that has passed is not repeated while commit, versions and devices are the same, unless `--again` is given.
`python -m megarl.certificate.harness MODULE:FUNCTION FOLDER DEADLINE_S` is the process of one section.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from megarl.benchmarks.sources import commit_now
from megarl.certificate.findings import Findings, Skipped, read_findings
from megarl.system.imports import import_callable, installed_version
from megarl.system.machine import visible_gpus
from megarl.system.processes import ending, has_nvidia_device, signals_raise, write_atomically

Status = Literal["passed", "failed", "skipped"]
_SECTION_OF = "MEGARL_SECTION_OF"  # environment variable of all processes of a section, with the section's folder
_GRACE_S = 20.0  # seconds in which a section may end itself and what it has started
_BEFORE_S = 5.0  # seconds before the deadline at which stacks are written, so that the log shows where a section hangs
_PACKAGES = (
    *("megarl", "torch", "triton", "megatron-core", "transformers", "transformer-engine", "flash-attn", "liger-kernel"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "ray"),
)


@dataclass(frozen=True)
class CertificateSection:
    """A section of the certificate.

    Attributes:
        name: name on the command line.
        title: parts of megarl or the machine that the section tests.
        deadline_s: seconds that it may take on GPUs.
        cpu_deadline_s: seconds that it may take without GPUs.
        function: `module:function` of (findings, folder); empty: `run` of the module with the section's name.
    """

    name: str
    title: str
    deadline_s: float
    cpu_deadline_s: float = 400
    function: str = ""


#: The certificate's sections, in the order in which they run.
SECTIONS = (
    CertificateSection("environment", "driver, compiler, NCCL, topology, shared memory", 300),
    CertificateSection("kernels", "attention, log-probs, norm, activation against float64", 300),
    CertificateSection("training", "dense, tied, mixture, critic against float64, offload round trips", 600),
    CertificateSection("parity", "log-probs of every architecture against transformers", 600),
    CertificateSection("layouts", "every layout that fits the devices against one process", 900),
    CertificateSection("generation", "embedded generation: graphs, log-probs, memory", 600),
    CertificateSection("servers", "SGLang servers, colocated and apart, each transport, checksums", 3600, 600),
    CertificateSection("recovery", "checkpoints, kill -9 of a worker, the run that goes on", 900),
    CertificateSection("performance", "products, memory, copies, attention beside the data sheet", 300),
    CertificateSection("steps", "steps of GRPO: tokens/s, MFU by phase, decoding, weight updates", 7800),
)


@dataclass(frozen=True)
class Result:
    """The result of a section.

    Attributes:
        section: the section's name.
        status: `failed` if a check or the section's process failed.
        reason: why the section was skipped or failed.
        seconds: seconds that it took.
        findings: lines that the section wrote, see `Findings`.
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
    for section in sections:
        earlier = read_result(folder / section.name)
        same = earlier is not None and earlier.machine == machine and not machine["commit"].endswith("+")
        if earlier is not None and same and earlier.status == "passed" and not again:
            tell(f"{section.name:<14} passed before, {earlier.seconds:.0f} s")
            results.append(earlier)
            continue
        tell(f"{section.name:<14} {section.title} ...")
        result = run_section(section, folder / section.name, machine)
        reason = f": {result.reason}" if result.reason else ""
        tell(f"{section.name:<14} {result.status}, {result.seconds:.0f} s{reason}")
        results.append(result)
    return results


def read_result(folder: Path) -> Result | None:
    """Return the result of a section of the certificate from its `folder`; None if the file is missing or damaged."""
    try:
        return Result(**json.loads((folder / "result.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def run_section(section: CertificateSection, folder: Path, machine: dict[str, Any]) -> Result:
    """Run a section of the certificate in its own process, at most until its deadline; return and save its result."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    deadline = section.deadline_s if has_nvidia_device() else section.cpu_deadline_s
    function = section.function or f"megarl.certificate.sections.{section.name}:run"
    command = [sys.executable, "-u", "-m", __name__, function, str(folder), str(deadline)]
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
    """Decide from a section's recorded checks and its process's exit code (None: it ran out of time) whether it passed;
    return the status and its reason.
    """
    checks = [line for line in findings if line["kind"] == "check"]
    last = f", after {checks[-1]['name']}" if checks else ""
    if code is None:
        return "failed", f"not done within {deadline_s:g} s{last}"
    if code != 0:
        return "failed", f"its process ended with {ending(code)}{last}"
    if failed := [line["name"] for line in checks if not line["passed"]]:
        return "failed", ", ".join(failed)
    skips = [f"{line['name']}: {line['detail']}" for line in findings if line["kind"] == "skip"]
    figures = [line for line in findings if line["kind"] == "figure"]
    return ("passed" if checks or figures else "skipped"), "; ".join(skips)


def end_family(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the process of a certificate's section with everything that it started; wait until all are gone.

    What it started, also in other sessions, is found by an environment variable that has the section's `folder`,
    since a dead process has no children any more.
    """
    processes = [other for other in psutil.process_iter(["environ"]) if other.pid != process.pid]
    family = [other for other in processes if (other.info["environ"] or {}).get(_SECTION_OF) == str(folder)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for relative in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            relative.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # kills children that outlived the process
    psutil.wait_procs(family, timeout=_GRACE_S)


def main(function: str, folder: Path, deadline_s: float) -> int:
    """Run the section; return its exit code: 1 if it raised an error, 0 even if checks failed, which the findings
    record.
    """
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(deadline_s - _BEFORE_S, deadline_s / 2))
    findings = Findings(folder / "findings.jsonl")
    try:
        with signals_raise():
            import_callable(function, where="section")(findings, folder)
    except Skipped as why:
        findings.skip("section", why)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
