"""Tests driver, compiler, NCCL of both interpreters, topology, peer access, and memory shared between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from megarl.certificate.findings import Findings, Skipped
from megarl.system.compat.cuda import (
    check_same_nccl,
    compiler_version,
    driver_problem,
    driver_version,
    nccl_of,
    toolkit_home,
    toolkit_problem,
)
from megarl.system.compat.sglang import find_python, sglang_version
from megarl.system.device import has_cuda
from megarl.system.errors import ConfigError
from megarl.system.machine import machine_info
from megarl.system.processes import has_nvidia_device

_WAIT_S = 120.0  # seconds within which a command, or the process that opens shared memory, must end
_SHARED_BYTES = 1 << 20


def run(found: Findings, folder: Path) -> None:
    """Check the environment on which all other sections depend."""
    for name, value in machine_info().items():
        found.fact(name, json.dumps(value))
    found.part("devices", lambda: _devices(found))
    found.part("driver", lambda: _driver(found))
    found.part("compiler", lambda: _compiler(found))
    found.part("NCCL", lambda: nccl(found))
    found.part("topology", lambda: found.fact("topology", "\n" + output_of(["nvidia-smi", "topo", "-m"])))
    found.part("peers", lambda: _peers(found))
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())] if has_cuda() else []
    for owner, user in [(a, b) for a in devices[:2] for b in devices[:2]] or [(torch.device("cpu"),) * 2]:
        _shared_memory(found, owner, user, hand_overs=1000 if has_cuda() else 50)


def output_of(command: list[str]) -> str:
    """Return the output of a program. Raise Skipped if the program is missing, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(f"{command[0]} cannot be used: {error}") from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-300:] or "it wrote nothing"
        raise Skipped(f"{' '.join(command)} ended with exit code {done.returncode}: {output}")
    return done.stdout.strip()


def _devices(found: Findings) -> None:
    if not has_nvidia_device():
        raise Skipped("this machine has no GPU")
    cuda = torch.version.cuda
    build = f"torch {torch.__version__} is built for {f'CUDA {cuda}' if cuda else 'the CPU only'}"
    if not found.check("torch computes on CUDA", torch.cuda.is_available(), build):
        return
    for number in range(torch.cuda.device_count()):
        ones = torch.ones(1024, device=f"cuda:{number}")
        found.check(f"cuda:{number} computes", float(ones.sum()) == 1024.0, torch.cuda.get_device_name(number))


def _driver(found: Findings) -> None:
    version, cuda = driver_version(), torch.version.cuda
    if version is None:
        raise Skipped("no NVIDIA driver is loaded")
    problem = driver_problem(int((cuda or "0").split(".")[0]))
    found.check("driver", problem is None, f"{version}, for CUDA {cuda}" + (f": {problem}" if problem else ""))


def _compiler(found: Findings) -> None:
    """Check the compiler, because SGLang and FlashInfer compile kernels at their first use."""
    if not has_cuda():
        raise Skipped("torch finds no GPU on this machine")
    try:
        python = find_python(None, cuda=True)  # servers use the compiler in their environment, if it has one
    except ConfigError:
        python = None
    problem, home = toolkit_problem(python=python), toolkit_home(python=python)
    found.check("toolkit", problem is None, str(problem or home))
    found.fact("nvcc", f"{compiler_version(home)} in {home}")


def nccl(found: Findings, servers: Path | None = None, trainer: Path = Path(sys.executable)) -> None:
    """Check that trainer and servers have the same version of NCCL, in their wheels or as loaded by their torch. Raise
    Skipped if there is no interpreter for servers.
    """
    try:
        python = servers or find_python(None, cuda=has_cuda())
        if servers is None:
            found.fact("servers", f"sglang {sglang_version(python, cuda=has_cuda())} in {python}")
    except ConfigError as error:
        raise Skipped(f"NCCL cannot be compared: {error.what}; fix: {error.fix}") from error
    try:
        check_same_nccl(python, trainer)
        found.check("NCCL", True, f"trainer {nccl_of(trainer)}, servers {nccl_of(python)}")
    except ConfigError as error:
        found.check("NCCL", False, f"{error.found}; {error.fix}")


def _peers(found: Findings) -> None:
    count = torch.cuda.device_count() if has_cuda() else 0
    if count < 2:
        raise Skipped(f"the check needs two GPUs or more, and torch finds {count}")
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
    """Hand one buffer to another process many times, as weight updates do during a run."""
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
    """Map each shared buffer whose handle arrives on standard input, copy it to the device `user`, and print the sum of
    its bytes, as a receiver of weights would.
    """
    from megarl.sync.shared import open_handle

    for line in sys.stdin:
        flat = open_handle(json.loads(line))
        copied = flat.to(user, copy=True)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        print(int(copied.sum(dtype=torch.int64)), flush=True)
        del flat, copied
