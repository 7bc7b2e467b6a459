"""Quiet end of a program whose output is no longer read, as before `| head -1`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

#: 128 and the number of SIGPIPE, as shells report programs that this signal ends.
EXIT_CODE = 141


def reader_is_gone() -> bool:
    """Return whether the reader of this program's output has gone."""
    return any(_gone(file) for file in _outputs())


def run_quietly(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, or silently EXIT_CODE when it ends because nobody reads its output.

    Raises:
        BrokenPipeError: another pipe is broken.
    """
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # the interpreter flushes at its end, where nobody can catch the error
    except BrokenPipeError:
        if not reader_is_gone():
            raise
    except SystemExit as end:  # rich converts the error, and closes the output
        if not isinstance(end.__context__, BrokenPipeError):
            raise
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in _outputs():
        if _gone(file):
            os.dup2(nowhere, file)  # unwritten output in buffers
    return EXIT_CODE


def _outputs() -> list[int]:
    """Return the descriptors of the outputs; none where a test captures them."""
    found = []
    for stream in (sys.stdout, sys.stderr):
        try:
            found.append(stream.fileno())
        except (AttributeError, OSError, ValueError):
            continue
    return found


def _gone(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
