"""Driver, compiler, NCCL of both interpreters, topology, peer access, and memory shared between processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from megarl.certificate.findings import Findings, Skipped
from megarl.compat.sglang import check_same_nccl, find_python, sglang_version
from megarl.device import has_cuda
from megarl.errors import ConfigError
from megarl.machine import machine_info
from megarl.processes import has_nvidia_device

_WAIT_S = 120.0  # for one command, or one message of the other process
_SHARED_BYTES = 1 << 20
_NCCL = "import torch; print('.'.join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else '')"
#: Least driver for the CUDA that torch was built with: CUDA's release notes, minor version compatibility.
_DRIVERS = {13: 580, 12: 525}


def run(found: Findings, folder: Path) -> None:
    """Check what everything else stands on."""
    for name, value in machine_info().items():
        found.fact(name, json.dumps(value))
    found.part("devices", lambda: _devices(found))
    found.part("driver", lambda: _driver(found))
    found.part("compiler", lambda: _compiler(found))
    found.part("NCCL", lambda: nccl(found))
    found.part("topology", lambda: found.fact("topology", "\n" + said(["nvidia-smi", "topo", "-m"])))
    found.part("peers", lambda: _peers(found))
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())] if has_cuda() else []
    for owner, user in [(a, b) for a in devices[:2] for b in devices[:2]] or [(torch.device("cpu"),) * 2]:
        _shared_memory(found, owner, user, hand_overs=1000 if has_cuda() else 50)


def said(command: list[str]) -> str:
    """Return the output of a program.

    Raises:
        Skipped: it is not there, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Skipped(f"{command[0]}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout.strip()


def _devices(found: Findings) -> None:
    if not has_nvidia_device():
        raise Skipped("no GPU")
    cuda = torch.version.cuda
    told = f"torch {torch.__version__} is built for {f'CUDA {cuda}' if cuda else 'the CPU only'}"
    if not found.check("torch computes on CUDA", torch.cuda.is_available(), told):
        return
    for number in range(torch.cuda.device_count()):
        ones = torch.ones(1024, device=f"cuda:{number}")
        found.check(f"cuda:{number} computes", float(ones.sum()) == 1024.0, torch.cuda.get_device_name(number))


def _driver(found: Findings) -> None:
    text = said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[0]
    cuda = torch.version.cuda or "0"
    least = _DRIVERS.get(int(cuda.split(".")[0]), 0)
    found.check("driver", int(text.split(".")[0]) >= least, f"{text}; CUDA {cuda} needs {least} or newer")


def _compiler(found: Findings) -> None:
    """SGLang and FlashInfer compile kernels at their first use."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{home}/bin"] * bool(home) + [os.environ.get("PATH", "")]))
    if not has_cuda():
        raise Skipped("no GPU")
    detail = "none on PATH or in CUDA_HOME: servers compile kernels at run time; install the CUDA toolkit"
    if found.check("nvcc", nvcc is not None, nvcc or detail):
        found.fact("nvcc", said([str(nvcc), "--version"]).splitlines()[-1])
    found.fact("CUDA_HOME", home)


def nccl(found: Findings, servers: Path | None = None, trainer: str | None = None) -> None:
    """Check that trainer and servers have one version of NCCL: by their wheels, and by what their torch has loaded.

    Args:
        found: takes the checks.
        servers: interpreter of the servers; None: the one that a run would find.
        trainer: site-packages of the trainer; None: of this interpreter.

    Raises:
        Skipped: there is no interpreter for servers.
    """
    try:
        python = servers or find_python(None, cuda=has_cuda())
        if servers is None:
            found.fact("servers", f"sglang {sglang_version(python, cuda=has_cuda())} in {python}")
    except ConfigError as error:
        raise Skipped(f"{error.what}: {error.fix}") from error
    try:
        check_same_nccl(python, trainer=trainer)
        found.check("NCCL wheels", True, "one version, or no wheel to compare")
    except ConfigError as error:
        found.check("NCCL wheels", False, f"{error.found}; {error.fix}")
    if has_cuda():
        ours, theirs = (said([str(one), "-c", _NCCL]) for one in (sys.executable, python))
        found.check("NCCL loaded", ours == theirs, f"trainer {ours or 'none'}, servers {theirs or 'none'}")


def _peers(found: Findings) -> None:
    """Copy between all pairs of GPUs, and compare."""
    count = torch.cuda.device_count() if has_cuda() else 0
    if count < 2:
        raise Skipped(f"{count} GPUs")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    found.fact("pairs without peer access", without or "none")
    wrong = []
    for a, b in pairs:
        source = torch.arange(1 << 20, device=f"cuda:{a}")
        if not torch.equal(source.to(f"cuda:{b}").cpu(), source.cpu()):
            wrong.append((a, b))
    found.check("copies between GPUs", not wrong, f"wrong: {wrong}" if wrong else f"{len(pairs)} pairs")


def _shared_memory(found: Findings, owner: torch.device, user: torch.device, hand_overs: int) -> None:
    """Hand one buffer to another process again and again, as weight synchronisation does for a whole run."""
    from megarl.sync.shared import handle_of, shared_buffer

    code = f"from {__name__} import take; take({str(user)!r})"
    flat, wrong = shared_buffer(_SHARED_BYTES, owner), 0
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as taker:
        assert taker.stdin is not None
        assert taker.stdout is not None
        for number in range(hand_overs):
            flat.fill_(number % 251)
            if owner.type == "cuda":
                torch.cuda.synchronize(owner)
            print(json.dumps(handle_of(flat)), file=taker.stdin, flush=True)
            answer = taker.stdout.readline().strip()
            if not answer:
                break
            wrong += int(answer) != (number % 251) * _SHARED_BYTES
        taker.stdin.close()
        code_of_taker = taker.wait(_WAIT_S)
    found.check(
        f"memory of {owner} mapped from {user} in another process",
        wrong == 0 and code_of_taker == 0,
        f"{hand_overs} hand-overs, {wrong} of them wrong, exit code {code_of_taker}",
    )


def take(user: str) -> None:
    """Map each buffer whose handle comes on standard input, copy it to the device `user`, and print the sum."""
    from megarl.sync.shared import open_handle

    for line in sys.stdin:
        flat = open_handle(json.loads(line))
        own = flat.to(user, copy=True)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        print(int(own.sum(dtype=torch.int64)), flush=True)
        del flat, own
