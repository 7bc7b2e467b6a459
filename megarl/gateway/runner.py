"""The process that starts the agents' programs of a replica: `python -m megarl.gateway.runner [SOURCE:FUNCTION]`.

    stdin    {"start": 3, "folder": ..., "launch": {"argv": [...], "environment": {...}, ...}, "limits": {...},
              "cwd": ..., "sandboxed": false}                                                  {"stop": 3}
    stdout   {"ready": true}
             {"ended": 3, "code": 0}        {"ended": 4, "code": 71, "error": "why it did not start"}
             {"ended": 5, "code": -9, "limit": "memory"}

This process forks every program, with a guardian process that ends the program and everything that it has started, in
any process group or session (`megarl.system.reaper`). The module of FUNCTION is imported once, before the first fork;
what it prints goes to stderr. The process ends with all programs when its stdin closes, which happens when the trainer
ends.

Only the end of a program's output is kept. A program that exceeds a limit is ended some tenths of a second later; a
sandbox, where there is one, itself refuses what could do harm in this time.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from megarl.gateway.enter import enter
from megarl.gateway.usage import Usage, usage_of
from megarl.system.imports import import_file, import_module
from megarl.system.reaper import guarded

_NO_FORK = 71  # exit code of a program that could not be forked
_PIECE = 1 << 16  # bytes that are read at once
_MOST_PIECES = 16  # as many as a pipe holds at most, by Linux's default limit
_KEPT = 1 << 14  # bytes at the end of a program's output that are kept
_LOOK_EVERY_S = 0.25  # seconds between two measurements of what programs use
_END_S = 3.0  # seconds in which a sandbox may end by itself, after passing on the program's result
_OPEN_FILES = 1024


@dataclass
class _Program:
    """A program that runs.

    Attributes:
        order: the trainer's message that started the program.
        guardian: process id of the program's guardian.
        output: descriptor from which the program's output is read.
        input: descriptor of the sandbox's stdin; the sandbox ends when it is closed. -1: there is no sandbox; -2: the
            descriptor is closed.
        unsent: part of the task that is still to be written to `input`.
        tail: end of the program's output.
        written: bytes of all the program's output.
        limit: name of the limit that the program has exceeded; empty: none.
        kill_at: time at which a program that was asked to end is killed; infinity: it was not asked.
    """

    order: dict[str, Any]
    guardian: int
    output: int
    input: int = -1
    unsent: bytes = b""
    tail: bytearray = field(default_factory=bytearray)
    written: int = 0
    limit: str = ""
    kill_at: float = float("inf")

    @property
    def is_measured(self) -> bool:
        """Whether the memory, CPU time and processes of the program are measured; containers have their own limits."""
        limits = self.order["limits"]
        return (
            not self.order["launch"]["after"]
            and not self.limit
            and any(limits[name] is not None for name in ("memory_mb", "cpu_s", "processes"))
        )


def main() -> None:
    """Start and stop programs until stdin closes."""
    orders, news = _taken()
    function = None
    if len(sys.argv) > 1:
        source, _, attribute = sys.argv[1].rpartition(":")
        module = import_file(source) if source.endswith(".py") else import_module(source)
        function = getattr(module, attribute)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what an interrupt ends
    Runner(orders, news, wake, function).run()


class Runner:
    """Starts programs and watches them.

    Args:
        orders, news: descriptors of the messages.
        wake: descriptor that becomes readable when a child ends.
        function: called by programs that have no command; None: all programs have one.
    """

    def __init__(self, orders: int, news: int, wake: int, function: Any) -> None:
        self._orders, self._news, self._wake, self._function = orders, news, wake, function
        self._running: dict[int, _Program] = {}  # programs by the process ids of their guardians
        self._poll = selectors.DefaultSelector()
        self._poll.register(orders, selectors.EVENT_READ)
        self._poll.register(wake, selectors.EVENT_READ)
        self._looked = time.monotonic()

    def run(self) -> None:
        """Start and stop programs until the trainer closes the descriptor of orders."""
        _tell(self._news, {"ready": True})
        waiting = b""
        while True:
            busy = any(program.is_measured or program.kill_at < float("inf") for program in self._running.values())
            for key, _ in self._poll.select(_LOOK_EVERY_S if busy else None):
                if key.fd == self._wake:
                    os.read(self._wake, 4096)
                elif key.fd == self._orders:
                    data = os.read(self._orders, _PIECE)
                    if not data:
                        for program in self._running.values():
                            _terminate(program)
                            _start_after(program)
                        return
                    *lines, waiting = (waiting + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
                elif key.data.output == key.fd:
                    self._read(key.data)
                else:
                    self._write(key.data)
            self._watch()
            for pid, code in _ended():
                if pid in self._running:  # otherwise the function's module has started the process
                    self._finish(self._running.pop(pid), code)

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            try:
                program = _start(order, self._function)
            except OSError as error:
                _tell(self._news, {"ended": order["start"], "code": _NO_FORK, "error": f"it did not start: {error}"})
                return
            self._running[program.guardian] = program
            self._poll.register(program.output, selectors.EVENT_READ, program)
            if program.input >= 0:
                self._poll.register(program.input, selectors.EVENT_WRITE, program)
        else:
            for program in self._running.values():
                if program.order["start"] == order["stop"]:
                    self._stop(program)

    def _stop(self, program: _Program) -> None:
        """Ask a sandbox to end, which first passes on its program's result; kill it if it was asked before. A program
        without a sandbox is killed at once."""
        if program.input >= 0 and program.kill_at == float("inf"):
            self._close_input(program)
            program.kill_at = time.monotonic() + _END_S
        else:
            program.kill_at = float("inf")
            _terminate(program)

    def _close_input(self, program: _Program) -> None:
        if program.input in self._poll.get_map():
            self._poll.unregister(program.input)
        os.close(program.input)
        program.input = -2  # closed, so that the next `_stop` kills the sandbox

    def _write(self, program: _Program) -> None:
        """Write more of the task to a sandbox."""
        try:
            program.unsent = program.unsent[os.write(program.input, program.unsent[:_PIECE]) :]
        except BlockingIOError:
            return
        except OSError:  # the sandbox has ended
            program.unsent = b""
        if not program.unsent:
            self._poll.unregister(program.input)

    def _read(self, program: _Program) -> bool:
        """Read a program's output and keep its end; return whether there may be more."""
        try:
            data = os.read(program.output, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._poll.unregister(program.output)
            return False
        program.written += len(data)
        program.tail += data
        del program.tail[:-_KEPT]
        most = program.order["limits"]["output_mb"]
        if most is not None and program.written > most << 20 and not program.limit:
            self._exceed(program, "output")
        return True

    def _exceed(self, program: _Program, limit: str) -> None:
        """Kill a program at once, without the time in which a sandbox passes on the result."""
        program.limit = limit
        _terminate(program)

    def _watch(self) -> None:
        """Kill programs that did not end in time, and programs whose measured use exceeds a limit."""
        now = time.monotonic()
        for program in self._running.values():
            if now >= program.kill_at:
                self._stop(program)
        measured = {pid: program for pid, program in self._running.items() if program.is_measured}
        if not measured or now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        above = {
            pid: program.order["limits"]["memory_mb"] << 20
            for pid, program in measured.items()
            if program.order["limits"]["memory_mb"] is not None
        }
        for pid, used in usage_of(measured, above).items():
            if limit := _exceeded(used, measured[pid].order["limits"]):
                self._exceed(measured[pid], limit)

    def _finish(self, program: _Program, code: int) -> None:
        for _ in range(_MOST_PIECES):  # only a process that could not be ended writes more than a pipe holds
            if program.output not in self._poll.get_map() or not self._read(program):
                break
        if program.output in self._poll.get_map():
            self._poll.unregister(program.output)
        os.close(program.output)
        if program.input >= 0:
            self._close_input(program)
        # A container outlives docker's client if a signal kills the client, so it is ended here.
        if code < 0:
            _start_after(program)
        with contextlib.suppress(OSError), open(os.path.join(program.order["folder"], "output.txt"), "wb") as file:
            file.write(program.tail)
        news = {"ended": program.order["start"], "code": code}
        _tell(self._news, {**news, "limit": program.limit} if program.limit else news)


def _terminate(program: _Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(program.guardian, signal.SIGTERM)


def _start_after(program: _Program) -> None:
    """Start the command that ends a program's container, if there is one, without waiting for it."""
    launch, nothing = program.order["launch"], subprocess.DEVNULL
    if launch["after"]:
        with contextlib.suppress(OSError):
            subprocess.Popen(
                launch["after"],
                env=launch["environment"],  # contains the address of the container's daemon
                stdin=0,
                stdout=nothing,
                stderr=nothing,
                start_new_session=True,
            )


def _exceeded(used: Usage, limits: dict[str, Any]) -> str:
    """Return the name of a limit that a program's use exceeds; empty: none."""
    memory = limits["memory_mb"]
    for name, value, most in (
        ("processes", used.processes, limits["processes"]),
        ("memory", used.memory, None if memory is None else memory << 20),
        ("cpu", used.cpu_s, limits["cpu_s"]),
    ):
        if most is not None and value > most:
            return name
    return ""


def _taken() -> tuple[int, int]:
    """Return copies of the descriptors of stdin and stdout, and replace stdin by an empty input and stdout by stderr.

    Whatever the function's module reads and prints is then apart from the messages.
    """
    orders, news, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return orders, news


def _tell(news: int, message: dict[str, Any]) -> None:
    """Write a message to the trainer; it is short enough that a pipe takes it whole."""
    with contextlib.suppress(BrokenPipeError):  # the trainer has ended; `run` stops when stdin closes
        os.write(news, json.dumps(message).encode() + b"\n")


def _start(order: dict[str, Any], function: Any) -> _Program:
    """Fork a program with its guardian."""
    output, written = os.pipe()
    given, input_ = os.pipe() if order["sandboxed"] else (os.open(os.devnull, os.O_RDONLY), -1)
    try:
        pid = os.fork()
    except OSError:
        for descriptor in (output, written, given, *([input_] if input_ >= 0 else [])):
            os.close(descriptor)
        raise
    if pid:
        os.close(written)
        os.close(given)
        os.set_blocking(output, False)
        program = _Program(order, pid, output, input_)
        if input_ >= 0:
            os.set_blocking(input_, False)
            program.unsent = json.dumps(order["task"]).encode() + b"\n"
        return program
    code = 70  # exit code of a program that could not be started
    try:
        _become(order, given, written)
        code = _run(order, function)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if not isinstance(exit_.code, int | None):
            print(exit_.code, file=sys.stderr)  # as Python does for sys.exit("text")
    except BaseException:
        code = 1 if not order["launch"]["argv"] else code
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(order: dict[str, Any], given: int, written: int) -> None:
    """Make this forked process that of a program: set its descriptors, guardian, environment, user and limits."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    result = written
    if order["sandboxed"]:
        result = os.open(os.path.join(order["folder"], "result.json"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, descriptor in enumerate((given, result, written)):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)
    guarded()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    launch, limits = order["launch"], order["limits"]
    os.environ.clear()
    os.environ.update(launch["environment"])
    os.chdir(order["cwd"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory is short, the kernel ends this process and not the trainer
    enter(launch["mounts"], as_nobody=launch["as_nobody"])
    if not launch["after"]:  # otherwise this process is a container's client, and the container has the limits
        _limit(limits, sandboxed=order["sandboxed"])


def _limit(limits: dict[str, Any], *, sandboxed: bool) -> None:
    if limits["memory_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_mb"] << 20,) * 2)
    if sandboxed:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["disk_mb"] << 20,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        files = min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def _run(order: dict[str, Any], function: Any) -> int:
    argv = order["launch"]["argv"]
    if argv:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals, which a program would inherit
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    environment = order["launch"]["environment"]
    with open(environment["MEGARL_TASK"], encoding="utf-8") as file:
        result = function(json.load(file))
    if result is not None:
        with open(environment["MEGARL_RESULT"], "w", encoding="utf-8") as file:
            json.dump(result, file)
    return 0


def _ended() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((child[0], os.waitstatus_to_exitcode(child[1])))
    return ended


if __name__ == "__main__":
    main()
