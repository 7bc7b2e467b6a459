"""Programs whose output nobody reads any more, as before `| head -1`: they end quietly."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

#: 128 and the number of SIGPIPE, as shells tell it of programs that this signal ends.
EXIT_CODE = 141


def nobody_reads() -> bool:
    """Whether the reader of what this program prints has gone."""
    return any(_gone(file) for file in _outputs())


def run_quietly(run: Callable[[], int]) -> int:
    """The exit code of `run`, or EXIT_CODE without a word where it ends because nobody reads what it prints.

    Raises:
        BrokenPipeError: it is about another pipe.
    """
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # the interpreter does it when it ends, where nobody can catch the error
    except BrokenPipeError:
        if not nobody_reads():
            raise
    except SystemExit as end:  # rich makes one of the error, and closes the output
        if not isinstance(end.__context__, BrokenPipeError):
            raise
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in _outputs():
        if _gone(file):
            os.dup2(nowhere, file)  # what is left in buffers
    return EXIT_CODE


def _outputs() -> list[int]:
    """Descriptors of the outputs; none where a test takes what is printed."""
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
