"""The first process in a sandbox, from a copy that stands alone: `python inside.py SETTINGS PROGRAM...`.

    stdin    the task as one line of JSON; when it closes, the program is ended
    stdout   a line feed once the program runs, and then its result
    stderr   what the program writes to stdout and stderr

    program -> http://127.0.0.1:PORT -> this process -> the gateway's Unix socket, the only way out of the sandbox

The program has a folder of its own, with its task and result. When it ends, everything that it started is ended before
the result is read, so that nothing can change the result later. This file imports nothing but the standard library and
runs with Python 3.8, because an image of a container may have an old one.

`python inside.py --call SOURCE:FUNCTION` calls a function with the task; it is a program of the process above.
"""

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

_PIECE = 1 << 16  # bytes that are read at once
_TICK_S = 0.5  # a child's end is noticed at once; this bounds the wait for the deadline
_PR_SET_DUMPABLE = 4
_NO_PROGRAM = 127  # exit code, as a shell has it


def main():
    """Run the program, relay its connections, and write its result to stdout."""
    if sys.argv[1] == "--call":
        call(sys.argv[2])
        return
    settings, argv = json.loads(sys.argv[1]), sys.argv[2:]
    _hide()
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


def _hide():
    """Refuse other processes of this user a look into this one (Linux)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # an image without ctypes: the program could change its own result, as it may in any case


def _line():
    task = b""
    while not task.endswith(b"\n"):
        piece = os.read(0, _PIECE)
        if not piece:
            sys.exit("the task did not arrive")
        task += piece
    return task


def _listener(port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        sys.exit(f"port {port} is not free, so this sandbox has no network of its own: {error}")
    listener.listen(64)
    listener.setblocking(False)
    return listener


def _start(settings, argv, paths):
    """Fork the program, with the limit of processes."""
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
        # Set here and not before the sandbox began: the kernel then counts the processes of this sandbox only.
        if settings["processes"] is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"],) * 2)
        os.execvp(argv[0], argv)
    except BaseException as error:
        os.write(2, f"the program did not start: {argv[0]}: {error}\n".encode())
    os._exit(code)


def _serve(child, listener, wake, gateway, deadline):
    """Relay connections until the program has ended; return its exit code, 128 and more for a signal."""
    poll = selectors.DefaultSelector()
    poll.register(listener, selectors.EVENT_READ)
    poll.register(wake, selectors.EVENT_READ)
    poll.register(0, selectors.EVENT_READ)
    pairs = {}  # socket -> the socket that its data goes to
    waiting = {}  # socket -> bytes that it has not taken yet

    def watch(end):
        """Read from an end unless its peer still has to take data; write where data waits."""
        events = (0 if waiting[pairs[end]] else selectors.EVENT_READ) | (selectors.EVENT_WRITE if waiting[end] else 0)
        known = end in poll.get_map()
        if known and events:
            poll.modify(end, events)
        elif known:
            poll.unregister(end)
        elif events:
            poll.register(end, events)

    def drop(end):
        for one in (end, pairs[end]):
            if one in poll.get_map():
                poll.unregister(one)
            del pairs[one], waiting[one]
            one.close()

    while time.monotonic() < deadline:
        for key, events in poll.select(_TICK_S):
            end = key.fileobj
            if end is listener:
                _accept(listener, gateway, pairs, waiting, watch)
            elif end == wake:
                os.read(wake, _PIECE)
            elif end == 0:
                if not os.read(0, _PIECE):
                    return 128 + signal.SIGTERM
            elif end in pairs:
                try:
                    _move(end, pairs[end], waiting, events)
                except BlockingIOError:
                    pass
                except OSError:
                    drop(end)
                else:
                    watch(end)
                    watch(pairs[end])
        code = _ended(child)
        if code is not None:
            return code
    os.write(2, b"the time of the sandbox is up\n")
    return 128 + signal.SIGTERM


def _accept(listener, gateway, pairs, waiting, watch):
    try:
        near = listener.accept()[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            time.sleep(0.05)  # the program holds too many connections: others wait
        return
    far = socket.socket(socket.AF_UNIX)
    try:
        far.connect(gateway)
    except OSError:
        near.close()
        far.close()
        return
    for end, peer in ((near, far), (far, near)):
        end.setblocking(False)
        pairs[end], waiting[end] = peer, b""
    watch(near)
    watch(far)


def _move(end, peer, waiting, events):
    """Move data from an end to its peer, and what waits for the end to it. Raise OSError at the connection's end."""
    if events & selectors.EVENT_WRITE:
        waiting[end] = waiting[end][end.send(waiting[end]) :]
    if events & selectors.EVENT_READ:
        data = end.recv(_PIECE)
        if not data:
            raise ConnectionResetError
        try:
            sent = peer.send(data)
        except BlockingIOError:
            sent = 0
        waiting[peer] = data[sent:]


def _ended(child):
    """Return the program's exit code, or None; forget the orphans that have ended."""
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


def _end_all(child):
    """End what the program has started: everything in the sandbox, if this is its first process."""
    try:
        os.kill(-1 if os.getpid() == 1 else -child, signal.SIGKILL)
    except OSError:
        pass  # nothing is left
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)
        except ChildProcessError:
            return


def _result(path, most):
    """Return the result, with one byte too many if it is too long."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    return os.read(number, most + 1) if stat.S_ISREG(os.fstat(number).st_mode) else b""


def call(name):
    """Call a function with the task; what it returns is the result."""
    import importlib
    import importlib.util

    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location("megarl_agent", source)
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


if __name__ == "__main__":
    main()
