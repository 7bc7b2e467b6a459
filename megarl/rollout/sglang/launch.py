"""Starts the servers of a run, or connects to external servers (`rollout.sglang.urls`)."""

from __future__ import annotations

import functools
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.run import ClusterConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.external import check_external, differences
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.gpus import place_servers, server_gpus
from megarl.rollout.sglang.server import ServerProcess, ServerSpec
from megarl.system.comm import WorkerGroup, address_for_others
from megarl.system.errors import ConfigError, count
from megarl.system.processes import address_of, nvidia_devices

_HOST = "rollout.sglang.host"  # a name is resolved, because servers with attention groups take addresses only


@dataclass(frozen=True)
class WorkerPlace:
    """The machine of this rank, and whether the rank is the first of the `workers` on it.

    Attributes:
        machine: index of the machine among the `machines` of the team.
    """

    machine: int = 0
    machines: int = 1
    is_first: bool = True
    workers: int = 1

    @classmethod
    def from_environment(cls, cluster: ClusterConfig) -> WorkerPlace:
        """Return the place of this worker in its team, from the environment variables of torchrun."""
        values = os.environ
        workers = int(values.get("LOCAL_WORLD_SIZE", cluster.nproc // cluster.nnodes))
        machine, machines = int(values.get("GROUP_RANK", "0")), int(values.get("GROUP_WORLD_SIZE", "1"))
        return cls(machine, machines, int(values.get("LOCAL_RANK", "0")) == 0, workers)


def open_fleet(
    config: SGLangConfig,
    place: WorkerPlace,
    run_dir: Path,
    model: Path,
    dtype: str,
    *,
    cuda: bool,
    random_weights: bool = False,
    longest: int = 0,
    images: bool = False,
    fp8: bool = False,
    key: str | None = None,
    host: str | None = None,
    world: WorkerGroup,
) -> Fleet:
    """Start the run's servers or connect to external servers, wait until they answer, and return them.

    Collective over `world`.

    Args:
        run_dir: run folder; the servers' logs are in its folder `servers`.
        model: Hugging Face folder, readable on every machine.
        dtype: float32, bfloat16 or float16.
        random_weights: whether servers start with random weights, so that the first update must send all weights.
        longest: tokens of the longest sequence, which external servers must accept; 0: not checked.
        fp8: whether the config of `model` names block-wise FP8 weights.
        key: API key of started servers; None: a random key.
        host: address of started servers without `rollout.sglang.host`; None: an address that the other ranks reach.
        world: the ranks that start the servers, check them, and generate on them.

    Raises:
        ConfigError: no interpreter, no API key, a setting that needs GPUs, too few machines or GPUs, or an external
            server with settings other than the recipe's.
        ServerError: on every rank, if no server answers.
    """
    watches = place.is_first and place.machine == 0  # one rank checks the health of external servers
    if config.urls:
        key = config.external_key()
        servers = [Server(i, ServerApi(url.rstrip("/"), key, f"server {i}")) for i, url in enumerate(config.urls)]
        fleet = Fleet(servers, config, watched=range(len(servers)) if watches else (), world=world)
    else:
        # The key is in memory only, not in a file or command line.
        key = key or world.broadcast_json(secrets.token_urlsafe(32))
        host = address_of(config.host, _HOST) or host or address_for_others(f"machine {place.machine}", world)
        if not cuda:
            _check_cpu(config, fp8)
        spec = ServerSpec(0, config, model, dtype, host, key, run_dir / "servers", cuda, random_weights=random_weights)
        fleet = _own(spec, place, world)
    try:
        if not config.urls:
            fleet.start()
        fleet.wait_started()
        if config.urls:
            examine = functools.partial(differences, config=config, dtype=dtype, longest=longest, images=images)
            check_external(fleet, examine if watches else None, world)
    except BaseException:
        fleet.close()
        raise
    return fleet


def _check_cpu(config: SGLangConfig, fp8: bool) -> None:
    """Raise a ConfigError for settings that SGLang supports only on GPUs."""
    if config.ep_size > 1:
        raise ConfigError(
            "on a CPU, SGLang keeps all experts of a mixture on every rank",
            where="rollout.sglang.ep_size",
            found=config.ep_size,
            allowed="1 on a CPU",
            fix="set rollout.sglang.ep_size=1, and split every expert with rollout.sglang.tp_size",
        )
    if config.speculative is not None:
        raise ConfigError(
            "SGLang has no kernels for speculative decoding on a CPU, and would accept drafts greedily there, "
            "whatever the temperature",
            where="rollout.sglang.speculative",
            found=config.speculative.algorithm,
            allowed="null on a CPU",
            fix="set rollout.sglang.speculative=null",
        )
    if fp8:
        raise ConfigError(
            "servers that megarl starts accept FP8 weights only on GPUs",
            where="sync.fp8",
            found=True,
            allowed="false on a CPU",
            fix="set sync.fp8=false",
        )


def _own(spec: ServerSpec, place: WorkerPlace, world: WorkerGroup) -> Fleet:
    """Return the run's own servers, not yet started; they differ from `spec` only in number, node, GPUs and peers."""
    config = spec.config
    team = world.all_gather_json([place.machine, place.workers, spec.host])
    workers, hosts = {rank[0]: rank[1] for rank in team}, {rank[0]: rank[2] for rank in team}
    machines = [workers[machine] for machine in range(place.machines)]
    if len(machines) < config.nnodes:
        raise ConfigError(
            f"the team that generates has only {count(len(machines), 'machine')}",
            where="rollout.sglang.nnodes",
            found=config.nnodes,
            allowed=f"at most {len(machines)}",
            fix="lower rollout.sglang.nnodes, or give the team that generates more machines",
        )
    nodes_of = place_servers(config.servers, config.ranks_per_node, machines, config.nnodes)
    here = nodes_of[place.machine]
    owned: dict[int, ServerProcess] = {}
    for local, (number, node) in enumerate(here if place.is_first else ()):
        on = [machine for machine, nodes in enumerate(nodes_of) if any(number == other for other, _ in nodes)]
        peers, gpus = tuple(dict.fromkeys(hosts[machine] for machine in on)), None
        if spec.cuda:
            gpus = server_gpus(config, len(here), local, place.workers, os.environ, nvidia_devices())
        owned[number] = ServerProcess(replace(spec, number=number, node=node, gpus=gpus, peers=peers))
    numbers = range(config.servers)
    # the server's URL is set when it starts
    servers = [Server(number, ServerApi("", spec.api_key, f"server {number}")) for number in numbers]
    return Fleet(servers, config, owned, world=world)
