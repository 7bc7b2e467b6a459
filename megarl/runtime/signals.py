"""Signals that end a run are its launcher's to decide on; a worker that gets one itself asks for a checkpoint.

Batch systems and containers may signal every process of a job at once (`scancel`, systemd, `kill -- -GROUP`). The
launcher has the step finished and saved then (megarl.launchers.interrupt), and ends its workers by other signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType

from megarl.artifacts.batch import SAVE
from megarl.processes import own_worker_name

_LEFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_to_launcher(run_dir: Path) -> None:
    """From now on these signals do not end this process, but ask the run in `run_dir` for a checkpoint.

    What it starts is ended by them as always: a handler does not outlive exec, and a fork gets the default again.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # the launcher asks, too, if it got the signal
            (run_dir / SAVE).touch()
            os.write(2, f"{own_worker_name()}: {name}: asks for a checkpoint; its launcher ends the run\n".encode())

    for number in _LEFT:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup: it stays ignored
            signal.signal(number, ask)
            signal.siginterrupt(number, False)  # a call of a library goes on
    os.register_at_fork(after_in_child=_as_always)


def _as_always() -> None:
    for number in _LEFT:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
