"""Run a program that is measured, to its end or not at all, and tell what else used the machine meanwhile."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType

import psutil

from megarl.system.errors import WorkerError

SHOWN = 3000  # characters of its messages that an error repeats
LIMIT_S = 6 * 3600.0  # of a program: far above what a round takes, so that one that hangs is told
# A program that is asked to end has the grace of this process, and gives less to what it runs itself: so the program
# at the bottom, which has workers and GPUs, has been killed before the one above it would be.
_GRACE, _GRACE_S, _LESS_S, _LEAST_S = "MEGARL_BENCH_GRACE_S", 60.0, 15.0, 5.0


def run_program(
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    limit_s: float = LIMIT_S,
    merged: bool = False,
) -> tuple[str, float]:
    """Return the standard output of a program, and the share of the machine that others took meanwhile (see
    `OthersShare`).

    The program has a session of its own. A SIGTERM to this process ends the program as well: one that keeps running
    would spoil the next measurement. All of its process group is killed where it does not end within a grace.

    Args:
        limit_s: seconds after which it is stopped.
        merged: what it writes to standard error is part of its output.

    Raises:
        WorkerError: it ended with an exit code other than 0, or not within its limit.
    """
    with OthersShare() as others, _sigterm_raises():
        code, output, said = _to_its_end(command, environment, limit_s, merged=merged)
    if code != 0:
        raise WorkerError(f"{shlex.join(command)} ended with exit code {code}:\n{said[-SHOWN:]}")
    return output, others.share


def _to_its_end(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, *, merged: bool
) -> tuple[int, str, str]:
    """Return the exit code, output, and what an error repeats of it."""
    grace = float(os.environ.get(_GRACE, _GRACE_S))
    given = {**environment, _GRACE: str(max(_LEAST_S, grace - _LESS_S))}
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    with subprocess.Popen(
        command, env=given, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
    ) as program:
        try:
            output, said = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            said = _stop(program, grace)
            raise WorkerError(
                f"{shlex.join(command)} did not end within {limit_s:g} s, and was stopped; it said last:\n"
                f"{said[-SHOWN:]}"
            ) from error
        except BaseException:
            _stop(program, grace)
            raise
    return program.returncode, output, output if merged else said


def _stop(program: subprocess.Popen[str], grace: float) -> str:
    """Ask it to end, and kill its process group after the grace; what it has said, as far as it ended by itself."""
    said = ""
    try:
        program.terminate()
        # Its pipes are read meanwhile: a program that writes into a full one could not end.
        output, errors = program.communicate(timeout=grace)
        said = errors or output
    except subprocess.TimeoutExpired:
        said = f"(nothing: it did not end within {grace:g} s of SIGTERM either, and was killed)"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(program.pid, signal.SIGKILL)
    return said


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class OthersShare:
    """The share of the machine that others take while a block runs its programs as child processes that end before it
    does.

    Attributes:
        share: after the block: CPU time that neither the children nor this process used, or that the hypervisor gave to
            other guests, as a share of what all cores had to give. Wall seconds are worth quoting when it is near 0.
    """

    share = 0.0

    def __enter__(self) -> OthersShare:
        self._start = (_busy(), _own(), time.perf_counter())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        busy, own, start = self._start
        capacity = (time.perf_counter() - start) * (os.cpu_count() or 1)
        self.share = max(0.0, (_busy() - busy) - (_own() - own)) / capacity


def _busy() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
