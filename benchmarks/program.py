"""Run a program that is measured: to its end, or not at all."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from megarl.benchmarks.quiet import OthersShare
from megarl.errors import WorkerError

SHOWN = 3000  # characters of its messages that an error repeats
_GRACE_S = 20.0  # for a program that is asked to end: it ends its workers first


def run_program(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, float]:
    """Standard output of a program, and the share of the machine that others took meanwhile (see `OthersShare`).

    A SIGTERM to this process ends the program as well: one that keeps running would spoil the next measurement.

    Raises:
        WorkerError: it ended with an exit code other than 0.
    """
    with OthersShare() as others, _sigterm_raises():
        code, output, said = _to_its_end(command, environment)
    if code != 0:
        raise WorkerError(f"{shlex.join(command)} ended with exit code {code}:\n{said[-SHOWN:]}")
    return output, others.share


def _to_its_end(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors. Where this process is stopped meanwhile, the program may end its own programs."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as program:
        try:
            output, said = program.communicate()
        except BaseException:
            program.terminate()
            try:
                program.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                program.kill()
            raise
    return program.returncode, output, said


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
