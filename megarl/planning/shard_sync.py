"""Seconds of a weight update from shard to shard (`sync.transport: shards`), formula W2 of docs/planning.md.

    calls + rounds' start and end + the fuller of (what a trainer rank sends, what a server rank receives) / the network

Every server rank receives what it stores. Where several servers share a machine, each box crosses the network once and
their ranks gather it over the machine's links, which takes no time of its own: it goes on while later rounds arrive.
Runs do not gather yet (`ShardTransfer._planned`): there every rank receives all that it stores.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megarl.artifacts.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.planning.links import Links


@dataclass(frozen=True)
class ShardUpdateSize:
    """The sizes of an update, its senders and its receivers.

    Attributes:
        model: bytes of the model on the wire.
        senders: ranks of the trainer.
        fullest: bytes that the trainer's fullest pipeline stage holds, over the mean of the stages.
        servers, ranks: number of servers, and of ranks of one.
        near: whether the servers run on the trainer's devices.
    """

    model: float
    senders: int
    fullest: float
    servers: int
    ranks: int
    near: bool = False

    def received(self, joined: int) -> float:
        """Return the bytes that a server rank receives; `joined`: devices that fast links join."""
        return self.model / max(self.ranks, min(joined, self.servers * self.ranks))

    def sent(self, joined: int) -> float:
        """Return the bytes that a rank of the fullest pipeline stage sends."""
        return self.received(joined) * self.servers * self.ranks / self.senders * self.fullest


def fullest_stage(facts: ModelFacts, parallel: ParallelConfig) -> float:
    """Return the bytes of the fullest pipeline stage over the mean of the stages. In a mixture only experts count,
    because they have most of the bytes.
    """
    chunks = parallel.chunk_layers(facts.layers)
    layers = iter([not facts.is_moe or facts.has_experts(layer) for layer in range(facts.layers)])
    counts = [sum(itertools.islice(layers, count)) for count in chunks]
    stages = [sum(counts[stage :: parallel.pp]) for stage in range(parallel.pp)]
    return max(stages) * parallel.pp / sum(stages)


def shard_update_seconds(update: ShardUpdateSize, links: Links) -> tuple[float, float]:
    """Return (seconds of fixed costs, seconds of the fuller link)."""
    given, joined = links.given, links.hardware.joined
    rate = links.rate(inside=True) if update.near else links.hardware.net_gbit / 8 * 1e9 * given.shard_share
    return given.shard_fixed_s, max(update.sent(joined), update.received(joined)) / rate
