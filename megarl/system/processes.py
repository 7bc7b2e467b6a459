"""Facts about processes that every layer may need: parents, ports, out-of-memory kills, atomically written files."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.system.errors import ConfigError
from megarl.system.parents import end_with_parents

LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Set in runs with several teams: this worker's team, its number among all teams' workers, and the buffer's name. RANK,
#: LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT then describe the team.
TEAM, WORKER, BUFFER = "MEGARL_TEAM", "MEGARL_WORKER", "MEGARL_BUFFER"
#: Set in a restarted team: the number of restarts, and the last finished step (0: none).
RESTARTS, FINISHED = "MEGARL_RESTARTS", "MEGARL_FINISHED"
#: Unix time at which this process's job began, across all attempts of a launcher and of a batch job.
JOB_BEGAN = "MEGARL_JOB_BEGAN"
#: Command line that started the run, without credentials.
COMMAND = "MEGARL_COMMAND"
#: Signals that stop a command. A run that would lose steps saves first (`megarl.launchers.interrupt`).
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: Signals within this time count as one request: `timeout` signals a process and then its group; systemd sends SIGTERM
#: and SIGHUP.
_REPEATED_S = 1.0
_PR_SET_PDEATHSIG = 1
# a higher limit would slow down programs that iterate over all numbers up to it when they start
_MOST_DESCRIPTORS = 1 << 20
# tolerated seconds: processes' start times are relative to the machine's start, which changes with its clock
_CLOCK_S = 2.0


def die_with_parents() -> None:
    """End this process when the thread that started it ends (by a kernel signal, Linux only) or when a parent ends.
    Only for processes started from their parent's main thread, because the signal follows the thread, not the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    end_with_parents()


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9, or the number of a real-time signal, which has no name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


def ending(code: int) -> str:
    """Describe how a process ended, by its return code.

    >>> ending(3), ending(-15)
    ('exit code 3', 'signal SIGTERM')
    """
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal_name(-code)}" + (", out of memory?" if code == -signal.SIGKILL else "")


def how_it_ended(process: subprocess.Popen[Any], seconds: float = 5.0) -> str:
    """Describe how a process ended whose connection broke, after waiting up to `seconds` for its end."""
    try:
        return ending(process.wait(seconds))
    except subprocess.TimeoutExpired:
        return "it closed its connection"


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process and its children to the hard limit, at most a million."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_first_process() -> bool:
    """Return whether this process reports for its whole team: it is rank 0 or the only process."""
    return os.environ.get("RANK", "0") == "0"


def worker_number() -> int:
    """Return this process's number among the workers of all teams; in a run of one team it equals the rank."""
    return int(os.environ.get(WORKER) or os.environ.get("RANK", "0"))


def worker_name(number: int, team: str | None, rank: int) -> str:
    """Return a worker's name for messages: `rank 1`, or `worker 3 (reference, rank 1)` with several teams."""
    return f"rank {rank}" if team is None else f"worker {number} ({team}, rank {rank})"


def own_worker_name() -> str:
    """Return `worker_name` of this process."""
    return worker_name(worker_number(), os.environ.get(TEAM), int(os.environ.get("RANK", "0")))


_QUIET_PORTS = range(15_000, 32_000)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port on `host` on which nothing listens at the moment. If possible, the port is below the range of
    outgoing connections (usually from 32768 on), so that no outgoing connection takes it before the listener does.
    """
    for port in random.SystemRandom().sample(_QUIET_PORTS, 64):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((host, port))
            return port
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def address_towards(host: str) -> str:
    """Return the address of this machine's interface that reaches `host`, from the routing table. No packet is sent.
    Raise OSError if `host` has no address, or no route leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_address_here(host: str) -> bool:
    """Return whether `host` is the address of one of this machine's interfaces."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):  # UnicodeError comes from an invalid name
        return False
    return True


def is_every_interface(address: str) -> bool:
    """Return whether `address` stands for every interface of a machine, in any spelling, such as `0` for `0.0.0.0`.
    Names are not resolved.
    """
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address)
        return (getattr(parsed, "ipv4_mapped", None) or parsed).is_unspecified
    with contextlib.suppress(OSError):  # IPv4 addresses in the spellings that `ipaddress` refuses
        return not any(socket.inet_aton(address))
    return address in ("", "*")


def address_of(host: str | None, where: str) -> str | None:
    """Return the address of the recipe's key `where`, with the value `host`: an address or a name on which a process is
    to listen. None stays None.

    Raises:
        ConfigError: no address belongs to this name, or its address stands for every interface.
    """
    if host is None:
        return None
    allowed = "an address of this machine, or a name that it resolves to one"
    fix = f"set {where} to an address, or to null"
    try:
        address = str(ipaddress.ip_address(host))
    except ValueError:
        try:
            address = socket.gethostbyname(host)
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name, such as a..b
            reason = f"no address belongs to this name ({error})"
            raise ConfigError(reason, where=where, found=host, allowed=allowed, fix=fix) from error
    if is_every_interface(address):
        reason = f"no part of a run may listen on every interface, for which the address {address} stands"
        raise ConfigError(reason, where=where, found=host, allowed=allowed, fix=fix)
    return address


def has_nvidia_device() -> bool:
    """Return whether an NVIDIA driver is loaded, without importing torch."""
    return Path("/dev/nvidiactl").exists()


def nvidia_devices(root: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs of this machine, regardless of CUDA_VISIBLE_DEVICES."""
    return sum(file.name.removeprefix("nvidia").isdecimal() for file in root.glob("nvidia*"))


def shared_memory_free() -> int | None:
    """Return the free bytes in shared memory, or None where there is no such file system."""
    folder = Path("/dev/shm")
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def oom_kills(root: Path = Path("/")) -> int:
    """Return how often the kernel killed a process for lack of memory: the machine's count since boot plus the counts
    of this process's cgroups.

    Only differences between two calls are meaningful. A kill because of a container's limit may be counted only in the
    cgroup (`memory.events` of version 2, `memory.oom_control` of version 1). The result is 0 if unknown.
    """
    events = {1: "memory.oom_control", 2: "memory.events"}
    files = []
    for cgroup_kills, top, version in memory_cgroups(root):
        file = cgroup_kills / events[version]
        files.append(file if file.is_file() else top / events[version])
    return sum(_counter(file, "oom_kill") for file in (root / "proc/vmstat", *files))


def memory_cgroups(root: Path) -> list[tuple[Path, Path, int]]:
    """Return (this process's folder, top folder, version 1 or 2) of each cgroup hierarchy that counts its memory."""
    hierarchies = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                top, version = root / "sys/fs/cgroup", 2
            elif "memory" in controllers.split(","):
                top, version = root / "sys/fs/cgroup/memory", 1
            else:
                continue
            folder = top / path.lstrip("/")
            # Inside a container the path may be the host's; the container's cgroup is then mounted at the top.
            hierarchies.append((folder if folder.is_dir() else top, top, version))
    return hierarchies


def _counter(file: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


@functools.cache
def process_scope() -> str:
    """Return the scope within which a process id is unique: this boot of this machine, and its pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()} 0"


def identity() -> dict[str, Any]:
    """Return plain JSON that identifies this process uniquely, even after its process id is used again."""
    import psutil

    return {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}


def has_ended(who: Mapping[str, Any]) -> bool:
    """Return whether the process of an `identity` is certainly gone; False for processes of other machines."""
    import psutil

    if who["host"] != socket.gethostname():
        return False
    try:
        process = psutil.Process(who["pid"])
        same = abs(process.create_time() - who["began"]) < _CLOCK_S
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write `content` so that a reader of `path` sees either the old file or the whole new one. `durable` content is on
    disk on return, so that a power cut leaves no empty file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not made by mkstemp, whose files only their owner may read: the umask decides who may read this file.
    name = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        with open(name, "xb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


class Stopped(KeyboardInterrupt):
    """Raised when a signal requests that this command stops."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """The handlers of this process for the signals in `CAUGHT`."""

    def __init__(self) -> None:
        self._number = 0  # number of the last signal
        self._came = -math.inf

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Raise `Stopped`, unless it was raised less than a second ago (a signal handler)."""
        now = time.monotonic()
        if now - self._came > _REPEATED_S:
            self._number, self._came = number, now
            raise Stopped(number)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """In this block, raise `Stopped` if a signal arrived but Ray raised its own KeyboardInterrupt."""
        try:
            yield
        except KeyboardInterrupt as error:
            if isinstance(error, Stopped) or not self._number:
                raise
            raise Stopped(self._number) from error

    def ignore(self) -> None:
        """Ignore these signals from now on."""
        if threading.current_thread() is threading.main_thread():
            for number in CAUGHT:
                signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_raise() -> Iterator[Signals]:
    """In this block, make the signals in `CAUGHT` raise `Stopped`. Only the main thread can set such handlers."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    # SIGHUP stays ignored where it was ignored (nohup), so that the run outlives the terminal.
    caught = [number for number in CAUGHT if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signals.stop) for number in caught}
    try:
        with signals.raised():
            yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
