"""torchrun's store on a listening socket of ours: torch would listen on every interface."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous import static_tcp_rendezvous


def serve_on(handle: int) -> None:
    """Make the agent of the first machine, in this process, put its store on the listening socket `handle`."""
    rendezvous: Any = static_tcp_rendezvous
    make = rendezvous.TCPStore

    def store(host: str, port: int, world_size: int, is_master: bool, *args: Any, **kwargs: Any) -> Any:
        if is_master:
            kwargs["master_listen_fd"] = handle
        return make(host, port, world_size, is_master, *args, **kwargs)

    rendezvous.TCPStore = store
