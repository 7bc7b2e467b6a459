"""The signal by which torchrun's agent ends its workers: torch takes SIGTERM when one of them has failed."""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def end_workers_with(number: signal.Signals) -> None:
    """Make the agent in this process send `number` in place of SIGTERM."""
    handler: Any = SubprocessHandler
    close = handler.close

    def close_with(self: Any, death_sig: signal.Signals | None = None) -> None:
        close(self, number if death_sig in (None, signal.SIGTERM) else death_sig)

    handler.close = close_with
