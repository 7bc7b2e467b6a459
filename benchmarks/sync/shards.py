"""Plans of weight updates from shard to shard for published models: bytes of each link, and seconds in virtual time.

    python -m megarl.benchmarks.sync.shards
    python -m megarl.benchmarks.sync.shards --only 30B --json shards.json

Nothing is sent. Every row is a whole plan, made by the function that runs use. Runs refuse servers on the trainer's
GPUs. `plan` is the number of CPU-seconds that a plan takes on this machine, with the trainer's storages but without the
servers' descriptions, which come over the network; `MB` is what the fullest rank keeps of it. Links are those of H100s:
400 Gbit/s for each GPU, of which rounds reach `shard_share`, and 450 GB/s inside a machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import artifacts
from megarl.system.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from megarl.artifacts.facts import ModelFacts
    from megarl.models.weight_table import Coordinate
    from megarl.sync.shards.boxes import RankStorage, ServerStorage
    from megarl.sync.shards.plan import UpdatePlan
    from megarl.sync.shards.table import Array

GPUS = 8  # of a machine
NVLINK_SHARE = 340 / 450
ROUND_S = 0.2e-3  # a round takes this much longer than its bytes


@dataclass(frozen=True)
class ShardCase:
    """A trainer and servers.

    Attributes:
        model: as in known_models.json.
        pp, tp, ep, ranks: the trainer's layout and number of ranks.
        servers, server_tp, server_ep, attention_dp: number and layout of the servers.
        target: seconds wanted.
        load_s: seconds in which a server computes weights that it derives from the loaded ones.
        colocated: whether the servers run on the trainer's GPUs.
    """

    name: str
    model: str
    pp: int
    tp: int
    ep: int
    ranks: int
    servers: int
    server_tp: int
    server_ep: int
    target: float
    attention_dp: int = 1
    load_s: float = 0.0
    colocated: bool = False


@dataclass(frozen=True)
class ShardRow:
    """What a plan takes: GB of the model, of the fullest and the mean sender, of the fullest receiver over the network,
    and over links inside its machine; seconds in virtual time and by the planner's formula; what planning takes."""

    name: str
    total_gb: float
    out_gb: float
    mean_out_gb: float
    in_gb: float
    machine_gb: float
    simulated_s: float
    formula_s: float
    target_s: float
    plan_s: float
    kept_mb: float


_30B, _235B, _671B = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3"
CASES = (
    ShardCase("30B, 16 GPUs PP2 EP8 to 2 x tp 8", _30B, 2, 1, 8, 16, 2, 8, 1, 0.7),
    ShardCase("30B, 16 GPUs PP2 EP8 to 8 x tp 2", _30B, 2, 1, 8, 16, 8, 2, 1, 0.7),
    ShardCase("30B, 32 GPUs EP8, colocated 4 x tp 8", _30B, 1, 1, 8, 32, 4, 8, 1, 0.7, colocated=True),
    ShardCase("235B, 64 GPUs TP4 PP4 EP16 to 4 x tp 16 ep 16", _235B, 4, 4, 16, 64, 4, 16, 16, 1.5),
    ShardCase("235B, 64 GPUs TP4 PP4 EP16 to 8 x tp 8 ep 8", _235B, 4, 4, 16, 64, 8, 8, 8, 2.0),
    ShardCase("671B, 256 GPUs PP16 EP16 to 8 x tp 32 ep 32", _671B, 16, 1, 16, 256, 8, 32, 32, 2.0, load_s=0.015),
    ShardCase("671B, the same, attention dp 32", _671B, 16, 1, 16, 256, 8, 32, 32, 2.0, 32, load_s=0.015),
)


def coordinates(case: ShardCase) -> list[Coordinate]:
    """Return the coordinates of the trainer's ranks in Megatron's order."""
    from megarl.models.weight_table import Coordinate

    inner = case.ranks // case.pp
    return [
        Coordinate(case.tp, i % case.tp, case.pp, stage, ep=case.ep, ep_rank=i % case.ep)
        for stage, i in itertools.product(range(case.pp), range(inner))
    ]


def planned(case: ShardCase) -> tuple[UpdatePlan, ModelFacts, float]:
    """Return the plan of a case, the model's sizes, and the CPU-seconds of making the plan."""
    from megarl.config.model import ModelConfig
    from megarl.models.hf import load_hf_config
    from megarl.models.weight_table import WeightTable
    from megarl.rollout.sglang.layout import ServerLayout
    from megarl.rollout.sglang.storage import predicted_storage
    from megarl.sync.shards.boxes import GpuPlace
    from megarl.sync.shards.plan import UpdatePlan
    from megarl.sync.shards.sources import tensors_of, trainer_storages

    known = json.loads((Path(artifacts.__file__).parent / "known_models.json").read_text(encoding="utf-8"))
    hf = load_hf_config(ModelConfig(hf_config=known[case.model]))
    table = WeightTable.of(hf)
    tensors, shapes = tensors_of(table), table.shapes()
    layout = ServerLayout.of(hf, case.server_tp, case.server_ep, attention_dp=case.attention_dp)
    storages = tuple(predicted_storage(layout, rank, tensors, shapes) for rank in range(case.server_tp))
    start = time.process_time()
    trainer = trainer_storages(table, coordinates(case), tensors)
    seats = [GpuPlace(f"trainer {rank // GPUS}", rank % GPUS) for rank in range(case.ranks)]
    plan = UpdatePlan(tensors, trainer, seats, servers_of(case, storages))
    return plan, layout.facts, time.process_time() - start


def servers_of(case: ShardCase, storages: tuple[RankStorage, ...]) -> list[ServerStorage]:
    """Return the servers of a case, on machines one after the other."""
    from megarl.sync.shards.boxes import GpuPlace, ServerStorage

    machines = "trainer" if case.colocated else "servers"
    gpus = [GpuPlace(f"{machines} {gpu // GPUS}", gpu % GPUS) for gpu in range(case.servers * case.server_tp)]
    size = case.server_tp
    return [ServerStorage(storages, tuple(gpus[i * size : (i + 1) * size])) for i in range(case.servers)]


def measured(case: ShardCase) -> ShardRow:
    """Return the row of a case."""
    from megarl.config.model import ParallelConfig
    from megarl.planning.assumptions import PlanAssumptions
    from megarl.planning.hardware import KINDS
    from megarl.planning.links import Links
    from megarl.planning.shard_sync import ShardUpdateSize, fullest_stage, shard_update_seconds
    from megarl.sync.shards.simulate import LinkRates, simulated_seconds

    plan, facts, plan_s = planned(case)
    given, hardware = PlanAssumptions(), KINDS["h100"]
    network, machine = hardware.net_gbit / 8 * 1e9 * given.shard_share, hardware.node_gb_s * 1e9 * NVLINK_SHARE
    rates = LinkRates(network, machine, round_s=ROUND_S)
    out, into, inside = link_bytes(plan)
    update = ShardUpdateSize(
        float((plan.tensors.shapes.prod(1) * plan.tensors.item_bytes).sum()),
        case.ranks,
        fullest_stage(facts, ParallelConfig(pp=case.pp)),
        case.servers,
        case.server_tp,
        case.colocated,
    )
    kept = max(plan.program(sender=rank).memory_bytes for rank in range(0, case.ranks, max(1, case.ranks // 16)))
    return ShardRow(
        case.name,
        update.model / 1e9,
        out.max() / 1e9,
        out.mean() / 1e9,
        into.max() / 1e9,
        inside.max() / 1e9,
        simulated_seconds(plan, rates) + given.shard_fixed_s + case.load_s,
        sum(shard_update_seconds(update, Links(hardware, given))) + case.load_s,
        case.target,
        plan_s,
        kept / 1e6,
    )


def link_bytes(plan: UpdatePlan) -> tuple[Array, Array, Array]:
    """Return the bytes that each trainer rank sends and each server rank receives over the network, and those that a
    server rank receives from ranks of its machine: float64 [senders], [receivers], [receivers]."""
    import numpy as np

    nbytes, far = plan.messages.nbytes, plan.distances()
    out = np.bincount(plan.messages.sender, nbytes * (far == 2), len(plan.places))
    into, inside = (
        np.bincount(plan.receiver_numbers, nbytes * (far == distance), len(plan.receivers)) for distance in (2, 1)
    )
    number = {(receiver.server, receiver.rank): place for place, receiver in enumerate(plan.receivers)}
    fans = plan.fans
    key = fans.round.astype(np.int64) << 32 | fans.group
    groups, group = np.unique(key, return_inverse=True)
    total = np.bincount(group, fans.stripe, len(groups))
    who = np.array([number[pair] for pair in zip(fans.server.tolist(), fans.rank.tolist(), strict=True)], int)
    return out, into, inside + np.bincount(who, total[group] - fans.stripe, len(plan.receivers))


def table(rows: Sequence[ShardRow]) -> Table:
    """Return one line per case."""
    from rich.table import Table

    made = Table(title="GB of the fullest rank, and seconds on H100s", title_justify="left")
    for name in (
        "case",
        "GB",
        "out max/mean",
        "in",
        "in a machine",
        "simulated s",
        "formula s",
        "target",
        "plan s",
        "MB",
    ):
        made.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        made.add_row(
            row.name,
            f"{row.total_gb:.0f}",
            f"{row.out_gb:.1f}/{row.mean_out_gb:.1f}",
            *(f"{size:.1f}" for size in (row.in_gb, row.machine_gb)),
            *(f"{amount:.2f}" for amount in (row.simulated_s, row.formula_s)),
            f"{row.target_s:.1f}",
            f"{row.plan_s:.2f}",
            f"{row.kept_mb:.1f}",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="cases whose name begins with this, such as 30B")
    parser.add_argument("--json", help="file for the numbers")
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if case.name.startswith(given.only or "")]
    if not cases:
        raise UserError(
            "no case has this name", where="--only", found=given.only, allowed=[case.name for case in CASES]
        )
    rows = [measured(case) for case in cases]
    Console(width=160).print(table(rows))
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
