"""Where samples come from: the trainer's own parameters in this process, or SGLang servers that follow them.

    cold start, weights loaded --> open_rollout --> publish(step) --> generate, train --> publish(step) --> ...

A recipe changes from one to the other with `rollout.engine`; the stages see a `RolloutEngine` either way. The cold
start evaluates on the trainer's own parameters in both cases, and the servers start after it. A rollout in a team of
its own has the same two functions in megarl/disaggregated/generation.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.dag.stage import Role
from megarl.data.batch import Batch, Jagged
from megarl.data.image_prompts import image_fields
from megarl.models.hf import encoder_of, facts_of, image_settings
from megarl.models.weights.metadata import write_metadata
from megarl.rollout.sglang.block_fp8 import write_block_fp8
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.images import write_processor
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.memory import ServerMemory
from megarl.rollout.sglang.probe import probe_gap, probe_servers
from megarl.rollout.sglang.receiver import SglangReceivers
from megarl.sync.protocol import version_tag
from megarl.sync.updater import SyncReport, WeightSync
from megarl.system.device import DTYPES, has_cuda
from megarl.system.errors import ConfigError, ServerError
from megarl.system.tracing import keep_beating, phase

if TYPE_CHECKING:
    from megarl.rollout.sglang.fleet import Fleet
    from megarl.runtime.rank_state import RankState

MODEL_FOLDER = "servers/model"


def open_rollout(c: RankState) -> None:
    """Prepare what generates samples, as the recipe says. Collective over the ranks of the team.

    Servers hold no usable weights before the first `publish`.
    """
    if c.config.rollout.engine != "sglang" or not c.team.holds(Role.ROLLOUT):
        return
    config, layout = c.config, c.layout
    c.fleet = fleet = start_servers(c)
    sync = send_weights_to(c, fleet)
    replica = Replica(layout.dp_rank, layout.dp_size, layout.mp_group, layout.world)
    c.rollout.engine = SglangEngine(
        config.rollout.sglang, fleet, replica, lambda: account_update(c, sync.catch_up()), sync.run, c.rollout.tokenizer
    )
    show_servers(c, fleet, sync)


def start_servers(c: RankState, key: str | None = None, host: str | None = None) -> Fleet:
    """Start the servers of the run, and wait until they answer. Collective.

    Args:
        key: their API key, which another team knows, too; None: they get one of their own.
        host: the address at which workers of other teams reach them; None: loopback.
    """
    config, layout = c.config, c.layout
    if layout.rank == 0:
        urls, logs = config.rollout.sglang.urls, c.run_dir / "servers"
        # The figure of docs/servers.md.
        what = f" at {', '.join(urls)}" if urls else f": about 17 s on two free cores; their logs: {logs}"
        print(f"waiting for SGLang servers{what}", flush=True)
    with (
        on_shared_devices(c, "start_servers"),  # a starting server takes its share of what is free then
        phase("start_servers"),
        keep_beating(),
        _addresses_are_the_users(config.rollout.sglang.urls),
    ):
        return open_fleet(
            config.rollout.sglang,
            WorkerPlace.from_environment(config.cluster),
            c.run_dir,
            _write_model_config(c),
            str(DTYPES[config.rollout_dtype]).removeprefix("torch."),
            cuda=has_cuda(),
            random_weights=True,
            longest=config.longest_sequence(),
            images=config.data.image_key is not None,
            fp8=config.sync.fp8,
            key=key,
            host=host,
            world=layout.world,
        )


def send_weights_to(c: RankState, fleet: Fleet) -> WeightSync:
    """Make what sends the actor's weights to these servers. Collective over the actor's team."""
    config = c.config
    if config.rollout.colocated:
        c.offload.add_servers(ServerMemory(fleet, config.rollout.sglang.health_timeout_s, c.layout.world))
    sizes = config.rollout.sglang.tp_size, config.rollout.sglang.ep_size
    receivers = SglangReceivers(fleet, ServerLayout.of(c.hf_config, *sizes, on_gpu=has_cuda()))
    # Weights of servers that share the trainer's GPUs leave them in the update, and nobody keeps them.
    stays = () if config.rollout.colocated and has_cuda() else config.model.freeze
    c.sync = sync = WeightSync(c.actor.chunks, receivers, config.sync, c.run_dir, c.layout.world, stays)
    return sync


def show_servers(c: RankState, fleet: Fleet, sync: WeightSync) -> None:
    """Print where the run generates."""
    if c.layout.rank == 0:
        where = ", ".join(server.api.url for server in fleet.servers)
        print(f"generation on SGLang servers at {where}; weights by {sync.transport_name}", flush=True)


def on_shared_devices(c: RankState, name: str) -> contextlib.AbstractContextManager[None]:
    """Enter a phase of the offload schedule if the servers share the trainer's devices; else nothing has to leave."""
    return c.offload.phase(name) if c.config.rollout.colocated else contextlib.nullcontext()


@contextlib.contextmanager
def _addresses_are_the_users(urls: list[str]) -> Iterator[None]:
    """Servers that run already and are not there when the run begins: most often an address is wrong.

    Raises:
        ConfigError: in the place of the ServerError.
    """
    try:
        yield
    except ServerError as error:
        if not urls:
            raise
        raise ConfigError(
            f"none of these servers can be used: {error.reason}",
            where="rollout.sglang.urls",
            found=urls,
            allowed="addresses of SGLang servers that run",
            fix="start the servers or correct the addresses; rollout.sglang.urls=[] lets the run start its own",
        ) from error


def publish(c: RankState, version: int) -> None:
    """Generate with the weights as they are now from here on, as `version`; nothing where nothing is generated.

    Collective over the ranks of the team.
    """
    if not c.team.holds(Role.ROLLOUT):
        return
    if c.fleet is not None:
        _look_after_servers(c)
    with on_shared_devices(c, "publish"):
        report = c.sync.push(version)
    account_update(c, report)
    c.rollout.engine.weight_version = version


def _look_after_servers(c: RankState) -> None:
    """Restart failed servers; those that came back since the last time get the weights with the others. Collective.

    A colocated one starts while the actor's gradients and optimizer state are away: it takes its share of the memory
    that is free when it starts.
    """
    assert c.fleet is not None
    with on_shared_devices(c, "start_servers"):
        c.fleet.refresh()
        starting = any(server.state == "starting" for server in c.fleet.servers)  # on all ranks, after `refresh`
        if starting and c.config.rollout.colocated:
            c.fleet.wait_started()
    assert isinstance(c.rollout.engine, SglangEngine)
    record_servers(c, c.fleet, c.rollout.engine)


def record_servers(c: RankState, fleet: Fleet, engine: SglangEngine) -> None:
    """Record what became of the servers, and of the drafts of what they generated since the last time."""
    c.context.metrics.max("rollout/servers_replaced", fleet.replaced)
    proposed, taken = engine.pop_drafts()
    if c.config.rollout.sglang.speculative is not None:
        c.context.metrics.mean("rollout/drafts_accepted", taken, proposed)


def _write_model_config(c: RankState) -> Path:
    """Folder with the model's configuration and no weights, readable on every machine; with the processor of a model
    that sees images."""
    folder = c.run_dir / MODEL_FOLDER
    if c.layout.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_metadata(folder, c.hf_config, None, DTYPES[c.config.model.dtype])
        if encoder_of(c.hf_config) is not None:
            write_processor(folder, c.hf_config)
        if c.config.sync.fp8:
            write_block_fp8(folder, facts_of(c.hf_config))
    c.layout.world.barrier()
    return folder


def account_update(c: RankState, report: SyncReport) -> None:
    """Compare what servers compute with the trainer where `sync.verify` wants it, and keep the numbers. Collective."""
    _record(c, report)
    if c.fleet is None or not report.to_probe:
        return
    with phase("probe"), c.offload.phase("probe"):
        assert isinstance(c.sync, WeightSync), "servers get their weights from it"
        tag = version_tag(report.version, c.sync.run)
        limit = c.config.sync.timeout_s
        if c.team.holds(Role.ROLLOUT):  # a server that another team generates on may have a queue; this one is idle
            limit = min(limit, c.fleet.answer_s)
        probes = probe_servers(c.fleet, report.to_probe, c.hf_config.vocab_size, limit, tag, c.layout.world)
        if not probes:
            return
        fields = {
            "prompt_ids": Jagged.from_list([probe.prompt_ids for probe in probes]),
            "response_ids": Jagged.from_list([probe.token_ids for probe in probes]),
        }
        if c.config.data.image_key is not None:
            none: list[list[Any]] = [[] for _ in probes]
            fields |= image_fields(none, none, image_settings(c.hf_config))
        batch = Batch(fields)
        ours, _ = c.actor.engine.logprobs(batch, entropy=False)
    c.context.metrics.max("sync/probe_gap", probe_gap(probes, [row.tolist() for row in ours.unbind()]))


def _record(c: RankState, report: SyncReport) -> None:
    """Metrics of a synchronisation; the report is the same on every rank."""
    if not report.updated and not report.failed:
        return
    m = c.context.metrics
    m.max("sync/gb", report.nbytes / 1e9)
    m.max("sync/seconds", report.seconds)
    m.max("sync/gb_per_s", report.nbytes / 1e9 / max(report.seconds, 1e-9))
    m.max("sync/gather_s", report.gather_s)
    m.max("sync/send_s", report.send_s)
    m.max("sync/servers", len(report.updated))
    m.max("sync/failed", len(report.failed))
    m.max("sync/verified_tensors", report.verified)
    if report.failed and c.layout.rank == 0:
        for number, why in sorted(report.failed.items()):
            print(f"server {number} did not take version {report.version}: {why}", flush=True)
