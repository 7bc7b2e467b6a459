"""The plan of bytes from senders to receivers: plain data, no torch, testable without processes.

    holders of a tensor's regions        routes                             buckets of a sender
    (trainer ranks)
    r0: rows 0..63   of q_proj --.
                                  >--> replica 0, sender r0 --> receiver 0   [q_proj | k_proj | v_proj | ...]
    r1: rows 64..127 of q_proj --'     replica 1, sender r2 --> receiver 1   [...]

A replica is a set of ranks that holds the whole model once. Receivers are shared out over the replicas; inside a
replica every tensor has one sender, other holders pass it their regions, and the bytes of the senders are balanced. A
transport that needs shared memory (`same_host`) sends from ranks on the receiver's own host, and of the replica whose
GPUs the receiver is on, if any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from megarl.models.weight_table import Coordinate, TensorRegion, WeightTable

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}
FP8_BLOCK = 128
SLAB_BYTES = 4 << 20  # pieces travel between trainer ranks in parts of at most this many bytes (one row at least)
_FIRST = 4  # the first bucket has a fourth of the size of the others
_NOT_FP8 = ("embed_tokens", "lm_head", ".gate.weight", "norm", "score", "visual.")  # encoders are small


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """The place of a trainer rank: its pipeline stage, its host, and the name of its GPU there (empty: a CPU)."""

    stage: int = 0
    host: str = "127.0.0.1"
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """One Hugging Face tensor: each region it is held in, with the trainer ranks that hold it, in rank order."""

    shape: tuple[int, ...]
    regions: tuple[tuple[TensorRegion, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor on the wire, at `offset` bytes in its bucket. `source`: the Hugging Face tensor it is made of."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tensors that travel as one flat buffer, without gaps; larger items first, so that all are aligned. `frozen`:
    training leaves them as they are."""

    entries: tuple[Entry, ...]
    nbytes: int
    frozen: bool = False

    def sources(self) -> list[str]:
        """Return the Hugging Face tensors in the bucket, in order."""
        return list(dict.fromkeys(entry.source for entry in self.entries))


@dataclass(frozen=True, slots=True)
class Route:
    """The transfers of one replica to its receivers: the buckets of each sender, and for every tensor who gives which
    region."""

    replica: int
    receivers: tuple[int, ...]
    senders: dict[int, tuple[Bucket, ...]]
    givers: dict[str, tuple[tuple[TensorRegion, int], ...]] = field(repr=False)

    @property
    def lead(self) -> int:
        """The rank that opens and closes the update on these receivers."""
        return min(self.senders)


@dataclass(frozen=True)
class SyncPlan:
    """The complete plan of a synchronisation, made before it starts. `hosts`: of the receivers, by number."""

    hosts: tuple[str, ...]
    routes: tuple[Route, ...]

    @property
    def frozen(self) -> frozenset[str]:
        """The tensors that training leaves as they are."""
        buckets = (bucket for route in self.routes for own in route.senders.values() for bucket in own)
        return frozenset(name for bucket in buckets if bucket.frozen for name in bucket.sources())

    def route_of(self, receiver: int) -> Route:
        """Return the route that feeds `receiver`."""
        return next(route for route in self.routes if receiver in route.receivers)


def holdings(weights: WeightTable, ranks: Sequence[Coordinate]) -> dict[str, Held]:
    """Return, for every tensor of the model in export order, which of the trainer's `ranks` hold which regions."""
    same: dict[Coordinate, list[int]] = {}
    for rank, at in enumerate(ranks):
        same.setdefault(at, []).append(rank)
    shapes = weights.shapes()
    found: dict[str, dict[TensorRegion, set[int]]] = {name: {} for name in shapes}
    for at, members in same.items():
        for shard in weights.shards(at):
            for piece in shard.pieces:
                found[piece.source].setdefault(piece.source_region, set()).update(members)
    return {
        name: Held(shapes[name], tuple((region, tuple(sorted(who))) for region, who in regions.items()))
        for name, regions in found.items()
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
) -> SyncPlan:
    """Plan a synchronisation.

    Args:
        tensors: the trainer's tensors, see `holdings`.
        ranks: one per trainer rank.
        hosts: hosts of the receivers, one for each.
        dtype: dtype of the tensors on the wire.
        fp8: send projection weights as float8_e4m3fn with a float32 scale per block of 128 x 128.
        bucket_bytes: bound of a bucket and of what gathering it also needs; a larger tensor has a bucket of its own.
        same_host: senders must run on the host of their receiver, and share GPUs with it where they can.
        gpus: names of the GPUs of each receiver on its host, where they may be the trainer's.
        one_replica: the first replica sends to all receivers.
        senders_per_stage: senders of one pipeline stage at most; None: every holder of a tensor may send it.
        frozen: tensors that training leaves as they are; they have buckets of their own, each sender's first.

    Raises:
        ValueError: a receiver's host has no trainer rank although `same_host` asks for it.
    """
    count = min(len(who) for held in tensors.values() for _, who in held.regions)
    members = _replicas(tensors, count)
    routes = []
    sharing = members[:1] if one_replica else members
    for replica, host, mine in _share_out(sharing, ranks, hosts, gpus if same_host else None):
        pools = _pools(members[replica], ranks, host, senders_per_stage)
        routes.append(_route(tensors, replica, count, mine, pools, ranks, dtype, fp8, bucket_bytes, frozen))
    return SyncPlan(tuple(hosts), tuple(routes))


def _in_replica(who: tuple[int, ...], replica: int, count: int) -> tuple[int, ...]:
    """Return the holders that belong to a replica: equal consecutive shares, as Megatron orders data parallelism."""
    return who[len(who) * replica // count : len(who) * (replica + 1) // count]


def _replicas(tensors: dict[str, Held], count: int) -> list[set[int]]:
    members: list[set[int]] = [set() for _ in range(count)]
    for who in {who for held in tensors.values() for _, who in held.regions}:
        for replica in range(count):
            members[replica].update(_in_replica(who, replica, count))
    return members


def _share_out(
    members: list[set[int]], ranks: Sequence[TrainerRank], hosts: Sequence[str], gpus: Sequence[Sequence[str]] | None
) -> Iterable[tuple[int, str | None, tuple[int, ...]]]:
    """Yield (replica, host its senders must be on or None, receivers) of every route. `gpus`: None where senders may be
    on any host."""
    if gpus is None:
        for replica in range(min(len(members), len(hosts))):
            yield replica, None, tuple(range(replica, len(hosts), len(members)))
        return
    for host in dict.fromkeys(hosts):
        near = [r for r, who in enumerate(members) if any(ranks[rank].host == host for rank in who)]
        if not near:
            raise ValueError(f"no trainer rank runs on the host {host!r} of a receiver, which this transport needs")
        there = {r: {ranks[rank].gpu for rank in members[r] if ranks[rank].host == host} - {""} for r in near}
        fed: dict[int, list[int]] = {replica: [] for replica in near}
        for receiver in (i for i, at in enumerate(hosts) if at == host):
            own = set(gpus[receiver]) if gpus else set()
            # What comes from another GPU costs a context there and a copy: the replica that shares most of them first.
            nearest = min(near, key=lambda r: (-len(there[r] & own), len(fed[r]), r))
            fed[nearest].append(receiver)
        for replica, receivers in fed.items():
            if receivers:
                yield replica, host, tuple(receivers)


def _pools(
    members: set[int], ranks: Sequence[TrainerRank], host: str | None, senders_per_stage: int | None
) -> dict[int, tuple[int, ...]]:
    """Return, for every stage of a replica, the ranks that may send its tensors."""
    allowed = sorted(rank for rank in members if host is None or ranks[rank].host == host)
    pools = {}
    for stage in sorted({ranks[rank].stage for rank in members}):
        of_stage = [rank for rank in allowed if ranks[rank].stage == stage]
        pools[stage] = tuple((of_stage or allowed)[:senders_per_stage])
    return pools


def _route(
    tensors: dict[str, Held],
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
        name: tuple((region, _in_replica(who, replica, count)) for region, who in held.regions)
        for name, held in tensors.items()
    }
    sender_of = _assign(tensors, holders, pools, ranks, ITEMSIZE[dtype])
    givers = {
        name: tuple((region, _giver(who, sender_of[name], ranks)) for region, who in regions)
        for name, regions in holders.items()
    }
    names: dict[int, list[str]] = {}
    for name in tensors:
        names.setdefault(sender_of[name], []).append(name)
    bound = max(bucket_bytes - SLAB_BYTES, 1)

    def buckets(sender: int, *, learn: bool) -> tuple[Bucket, ...]:
        mine = [(name, tensors[name].shape) for name in names[sender] if (name in frozen) != learn]
        return _in_turn(_buckets(mine, dtype, fp8, bound), bound)

    senders = {
        sender: (
            *(replace(bucket, frozen=True) for bucket in buckets(sender, learn=False)),
            *buckets(sender, learn=True),
        )
        for sender in sorted(names)
    }
    return Route(replica, receivers, senders, givers)


def _giver(who: tuple[int, ...], sender: int, ranks: Sequence[TrainerRank]) -> int:
    """Return the holder that gives a region: the sender itself, else one on its host, else the first."""
    if sender in who:
        return sender
    return next((rank for rank in who if ranks[rank].host == ranks[sender].host), who[0])


def _assign(
    tensors: dict[str, Held],
    holders: dict[str, tuple[tuple[TensorRegion, tuple[int, ...]], ...]],
    pools: dict[int, tuple[int, ...]],
    ranks: Sequence[TrainerRank],
    itemsize: int,
) -> dict[str, int]:
    """Return one sender per tensor. The largest first, each to the candidate with the least to send so far."""
    candidates: dict[str, tuple[int, ...]] = {}
    known: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
    for name, regions in holders.items():
        key = tuple(who for _, who in regions)
        if key not in known:
            pool = pools[ranks[key[0][0]].stage]
            holding = {rank for who in key for rank in who}
            known[key] = tuple(rank for rank in pool if rank in holding) or pool
        candidates[name] = known[key]
    size = {name: math.prod(held.shape) * itemsize for name, held in tensors.items()}
    load: dict[int, int] = {}
    chosen: dict[str, int] = {}
    # Tensors without a choice come first, so that the others fill the gaps.
    for name in sorted(tensors, key=lambda n: (len(candidates[n]) > 1, -size[n])):
        sender = min(candidates[name], key=lambda rank: (load.get(rank, 0), rank))
        chosen[name] = sender
        load[sender] = load.get(sender, 0) + size[name]
    return chosen


def _buckets(tensors: list[tuple[str, tuple[int, ...]]], dtype: str, fp8: bool, bound: int) -> Iterable[Bucket]:
    """Yield the tensors in order, as many as fit into `bound` bytes.

    The first of several buckets within the bound is small: while it is gathered nothing else happens.
    """
    on_wire = [wire_tensors(name, shape, dtype, fp8) for name, shape in tensors]
    sizes = [sum(part[3] for part in parts) for parts in on_wire]
    room = bound if sum(sizes) <= bound else bound // _FIRST
    waiting: list[tuple[str, tuple[int, ...], str, int, str]] = []
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
    """Order a sender's buckets: those above the bound, of one tensor each, get even numbers as far as there are others
    for the odd ones. Two buffers take turns, so that only the first of them has to be large."""
    large: list[Bucket] = []
    small: list[Bucket] = []
    for bucket in buckets:
        (large if bucket.nbytes > bound else small).append(bucket)
    ahead = 2 if len(small) > len(large) else 0  # the first one is small on purpose
    found, small = small[:ahead], small[ahead:]
    for turn in itertools.zip_longest(large, small):
        found += [bucket for bucket in turn if bucket is not None]
    return tuple(found)


def goes_as_fp8(name: str) -> bool:
    """Tell whether the matrix of a Hugging Face name is one of those that `sync.fp8` quantises."""
    return name.endswith(".weight") and not any(part in name for part in _NOT_FP8)


def wire_tensors(
    name: str, shape: tuple[int, ...], dtype: str, fp8: bool
) -> list[tuple[str, tuple[int, ...], str, int, str]]:
    """(name, shape, dtype, bytes, source) of what is sent for one Hugging Face tensor."""
    if fp8 and len(shape) == 2 and goes_as_fp8(name):
        blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
        scale = f"{name}_scale_inv"
        return [
            (name, shape, "float8_e4m3fn", math.prod(shape), name),
            (scale, blocks, "float32", 4 * math.prod(blocks), name),
        ]
    return [(name, shape, dtype, math.prod(shape) * ITEMSIZE[dtype], name)]


def _pack(parts: list[tuple[str, tuple[int, ...], str, int, str]]) -> Bucket:
    entries, offset = [], 0
    for name, shape, dtype, nbytes, source in sorted(parts, key=lambda part: -ITEMSIZE[part[2]]):
        entries.append(Entry(name, shape, dtype, offset, nbytes, source))
        offset += nbytes
    return Bucket(tuple(entries), offset)
