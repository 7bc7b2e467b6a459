"""Tests SGLang servers, colocated and on their own GPUs, with each transport of weights, and with separate adapters.

After every update checksums of all tensors are compared, and log-probs of generated samples with the trainer's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.certificate.findings import Findings, Skipped, worst
from megarl.certificate.runs import gpu_count, in_workers, sizes_of, write_numbers
from megarl.config.run import RunConfig
from megarl.system.compat.sglang import find_python
from megarl.system.device import has_cuda
from megarl.system.errors import ConfigError
from megarl.system.machine import visible_gpus
from megarl.system.processes import nvidia_devices

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState
    from megarl.sync.plan import SyncPlan

TRANSPORTS = ("tensor", "distributed", "disk", "delta", "shards")
_UPDATES = 3
_PROMPTS = 8
#: Limits for the difference between log-probs of servers and trainer: in float32 2e-5 was measured on a CPU; bf16 keeps
#: 8 bits.
_LIMITS = {"fp32": 1e-3, "bf16": 0.2}
_ADAPTERS = ("model.lora={rank: 16}", "sync.adapters=separate")
_MODEL = "Qwen/Qwen3-0.6B"  # randomly initialised; large enough for update times to be meaningful


def run(found: Findings, folder: Path) -> None:
    """Start servers for each placement and transport, and update them several times."""
    try:
        find_python(None, cuda=has_cuda())
    except ConfigError as error:
        raise Skipped(f"no server can be started: {error.what}; fix: {error.fix}") from error
    gpus = gpu_count()
    for colocated in (True, False):
        for transport in TRANSPORTS if gpus or not colocated else TRANSPORTS[:1]:
            name = f"{'colocated' if colocated else 'apart'} {transport}"
            if gpus == 1 and not colocated:
                found.skip(name, "one GPU, but trainer and server need one each")
            elif gpus and colocated and transport == "distributed":
                found.skip(name, "NCCL cannot join two processes on one GPU")
            elif gpus and colocated and transport == "delta":
                found.skip(name, "servers release their weights in each update, so a delta has nothing to change")
            else:
                _run_and_check(found, name, settings(gpus, transport, colocated=colocated), folder)
        if gpus != 1 or colocated:
            given = settings(gpus, "auto" if gpus else "tensor", colocated=colocated)
            _run_and_check(found, f"{'colocated' if colocated else 'apart'} adapters", [*given, *_ADAPTERS], folder)


def settings(gpus: int, transport: str, *, colocated: bool) -> list[str]:
    """Return the recipe's overrides: all GPUs train and serve, or half of them each; on a CPU one process each."""
    dtype = "bf16" if gpus else "fp32"
    trainers, servers = (max(gpus, 1),) * 2 if colocated else (max(gpus // 2, 1), max(gpus - gpus // 2, 1))
    given = [f"cluster.nproc={trainers}", "sft.steps=0", "tracking.mlflow=false", f"model.dtype={dtype}"]
    given += ["rollout.engine=sglang", f"rollout.sglang.servers={servers}", f"sync.transport={transport}"]
    given += ["sync.verify=every", "rollout.sampling.max_new_tokens=32", f"rollout.sglang.colocated={_yaml(colocated)}"]
    given += [f"actor.engine.offload={_yaml(colocated)}", "cluster.timeout_s=2400"]
    if colocated and gpus:
        given.append("rollout.sglang.memory_fraction=0.4")
    if trainers >= 4 and trainers % 2 == 0:  # each rank holds only half of the weights that the servers get
        given.append("actor.parallel={tp: 2, sp: true}")
    if gpus:
        given += [f"model.hf_config={json.dumps(sizes_of(_MODEL))}", "rollout.sglang.start_timeout_s=1200"]
    return given


def _yaml(value: bool) -> str:
    return str(value).lower()


def _run_and_check(found: Findings, name: str, overrides: list[str], folder: Path) -> None:
    try:
        ranks = in_workers(f"{__name__}:work", overrides, folder / name.replace(" ", "_"))
    except RuntimeError as error:  # other placements and transports may still work
        found.check(f"{name}: runs", False, str(error))
        return
    _check(found, name, ranks)


def _check(found: Findings, name: str, ranks: Sequence[dict[str, Any]]) -> None:
    numbers, servers = ranks[0]["updates"], ranks[0]["servers"]
    updated = all(metrics["sync/failed"] == 0 and metrics["sync/servers"] == servers for metrics in numbers)
    found.check(f"{name}: all servers updated", updated, f"{servers} servers, {len(numbers)} updates")
    verified = [int(metrics["sync/verified_tensors"]) for metrics in numbers]
    found.check(f"{name}: checksums of all tensors", min(verified) > 0, f"{verified} tensors compared")
    crossing = ranks[0]["crossings"]
    found.check(f"{name}: colocated servers are fed from their own GPUs", not crossing, "; ".join(crossing))
    gap = worst(rank["gap"] for rank in ranks)
    found.within(f"{name}: log-probs of servers and trainer", gap, _LIMITS[ranks[0]["dtype"]])
    versions = {version for rank in ranks for version in rank["versions"]}
    found.check(f"{name}: samples are of the newest weights", versions == {_UPDATES}, f"versions {sorted(versions)}")
    last = numbers[-1]
    found.figure(f"{name}: weight update", last["sync/seconds"], "s")
    found.figure(f"{name}: sent", last["sync/gb_per_s"], "GB/s")


def crossings(plan: SyncPlan, ranks: Sequence[str], servers: Sequence[Sequence[str]]) -> list[str]:
    """Return the servers that share GPUs with trainer ranks but get no weights from these. Memory of a colocated server
    can be written only from its own GPU, so weights from other GPUs take a detour.
    """
    problems = []
    for route in plan.routes:
        for receiver in route.receivers:
            server_gpus = set(servers[receiver])
            if server_gpus & set(ranks) and not any(ranks[sender] in server_gpus for sender in route.senders):
                gpus = ", ".join(sorted({ranks[sender] for sender in route.senders}))
                problems.append(
                    f"server {receiver} on GPU {', '.join(sorted(server_gpus))} gets weights from GPU {gpus}"
                )
    return problems


def _crossings_here(c: RankState) -> list[str]:
    """Return `crossings` for the weight updates of a run whose processes are all on this machine; empty on a CPU."""
    from megarl.rollout.sglang.gpus import server_gpus
    from megarl.rollout.sglang.links import OwnServers

    servers, workers, present = c.config.rollout.sglang, c.layout.world.size, nvidia_devices()
    if not present:
        return []
    assert isinstance(c.link, OwnServers), "one team starts and fills the servers"
    if c.link.sync.transport_name == "shards":  # refuses a server rank without a trainer rank on its GPU
        return []
    names = visible_gpus(os.environ) or [str(number) for number in range(present)]
    count = servers.servers
    gpus_of_servers = [
        server_gpus(servers, count, number, workers, os.environ, present) or () for number in range(count)
    ]
    return crossings(c.link.sync.plan, names[:workers], [gpus[: servers.ranks] for gpus in gpus_of_servers])


def work(config: RunConfig, run_dir: Path) -> None:
    """Update servers and generate on them. Runs in each worker."""
    from megarl.runtime.generation import open_rollout
    from megarl.runtime.setup import build_rank_state

    c = build_rank_state(config, run_dir, scored=())
    try:
        open_rollout(c)
        updates = [_update(c, version) for version in range(1, _UPDATES + 1)]
        gap, versions = _generate(c)
        world = c.layout.world
        numbers = {"updates": updates, "gap": gap, "versions": versions, "dtype": config.model.dtype}
        numbers |= {"servers": config.rollout.sglang.servers, "crossings": _crossings_here(c)}
        write_numbers(run_dir, world.rank, numbers)
        world.barrier()
    finally:
        c.close()


def _update(c: RankState, version: int) -> dict[str, float]:
    """Change all weights that are trained, equally on every rank, and publish them; return the metrics of the
    update."""
    from megarl.runtime.generation import publish
    from megarl.system.metrics import Metrics

    with c.offload.phase("score", "actor"), torch.no_grad():
        for chunk in c.actor.chunks:
            for parameter in chunk.parameters():
                if c.config.model.lora is None:
                    parameter.mul_(1.0 + 0.01 * version)
                elif parameter.requires_grad:  # adapters, half of which begin as zeros
                    parameter.add_(0.003 * version)
    c.context.metrics = Metrics()
    publish(c, version)
    return {name: value for name, value in c.context.metrics.result().items() if name.startswith("sync/")}


def _generate(c: RankState) -> tuple[float, list[int]]:
    """Generate samples with a server; return the largest difference between its log-probs and the trainer's, and the
    weight versions that generated the samples.
    """
    from megarl.data.batch import Batch, Jagged
    from megarl.rollout.engine import Request

    g = torch.Generator().manual_seed(c.layout.rank)
    prompts = torch.randint(3, 20, (_PROMPTS, 12), generator=g).tolist()
    requests = [Request(prompt, [1000 * c.layout.rank + i]) for i, prompt in enumerate(prompts)]
    with c.offload.phase("generate"):
        samples = [sample for (sample,) in c.rollout.engine.generate(requests, c.config.rollout.sampling, [2])]
    rows = {
        "prompt_ids": Jagged.from_list([torch.tensor(request.prompt_ids) for request in requests]),
        "response_ids": Jagged.from_list([torch.tensor(sample.token_ids) for sample in samples]),
    }
    with c.offload.phase("score", "actor"):
        logp, _ = c.actor.engine.logprobs(Batch(rows, {}), entropy=False)
    theirs = torch.tensor([value for sample in samples for value in sample.logprobs])
    versions = sorted({version for sample in samples for version, _ in sample.versions})
    return float((logp.values.cpu() - theirs).abs().max()), versions
