"""Changes to torchrun: the signal by which its agent ends workers, and the listening socket of its store."""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous


def end_workers_with(number: signal.Signals) -> None:
    """Make torchrun's agent in this process end workers with the signal `number` instead of SIGTERM."""
    handler: Any = SubprocessHandler
    close = handler.close

    def close_with(self: Any, death_sig: signal.Signals | None = None) -> None:
        close(self, number if death_sig in (None, signal.SIGTERM) else death_sig)

    handler.close = close_with


def serve_on(handle: int) -> None:
    """Make torchrun's agent in this process, if it is the first machine's, serve its TCPStore on the listening socket
    with the file descriptor `handle`."""
    rendezvous: Any = static_tcp_rendezvous
    make = rendezvous.TCPStore

    def store(host: str, port: int, world_size: int, is_master: bool, *args: Any, **kwargs: Any) -> Any:
        if is_master:
            kwargs["master_listen_fd"] = handle
        return make(host, port, world_size, is_master, *args, **kwargs)

    rendezvous.TCPStore = store
