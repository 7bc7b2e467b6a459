"""Device memory of weight updates to servers, and of colocated servers in addition to weights and cache.

    always, from the first update on     a sender's two buffers, NCCL's connections to ranks that exchange slices
    always, from the start of servers    contexts of those on the device, and contexts of those on others that map
                                         memory of this one
    during generation                    CUDA graphs of servers on the device; always, if they cannot be released
    during an update                     a bucket on its way into a server, a tensor that is verified

The sizes of contexts, graphs and connections are not measured by this project, so none of them count as certain.
"""

from __future__ import annotations

from megarl.artifacts.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import TeamPlan
from megarl.dag.stage import Role
from megarl.planning.nccl import PEER_BYTES
from megarl.planning.shards import BYTES, adapter_parameters
from megarl.planning.terms import Term, term
from megarl.system.errors import count

CONTEXT_BYTES = 0.5e9
"""A process's CUDA context on one GPU, including its kernels."""
SERVER_BYTES = 1.5e9
"""A server's context and workspaces, which stay when its weights and cache are released."""
GRAPH_BYTES = 1.5e9
"""A server's CUDA graphs."""
NETWORK_BYTES = 2**29
"""NCCL's network buffers for messages to all ranks on other machines (NVIDIA/nccl issue 2363)."""
ADAPTER_SLOTS = 3
"""Adapters on a server's device with `sync.adapters: separate`, which one rank holds whole at most."""
_HASHING = 0.1e9
CELL_BYTES = 0.15e9
"""NCCL's communicator of a trainer rank for weights from shard to shard (sync.transport: shards), assumed: with the
servers of one cell, or with all trainer ranks if the servers are on their GPUs."""
_MOST_CELLS = 8
_ON_DEVICE = ("auto", "tensor", "distributed", "shards")  # transports with buffers on the device


class WeightSyncMemory:
    """Memory of weight updates on the fullest rank of the actor's team, on GPUs.

    Args:
        team: the actor's team.
    """

    def __init__(self, config: RunConfig, facts: ModelFacts, team: TeamPlan) -> None:
        self.config, self.facts, self.team = config, facts, team
        parallel = team.parallel
        experts = parallel.expert_tp * parallel.ep * parallel.pp if facts.is_moe else 0
        self._replica = max(parallel.tp * parallel.pp, experts)  # number of ranks that together hold the model once
        # how many ranks of a replica share a machine
        self._here = min(self._replica, -(-team.devices // config.cluster.nnodes))

    @property
    def _largest(self) -> float:
        """Bytes of the embedding, the largest tensor, in the dtype in which weights are sent."""
        return self.facts.vocab * self.facts.hidden * BYTES[self._dtype]

    @property
    def _dtype(self) -> str:
        return self.config.model.dtype if self.config.sync.dtype == "model" else self.config.sync.dtype

    def buffers(self) -> tuple[float, float]:
        """Return the bytes of a sender's two buffers; an embedding larger than a bucket gets its own bucket."""
        share = max(self.facts.parameters * BYTES[self._dtype] / self._here, self._largest)
        bucket = self.config.sync.bucket_mb * 1e6
        return (share, 0.0) if share <= bucket else (max(bucket, self._largest), min(bucket, share - self._largest))

    @property
    def _separate(self) -> bool:
        return self.config.sync.adapters == "separate"

    def _buffer_terms(self) -> list[Term]:
        if self.config.sync.transport not in _ON_DEVICE:
            return []
        return [term("buffers of new weights for servers", sum(self.buffers()), "sync.bucket_mb, the model's size")]

    def always(self) -> list[Term]:
        """Return the terms of device memory that weight updates and colocated servers take all the time, not only
        during an update."""
        terms = [] if self._separate else self._buffer_terms()
        shards = self.config.sends_shards
        terms += self._shards() if shards else self._slices()
        servers = self.config.rollout.sglang
        if self.config.rollout.colocated:
            terms.append(Term("a server's context and workspaces", SERVER_BYTES, "rollout.sglang.colocated", 0.0))
            if not servers.releases_graphs:
                terms.append(graphs())
            if self._separate:
                size = ADAPTER_SLOTS * adapter_bytes(self.config, self.facts)
                terms.append(Term("a server's slots for adapters", size, "model.lora", 0.0))
            # Every rank of a server maps the buffers of all senders that send to it.
            others = max(self._here, servers.ranks) - 1
            if others and not shards and self.config.sync.transport in ("auto", "tensor"):
                contexts = f"contexts of {count(others, 'server rank')} on other GPUs"
                keys = "actor.parallel.tp, rollout.sglang.tp_size"
                terms.append(Term(contexts, others * CONTEXT_BYTES, keys, 0.0))
        return terms

    def _slices(self) -> list[Term]:
        """Return the terms of connections over which ranks pass slices of tensors to the rank that sends these."""
        terms = []
        near = min(self.team.parallel.tp, self._here) - 1
        if near:
            ranks = f"NCCL's connections for slices of weights to {count(near, 'rank')}"
            terms.append(Term(ranks, near * PEER_BYTES, "actor.parallel.tp", 0.0))
        if self._replica > self._here:
            terms.append(Term("NCCL's network buffers for slices of weights", NETWORK_BYTES, "actor.parallel", 0.0))
        return terms

    def _shards(self) -> list[Term]:
        """Return the terms of updates from shard to shard, apart from the buffers from which a rank sends.

        No slices are passed on to other senders, and no rank of a server maps memory of another GPU.
        """
        servers = self.config.rollout.sglang
        if not self.config.rollout.colocated:
            cells = min(servers.servers, _MOST_CELLS, self.team.devices)
            groups = f"NCCL's groups with {count(cells, 'cell')} of servers"
            return [Term(groups, cells * CELL_BYTES, "rollout.sglang.servers", 0.0)]
        stored = self.facts.parameters * BYTES[self._dtype] / servers.ranks
        buffers = 2 * min(self.config.sync.bucket_mb * 1e6, stored)
        terms = [
            term(
                "buffers that the server rank on a GPU copies from", buffers, "sync.bucket_mb, rollout.sglang.tp_size"
            ),
            Term("NCCL's group of all trainer ranks for new weights", CELL_BYTES, "sync.transport", 0.0),
        ]
        keys = "actor.parallel, rollout.sglang.tp_size"
        if near := self._proxy_peers():
            terms.append(
                Term(f"NCCL's connections for new weights to {count(near, 'rank')}", near * PEER_BYTES, keys, 0.0)
            )
        if servers.nnodes > 1 or self._replica > self._here:
            terms.append(Term("NCCL's network buffers for new weights", NETWORK_BYTES, keys, 0.0))
        return terms

    def _proxy_peers(self) -> int:
        """Return the number of trainer ranks on a machine with which a rank there exchanges weights of servers on their
        GPUs, at most.

        Ranks that store the same slices as the server ranks there only exchange the ends of vocabularies, which both
        pad in their own way. Of other layouts a few exchange with fewer ranks than this counts.
        """
        parallel, servers = self.team.parallel, self.config.rollout.sglang
        here = -(-self.team.devices // self.config.cluster.nnodes)
        if self._replica == 1:
            return 0  # each rank holds all weights itself
        same = self._replica == parallel.tp == servers.ranks and not self.facts.is_moe
        return min(parallel.tp if same else here, here) - 1

    def passing(self) -> list[Term]:
        """Return the terms of device memory that are in use only during a weight update.

        With `sync.adapters: separate` buffers are only there while the base model is sent.
        """
        terms = self._buffer_terms() if self._separate else []
        alone = max(self._here, self.config.rollout.sglang.ranks) == 1
        if self.config.rollout.colocated and not alone and not self.config.sends_shards:
            terms.append(Term("a bucket on its way into a server", max(self.buffers()), "sync.bucket_mb", 0.0))
        if self.config.sync.verify != "off":
            parts = 2 if self.team.parallel.tp > 1 else 1
            size = parts * self._largest + _HASHING
            terms.append(Term("a tensor that is verified", size, "sync.verify, the model's size", 0.0))
        return terms


def adapter_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Return the bytes of all adapters in the dtype of the policy's parameters; 0 without `model.lora`."""
    if config.model.lora is None:
        return 0.0
    return sum(adapter_parameters(facts, ParallelConfig(), config.model.lora)) * BYTES[config.model.dtype]


def graphs() -> Term:
    """Return the memory term of the CUDA graphs of a server that shares the device with the trainer."""
    return Term("a server's CUDA graphs", GRAPH_BYTES, "rollout.sglang.colocated", 0.0)


def sends_weights(config: RunConfig, team: TeamPlan) -> bool:
    """Return whether processes outside of the team generate with its weights; preference recipes do not generate."""
    if Role.ACTOR not in team.roles:
        return False
    if Role.ROLLOUT in team.roles:
        return config.rollout.servers is not None
    return config.preference is None
