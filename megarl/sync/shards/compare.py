"""Compares the parameters of server ranks with what the trainer's ranks sent, without gathering a tensor: the hashes of
all parts of a parameter add up to the parameter's hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megarl.sync.shards.boxes import RankStorage
from megarl.sync.shards.hashes import box_hash, numbers_of
from megarl.sync.shards.program import TransferProgram

Hashes = dict[str, dict[str, int]]  # "server/rank" -> parameter -> hash modulo 2**64
_MODULUS = 1 << 64


@torch.no_grad()
def sent_hashes(
    program: TransferProgram,
    parameters: Sequence[Tensor],
    servers: Sequence[Sequence[RankStorage]],
    skipped: Iterable[int] = (),
) -> Hashes:
    """Return, for each parameter of each server rank, the hash of the boxes (parts of it) that this trainer rank sends.

    Args:
        program: the transfers in which this trainer rank sends.
        parameters: this trainer rank's parameters, in the order of its storage.
        servers: storage of each rank of each server.
        skipped: numbers of servers to leave out.
    """
    links, targets, left_out = program.links, program.targets, set(skipped)
    places: list[tuple[str, str]] = []
    values: list[Tensor] = []
    for row in range(len(targets)):
        server, rank, link = int(targets.server[row]), int(targets.rank[row]), int(targets.link[row])
        if server in left_out:
            continue
        table, number = servers[server][rank].parameters, int(targets.parameter[row])
        whole = parameters[int(links.parameter[link])]
        shape = (links.hi[link] - links.lo[link]).tolist()
        part = whole.as_strided(shape, links.strides[link].tolist(), whole.storage_offset() + int(links.offset[link]))
        cast = part.to(getattr(torch, str(table.dtypes[number])))
        values.append(box_hash(cast, int(targets.offset[row]), targets.strides[row].tolist()))
        places.append((f"{server}/{rank}", str(table.names[number])))
    sums: Hashes = {}
    for (of, name), value in zip(places, numbers_of(values), strict=True):
        of_rank = sums.setdefault(of, {})
        of_rank[name] = (of_rank.get(name, 0) + value) % _MODULUS
    return sums


def differing(sent: Iterable[Hashes], server: int, held: Sequence[Mapping[str, int]]) -> list[str]:
    """Return `NAME (rank R)` of each server parameter whose hash differs from the sum of all that was sent for it.

    Args:
        sent: `sent_hashes` of every trainer rank.
        held: for each rank of the server, the hash of each parameter.
    """
    sent, wrong = list(sent), []
    for rank, hashes in enumerate(held):
        parts = [each.get(f"{server}/{rank}", {}) for each in sent]
        expected = {name: sum(part.get(name, 0) for part in parts) % _MODULUS for part in parts for name in part}
        wrong += [
            f"{name} (rank {rank})"
            for name in sorted(expected.keys() | hashes)
            if expected.get(name, 0) != hashes.get(name)
        ]
    return wrong
