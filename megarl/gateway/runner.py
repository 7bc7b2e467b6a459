"""The process that starts a replica's programs: `python -m megarl.gateway.runner [SOURCE:FUNCTION]`.

    stdin    {"start": 3, "argv": [...] or null, "task": ..., "result": ..., "environment": {...}, "cwd", "output",
              "memory_mb"}                                                            {"stop": 3}
    stdout   {"ready": true}
             {"ended": 3, "code": 0}        {"ended": 4, "code": 71, "error": "why it did not start"}

Every program is forked from here, with a guardian that ends it with everything that it has started, in any group or
session (`megarl.system.reaper`). A function's module is imported once, before the first fork; what it prints goes to
stderr. The process ends with all programs when its stdin closes, which happens when the trainer ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import traceback
from typing import Any

from megarl.system.imports import import_file, import_module
from megarl.system.reaper import guarded

_NO_FORK = 71  # exit code of a program that could not be forked


def main() -> None:
    """Start and stop programs until stdin closes."""
    orders, news = _taken()
    function = None
    if len(sys.argv) > 1:
        source, _, attribute = sys.argv[1].rpartition(":")
        module = import_file(source) if source.endswith(".py") else import_module(source)
        function = getattr(module, attribute)
    running: dict[int, int] = {}  # process id of a guardian -> number of its program
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what an interrupt ends
    waiting = b""
    _tell(news, {"ready": True})
    while True:
        ready, _, _ = select.select([orders, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if orders in ready:
            data = os.read(orders, 1 << 16)
            if not data:
                break
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if "start" in order:
                    try:
                        running[_start(order, function)] = order["start"]
                    except OSError as error:
                        _tell(news, {"ended": order["start"], "code": _NO_FORK, "error": f"it did not start: {error}"})
                else:
                    _stop([pid for pid, number in running.items() if number == order["stop"]])
        for pid, code in _ended():
            if pid in running:  # others are processes that the function's module started
                _tell(news, {"ended": running.pop(pid), "code": code})
    _stop(list(running))


def _taken() -> tuple[int, int]:
    """Return descriptors of stdin and stdout, which are replaced by an empty input and by stderr.

    The function's module can then read and print without disturbing the messages.
    """
    orders, news, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return orders, news


def _tell(news: int, message: dict[str, Any]) -> None:
    """Write a message, whose length is less than what a pipe takes at once."""
    os.write(news, json.dumps(message).encode() + b"\n")


def _start(order: dict[str, Any], function: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70  # exit code of a program that could not be started
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(descriptor, number)
        os.closerange(3, 256)
        guarded()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["cwd"])
        if order["memory_mb"] is not None:
            resource.setrlimit(resource.RLIMIT_AS, (order["memory_mb"] << 20,) * 2)
        if order["argv"] is not None:
            os.execvp(order["argv"][0], order["argv"])
        _call(function, order)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        code = 1 if order["argv"] is None else code
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _call(function: Any, order: dict[str, Any]) -> None:
    """Call the user's function with the task; what it returns is the result."""
    with open(order["task"], encoding="utf-8") as file:
        result = function(json.load(file))
    if result is not None:
        with open(order["result"], "w", encoding="utf-8") as file:
            json.dump(result, file)


def _stop(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _ended() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((child[0], os.waitstatus_to_exitcode(child[1])))
    return ended


if __name__ == "__main__":
    main()
