"""The trainer's side of one simulator process: a socket, shared memory for pictures, and its last output."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.robots.envs.settings import SimulatorSettings
from megarl.robots.simulators import start
from megarl.robots.simulators.protocol import Frame, Recording, TaskSpec
from megarl.robots.simulators.wire import Inbox, Message, clip_places, pack, places
from megarl.system.errors import ConfigError
from megarl.system.parents import as_parent
from megarl.system.plain import Malformed, short, whole

_EXIT_S = 10.0  # seconds to wait after SIGTERM; the guardian needs up to 5 s to kill all children
_TOLD_S = 0.5  # seconds in which a hanging process prints its stack traces, or an ended one's output is read
_LINES, _BYTES = 15, 8000
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")


class SimulatorProcess:
    """A started process, which handles one call at a time.

    Attributes:
        waiting: kinds of the pending answers, in order.
        since: time when the wait for the first pending answer began.
    """

    def __init__(self, settings: SimulatorSettings, where: str, cuda_device: int | None) -> None:
        python = os.path.expanduser(settings.python or sys.executable)
        ours, theirs = socket.socketpair()
        # Memory without a name: the kernel frees it with its last user. Sealed, so that nobody truncates mapped memory.
        self._memory = os.memfd_create("megarl-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._map: mmap.mmap | None = None
        with theirs:
            handed = [theirs.fileno(), self._memory]
            command = [python, "-I", "-u", str(Path(start.__file__).resolve()), *map(str, handed)]
            try:
                self.process = subprocess.Popen(
                    command,
                    pass_fds=handed,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    # starts a process group of its own, so that the simulator's children are killed too
                    start_new_session=True,
                    env=environment(settings, where, cuda_device),
                )
            except OSError as error:
                ours.close()
                os.close(self._memory)
                fix = "name the interpreter of the simulator's environment, .../bin/python"
                problem = f"the simulator's interpreter does not start: {error.strerror}"
                raise ConfigError(problem, where=f"{where}.python", found=python, fix=fix) from error
        self.socket = ours
        self.socket.setblocking(False)
        self._inbox, self._output = Inbox(), _Tail(self.process)
        self._closed_output: str | None = None
        self._send_s = settings.answer_s
        self.waiting: deque[str] = deque()
        self.since = time.monotonic()
        given = {"settings": settings.own, "tasks": settings.tasks, "kept": settings.kept}
        given["rows"] = settings.workers if settings.batched else 0
        self.ask({"call": "open", "name": settings.name, **given}, ["open"])

    def ask(
        self, header: Mapping[str, Any], answers: Sequence[str], arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Send a call to the process; return after at most `answer_s` seconds, even if the process does not read it.

        Errors are left to `read`: it raises EOFError for a dead process, and the answer to an unread call never comes.

        Args:
            header, arrays: the message.
            answers: the kinds of the answers that the call gets, in order.
        """
        if not self.waiting:
            self.since = time.monotonic()
        self.waiting.extend(answers)
        with contextlib.suppress(OSError):  # the process is gone or reads too slowly, or the socket is closed
            self.socket.settimeout(self._send_s)  # sending may block: a call may be larger than the socket's buffer
            self.socket.sendall(pack(header, arrays))
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)

    def read(self) -> list[Message]:
        """Return the answers that have arrived.

        Raises:
            EOFError: the process is gone.
            Malformed: an answer is invalid, or was not requested.
        """
        answers: list[Message] = []
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                return answers
            except ConnectionError:
                data = b""
            if not data and not answers:
                raise EOFError
            if not data:
                return answers  # the process has closed its end, for which the next call raises EOFError
            self._inbox.feed(data)
            while (message := self._inbox.take()) is not None:
                if len(answers) == len(self.waiting):
                    raise Malformed("the process sent an answer that was not requested")
                answers.append(message)
                self.since = time.monotonic()

    def frames(self, spec: TaskSpec, base: int = 0) -> dict[str, Frame]:
        """Return copies of the pictures of the last answer, by camera; `base`: where they begin in the shared memory,
        in bytes.

        Raises:
            Malformed: the shared memory is too small for the pictures.
        """
        layout, size = places(spec)
        memory = self._mapped(base + size)
        return {camera: np.ndarray(shape, np.uint8, memory, base + at).copy() for camera, (at, shape) in layout.items()}

    def clip(self, spec: TaskSpec, recording: Recording, counts: Any, base: int = 0) -> dict[str, NDArray[np.uint8]]:
        """Return a copy of the last answer's clip, the recorded frames of an episode: uint8 [n, H, W, 3] by camera.

        Args:
            counts: number of frames n by camera, as the process sent it.
            base: where the episode's pictures begin in the shared memory, in bytes.

        Raises:
            Malformed: the clip has other cameras or more frames than requested, or the shared memory is too small.
        """
        offsets, size = clip_places(spec, recording)
        if not isinstance(counts, Mapping) or set(counts) != set(offsets):
            names = sorted(counts) if isinstance(counts, Mapping) else short(counts)
            raise Malformed(f"the clip must have frames of the cameras {sorted(offsets)}, not of {names!s:.200}")
        for number in counts.values():
            whole(number, range(1, recording.frames + 1), "the number of frames of a clip")
        memory = self._mapped(base + size)
        return {
            camera: np.ndarray((counts[camera], *spec.cameras[camera], 3), np.uint8, memory, base + at).copy()
            for camera, at in offsets.items()
        }

    def _mapped(self, size: int) -> mmap.mmap | None:
        if size > os.fstat(self._memory).st_size:
            memory = os.fstat(self._memory).st_size
            raise Malformed(
                f"the pictures of this answer take {size} bytes, but the simulator's process made the shared memory "
                f"only {memory} bytes large"
            )
        if size and (self._map is None or len(self._map) < size):
            self._map = mmap.mmap(self._memory, size, prot=mmap.PROT_READ)
        return self._map

    def print_stack(self) -> None:
        """Make a hanging process print its stack traces."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGUSR1)
        self.wait(_TOLD_S)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until the process has ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def kill(self) -> str:
        """Kill the process and its children, and return their last lines of output."""
        if self._closed_output is None:
            self.socket.close()
            self.process.terminate()  # ends the guardian, which finds children outside the group (megarl.system.reaper)
            self.wait(_EXIT_S)
            with contextlib.suppress(OSError):  # raised if the process group is empty
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            if self._map is not None:
                self._map.close()
            os.close(self._memory)
            self._closed_output = self._output.close()
        return self._closed_output


class _Tail:
    """Reads a process's output in a thread, so that the process never blocks, and keeps the last lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._file, self._kept = process.stdout, b""
        self._thread = threading.Thread(target=self._read, name="simulator-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._file.fileno(), 1 << 16):
            self._kept = (self._kept + data)[-_BYTES:]

    def close(self) -> str:
        """Read to the end of the ended process's output, and return its last lines for an error message."""
        self._thread.join(_TOLD_S)
        if not self._thread.is_alive():  # otherwise a process that left the process group still has the pipe open
            self._file.close()
        lines = self._kept.decode(errors="replace").replace("\r", "\n").splitlines()
        return "\n".join([line for line in lines if line.strip()][-_LINES:])


def environment(settings: SimulatorSettings, where: str, cuda_device: int | None) -> dict[str, str]:
    """Return the environment variables for a simulator's process.

    A process with many environments (`batched`) sees only this rank's CUDA device.

    Args:
        where: dotted path of the recipe's section with `settings`, for messages.
        cuda_device: this rank's CUDA device, as the recipe's `egl_devices` numbers it; None: the rank has none.

    Raises:
        ConfigError: `egl_devices` lacks the device.
    """
    made = {**os.environ, **as_parent(), **dict.fromkeys(_THREADS, str(settings.threads))}
    if settings.batched and cuda_device is not None:  # the process simulates on this device, its device 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        made["CUDA_VISIBLE_DEVICES"] = visible[cuda_device].strip() if visible[0] else str(cuda_device)
    if not settings.egl_devices or cuda_device is None:
        return made
    if cuda_device not in settings.egl_devices:
        raise ConfigError(
            f"CUDA device {cuda_device} has no EGL device in this mapping",
            where=f"{where}.egl_devices",
            found=settings.egl_devices,
            fix=f"add {cuda_device}: NUMBER; `eglinfo` lists the devices in the order of their numbers",
        )
    made["MUJOCO_EGL_DEVICE_ID"] = str(settings.egl_devices[cuda_device])
    # robosuite refuses an EGL device number that CUDA_VISIBLE_DEVICES does not list, so remove the variable.
    if not settings.batched:
        made.pop("CUDA_VISIBLE_DEVICES", None)
    return made
