"""The programs of a replica's episodes, as the environments' event loop sees them; `runner.py` starts them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.gateway.sandbox import INHERITED as INHERITED_IN_SANDBOX
from megarl.gateway.sandbox import RESULT_BYTES, Launch, Limits, Sandbox
from megarl.system.errors import MegarlError
from megarl.system.leftovers import PREFIX
from megarl.system.parents import as_parent
from megarl.system.processes import ending

_RUNNER = "megarl.gateway.runner"
START = Path(__file__).with_name("start.py")  # runs a module with an interpreter that has no megarl
_TAIL = 2000  # characters of a program's output in a message
_READY_S = 120.0  # seconds that the import of a function's module may take
#: Variables that every program gets from the trainer's environment.
INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TERM",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)
#: Processes of a sandbox itself, which do not count as the program's.
_SANDBOX_PROCESSES = 3


@dataclass
class Program:
    """A program that was started.

    Attributes:
        folder: the episode's folder, with the program's task, result and output.
        ended: the program's exit code, negative for a signal.
        sandboxed: whether the program runs in a sandbox.
        error: why the program did not start, or why its end is not known; empty: it ended by itself.
        limit: the limit for which the program was ended: memory, processes, cpu or output; empty: none.
    """

    number: int
    folder: Path
    ended: asyncio.Future[int] = field(repr=False)
    sandboxed: bool = False
    error: str = ""
    limit: str = ""

    @property
    def result(self) -> Path:
        """The file in which the program leaves its result."""
        return self.folder / "result.json"

    def read_result(self) -> str:
        """Return the program's result; empty: the program has left no result.

        Raises:
            ValueError: the result is too long.
        """
        if not self.result.is_file():
            return ""
        with self.result.open("rb") as opened:
            data = opened.read(RESULT_BYTES + 2)
        if len(data) > RESULT_BYTES + self.sandboxed:  # a sandbox writes a line feed first
            raise ValueError(f"the result is too long; allowed: {RESULT_BYTES} bytes")
        return data.decode(errors="replace").strip()

    @property
    def has_begun(self) -> bool:
        """Whether the program has been started, in the case of a sandbox by the sandbox."""
        return not self.sandboxed or (self.result.is_file() and self.result.stat().st_size > 0)

    @property
    def output(self) -> str:
        """The end of what the program has written to stdout and stderr."""
        file = self.folder / "output.txt"
        if not file.exists():
            return ""
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - 4 * _TAIL))
            return opened.read().decode(errors="replace")[-_TAIL:]

    def how_it_ended(self) -> str:
        """Describe how the program ended, with its last output."""
        output = self.output.strip()
        how = ending(self.ended.result()) if self.ended.done() else "no exit: it could not be ended"
        how += f" ({self.error})" if self.error else ""
        return how + (f"; its last output:\n{output}" if output else "; it printed nothing")


@dataclass
class Programs:
    """Starts the agents' programs of a replica.

    Attributes:
        argv: the command; None: `function` is called.
        function: `file.py:fn` or `pkg.mod:fn`.
        cwd: folder in which a program starts; None: the current one.
        pass_env: further variables of the trainer's environment that programs get.
        sandbox: the sandbox in which programs run; None: no sandbox.
        python: interpreter of the function, and of a command `python`; None: the trainer's.
    """

    argv: Sequence[str] | None
    function: str | None
    cwd: str | None = None
    pass_env: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    sandbox: Sandbox | None = None
    python: str | None = None
    _runner: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None
    _running: dict[int, Program] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _folders: set[Path] = field(default_factory=set)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, task: dict[str, Any], environment: dict[str, str]) -> Program:
        """Start a program for a task.

        Args:
            environment: variables in addition to those that every program gets.

        Raises:
            MegarlError: programs cannot be started.
        """
        runner = await self._ready()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._folders.add(folder)
        sandboxed = self.sandbox is not None
        program = Program(next(self._numbers), folder, asyncio.get_running_loop().create_future(), sandboxed)
        launch = self._launch(folder, task, environment)
        limits = self.limits
        if sandboxed and limits.processes is not None:
            limits = replace(limits, processes=limits.processes + _SANDBOX_PROCESSES)
        self._running[program.number] = program
        order = {
            "start": program.number,
            "folder": str(folder),
            "task": json.loads(json.dumps(task, default=str)) if sandboxed else None,
            "launch": asdict(launch),
            "limits": asdict(limits),
            "cwd": "/" if sandboxed else os.path.abspath(self.cwd or "."),
            "sandboxed": sandboxed,
        }
        self._send(runner, order)
        return program

    def _launch(self, folder: Path, task: dict[str, Any], environment: dict[str, str]) -> Launch:
        """Return how a program is started; without a sandbox, also write its task into the episode's folder."""
        argv = list(self.argv or [])
        if self.sandbox is not None:
            return self.sandbox.launch(argv, self.function, self._inherited(INHERITED_IN_SANDBOX) | environment)
        (folder / "task.json").write_text(json.dumps(task, default=str), encoding="utf-8")
        paths = {"MEGARL_TASK": str(folder / "task.json"), "MEGARL_RESULT": str(folder / "result.json")}
        if argv and argv[0] == "python":
            argv[0] = self.python or sys.executable
        return Launch(argv, self._inherited() | paths | environment)

    async def stop(self, program: Program) -> None:
        """End a program with everything that it has started, and wait up to 10 seconds for its end."""
        if not program.ended.done() and self._runner is not None:
            self._send(self._runner, {"stop": program.number})
            await asyncio.wait({program.ended}, timeout=10)

    def remove(self, program: Program) -> None:
        """Remove a program's folder."""
        self._folders.discard(program.folder)
        shutil.rmtree(program.folder, ignore_errors=True)

    async def close(self) -> None:
        """End all programs."""
        if self._runner is not None and self._runner.returncode is None:
            self._runner.kill()  # the guardians and the programs that they guard end with this process
        if self._reader is not None:
            await self._reader
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        if self.sandbox is not None:
            self.sandbox.close()

    def _inherited(self, names: Sequence[str] = INHERITED) -> dict[str, str]:
        return {name: os.environ[name] for name in (*names, *self.pass_env) if name in os.environ}

    async def _ready(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._runner is not None and self._runner.returncode is None:
                return self._runner
            if self._reader is not None:
                await self._reader  # the reader sets `ended` of the programs of the previous process
            function = [] if self.function is None or self.sandbox is not None else [self.function]
            python = self.python if function else None
            start = ["-m", _RUNNER] if python is None else [str(START), _RUNNER]
            pipe = asyncio.subprocess.PIPE
            runner = await asyncio.create_subprocess_exec(
                *(python or sys.executable, *start, *function),
                stdin=pipe,
                stdout=pipe,
                env=self._inherited() | as_parent(),
                start_new_session=True,
            )
            try:
                ready = await asyncio.wait_for(_pipes(runner)[1].readline(), _READY_S)
            except BaseException as error:
                runner.kill()
                await runner.wait()
                if not isinstance(error, asyncio.TimeoutError):
                    raise
                if not function:
                    raise MegarlError(
                        f"the process that starts the agents is not ready after {_READY_S:g} seconds\n  where:   env\n"
                        "  fix:     check that this machine is not overloaded, and start the run again"
                    ) from error
                raise MegarlError(
                    "the process that starts the agents is not ready: the import of the function's module takes too "
                    f"long\n  where:   env.function\n  found:   {self.function}\n  allowed: {_READY_S:g} seconds\n"
                    "  fix:     let the module do less when it is imported"
                ) from error
            if not ready:
                raise MegarlError(
                    f"the process that starts the agents ended: {ending(await runner.wait())}\n  where:   env\n"
                    "  fix:     its output above names the error"
                )
            self._runner, self._reader = runner, asyncio.ensure_future(self._read(runner))
            return runner

    async def _read(self, runner: asyncio.subprocess.Process) -> None:
        """Set `ended` of programs as they end, and of all programs when the process that starts them has ended."""
        output, lost = _pipes(runner)[1], "the process that started it has ended"
        try:
            while line := await output.readline():
                news = json.loads(line)
                program = self._running.pop(news["ended"], None)
                if program is not None and not program.ended.done():
                    program.error, program.limit = news.get("error", ""), news.get("limit", "")
                    program.ended.set_result(news["code"])
        except Exception as error:
            lost = f"the process that started it sent a line that is not a message: {error!r}"
            runner.kill()
        await runner.wait()
        if self._runner is runner:
            self._runner = None  # `start` of the next program starts another process
        for program in self._running.values():
            if not program.ended.done():
                program.error = lost
                program.ended.set_result(-signal.SIGKILL)
        self._running.clear()

    def _send(self, runner: asyncio.subprocess.Process, order: dict[str, Any]) -> None:
        _pipes(runner)[0].write(json.dumps(order).encode() + b"\n")


def _pipes(runner: asyncio.subprocess.Process) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    """Return the stdin and stdout of a process that has pipes for them."""
    assert runner.stdin, "it is a pipe"
    assert runner.stdout, "it is a pipe"
    return runner.stdin, runner.stdout
