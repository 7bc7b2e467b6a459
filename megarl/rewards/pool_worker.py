"""One process of the reward pool: `python -m megarl.rewards.pool_worker FD`, controlled over that socket by `pool.py`.

It loads the reward function itself, so a user's file never runs in a training process. It ends when its parent does.

    parent    setup, then chunks: samples, stop_at_failure
    process   ready (whether it asks for images), or refused (text); then per sample: scored (index, result or failure),
              and idle after a chunk; or refused, where a built-in reward cannot score as it is configured
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megarl.system.plain import PlainInbox, pack
from megarl.system.reaper import guarded

#: A work function: (samples, stop at the first failure) -> (index, outcome) of each sample.
Work = Callable[[list[Any], bool], Iterable[tuple[int, Any]]]
_ANY = (1 << 32) - 1  # no limit in bytes, because the parent is trusted


def main() -> None:
    """Score until the parent closes the connection."""
    run(_scoring)


def run(load: Callable[[dict[str, Any]], tuple[Work, bool]]) -> None:
    """Score until the parent closes the connection, with the function that `load` returns for the parent's setup.
    `load` also returns whether the function uses images."""
    handle = int(sys.argv[1])
    guarded(handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but the parent decides when it ends
    with socket.socket(fileno=handle) as parent, contextlib.suppress(OSError):
        serve(parent, load)
    sys.stdout.flush()
    os._exit(0)  # the parent is gone, so no clean shutdown is needed


def serve(parent: socket.socket, load: Callable[[dict[str, Any]], tuple[Work, bool]]) -> None:
    """Load the function, report that, then score chunk after chunk with one message per sample until the parent hangs
    up."""
    from megarl.rewards.images import unpacked
    from megarl.rewards.scoring import plain_outcome
    from megarl.system.errors import UserError

    messages = _messages(parent)
    setup = next(messages, None)
    if setup is None:
        return
    sys.path[:] = setup["sys_path"]
    try:
        work, uses_images = load(setup)
        parent.sendall(pack({"kind": "ready", "images": uses_images}))
        for message in messages:
            for index, outcome in work(unpacked(message), message["stop_at_failure"]):
                parent.sendall(pack({"kind": "scored", "index": index, **plain_outcome(outcome)}))
            parent.sendall(pack({"kind": "idle"}))
    except UserError as error:
        parent.sendall(pack({"kind": "refused", "text": str(error)}))


def _messages(parent: socket.socket) -> Iterator[dict[str, Any]]:
    inbox = PlainInbox(_ANY, 0, None)
    while data := parent.recv(1 << 20):
        inbox.feed(data)
        while (message := inbox.take()) is not None:
            yield message[0]


def _scoring(setup: dict[str, Any]) -> tuple[Work, bool]:
    from megarl.rewards.images import with_images
    from megarl.rewards.registry import load_scorer
    from megarl.rewards.scoring import score

    scorer = load_scorer(setup["name"], setup["mode"], setup["kwargs"])

    def work(samples: list[Any], stop_at_failure: bool) -> Iterable[tuple[int, Any]]:
        return score(scorer, with_images(samples) if scorer.uses_images else samples, stop_at_failure)

    return work, scorer.uses_images


if __name__ == "__main__":
    main()
