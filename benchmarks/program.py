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


def run_program(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, float]:
    """Standard output of a program, and the share of the machine that others took meanwhile (see `OthersShare`).

    A SIGTERM to this process ends the program as well: one that keeps running would spoil the next measurement.

    Raises:
        WorkerError: it ended with an exit code other than 0.
    """
    with OthersShare() as others, _sigterm_raises():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr[-SHOWN:]
        raise WorkerError(f"{shlex.join(command)} ended with exit code {done.returncode}:\n{said}")
    return done.stdout, others.share


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
