"""Rendezvous of a run's ranks: torch's store, listening on one address, with keys that only the run's ranks know.

    launcher: a token in RUN_DIR/token     a listening socket on loopback, or on the address in MASTER_ADDR
                        |                                    |
                        v                                    v
    rank K: writes HMAC(token)/rank_K to the store of rank 0, which names the ranks that do not come

The store itself has no authentication: any process that reaches its address can read and write it. The prefix keeps out
processes of other runs and accidental strangers, not an attacker who rewrites the store's content.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.system.errors import ConfigError, UnavailableError, WorkerError
from megarl.system.processes import address_towards, is_address_here

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)
# file descriptor of the listening socket that a launcher passes to the process with the store
LISTENER = "MEGARL_BUFFER_FD"
_TOKEN_FILE = "token"
#: Environment variables (torchrun's names) with numbers that describe a worker's place in its team, and the lowest and
#: highest number that each may have; None: no limit.
_NUMBERS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), (0, None)),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), (1, None)),
    "MASTER_PORT": (1, 65535),
}
_BACKLOG = 4096  # all ranks of a large run connect at once; the kernel uses its own limit if that is lower


def write_token(run_dir: Path) -> None:
    """Create a random token for the run, in a file in the run folder that only the user can read."""
    path = run_dir / _TOKEN_FILE
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))


def read_token(run_dir: Path) -> bytes | None:
    """Return the run's secret, which proves that a process belongs to it; None if no launcher of megarl started it."""
    with contextlib.suppress(FileNotFoundError):
        return (run_dir / _TOKEN_FILE).read_bytes()
    return None


def run_key(run_dir: Path, purpose: str) -> str:
    """Return a secret for one purpose that all processes of the run can derive from its token. Raise WorkerError if the
    run has no token, because no launcher of this package started it.
    """
    token = read_token(run_dir)
    if token is None:
        raise WorkerError(f"the run has no token in {run_dir}: start it through `megarl train`")
    return hmac.new(token, purpose.encode(), hashlib.sha256).hexdigest()


def forget_token(run_dir: Path) -> None:
    """Delete the file with the secret token of a run that has ended."""
    (run_dir / _TOKEN_FILE).unlink(missing_ok=True)


def number_in_environment(name: str) -> int:
    """Return the number in an environment variable of `_NUMBERS`, which must be set. Raise ConfigError if it is not a
    whole number, or is out of range.
    """
    text, (lowest, highest) = os.environ[name], _NUMBERS[name]
    if text.isdecimal() and lowest <= int(text) <= (int(text) if highest is None else highest):
        return int(text)
    raise ConfigError(
        "the environment variable is not a whole number in the allowed range",
        where=name,
        found=text,
        allowed=f"{lowest} or more" if highest is None else f"{lowest} to {highest}",
        fix=f"set {name} to such a number",
    )


def refuse_bad_numbers() -> None:
    """Raise ConfigError if an environment variable that describes this worker's place in its team is not a number."""
    for name in _NUMBERS:
        if name in os.environ:
            number_in_environment(name)


def listen(host: str, port: int = 0, *, one_machine: bool = True) -> socket.socket:
    """Return a listening socket for the store, only on the address of `host`.

    If other machines could not reach that address (it is not one of this machine's, as with a port mapping, or the
    machine's own name resolves to loopback), listen on every interface, with a warning. An explicit loopback address is
    used as it is. Raise UnavailableError if the port is in use, or this process may not listen on it.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        family, bound = address[0], str(address[4][0])
        if not (one_machine or is_loopback(host)) and (not is_address_here(bound) or is_loopback(bound)):
            log.warning(
                "MASTER_ADDR=%s resolves to %s here, where other machines cannot reach it: the store of the run "
                "listens on every interface; set MASTER_ADDR to an address of the private network",
                host,
                bound,
            )
            bound = ""
        return socket.create_server((bound, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise UnavailableError(
            "another process listens on this port" if in_use else f"cannot listen here: {error.strerror or error}",
            where="MASTER_PORT" if in_use else "MASTER_ADDR, MASTER_PORT",
            found=f"{host}:{port}",
            fix="set MASTER_PORT to a free port, the same on every machine"
            if in_use
            else "set MASTER_ADDR to an address of the first machine, and MASTER_PORT to a free port",
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or `localhost`; other names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def given_listener() -> int | None:
    """Return the listening socket that a launcher passed to this process, or None; children do not inherit it."""
    text = os.environ.pop(LISTENER, None)
    if text is None:
        return None
    os.set_inheritable(int(text), False)
    return int(text)


def gloo_interface(master: str) -> str | None:
    """Return the name of the network interface that leads to `master`; None if it is loopback or has no name. gloo must
    be set to this interface, because it would otherwise use the address of the host name, on any network.
    """
    import psutil

    with contextlib.suppress(OSError):
        towards = address_towards(master)
        for name, addresses in psutil.net_if_addrs().items():
            if not is_loopback(towards) and any(entry.address == towards for entry in addresses):
                return name
    return None


def join(backend: str, timeout_s: float, run_dir: Path) -> None:
    """Run `torch.distributed.init_process_group` on a store with one address; collective. Does nothing if already done.

    Rank, number of ranks and the rendezvous come from the environment, see `megarl.runtime.worker`. Under
    torchrun the agent's store is used. Each team of a run has its own store and world.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    # In a run on several machines, even a team on one machine has a network address, not a loopback one.
    inside = one_machine and is_loopback(host)
    if not inside and "GLOO_SOCKET_IFNAME" not in os.environ and (name := gloo_interface(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    handle = given_listener()
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if is_master and handle is None:
        handle = listen(host, port, one_machine=one_machine).detach()
    timeout = datetime.timedelta(seconds=timeout_s)
    listener: dict[str, Any] = {"master_listen_fd": handle} if is_master else {}
    store = dist.TCPStore(host, port, world, is_master, timeout, wait_for_workers=False, **listener)
    # torchrun's store keeps the keys of earlier attempts, so each attempt has a prefix of its own
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    token = read_token(run_dir)
    prefix = f"ranks/{attempt}" if token is None else f"{run_key(run_dir, 'store')}/{attempt}"
    if token is not None:
        meet(dist.PrefixStore(f"{prefix}/meet", store), rank, world, timeout_s)
    prefixed = dist.PrefixStore(prefix, store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=timeout)


def meet(store: Store, rank: int, world: int, timeout_s: float) -> None:
    """Wait until all ranks have connected to the store; raise WorkerError with the missing ranks. Collective."""
    limit = f"within {timeout_s:g} s (cluster.timeout_s)"
    end = time.monotonic() + timeout_s
    store.set(f"rank_{rank}", "")
    if rank:
        if not _exists(store, "all", end):
            raise WorkerError(f"timed out waiting for the other ranks to join {limit}")
        return
    missing = [r for r in range(1, world) if not _exists(store, f"rank_{r}", end)]
    if missing:
        raise WorkerError(f"timed out waiting for {ranks_text(missing)} to join {limit}")
    store.set("all", "")


def _exists(store: Store, key: str, end: float) -> bool:
    """Wait until the store has a key or `end` is reached; return whether it has it. Reads the store at least once."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], datetime.timedelta(seconds=max(end - time.monotonic(), 0.01)))
    except DistStoreError:  # the wait timed out
        return False
    return True


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 1` or `ranks 0, 2` as text; but at most the first sixteen ranks."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))}{more}"
