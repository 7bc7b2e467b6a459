"""Passes rounds of weights from a trainer rank to the server rank on its GPU, through two buffers that both map.

    trainer rank   fill A, fill B, wait until A is copied, fill A, ...
    server rank    wait until A is filled, copy A to its parameters, wait until B is filled, ...

Both count their rounds on a page of host memory that they share, so a round takes no message. Servers' processes, which
lack megarl, load this file too, so it imports nothing of megarl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PAGE_BYTES = 128
_POLL_S = 0.0002  # seconds between two looks at a count
_COPIED = 8  # the two counts lie on different cache lines, because different processes write them


class HandoverPage:
    """How many rounds of an update a trainer rank has filled, and how many the server rank on its GPU has copied.

    Writes of a count are atomic, because its 8 bytes are aligned. Each process writes its own count only after the
    device has done what the count reports. On a CPU this relies on a processor that keeps the order of writes, as x86
    does.

    Args:
        memory: uint8 [`PAGE_BYTES`], host memory that both processes map; zeros at the start of an update.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._counts = memory.view(torch.int64).numpy()

    @property
    def filled(self) -> int:
        """Number of rounds whose bytes are in their buffer."""
        return int(self._counts[0])

    @filled.setter
    def filled(self, rounds: int) -> None:
        self._counts[0] = rounds

    @property
    def copied(self) -> int:
        """Number of rounds whose buffer may be filled again."""
        return int(self._counts[_COPIED])

    @copied.setter
    def copied(self, rounds: int) -> None:
        self._counts[_COPIED] = rounds


def wait_for(count: Callable[[], int], rounds: int, look: Callable[[], str | None], deadline_s: float) -> str | None:
    """Wait until the other process has counted up to `rounds`; return why the wait ended without that, or None.

    Args:
        count: returns the other process's count.
        look: called while this call waits; returns why it has to end, such as another rank that is gone, or None.
        deadline_s: seconds after which the wait ends.
    """
    end = time.monotonic() + deadline_s
    while count() < rounds:
        if (why := look()) is not None:
            return why
        if time.monotonic() > end:
            return f"not done within {deadline_s:g} s"
        time.sleep(_POLL_S)
    return None


def device_name(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes; an empty string for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@torch.no_grad()
def copy_rounds(
    rounds: Sequence[Any], page: HandoverPage, look: Callable[[], str | None], deadline_s: float
) -> str | None:
    """Copy all rounds of an update from the buffers to a server rank's parameters; return why that failed, or None.

    Args:
        rounds: the `exchange.Round` of each, whose `parts` are in the buffers.
        look: as for `wait_for`.
        deadline_s: seconds in which each round has to be filled.
    """
    for number, now in enumerate(rounds, 1):
        if (why := wait_for(lambda: page.filled, number, look, deadline_s)) is not None:
            return f"{now.name}, which its proxy receives: {why}"
        if now.parts:
            torch._foreach_copy_(now.parameters, now.parts)
            if now.parts[0].is_cuda:
                torch.cuda.current_stream(now.parts[0].device).synchronize()
        page.copied = number
    return None
