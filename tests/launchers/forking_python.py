"""An interpreter for `launch.slurm.python` that runs modules in forks of a process with its imports done.

    python = forking_python(folder)     # python -P -m megarl train recipe.yaml ...

The program of every node and its workers would import torch and Megatron: 10 CPU-seconds. To Slurm nothing differs:
the process that it starts passes on signals, ends with the exit code of the other one, and takes it along when it is
killed. What is not `-P -m MODULE` is run by the real interpreter. Workers of a Ray are forked within `offered` of
tests/ray_forks/clusters.py. Nodes start real programs in the campaign `slurm`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from megarl.system.processes import CAUGHT, has_nvidia_device
from tests.forked import fork_programs, in_child
from tests.forker import forker, received
from tests.ray_forks.launcher import FORKER, choose_programs

_PASSED = (*CAUGHT, signal.SIGUSR1, signal.SIGUSR2)
_PROGRAM = """\
#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1:3] != ["-P", "-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as forker:
    forker.connect({path!r})
    request = {{"arguments": sys.argv[3:], "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(forker, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
    for number in {passed}:
        signal.signal(number, lambda number, frame: forker.send(bytes([number])))
    code = int(forker.recv(16) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def forking_python(folder: Path) -> Path:
    """Write the interpreter into `folder`; with a GPU, which no fork survives, it is the real one."""
    if has_nvidia_device():
        return Path(sys.executable)
    program = folder / "python"
    passed = [int(number) for number in _PASSED]
    program.write_text(_PROGRAM.format(python=sys.executable, path=forker(_keep), passed=passed))
    program.chmod(0o755)
    return program


def _keep(client: socket.socket) -> NoReturn:
    """Start the program that is asked for, and pass on signals until it or who asks has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files = received(client)
    program = os.fork()
    if not program:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        in_child(request["environment"], (), functools.partial(_module, request["folder"], request["arguments"]))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    while ended not in select.select([client, ended], [], [])[0]:
        numbers = client.recv(16) or bytes([signal.SIGKILL])
        for number in numbers:
            os.kill(program, number)
        if signal.SIGKILL in numbers:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)  # what it leaves; Slurm does so where it has started it
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        client.send(str(code).encode())
    os._exit(0)


def _module(folder: str, arguments: list[str]) -> None:
    """Run `python -P -m MODULE ...` in a folder."""
    for number in _PASSED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(folder)
    fork_programs()
    if FORKER in os.environ and arguments[0] == "megarl.launchers.ray_start":
        choose_programs()
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
