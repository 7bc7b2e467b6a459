"""Collects progress reports of a team's workers in the team's own store, so that one worker reports them to the buffer
for all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from megarl.disaggregated.buffer.progress import Ping

if TYPE_CHECKING:
    from megarl.system.store import SharedStore


class TeamProgress:
    """Writes and reads progress reports of a team's workers. Reports go through the team's store because it answers in
    tens of microseconds, without Python, while a call costs the buffer's single process about a millisecond.

    Args:
        store: the store of the team's world.
        rank: this worker's rank in the team.
        size: number of workers of the team.
    """

    def __init__(self, store: SharedStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._missing, self._known = list(range(size)), dict[int, str]()

    def write(self, ping: Ping) -> None:
        """Write this worker's progress report to the store, in place of its last one."""
        self._store.set(_key(self._rank), json.dumps(ping))

    def news(self) -> dict[int, Ping]:
        """Return the progress reports that workers have written since the last call, by rank, without waiting."""
        if self._missing and self._store.check([_key(rank) for rank in self._missing]):
            self._missing = []
        self._missing = [rank for rank in self._missing if not self._store.check([_key(rank)])]
        ranks = [rank for rank in range(self._size) if rank not in self._missing]  # get_all waits for missing keys
        texts = [text.decode() for text in self._store.get_all([_key(rank) for rank in ranks])]
        new = {rank: text for rank, text in zip(ranks, texts, strict=True) if self._known.get(rank) != text}
        self._known |= new
        return {rank: Ping(*json.loads(text)) for rank, text in new.items()}


def _key(rank: int) -> str:
    return f"progress/{rank}"
