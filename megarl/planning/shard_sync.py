"""Seconds of a weight update from shard to shard (`sync.transport: shards`), formula W2 of docs/planning.md.

    calls + the first and last round + the fuller of (what a trainer rank sends, what a server rank receives) / the link

Every server rank receives what it stores. Where several servers share a machine without trainer ranks, each box crosses
the network once and their ranks gather it over the machine's links, which takes no time of its own: it goes on while
later rounds arrive. On the trainer's machine every rank receives all that it stores, over the machine's links.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megarl.artifacts.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.planning.links import Links


@dataclass(frozen=True)
class ShardUpdateSize:
    """The sizes that decide how long a weight update from shard to shard takes.

    Attributes:
        model: bytes of the whole model as it is sent.
        senders: number of the trainer's ranks.
        fullest: ratio of the bytes of the trainer's fullest pipeline stage to the mean of its stages.
        servers: number of servers.
        ranks: number of ranks of each server.
        near: whether the servers run on the trainer's machines.
    """

    model: float
    senders: int
    fullest: float
    servers: int
    ranks: int
    near: bool = False

    def received(self, per_machine: int) -> float:
        """Return the bytes that a server rank receives from trainer ranks.

        Args:
            per_machine: devices of a machine. Servers on a machine without trainer ranks share what they receive.
        """
        gathering = 1 if self.near else min(per_machine, self.servers * self.ranks)
        return self.model / max(self.ranks, gathering)

    def sent(self, per_machine: int) -> float:
        """Return the bytes that a trainer rank of the fullest pipeline stage sends; `per_machine` as in `received`."""
        return self.received(per_machine) * self.servers * self.ranks / self.senders * self.fullest


def fullest_stage(facts: ModelFacts, parallel: ParallelConfig) -> float:
    """Return the ratio of the bytes of the fullest pipeline stage to the mean of the stages.

    Layers stand for bytes. In a mixture of experts only layers with experts count, because they have most of the bytes.
    """
    chunks = parallel.chunk_layers(facts.layers)
    layers = iter([not facts.is_moe or facts.has_experts(layer) for layer in range(facts.layers)])
    counts = [sum(itertools.islice(layers, count)) for count in chunks]
    stages = [sum(counts[stage :: parallel.pp]) for stage in range(parallel.pp)]
    return max(stages) * parallel.pp / sum(stages)


def shard_update_seconds(update: ShardUpdateSize, links: Links) -> tuple[float, float]:
    """Return the fixed seconds of a weight update, and the seconds of the link with most bytes: a sending trainer
    rank's or a receiving server rank's."""
    given, per_machine = links.given, links.hardware.per_node
    rate = links.rate(inside=True) if update.near else links.hardware.net_gbit / 8 * 1e9 * given.shard_share
    return given.shard_fixed_s, max(update.sent(per_machine), update.received(per_machine)) / rate
