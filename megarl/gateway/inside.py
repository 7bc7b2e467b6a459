"""The first process in a sandbox, run from a copy of this file: `python inside.py SETTINGS PROGRAM...`.

    stdin    the task as one line of JSON; when it closes, the program is ended
    stdout   a line feed once the program runs, and then its result
    stderr   what the program writes to stdout and stderr

    program -> http://127.0.0.1:PORT -> this process -> the gateway's Unix socket, the only way out of the sandbox

The program has a folder of its own, with its task and result. When the program ends, this process ends everything that
the program has started, and then reads the result. This file imports only the standard library and runs with Python
3.8, because the image of a container may have an old Python.

With `--call SOURCE:FUNCTION` as the program, a fork of this process calls the function with the task.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import signal
import socket
import stat
import sys
import time
from typing import Any, NoReturn

_PIECE = 1 << 16  # bytes that are read at once
_TICK_S = 0.5  # seconds between two checks of the deadline; the end of a child is noticed at once
_PR_SET_DUMPABLE = 4
_NO_PROGRAM = 127  # exit code for a program that does not start, as in a shell


def main() -> NoReturn:
    """Run the program, relay its connections, and write its result to stdout."""
    settings, argv = json.loads(sys.argv[1]), sys.argv[2:]
    _allow_looks(False)
    task = _line()
    os.makedirs(settings["folder"], exist_ok=True)
    paths = {name: os.path.join(settings["folder"], name + ".json") for name in ("task", "result")}
    with open(paths["task"], "wb") as file:
        file.write(task)
    listener = _listener(settings["port"])
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = _start(settings, argv, paths)
    os.write(1, b"\n")
    code = _serve(child, listener, wake, settings["socket"], time.monotonic() + settings["seconds"])
    _end_all(child)
    os.write(1, _result(paths["result"], settings["result_bytes"]))
    os._exit(code)


def _allow_looks(allowed: bool) -> None:
    """Allow or forbid other processes of this user to read this process's memory (Linux)."""
    # An image may lack ctypes. The program could then change this process, but only to change its own result.
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0)


def _line() -> bytes:
    task = b""
    while not task.endswith(b"\n"):
        piece = os.read(0, _PIECE)
        if not piece:
            sys.exit("the task did not arrive")
        task += piece
    return task


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        sys.exit(f"port {port} is not free, so this sandbox has no network of its own: {error}")
    listener.listen(64)
    listener.setblocking(False)
    return listener


def _start(settings: dict[str, Any], argv: list[str], paths: dict[str, str]) -> int:
    """Fork the program, which gets the limit on its number of processes; return its process id."""
    child = os.fork()
    if child:
        return child
    code = _NO_PROGRAM
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.closerange(3, 256)
        os.setsid()
        os.environ.update(
            MEGARL_TASK=paths["task"], MEGARL_RESULT=paths["result"], HOME=settings["folder"], TMPDIR="/tmp"
        )
        os.chdir(settings["cwd"] or settings["folder"])
        # Set inside the sandbox, where the kernel counts only the processes of this sandbox.
        if settings["processes"] is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"],) * 2)
        if argv[0] != "--call":
            os.execvp(argv[0], argv)
        _allow_looks(True)
        code = _call(argv[1])
    except BaseException as error:
        os.write(2, f"the program did not start: {argv[0]}: {error}\n".encode())
    os._exit(code)


class SocketRelay:
    """Connections between a TCP port, at which the program finds the endpoint, and the gateway's Unix socket.

    Args:
        gateway: path of the Unix socket.
    """

    def __init__(self, listener: socket.socket, gateway: str, poll: selectors.BaseSelector) -> None:
        self._listener, self._gateway, self._poll = listener, gateway, poll
        self._peers: dict[socket.socket, socket.socket] = {}  # the socket to which the data of each socket goes
        self._waiting: dict[socket.socket, bytes] = {}  # bytes that are still to be sent to each socket
        poll.register(listener, selectors.EVENT_READ)

    def handle(self, end: Any, events: int) -> None:
        """Receive or send data on the socket `end`, which is ready for `events`; the listener accepts a connection."""
        if end is self._listener:
            self._accept()
        elif end in self._peers:
            try:
                self._move(end, events)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(end)
            else:
                self._watch(end)
                self._watch(self._peers[end])

    def _accept(self) -> None:
        try:
            near = self._listener.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.05)  # the program has too many open connections, so further ones have to wait
            return
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(self._gateway)
        except OSError:
            near.close()
            far.close()
            return
        for end, peer in ((near, far), (far, near)):
            end.setblocking(False)
            self._peers[end], self._waiting[end] = peer, b""
        self._watch(near)
        self._watch(far)

    def _move(self, end: socket.socket, events: int) -> None:
        """Send the socket `end` the data that waits for it, and pass on to its peer what the socket has received.

        Raises:
            OSError: the connection is closed.
        """
        if events & selectors.EVENT_WRITE:
            self._waiting[end] = self._waiting[end][end.send(self._waiting[end]) :]
        if events & selectors.EVENT_READ:
            data = end.recv(_PIECE)
            if not data:
                raise ConnectionResetError
            peer, sent = self._peers[end], 0
            with contextlib.suppress(BlockingIOError):
                sent = peer.send(data)
            self._waiting[peer] = data[sent:]

    def _watch(self, end: socket.socket) -> None:
        """Poll the socket `end` for reading unless data waits for its peer, and for writing if data waits for it."""
        reads = 0 if self._waiting[self._peers[end]] else selectors.EVENT_READ
        events = reads | (selectors.EVENT_WRITE if self._waiting[end] else 0)
        known = end in self._poll.get_map()
        if known and events:
            self._poll.modify(end, events)
        elif known:
            self._poll.unregister(end)
        elif events:
            self._poll.register(end, events)

    def _drop(self, end: socket.socket) -> None:
        for closed in (end, self._peers[end]):
            if closed in self._poll.get_map():
                self._poll.unregister(closed)
            del self._peers[closed], self._waiting[closed]
            closed.close()


def _serve(child: int, listener: socket.socket, wake: int, gateway: str, deadline: float) -> int:
    """Relay connections until the program has ended; return its exit code, 128 and more for a signal."""
    poll = selectors.DefaultSelector()
    poll.register(wake, selectors.EVENT_READ)
    poll.register(0, selectors.EVENT_READ)
    relay = SocketRelay(listener, gateway, poll)
    while time.monotonic() < deadline:
        for key, events in poll.select(_TICK_S):
            if key.fileobj == wake:
                os.read(wake, _PIECE)
            elif key.fileobj == 0:
                if not os.read(0, _PIECE):
                    return 128 + signal.SIGTERM
            else:
                relay.handle(key.fileobj, events)
        code = _ended(child)
        if code is not None:
            return code
    os.write(2, b"the time of the sandbox is up\n")
    return 128 + signal.SIGTERM


def _ended(child: int) -> int | None:
    """Return the program's exit code, or None while it runs; also reap orphaned processes that have ended."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if not pid:
            return code
        if pid == child:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _end_all(child: int) -> None:
    """Kill all other processes of the sandbox or, if this is not its first process, those of the program's group."""
    with contextlib.suppress(OSError):  # raised if no process is left
        os.kill(-1 if os.getpid() == 1 else -child, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)
        except ChildProcessError:
            return


def _result(path: str, most: int) -> bytes:
    """Return up to `most` + 1 bytes of the result, so that the reader can refuse a longer one; empty: no result."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    return os.read(number, most + 1) if stat.S_ISREG(os.fstat(number).st_mode) else b""


def _call(name: str) -> int:
    """Call the user's function `name` with the task, write its return value as the result; return an exit code."""
    import importlib.util
    import traceback

    code = 0
    try:
        sys.path = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
        source, _, attribute = name.rpartition(":")
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location("megarl_agent", source)
            assert spec, "a .py file has a loader"
            assert spec.loader, "a .py file has a loader"
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        with open(os.environ["MEGARL_TASK"], encoding="utf-8") as file:
            result = getattr(module, attribute)(json.load(file))
        if result is not None:
            with open(os.environ["MEGARL_RESULT"], "w", encoding="utf-8") as file:
                json.dump(result, file)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # as Python does for sys.exit("text")
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


if __name__ == "__main__":
    main()
