"""The plan of bytes from senders to receivers: plain data, no torch, testable without processes.

    ranks with slices of a tensor        routes                             buckets of a sender
    (trainer ranks)
    r0: rows 0..63   of q_proj --.
                                  >--> replica 0, sender r0 --> receiver 0   [q_proj | k_proj | v_proj | ...]
    r1: rows 64..127 of q_proj --'     replica 1, sender r2 --> receiver 1   [...]

A replica is a set of ranks that together hold the model once. Receivers are distributed over the replicas. Within a
replica every tensor has one sender, to which other ranks pass their slices, and the senders' bytes are balanced. A
transport that needs shared memory (`same_host`) sends from ranks on the receiver's host, and if possible from the
replica whose GPUs the receiver uses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from megarl.models.layers.rules import TensorRegion
from megarl.models.weight_table import Coordinate, WeightTable

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}
FP8_BLOCK = 128
#: Suffix of a weight's name in the name of the tensor with its FP8 scales.
FP8_SCALE = "_scale_inv"
SLAB_BYTES = 4 << 20  # trainer ranks exchange pieces in slabs of at most this many bytes, but at least one row
_FIRST = 4  # the first of several buckets has a fourth of the room of the others
# parts of the names of tensors that are not quantised; vision encoders are small
_NOT_FP8 = ("embed_tokens", "lm_head", ".gate.weight", "norm", "score", "visual.")


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """The place of a trainer rank: its pipeline stage, its host, and the name of its GPU on this host (empty: CPU)."""

    stage: int = 0
    host: str = "127.0.0.1"
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """The slices of a Hugging Face tensor (`regions`), each with the trainer ranks that hold it, in rank order."""

    shape: tuple[int, ...]
    regions: tuple[tuple[TensorRegion, tuple[int, ...]], ...]
    float32: bool = False  # whether the tensor is float32 whatever the model's dtype


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to send, at `offset` bytes in its bucket; `source` is the Hugging Face tensor that it comes from.

    Tensors of a bucket with the same name in `together` are always delivered together; empty: it has no partners.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    source: str
    together: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent as one flat buffer without gaps; larger dtypes come first, so that all are aligned.

    `frozen`: whether the tensors are not trained."""

    entries: tuple[Entry, ...]
    nbytes: int
    frozen: bool = False

    def with_partners(self, numbers: Iterable[int]) -> list[Entry]:
        """Return the entries with these numbers, and those that receivers must get in the same call as one of them."""
        chosen = set(numbers)
        units = {self.entries[number].together for number in chosen} - {""}
        return [entry for i, entry in enumerate(self.entries) if i in chosen or entry.together in units]

    def sources(self) -> list[str]:
        """Return the names of the Hugging Face tensors in the bucket, in order."""
        return list(dict.fromkeys(entry.source for entry in self.entries))


@dataclass(frozen=True, slots=True)
class Route:
    """The transfers of a weight update from one replica to its receivers: the buckets of each sender, and the rank that
    provides each slice of a tensor."""

    replica: int
    receivers: tuple[int, ...]
    senders: dict[int, tuple[Bucket, ...]]
    givers: dict[str, tuple[tuple[TensorRegion, int], ...]] = field(repr=False)

    @property
    def lead(self) -> int:
        """The rank that opens and closes the weight updates of the receivers on this route."""
        return min(self.senders)


@dataclass(frozen=True)
class SyncPlan:
    """The plan of a weight synchronisation; `hosts` lists the host of each receiver by number."""

    hosts: tuple[str, ...]
    routes: tuple[Route, ...]

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors that training does not change."""
        buckets = (bucket for route in self.routes for sent in route.senders.values() for bucket in sent)
        return frozenset(name for bucket in buckets if bucket.frozen for name in bucket.sources())


def holdings(weights: WeightTable, ranks: Sequence[Coordinate]) -> dict[str, Held]:
    """Return, for every tensor of the model in export order, which of the trainer's `ranks` hold which slices."""
    same: dict[Coordinate, list[int]] = {}
    for rank, at in enumerate(ranks):
        same.setdefault(at, []).append(rank)
    shapes, float32 = weights.shapes(), weights.float32()
    holders: dict[str, dict[TensorRegion, set[int]]] = {name: {} for name in shapes}
    for at, members in same.items():
        for shard in weights.shards(at):
            for piece in shard.pieces:
                holders[piece.source].setdefault(piece.source_region, set()).update(members)
    return {
        name: Held(
            shapes[name], tuple((region, tuple(sorted(who))) for region, who in regions.items()), name in float32
        )
        for name, regions in holders.items()
    }


def make_plan(
    tensors: dict[str, Held],
    ranks: Sequence[TrainerRank],
    hosts: Sequence[str],
    *,
    dtype: str = "bfloat16",
    fp8: bool = False,
    bucket_bytes: int = 256 << 20,
    same_host: bool = False,
    gpus: Sequence[Sequence[str]] = (),
    one_replica: bool = False,
    senders_per_stage: int | None = None,
    frozen: Container[str] = (),
    together: Callable[[str], str] | None = None,
) -> SyncPlan:
    """Plan a weight synchronisation.

    Args:
        tensors: the trainer's tensors, see `holdings`.
        ranks: place of each trainer rank.
        hosts: host of each receiver.
        dtype: dtype of the tensors on the wire; tensors that are float32 in every model are sent in float32.
        fp8: whether to send projection weights as float8_e4m3fn with a float32 scale per block of 128 x 128.
        bucket_bytes: largest size of a bucket plus a slab (`SLAB_BYTES`); a larger tensor gets its own bucket.
        same_host: whether senders must run on the host of their receiver; they also share its GPUs if possible.
        gpus: names of each receiver's GPUs on its host, if the trainer may use these GPUs too.
        one_replica: whether the first replica sends to all receivers.
        senders_per_stage: largest number of senders per pipeline stage; None: every rank with the tensor may send it.
        frozen: tensors that training does not change; they have separate buckets, which each sender sends first.
        together: returns a name that tensors have in common which must share a bucket; None: receivers take each
            tensor by itself.

    Raises:
        ValueError: a receiver's host has no trainer rank although `same_host` needs one.
    """
    count = min(len(who) for tensor in tensors.values() for _, who in tensor.regions)
    members = _replicas(tensors, count)
    units: dict[str, list[str]] = {}  # the tensors of each unit, which must share a bucket; most units have one tensor
    for name in tensors:
        units.setdefault(name if together is None else together(name), []).append(name)
    routes = []
    sharing = members[:1] if one_replica else members
    for replica, host, served in _share_out(sharing, ranks, hosts, gpus if same_host else None):
        pools = _pools(members[replica], ranks, host, senders_per_stage)
        routes.append(_route(tensors, units, replica, count, served, pools, ranks, dtype, fp8, bucket_bytes, frozen))
    return SyncPlan(tuple(hosts), tuple(routes))


def _in_replica(who: tuple[int, ...], replica: int, count: int) -> tuple[int, ...]:
    """Return the ranks in `who`, which hold a slice of a tensor, that belong to replica number `replica` of `count`."""
    return who[len(who) * replica // count : len(who) * (replica + 1) // count]


def _replicas(tensors: dict[str, Held], count: int) -> list[set[int]]:
    members: list[set[int]] = [set() for _ in range(count)]
    for who in {who for tensor in tensors.values() for _, who in tensor.regions}:
        for replica in range(count):
            members[replica].update(_in_replica(who, replica, count))
    return members


def _share_out(
    members: list[set[int]], ranks: Sequence[TrainerRank], hosts: Sequence[str], gpus: Sequence[Sequence[str]] | None
) -> Iterable[tuple[int, str | None, tuple[int, ...]]]:
    """Yield (replica that sends, host of its senders, numbers of the receivers) of every route. Without `gpus`, the
    names of each receiver's GPUs, senders may be on any host, and the host is None."""
    if gpus is None:
        for replica in range(min(len(members), len(hosts))):
            yield replica, None, tuple(range(replica, len(hosts), len(members)))
        return
    for host in dict.fromkeys(hosts):
        near = [r for r, who in enumerate(members) if any(ranks[rank].host == host for rank in who)]
        if not near:
            raise ValueError(f"this transport needs a trainer rank on every host of a receiver; {host!r} has none")
        gpus_of = {r: {ranks[rank].gpu for rank in members[r] if ranks[rank].host == host} - {""} for r in near}
        fed: dict[int, list[int]] = {replica: [] for replica in near}
        for receiver in (i for i, at in enumerate(hosts) if at == host):
            wanted = set(gpus[receiver]) if gpus else set()
            # Data from another GPU costs a context and a copy, so prefer the replica that shares most GPUs.
            nearest = min(near, key=lambda r: (-len(gpus_of[r] & wanted), len(fed[r]), r))
            fed[nearest].append(receiver)
        for replica, receivers in fed.items():
            if receivers:
                yield replica, host, tuple(receivers)


def _pools(
    members: set[int], ranks: Sequence[TrainerRank], host: str | None, senders_per_stage: int | None
) -> dict[int, tuple[int, ...]]:
    """Return, for every pipeline stage of a replica, the ranks that may send its tensors."""
    allowed = sorted(rank for rank in members if host is None or ranks[rank].host == host)
    pools = {}
    for stage in sorted({ranks[rank].stage for rank in members}):
        of_stage = [rank for rank in allowed if ranks[rank].stage == stage]
        pools[stage] = tuple((of_stage or allowed)[:senders_per_stage])
    return pools


def _route(
    tensors: dict[str, Held],
    units: dict[str, list[str]],
    replica: int,
    count: int,
    receivers: tuple[int, ...],
    pools: dict[int, tuple[int, ...]],
    ranks: Sequence[TrainerRank],
    dtype: str,
    fp8: bool,
    bucket_bytes: int,
    frozen: Container[str],
) -> Route:
    holders = {
        name: tuple((region, _in_replica(who, replica, count)) for region, who in tensor.regions)
        for name, tensor in tensors.items()
    }
    sender_of = _assign(tensors, units, holders, pools, ranks, ITEMSIZE[dtype])
    givers = {
        name: tuple((region, _provider(who, sender_of[name], ranks)) for region, who in regions)
        for name, regions in holders.items()
    }
    sent: dict[int, list[str]] = {}
    for unit, members in units.items():
        sent.setdefault(sender_of[members[0]], []).append(unit)
    bound = max(bucket_bytes - SLAB_BYTES, 1)
    senders: dict[int, tuple[Bucket, ...]] = {}
    for sender in sorted(sent):
        for is_frozen in (True, False):
            on_wire = [
                _wire_unit(unit, {name: tensors[name] for name in units[unit]}, dtype, fp8)
                for unit in sent[sender]
                if all(name in frozen for name in units[unit]) == is_frozen
            ]
            buckets = _in_turn(_buckets(on_wire, bound), bound)
            senders[sender] = (*senders.get(sender, ()), *(replace(bucket, frozen=is_frozen) for bucket in buckets))
    return Route(replica, receivers, senders, givers)


def _provider(who: tuple[int, ...], sender: int, ranks: Sequence[TrainerRank]) -> int:
    """Return which of the ranks `who`, which hold a slice of a tensor, provides it to the sender: the sender itself,
    else a rank on the sender's host, else the first one.
    """
    if sender in who:
        return sender
    return next((rank for rank in who if ranks[rank].host == ranks[sender].host), who[0])


def _assign(
    tensors: dict[str, Held],
    units: dict[str, list[str]],
    holders: dict[str, tuple[tuple[TensorRegion, tuple[int, ...]], ...]],
    pools: dict[int, tuple[int, ...]],
    ranks: Sequence[TrainerRank],
    itemsize: int,
) -> dict[str, int]:
    """Return the sender of each tensor. Large units are assigned first, each to the candidate with the fewest bytes.

    A unit consists of the tensors that receivers must get in one bucket, so they have one sender.
    """
    candidates: dict[str, tuple[int, ...]] = {}
    known: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
    for name, regions in holders.items():
        key = tuple(who for _, who in regions)
        if key not in known:
            pool = pools[ranks[key[0][0]].stage]
            holding = {rank for who in key for rank in who}
            known[key] = tuple(rank for rank in pool if rank in holding) or pool
        candidates[name] = known[key]
    size = {unit: sum(math.prod(tensors[name].shape) for name in names) * itemsize for unit, names in units.items()}
    ranks_of = {unit: candidates[names[0]] for unit, names in units.items()}
    load: dict[int, int] = {}
    chosen: dict[str, int] = {}
    # Assign units with only one candidate first; the others balance the load.
    for unit in sorted(units, key=lambda u: (len(ranks_of[u]) > 1, -size[u])):
        sender = min(ranks_of[unit], key=lambda rank: (load.get(rank, 0), rank))
        chosen |= dict.fromkeys(units[unit], sender)
        load[sender] = load.get(sender, 0) + size[unit]
    return chosen


def _wire_unit(unit: str, tensors: dict[str, Held], dtype: str, fp8: bool) -> list[Entry]:
    """Return the bucket entries of `tensors`, which must share a bucket; several are marked to be delivered together
    under the name `unit`.
    """
    entries = [
        entry
        for name, tensor in tensors.items()
        for entry in wire_tensors(name, tensor.shape, "float32" if tensor.float32 else dtype, fp8)
    ]
    return [replace(entry, together=unit) for entry in entries] if len(tensors) > 1 else entries


def _buckets(on_wire: list[list[Entry]], bound: int) -> Iterable[Bucket]:
    """Yield buckets of consecutive tensors, each with as many as fit into `bound` bytes.

    The first of several buckets is small, because no bucket can be sent while the first is gathered.
    """
    sizes = [sum(part.nbytes for part in parts) for parts in on_wire]
    room = bound if sum(sizes) <= bound else bound // _FIRST
    waiting: list[Entry] = []
    filled = 0
    for parts, size in zip(on_wire, sizes, strict=True):
        if waiting and filled + size > room:
            yield _pack(waiting)
            waiting, filled, room = [], 0, bound if filled <= bound else room
        waiting += parts
        filled += size
    if waiting:
        yield _pack(waiting)


def _in_turn(buckets: Iterable[Bucket], bound: int) -> tuple[Bucket, ...]:
    """Return a sender's buckets, ordered so that buckets larger than `bound` (single tensors) have even numbers if
    possible.

    Buckets are double-buffered: those with even numbers use the first buffer, so only this buffer has to be large.
    """
    large: list[Bucket] = []
    small: list[Bucket] = []
    for bucket in buckets:
        (large if bucket.nbytes > bound else small).append(bucket)
    # The plan made the first bucket small so that sending begins early. Two small buckets come first if enough others
    # remain to give all large buckets even numbers.
    ahead = 2 if len(small) > len(large) else 0
    ordered, small = small[:ahead], small[ahead:]
    for turn in itertools.zip_longest(large, small):
        ordered += [bucket for bucket in turn if bucket is not None]
    return tuple(ordered)


def is_sent_as_fp8(name: str) -> bool:
    """Return whether `sync.fp8` quantises the matrix with this Hugging Face name."""
    return name.endswith(".weight") and not any(part in name for part in _NOT_FP8)


def wire_tensors(name: str, shape: tuple[int, ...], dtype: str, fp8: bool) -> list[Entry]:
    """Return the tensors that are sent for one Hugging Face tensor, all with offset 0."""
    if fp8 and len(shape) == 2 and is_sent_as_fp8(name):
        blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
        values = Entry(name, shape, "float8_e4m3fn", 0, math.prod(shape), name)
        return [values, Entry(f"{name}{FP8_SCALE}", blocks, "float32", 0, 4 * math.prod(blocks), name)]
    return [Entry(name, shape, dtype, 0, math.prod(shape) * ITEMSIZE[dtype], name)]


def _pack(parts: list[Entry]) -> Bucket:
    entries, offset = [], 0
    for part in sorted(parts, key=lambda part: -ITEMSIZE[part.dtype]):
        entries.append(replace(part, offset=offset))
        offset += part.nbytes
    return Bucket(tuple(entries), offset)
