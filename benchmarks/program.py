"""Run the programs of a benchmark, and measure how much of the machine other programs used meanwhile."""

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

SHOWN = 3000  # characters of a program's output that an error repeats
LIMIT_S = 6 * 3600.0  # far above what a round takes, so that only a program that hangs reaches it
# Seconds between SIGTERM and SIGKILL. Each program gives the programs that it runs less than it has itself, so that the
# innermost program, which has workers and GPUs, is killed before the programs around it are.
_GRACE, _GRACE_S, _LESS_S, _LEAST_S = "MEGARL_BENCH_GRACE_S", 60.0, 15.0, 5.0


def run_program(
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    limit_s: float = LIMIT_S,
    merged: bool = False,
) -> tuple[str, float]:
    """Run a program in a session of its own. Return its standard output, and the share of the machine that other
    programs took meanwhile (see `OthersShare`).

    SIGTERM to this process also ends the program, which would spoil the next measurement if it went on. If it does not
    end within a grace, its process group is killed.

    Args:
        limit_s: seconds after which the program is stopped.
        merged: the output includes standard error.

    Raises:
        WorkerError: the program ended with an exit code other than 0, or not within its limit.
    """
    grace = float(os.environ.get(_GRACE, _GRACE_S))
    with (
        OthersShare() as others,
        _sigterm_raises(),
        subprocess.Popen(
            command,
            env={**environment, _GRACE: str(max(_LEAST_S, grace - _LESS_S))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as program,
    ):
        try:
            output, errors = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            last = _stop(program, grace)[-SHOWN:]
            raise WorkerError(
                f"{shlex.join(command)} did not end within {limit_s:g} s, and was stopped; its last output:\n{last}"
            ) from error
        except BaseException:
            _stop(program, grace)
            raise
    if program.returncode != 0:
        last = (output if merged else errors)[-SHOWN:]
        raise WorkerError(f"{shlex.join(command)} ended with exit code {program.returncode}:\n{last}")
    return output, others.share


def _stop(program: subprocess.Popen[str], grace: float) -> str:
    """Send SIGTERM, and kill the process group after the grace; return the program's errors, or else its output."""
    try:
        program.terminate()
        # The pipes are read meanwhile, because a program that writes into a full pipe cannot end.
        output, errors = program.communicate(timeout=grace)
        return errors or output
    except subprocess.TimeoutExpired:
        return f"(none: it did not end within {grace:g} s of SIGTERM either, and was killed)"
    finally:
        with contextlib.suppress(ProcessLookupError):  # raised if the whole process group has ended
            os.killpg(program.pid, signal.SIGKILL)


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
    """Measures the share of the machine that other programs take during a block. The block's own programs are child
    processes that end within it.

    Attributes:
        share: after the block: CPU time used by processes other than this one and its children, or given to other
            guests by the hypervisor, as a share of all cores. Wall seconds mean something when it is near 0.
    """

    share = 0.0

    def __enter__(self) -> OthersShare:
        self._start = (_busy(), _own(), time.perf_counter())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        busy, used, start = self._start
        capacity = (time.perf_counter() - start) * (os.cpu_count() or 1)
        self.share = max(0.0, (_busy() - busy) - (_own() - used)) / capacity


def _busy() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
