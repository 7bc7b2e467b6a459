"""Ends a program quietly when nobody reads its output any more, as with `| head -1`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable

#: 128 plus the number of SIGPIPE, as shells report programs that this signal ends.
EXIT_CODE = 141


def reader_is_gone() -> bool:
    """Return whether nobody reads this program's output any more."""
    return bool(_unread_outputs())


def run_quietly(run: Callable[[], int]) -> int:
    """Return the exit code of `run`; return EXIT_CODE without a message when `run` ends because nobody reads its
    output. Raise BrokenPipeError if another pipe is broken.
    """
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # the interpreter flushes at exit, where the error could not be caught
    except BrokenPipeError:
        if not reader_is_gone():
            raise
    except SystemExit as end:  # rich turns the error into SystemExit and closes the output
        if not isinstance(end.__context__, BrokenPipeError):
            raise
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in _unread_outputs():
        os.dup2(nowhere, file)  # discard buffered output
    return EXIT_CODE


def _unread_outputs() -> list[int]:
    """Return the file descriptors of outputs whose reader has gone; none where a test captures them."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            poll.register(stream.fileno(), 0)
    return [file for file, event in poll.poll(0) if event & select.POLLERR]
