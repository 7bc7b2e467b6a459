"""Starts a run's SGLang servers: writes their model folder, chooses their API key, and waits until they answer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.models.hf import encoder_of, facts_of
from megarl.models.weights.metadata import write_metadata
from megarl.rollout.sglang.adapters import serving_adapters
from megarl.rollout.sglang.block_fp8 import write_block_fp8
from megarl.rollout.sglang.images import keeping_sizes, write_processor
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.rollout.sglang.layout import with_plain_experts
from megarl.rollout.sglang.routes import returning_routes
from megarl.system.device import DTYPES, has_cuda
from megarl.system.errors import ConfigError, ServerError
from megarl.system.rendezvous import run_key
from megarl.system.tracing import keep_beating, phase

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.config.sglang import SGLangConfig
    from megarl.rollout.family import EngineHost
    from megarl.rollout.sglang.fleet import Fleet

MODEL_FOLDER = "servers/model"


def servers_key(config: RunConfig, run_dir: Path) -> str | None:
    """Return the servers' API key, the same in every team; None: servers that the user has started need no key.

    Raises:
        ConfigError: the environment variable that should contain the key is not set.
    """
    settings = config.rollout.sglang
    return settings.external_key() if settings.urls else run_key(run_dir, "requests to servers")


def start_servers(host: EngineHost, key: str | None = None, address: str | None = None) -> Fleet:
    """Start the servers of the run, wait until they answer, and return them. Collective.

    Args:
        key: the servers' API key, if another team uses it too; None: a new key.
        address: the address at which workers of other teams reach the servers; None: only this team calls them.
    """
    config, layout = host.config, host.layout
    servers = with_plain_experts(settings_of_servers(host), facts_of(host.hf_config))
    servers = keeping_sizes(servers, encoder_of(host.hf_config))
    if layout.rank == 0:
        logs = host.run_dir / "servers"
        # docs/servers.md has the measurement of the 17 s in this message
        where = (
            f" at {', '.join(servers.urls)}" if servers.urls else f": about 17 s on two free cores; their logs: {logs}"
        )
        print(f"waiting for SGLang servers{where}", flush=True)
    # On shared devices the trainer offloads first, because a starting server allocates a share of the free memory.
    with on_shared_devices(host, "start_servers"), phase("start_servers"), keep_beating():
        try:
            return open_fleet(
                returning_routes(servers) if config.rollout.replay_routes else servers,
                WorkerPlace.from_environment(config.cluster),
                host.run_dir,
                _write_model_config(host),
                str(DTYPES[config.rollout_dtype]).removeprefix("torch."),
                cuda=has_cuda(),
                random_weights=True,
                longest=config.longest_sequence(),
                images=config.data.image_key is not None,
                fp8=config.sync.fp8,
                key=key,
                host=address,
                world=layout.world,
            )
        except ServerError as error:
            if not servers.urls:
                raise
            raise ConfigError(
                f"none of these servers can be used: {error.reason}",
                where="rollout.sglang.urls",
                found=servers.urls,
                allowed="addresses of SGLang servers that run",
                fix="start the servers or correct the addresses; rollout.sglang.urls=[] lets the run start its own",
            ) from error


def settings_of_servers(host: EngineHost) -> SGLangConfig:
    """Return the recipe's settings of servers, with what they need if they get only adapters."""
    servers, lora = host.config.rollout.sglang, host.config.model.lora
    if host.config.sync.adapters == "merged" or lora is None:
        return servers
    return serving_adapters(servers, lora, facts_of(host.hf_config), cuda=has_cuda())


def on_shared_devices(host: EngineHost, name: str) -> contextlib.AbstractContextManager[None]:
    """Enter phase `name` of the offload schedule if the servers share the trainer's devices; else do nothing."""
    return host.offload.phase(name) if host.config.rollout.colocated else contextlib.nullcontext()


def _write_model_config(host: EngineHost) -> Path:
    """Write the model's config, without weights, into a folder that every machine can read, and return the folder.

    For a vision-language model the folder also has the image processor.
    """
    folder = host.run_dir / MODEL_FOLDER
    if host.layout.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_metadata(folder, host.hf_config, None, DTYPES[host.config.model.dtype])
        if encoder_of(host.hf_config) is not None:
            write_processor(folder, host.hf_config)
        if host.config.sync.fp8:
            write_block_fp8(folder, facts_of(host.hf_config))
    host.layout.world.barrier()
    return folder
