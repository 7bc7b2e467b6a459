"""Start the servers of a run, or find the ones that run already."""

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
from megarl.system.processes import nvidia_devices


@dataclass(frozen=True)
class WorkerPlace:
    """The place of this rank: `machine` of `machines`, and whether it is the first of the `workers` there."""

    machine: int = 0
    machines: int = 1
    is_first: bool = True
    workers: int = 1

    @classmethod
    def from_environment(cls, cluster: ClusterConfig) -> WorkerPlace:
        """Return the place of a worker among those of its team, from what its launcher says: torchrun's variables."""
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
    """Return the servers of the run, started if they are ours, all of them answering. Collective over `group`.

    Args:
        run_dir: logs go to its folder `servers`.
        model: Hugging Face folder, readable on every machine.
        dtype: float32, bfloat16 or float16.
        random_weights: see ServerSpec; for a first synchronisation that brings every weight.
        longest: tokens of the longest sequence, which servers that run already must take; 0: any.
        images: prompts may have some.
        fp8: `model` says that weights are block-wise FP8.
        key: that requests to started servers must carry; None: a random one.
        host: address of this machine, as all who speak to its servers reach it, where the recipe names none; None: the
            ranks of `world` do, and find one.
        world: the ranks that look after the servers, and generate samples on them.

    Raises:
        ConfigError: no interpreter, the variable of `api_key_env` is not set, experts spread over ranks of a CPU, or a
            server that runs already is not what the recipe says.
        ServerError: on every rank, when no server came up.
    """
    if config.urls:
        fleet = _external(config, place, world)
    else:
        # In memory only: no file and no command line has it.
        key = key or world.broadcast_json(secrets.token_urlsafe(32))
        host = config.host or host or address_for_others(f"machine {place.machine}", world)
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
            check_external(fleet, examine if _watches(place) else None, world)
    except BaseException:
        fleet.close()
        raise
    return fleet


def _external(config: SGLangConfig, place: WorkerPlace, world: WorkerGroup) -> Fleet:
    key = config.external_key()
    servers = [Server(i, ServerApi(url.rstrip("/"), key, f"server {i}")) for i, url in enumerate(config.urls)]
    return Fleet(servers, config, watched=range(len(servers)) if _watches(place) else (), world=world)


def _watches(place: WorkerPlace) -> bool:
    """Return whether this rank looks after external servers: one of all ranks does."""
    return place.is_first and place.machine == 0


def _check_cpu(config: SGLangConfig, fp8: bool) -> None:
    """Refuse what SGLang does on GPUs only."""
    if config.ep_size > 1:
        raise ConfigError(
            "SGLang's mixture of experts for a CPU keeps all experts on every rank",
            where="rollout.sglang.ep_size",
            found=config.ep_size,
            allowed="1 on a CPU",
            fix="set rollout.sglang.ep_size=1; tp_size splits every expert",
        )
    if config.speculative is not None:
        raise ConfigError(
            "SGLang has no kernels for it on a CPU, and checks drafts greedily there, whatever the temperature",
            where="rollout.sglang.speculative",
            found=config.speculative.algorithm,
            allowed="null on a CPU",
            fix="set rollout.sglang.speculative=null",
        )
    if fp8:
        raise ConfigError(
            "the servers that megarl starts take FP8 weights on GPUs only",
            where="sync.fp8",
            found=True,
            allowed="false on a CPU",
            fix="set sync.fp8=false",
        )


def _own(spec: ServerSpec, place: WorkerPlace, world: WorkerGroup) -> Fleet:
    """Return the run's own servers: `spec`, as each of them and each of its nodes has it."""
    config = spec.config
    workers = dict(world.all_gather_json([place.machine, place.workers]))
    machines = [workers[machine] for machine in range(place.machines)]
    if len(machines) < config.nnodes:
        raise ConfigError(
            f"servers are started on {count(len(machines), 'machine')}",
            where="rollout.sglang.nnodes",
            found=config.nnodes,
            allowed=f"at most {len(machines)}",
            fix="lower rollout.sglang.nnodes, or give the team that generates more machines",
        )
    here = place_servers(config.servers, config.ranks_per_node, machines, config.nnodes)[place.machine]
    owned: dict[int, ServerProcess] = {}
    for local, (number, node) in enumerate(here if place.is_first else ()):
        gpus = None
        if spec.cuda:
            gpus = server_gpus(config, len(here), local, place.workers, os.environ, nvidia_devices())
        owned[number] = ServerProcess(replace(spec, number=number, node=node, gpus=gpus))
    apis = (ServerApi("", spec.api_key, f"server {number}") for number in range(config.servers))
    servers = [Server(number, api) for number, api in enumerate(apis)]  # addresses: wait_started
    return Fleet(servers, config, owned, world=world)
