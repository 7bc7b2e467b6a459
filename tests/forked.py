"""`megarl ...` in a process that is forked with its imports done, and so are its workers and reward processes.

    ended = run(["train", "tiny.yaml"], folder)           # ended.code, ended.output
    command = Command(["train", "tiny.yaml"], folder)     # goes on beside the test; used like a subprocess.Popen

The program and two workers would import torch and Megatron three times: 17 CPU-seconds, most of a tiny run. What looks
at users' functions before a start, and what scores, would import for 3 more. To the command its workers are what they
always are: children in sessions of their own, with their environment, pipe, signals and exit codes. What the start of
a program itself can break (its interpreter, module and memory settings) is seen where tests start it for real:
tests/launchers, tests/rewards, and `harness.run(..., program=True)`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from megarl.system.parents import PARENTS, as_parent
from megarl.system.processes import CAUGHT, die_with_parents, has_nvidia_device
from tests import dist
from tests.ray_forks.launcher import accept


class Forked:
    """A process that was forked with its imports done; used like a subprocess.Popen.

    Args:
        main: what it does, with `arguments`.
    """

    def __init__(self, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._process = dist.start(0, main, arguments, "tests.preload")
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

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


class Command(Forked):
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
        super().__init__(_command_main, task)

    def communicate(self, timeout: float = 300.0) -> tuple[str, None]:
        """Wait for the end; all that was printed."""
        self.wait(timeout)
        self._file.seek(0)
        return self._file.read().decode(), None


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
    become(environment, output, output)
    os.chdir(folder)
    sys.path.insert(0, folder)  # as for `python -m`
    from megarl import cli

    fork_programs()
    sys.exit(cli.main(arguments))


def fork_programs() -> None:
    """Fork what launchers start, which this process is one of: workers, and torchrun's agent, which does the same."""
    accept()
    if has_nvidia_device():
        return
    from megarl.benchmarks import program
    from megarl.launchers import local, torchrun
    from megarl.rewards import preflight

    for module in (local, torchrun):
        _start_by(forked_program, module)
    _start_by(_forked_module, preflight)
    _start_by(_forked_command, program)


def fork_scorers() -> None:
    """Fork reward processes of this process from it: they would import for 0.6 CPU-seconds what is there."""
    from megarl.rewards import pool_process

    _start_by(_forked_module, pool_process)


def fork_relays() -> None:
    """Fork relays of changed weights from this process: they would import torch and Megatron for 3 CPU-seconds."""
    from megarl.sync.transports import delta

    if not has_nvidia_device():
        _start_by(functools.partial(_forked_module, before=_share_memory), delta)


def _share_memory() -> None:
    """Start torch's manager of shared memory before there are threads, two of which cannot start it in a fork."""
    import torch

    torch.UntypedStorage._new_using_filename_cpu(1)


@contextlib.contextmanager
def forked_scorers() -> Iterator[None]:
    """`fork_scorers` within the block, and what imports users' files before a run is forked too. Not with a GPU."""
    from megarl.rewards import pool_process, preflight

    if has_nvidia_device():
        yield
        return
    try:
        fork_scorers()
        _start_by(_forked_module, preflight)
        yield
    finally:
        pool_process.subprocess = preflight.subprocess = subprocess


def fork_simulators() -> None:
    """Fork simulators' processes of this process's interpreter from it: they would import NumPy for 0.2 CPU-seconds."""
    from megarl.robots.envs import process

    if not has_nvidia_device():
        _start_by(_forked_simulator, process)


@contextlib.contextmanager
def forked_simulators() -> Iterator[None]:
    """`fork_simulators` within the block."""
    from megarl.robots.envs import process

    try:
        fork_simulators()
        yield
    finally:
        process.subprocess = subprocess


def _start_by(popen: Callable[..., Any], module: Any) -> None:
    """In this module only: everybody else goes on starting programs."""
    module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": popen})


def _forked_module(
    command: list[str],
    *,
    env: dict[str, str],
    pass_fds: Sequence[int] = (),
    before: Callable[[], None] = lambda: None,
    **options: Any,
) -> Any:
    """A child that would become the program `python -m MODULE ...` and instead does what that does, under its name."""
    module = command[2]

    def work() -> None:
        Path("/proc/self/comm").write_text(module.rpartition(".")[2])
        _leave_folder_out()
        sys.argv = command[2:]
        before()
        main = getattr(importlib.import_module(module), "main", None)
        main() if main is not None else runpy.run_module(module, run_name="__main__")

    if before is _share_memory and _has_shared_memory():
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)
    becoming = functools.partial(in_child, env, pass_fds, work)
    return subprocess.Popen(command, env=env, pass_fds=pass_fds, preexec_fn=becoming, **options)


def _forked_simulator(command: list[str], *, env: dict[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
    """A child that would become `python -I -u start.py ...` and does what that does; other interpreters start."""
    if command[0] != sys.executable:
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)

    def work() -> None:
        sys.argv = command[3:]
        runpy.run_path(command[3], run_name="__main__")

    becoming = functools.partial(in_child, env, pass_fds, work)
    return subprocess.Popen(command, env=env, pass_fds=pass_fds, preexec_fn=becoming, **options)


def _has_shared_memory() -> bool:
    """Whether torch has started its manager of shared memory here: a fork has torch's number of the connection, not the
    connection."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as file:
            if "torch-shm-dir" in str(file.getpeername()):
                return True
    return False


def forked_program(args: list[str], *, env: dict[str, str], pass_fds: Sequence[int] = (), **options: Any) -> Any:
    """A child that would become `python -m MODULE ...` and instead does what that does, at the same place."""
    place = args.index("-m") + 1
    main = {"megarl.runtime.worker": _worker_main, "megarl.launchers.torchrun": _agent_main}[args[place]]

    def work() -> int:
        for number in (*CAUGHT, signal.SIGUSR2):  # those of the launcher or the agent
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return main([str(one) for one in args[place + 1 :]])

    becoming = functools.partial(in_child, env, pass_fds, work)
    return subprocess.Popen(args, env=env, pass_fds=pass_fds, preexec_fn=becoming, **options)


def _forked_command(command: Sequence[str], *, env: dict[str, str], **options: Any) -> Any:
    """A child that would become `python -m megarl ...` and instead does what that does; other programs start."""
    if list(command[1:3]) != ["-m", "megarl"]:
        return subprocess.Popen(command, env=env, **options)

    def work() -> int:
        from megarl import cli

        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # that of who measures
        fork_programs()
        return cli.main(list(command[3:]))

    becoming = functools.partial(in_child, env, (), work)
    return subprocess.Popen(command, env=env, preexec_fn=becoming, **options)


def _leave_folder_out() -> None:
    """Do what PYTHONSAFEPATH does."""
    with contextlib.suppress(ValueError):
        sys.path.remove(os.getcwd())


def _worker_main(arguments: list[str]) -> int:
    _leave_folder_out()
    fork_scorers()
    fork_relays()
    fork_simulators()
    import torch

    from megarl.runtime import worker

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return worker.main(arguments)


def _agent_main(arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from megarl.launchers import torchrun

    subprocess_handler.Popen = forked_program  # type: ignore[assignment]
    die_with_parents()
    os.environ |= as_parent(os.environ.get(PARENTS))
    return torchrun.agent(arguments, Path(os.environ[torchrun.AGENT_REPORT]))


def in_child(env: dict[str, str], pass_fds: Sequence[int], work: Callable[[], int | None]) -> NoReturn:
    """Do in a child that was just forked what a program would do, with the files that it would have."""
    kept = {0, 1, 2, *pass_fds}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    code = 1
    try:
        _become(env)
        code = work() or 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(environment: dict[str, str], output: str, errors: str) -> None:
    """Take an environment, and files in place of stdout and stderr."""
    for number, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    _become(environment)


def _become(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
