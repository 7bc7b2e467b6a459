"""Device memory of NCCL's connections between the ranks of a team, on GPUs.

Two ranks of one machine have channels, each with a buffer where it is received (10 MiB: NCCL's three protocols, of 0.5,
4.7 and 4 MiB) and one where it is sent (2 MiB, the allocation's granularity). A collective goes around a ring, so a
rank is connected to two others in every channel, whatever the size of the group. Messages and all-to-all connect a rank
to each of its peers. Connections are made at their first use and stay.

Sources: `p2pRecvSetup` of NCCL's src/transport/p2p.cc; NVIDIA/nccl issue 1685 (eight H100 of a machine: allocations of
10,485,760 and 2,097,152 bytes, 32 channels for each pair, 3.28 GB for one all-to-all; this file gives 2.82 GB); NCCL's
log on eight H100 ("24 coll channels", "32 p2p channels per peer"). Ranks on other machines are reached by the network,
whose buffers are at most as large; those of messages are one pool of 512 MiB (issue 2363). This project has not
measured them, so none of them count as certain.
"""

from __future__ import annotations

from collections.abc import Iterable

from megarl.config.model import ParallelConfig
from megarl.planning.terms import Term
from megarl.system.errors import count

CHANNEL_BYTES = 12 * 2**20
"""One channel of a connection: 10 MiB to receive and 2 MiB to send."""
RING_BYTES = 24 * CHANNEL_BYTES
"""A group that runs collectives: its ring."""
PEER_BYTES = 32 * CHANNEL_BYTES
"""A rank of the same machine with which messages are exchanged."""


def rings(parallel: ParallelConfig, replicas: int, *, mixture: bool) -> list[str]:
    """Return the names of a rank's process groups that run collectives over more than one rank."""
    sizes = {
        "all ranks (norms, metrics of the device, verified weights)": parallel.model_parallel_size * replicas,
        "tensor parallel": parallel.tp,
        "context parallel": parallel.cp,
        "gradients": replicas * parallel.cp,
    }
    if mixture and parallel.ep * parallel.expert_tp > 1:
        ranks = parallel.model_parallel_size * replicas
        sizes["gradients of experts"] = ranks // (parallel.ep * parallel.expert_tp * parallel.pp)
        sizes["expert tensor parallel"] = parallel.expert_tp
    return [name for name, size in sizes.items() if size > 1]


def peers(parallel: ParallelConfig, replicas: int, here: int, *, mixture: bool) -> dict[str, int]:
    """Return the number of ranks on the same machine to which a rank sends messages (not collectives), by purpose.

    Args:
        here: number of the team's ranks on one machine.
    """
    stage = parallel.tp * parallel.cp * replicas  # difference between the ranks of neighbouring pipeline stages
    experts = max(1, min(parallel.ep, here // parallel.expert_tp)) if mixture else 1
    ranks = {"stages": min(2, parallel.pp - 1) if stage < here else 0, "experts": experts - 1}
    return {purpose: number for purpose, number in ranks.items() if number}


def nccl_terms(parallel: ParallelConfig, replicas: int, here: int, *, mixture: bool) -> list[Term]:
    """Return the memory terms of a rank's NCCL connections to the other ranks of its team; empty for a single rank."""
    terms = []
    if groups := rings(parallel, replicas, mixture=mixture):
        terms.append(
            _term(f"NCCL's rings of {count(len(groups), 'group')}", len(groups) * RING_BYTES, ["actor.parallel"])
        )
    for name, ranks in peers(parallel, replicas, here, mixture=mixture).items():
        keys = ["actor.parallel.ep" if name == "experts" else "actor.parallel.pp"]
        terms.append(_term(f"NCCL's connections of {name} to {count(ranks, 'rank')}", ranks * PEER_BYTES, keys))
    return terms


def _term(what: str, size: float, keys: Iterable[str]) -> Term:
    return Term(what, size, ", ".join(keys), least=0.0)
