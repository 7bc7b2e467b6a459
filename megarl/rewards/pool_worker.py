"""One process of the reward pool: `python -m megarl.rewards.pool_worker FD`, driven over that socket by `pool.py`.

It loads the reward function itself, so a user's file never runs in a training process. It ends when its parent does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

#: Samples, and whether to stop at the first failure, to (index, outcome) of each.
Work = Callable[[list[Any], bool], Iterable[tuple[int, Any]]]
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Score until the parent closes the connection."""
    run(_scoring)


def run(load: Callable[[dict[str, Any]], Work]) -> None:
    """Serve until the parent closes the connection, with what `load` makes of the parent's setup."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    conn = Connection(int(sys.argv[1]))
    try:
        serve(conn, load)
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone, and nobody waits for a clean interpreter shutdown


def serve(conn: Connection, load: Callable[[dict[str, Any]], Work]) -> None:
    """Load the function, say so, then work off chunk after chunk, one message per sample."""
    from megarl.errors import UserError

    setup = conn.recv()
    sys.path[:] = setup["sys_path"]
    try:
        work = load(setup)
    except UserError as error:
        conn.send(("refused", str(error)))
        return
    conn.send(("ready",))
    while True:
        samples, stop_at_failure = conn.recv()
        for index, outcome in work(samples, stop_at_failure):
            conn.send(("scored", index, outcome))
        conn.send(("idle",))


def _scoring(setup: dict[str, Any]) -> Work:
    from megarl.rewards.registry import load_scorer
    from megarl.rewards.scoring import score

    return partial(score, load_scorer(setup["name"], setup["mode"], setup["kwargs"]))


if __name__ == "__main__":
    main()
