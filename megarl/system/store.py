"""A key-value store of torch between processes, for any thread, with errors that name rank and phase.

    thread of rank K   `SharedStore` -> a connection of its own --.
    another thread     `SharedStore` -> a connection of its own --+--> thread of rank 0's process, without Python

torch's client holds a lock while it waits for a key, so threads with one connection would wait for each other's keys.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from megarl.system import tracing

# Seconds between the first two checks for a key in `has`, and the longest pause, with which 1,000 waiting ranks take
# less than a fifth of the store's thread.
_PAUSE_S = 0.001, 0.05


class SharedStore:
    """This process's connections to a store. Keys and values are those of torch.

    Every call raises WorkerError if the store is gone; the message names this rank and its phase.

    Args:
        store: connection of the thread that makes this object.
        who: name of this rank, for messages.
        deadline: deadline of every call, which torch enforces, and its key, for messages.
    """

    def __init__(self, store: dist.Store, who: str, deadline: str) -> None:
        self._first, self._who, self._deadline = store, who, deadline
        self._threads = threading.local()
        self._threads.store = store

    @property
    def connection(self) -> dist.Store:
        """This thread's connection."""
        if not hasattr(self._threads, "store"):
            with self._located("a connection"):
                self._threads.store = self._first.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        return self._threads.store

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, in place of an older one."""
        with self._located(f"writing {key}"):
            self.connection.set(key, value)  # type: ignore[arg-type]  # str in torch's stub

    def set_if(self, key: str, expected: str, value: str) -> None:
        """Write a value if the key has the value `expected`; an empty one: if the key does not exist."""
        with self._located(f"writing {key}"):
            self.connection.compare_set(key, expected, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it exists.

        Raises:
            WorkerError: it does not exist within the deadline.
        """
        with self._located(key):
            return self.connection.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys by one message; wait until all exist, as `get` does."""
        with self._located(", ".join(keys[:3])):
            return self.connection.multi_get(list(keys)) if keys else []

    def add(self, key: str, number: int) -> int:
        """Add a number to the value of a key, which begins at 0, and return the sum."""
        with self._located(f"writing {key}"):
            return self.connection.add(key, number)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist. Never waits."""
        with self._located(", ".join(keys[:3])):
            return self.connection.check(list(keys))

    def has(self, key: str, seconds: float) -> bool:
        """Wait for a key up to a number of seconds; return whether it exists.

        This checks several times: for each of its own waits that ends without the key, torch prints two warnings.
        """
        end, pause = time.monotonic() + seconds, _PAUSE_S[0]
        with self._located(key):
            while not self.connection.check([key]):
                left = end - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(pause, left))
                pause = min(2 * pause, _PAUSE_S[1])
            return True

    def delete(self, *keys: str) -> None:
        """Delete keys, of which any may be missing."""
        with self._located("deleting keys"):
            for key in keys:
                self.connection.delete_key(key)

    @contextlib.contextmanager
    def _located(self, what: str) -> Iterator[None]:
        def late(phase: str) -> str:
            return (
                f"{self._who} timed out waiting for {what} in the store, in phase {phase} (deadline {self._deadline})"
            )

        def gone(phase: str) -> str:
            return (
                f"{self._who}: the connection was closed to the store in rank 0's process, in phase {phase} ({what}); "
                "has rank 0 ended?"
            )

        with tracing.located(RuntimeError, gone), tracing.located(dist.DistStoreError, late):
            yield
