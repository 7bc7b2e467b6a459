"""Transport from shard to shard: every trainer rank sends boxes (rectangular parts of tensors) to the server ranks that
store them.

`WeightSync` calls `ShardTransfer.run` instead of sending buckets, so only the transport's methods that release
resources do something here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.models.policy import PolicyModel
from megarl.models.weight_table import Coordinate, WeightTable
from megarl.models.weights.fill import local_shards
from megarl.sync.receiver import Receiver, Receivers
from megarl.sync.shards.boxes import GpuPlace, ServerStorage
from megarl.sync.shards.plan import UpdatePlan
from megarl.sync.shards.rounds import RoundLimits
from megarl.sync.shards.sources import tensors_of, trainer_storages
from megarl.sync.shards.transfer import OwnShards, Planner, ShardTransfer
from megarl.sync.transports.base import Transport
from megarl.system.errors import ConfigError


class ShardsTransport(Transport):
    """Releases the resources of `transfer`, which sends whole updates without buckets."""

    in_parts = False

    def __init__(self, transfer: ShardTransfer) -> None:
        self.transfer = transfer

    def drop(self, receiver: Receiver) -> None:
        """Forget how a receiver that failed stores its parameters."""
        self.transfer.drop(receiver.url)
        super().drop(receiver)

    def close(self) -> None:
        """Leave the process groups shared with receivers."""
        self.transfer.close()


def own_shards(
    chunks: Sequence[PolicyModel],
    table: WeightTable,
    ranks: Sequence[Coordinate],
    machines: Sequence[str],
    wire: str,
    gpus: Sequence[str] | None = None,
) -> OwnShards:
    """Return how all trainer ranks store the model, and this rank's parameters, to send from shard to shard.

    Args:
        table: the tensors to send.
        ranks: coordinate of every trainer rank.
        machines: name of every trainer rank's machine (`machine_name`).
        wire: dtype in which tensors are sent, such as `bfloat16`.
        gpus: name of every trainer rank's GPU (`device_name`), if receivers run on these GPUs; else None.
    """
    tensors = tensors_of(table, wire)
    stored = str(chunks[0].config.params_dtype).removeprefix("torch.")
    shapes = table.shapes()
    seats: dict[str, int] = {}
    places = []
    for rank in range(len(ranks)):
        places.append(GpuPlace(machines[rank], seats.get(machines[rank], 0)))
        seats[machines[rank]] = places[-1].gpu + 1
    with torch.no_grad():
        parameters = {f"{shard.chunk}/{shard.param}": param.detach() for shard, param in local_shards(chunks)}
    return OwnShards(
        parameters,
        trainer_storages(table, ranks, tensors, stored),
        places,
        tensors,
        [shapes[name] for name in tensors.names.tolist()],
        gpus,
    )


def planner(round_bytes: int, *, colocated: bool = False) -> Planner:
    """Return a function that plans updates in which a rank sends or receives at most `round_bytes` bytes at a time.

    `colocated`: receivers run on the trainer's GPUs. A trainer rank then sends and receives in one round, for which all
    receivers have to be in one cell.
    """

    # a rank has several peers in a round, so a message must be allowed to be smaller than a round
    limits = RoundLimits(
        nbytes=round_bytes,
        message=max(min(RoundLimits.message, round_bytes // RoundLimits.peers), 1),
        cells=1 if colocated else RoundLimits.cells,
    )

    def plan(own: OwnShards, servers: Sequence[ServerStorage]) -> UpdatePlan:
        return UpdatePlan(own.tensors, own.storages, own.places, servers, limits)

    return plan


def refuse_shards(receivers: Receivers, *, adapters: bool) -> None:
    """Check that trainer ranks can send weights directly to server ranks (`sync.transport=shards`).

    Raises:
        ConfigError: receivers take whole tensors only, or the weights to send are merged with adapters.
    """
    why = receivers.takes_no_shards or ("weights that are merged with adapters lie in no parameter" if adapters else "")
    if why:
        raise ConfigError(
            f"{why}, so sync.transport=shards cannot be used",
            where="sync.transport",
            found="shards",
            allowed="auto, distributed or disk; tensor or delta beside a trainer rank"
            if not receivers.colocated
            else "disk; tensor with servers on one machine each",
            # auto is shards itself for such servers
            fix=f"set sync.transport={'disk' if receivers.colocated and receivers.spread else 'auto'}",
        )
