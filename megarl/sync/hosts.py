"""The hosts of trainer ranks and receivers, and the transports that are possible between them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from megarl.sync.shards.machine import machine_name
from megarl.system.comm import WorkerGroup, address_for_others
from megarl.system.errors import ConfigError
from megarl.system.processes import LOOPBACK, is_address_here


def choose_transport(
    wanted: str,
    receivers: Sequence[str],
    trainers: set[str],
    cannot_map: str = "",
    spread: str = "",
    *,
    colocated: bool = False,
) -> str:
    """Return the transport `wanted` (`sync.transport`), or for `auto` the best possible transport.

    Args:
        receivers: host of each receiver.
        trainers: hosts of trainer ranks.
        cannot_map: why receivers cannot map the trainer's memory even on the same host; empty if they can.
        spread: why one host cannot reach all ranks of a receiver; empty if they are on one host.
        colocated: whether the receivers share the trainer's GPUs.

    Raises:
        ConfigError: the recipe's transport needs memory shared with a receiver, and there is none.
    """
    if spread and wanted in ("tensor", "delta"):
        raise ConfigError(
            spread,
            where="sync.transport",
            found=wanted,
            allowed="auto, disk or shards" if colocated else "auto, distributed, disk or shards",
            fix="set sync.transport=auto",
        )
    cannot_map = cannot_map or spread
    away = [host for host in receivers if host not in trainers]
    if wanted == "auto" and spread and colocated:
        return "shards"  # nccl of `distributed` joins no two processes on one GPU
    if wanted == "auto":
        return "distributed" if away or cannot_map else "tensor"
    if wanted == "tensor" and (away or cannot_map):
        raise ConfigError(
            f"no trainer rank runs on {away[0]}, so memory cannot be shared with the server there"
            if away
            else cannot_map,
            where="sync.transport",
            found=wanted,
            allowed="auto, distributed, disk, or shards to SGLang's servers"
            if away
            else "auto, distributed, disk, delta, or shards to SGLang's servers",
        )
    return wanted


def hosts_of_ranks(world: WorkerGroup) -> tuple[dict[int, str], dict[str, str]]:
    """Return the host of every rank, and the address at which other hosts reach each host. Collective.

    A host is named by its host name. Machines that have one host name are named by `machine_name`.

    Raises:
        WorkerError: a host has no route to the other hosts.
    """
    machine = machine_name()
    everyone = world.all_gather_json([socket.gethostname(), machine, address_for_others(machine, world)])
    machines: dict[str, set[str]] = {}
    for name, machine, _ in everyone:
        machines.setdefault(name, set()).add(machine)
    hosts = [name if len(machines[name]) == 1 else machine for name, machine, _ in everyone]
    return dict(enumerate(hosts)), {host: address for host, (*_, address) in zip(hosts, everyone, strict=True)}


def place_of_store(wanted: str | None, world: WorkerGroup) -> tuple[list[str], str | None]:
    """Return the name of every rank's machine (`machine_name`), and the address at which the first rank's store has to
    listen: `wanted` (`sync.address`) on one machine, and with several an address that the other machines reach.
    Collective.

    Raises:
        WorkerError: a machine has no route to the other machines.
    """
    machine = machine_name()
    machines = world.all_gather_json(machine)
    if len(set(machines)) == 1:
        return machines, wanted
    return machines, world.broadcast_json(address_for_others(machine, world))


def hosts_of_receivers(
    urls: Sequence[str], names: dict[int, str], addresses: dict[str, str], world: WorkerGroup
) -> list[str]:
    """Return the host of every receiver. Only rank 0 resolves names, so that all ranks compute the same plan."""
    resolved = [host_of(url, names[0], addresses) for url in urls] if world.rank == 0 else None
    hosts: list[str] = world.broadcast_json(resolved)
    return hosts


def host_of(url: str, here: str, addresses: dict[str, str]) -> str:
    """Return the host of a receiver; for a host of the trainer, return its name in `hosts_of_ranks`.

    Args:
        url: url of the receiver.
        here: this host.
        addresses: address by which other hosts reach each of the trainer's hosts; a host may resolve its own
            name to a loopback address only.
    """
    host = urlsplit(url).hostname or ""
    if host in LOOPBACK:
        return here if len(addresses) == 1 else host
    for name, address in addresses.items():
        if host in (name, address):
            return name
    if is_address_here(host):
        return here
    return next((name for name in addresses if host in _looked_up(name)), host)


def _looked_up(name: str) -> list[str]:
    try:
        return socket.gethostbyname_ex(name)[2]
    except OSError:
        return []
