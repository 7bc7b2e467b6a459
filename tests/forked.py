"""`megarl ...` in a process that is forked with its imports done, and so are the workers that it starts.

    ended = run(["train", "tiny.yaml"], folder)           # ended.code, ended.output
    command = Command(["train", "tiny.yaml"], folder)     # goes on beside the test; used like a subprocess.Popen

The program and two workers would import torch and Megatron three times: 17 CPU-seconds, most of a tiny run. To the
command its workers are what they always are: children in sessions of their own, with their environment, pipe, signals
and exit codes. What the start of a program itself can break (its interpreter, module and memory settings) is seen where
tests start it for real: tests/launchers, and `harness.run(..., program=...)`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from megarl.processes import has_nvidia_device
from tests import dist


class Command:
    """`python -m megarl ARGUMENTS` in `folder`, begun; stdout and stderr go to one file.

    Args:
        arguments: of the command line.
        folder: the working folder.
        environment: variables that are changed.
    """

    def __init__(self, arguments: Sequence[object], folder: Path, **environment: str) -> None:
        self._file = tempfile.NamedTemporaryFile("rb", prefix="megarl-command-")  # noqa: SIM115
        changed = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        task = ([str(argument) for argument in arguments], str(folder), changed, self._file.name)
        self._process = dist.start(0, _command_main, task, "tests.preload")
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, as soon as there is one; subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("megarl", timeout)
        return self.returncode

    def communicate(self, timeout: float = 300.0) -> tuple[str, None]:
        """Wait for the end; all that was printed."""
        self.wait(timeout)
        self._file.seek(0)
        return self._file.read().decode(), None

    def send_signal(self, number: int) -> None:
        """Send a signal to a command that runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """What a command left: its exit code, and all that it printed."""

    code: int
    output: str


def run(arguments: Sequence[object], folder: Path, timeout: float = 300.0, **environment: str) -> Ended:
    """A command to its end, which comes within `timeout` seconds; later it is ended with its ranks."""
    command = Command(arguments, folder, **environment)
    try:
        output = command.communicate(timeout)[0]
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGTERM)  # the launcher ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(30.0)
        command.kill()
        raise
    assert command.returncode is not None
    return Ended(command.returncode, output)


def _command_main(arguments: list[str], folder: str, environment: dict[str, str], output: str) -> NoReturn:
    _become(environment, os.open(output, os.O_WRONLY | os.O_APPEND))
    os.chdir(folder)
    sys.path.insert(0, folder)  # as for `python -m`
    from megarl import cli
    from megarl.launchers import local

    if not has_nvidia_device():
        # In place of the name in this module only: everybody else goes on starting programs.
        local.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _forked_worker})
    sys.exit(cli.main(arguments))


def fork_scorers() -> None:
    """Fork reward processes of this rank from it: they would import for 0.4 CPU-seconds what is there."""
    from megarl.rewards import pool_process

    pool_process.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _forked_scorer})  # type: ignore[assignment]


def _forked_scorer(command: list[str], *, env: dict[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
    """A child that would become the program `python -m MODULE FD` and instead does what that does."""

    def work() -> None:
        sys.argv = command[2:]
        importlib.import_module(command[2]).main()

    in_child = functools.partial(_in_child, env, pass_fds, work)
    return subprocess.Popen(command, env=env, pass_fds=pass_fds, preexec_fn=in_child, **options)


def _forked_worker(command: list[str], *, env: dict[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
    """A child that would become the program `command` and instead does what that does, at the same place."""

    def work() -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # those of the launcher
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        sys.path.remove(os.getcwd())  # PYTHONSAFEPATH
        import torch

        from megarl.runtime import worker

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        return worker.main(command[command.index("--entry") :])

    assert command[1:3] == ["-m", "megarl.runtime.worker"], command
    in_child = functools.partial(_in_child, env, pass_fds, work)
    return subprocess.Popen(command, env=env, pass_fds=pass_fds, preexec_fn=in_child, **options)


def _in_child(env: dict[str, str], pass_fds: Sequence[int], work: Callable[[], int | None]) -> NoReturn:
    """Do in a child that was just forked what a program would do, with the files that it would have."""
    kept = {0, 1, 2, *pass_fds}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    code = 1
    try:
        _become(env, None)
        code = work() or 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(environment: dict[str, str], output: int | None) -> None:
    """Take an environment, and a file in place of stdout and stderr; None: as they are."""
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        if output is not None:
            os.dup2(output, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
