"""The trainer's side of a plan: passes this rank's pieces to senders, and fills this rank's buckets.

Work goes in rounds: in round k every sender fills its k-th bucket. All ranks walk the tensors of a round in the same
order (route, sender, place in the bucket) and move the pieces that they give or take; equal order avoids deadlocks.
Pieces are sent in the wire's dtype, in slabs of a few megabytes: directly into the bucket if they are contiguous there,
otherwise through a temporary slab.

Slab k of all pieces of a tensor is one batch on each rank. With nccl a batch uses the communicator of the whole world,
where a single send or receive would create a communicator for its pair of ranks, which takes time and memory. A rank
runs its batches one after the other, and all ranks run them in one global order. So all ranks of the earliest
unfinished batch have started it, and it finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.layers.rules import TensorRegion
from megarl.models.policy import PolicyModel
from megarl.models.weight_table import as_index, region_numel
from megarl.models.weights.fill import weight_readers
from megarl.sync.plan import FP8_BLOCK, ITEMSIZE, SLAB_BYTES, Bucket, Entry, Route, SyncPlan
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError
from megarl.system.tracing import beat

HeldTensors = Mapping[tuple[str, TensorRegion], Tensor]
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Move:
    """A slice of a tensor that rank `giver` sends into the bucket of rank `sender`."""

    giver: int
    sender: int
    entry: Entry
    region: TensorRegion


class Pieces(HeldTensors):
    """This rank's pieces of the weights: views of parameters or, with adapters, merged weights computed on access."""

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        self._readers = {
            (piece.source, piece.source_region): partial(read, piece.target_region)
            for shard, read in weight_readers(chunks)
            for piece in shard.pieces
        }

    def __getitem__(self, key: tuple[str, TensorRegion]) -> Tensor:
        return self._readers[key]()

    def __iter__(self) -> Iterator[tuple[str, TensorRegion]]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


class Source:
    """Reads this rank's parameters: fills its buckets and sends pieces to other senders. Every rank has one.

    Args:
        held: this rank's pieces of the weights, read at the time of access.
        world: all ranks of the trainer, by the plan's numbers.
        dtype: dtype in which tensors are collected that are sent as FP8.
        device: device of the buckets; pieces are sent between buckets' devices, so all ranks must use one backend.
        live: whether tensors that this rank already holds in the form to be sent are not copied into buckets; `parts`
            then returns the parameters themselves.

    Attributes:
        route: number of the route on which this rank sends; None if it only sends pieces to other ranks.
        buckets: the buckets that this rank sends, in order.
    """

    def __init__(
        self,
        held: HeldTensors,
        plan: SyncPlan,
        world: WorkerGroup,
        dtype: torch.dtype,
        device: torch.device = HOST,
        *,
        live: bool = False,
    ) -> None:
        self.held, self.plan, self.world, self.dtype, self.device = held, plan, world, dtype, device
        self.rank = rank = world.rank
        self.peak_staged = 0  # maximum bytes allocated at once in addition to the buckets; read by tests
        self._staged = 0
        self._moves = [_moves(route, rank) for route in plan.routes]
        self._frozen = plan.frozen
        self.route = next((i for i, route in enumerate(plan.routes) if rank in route.senders), None)
        self.buckets: tuple[Bucket, ...] = () if self.route is None else plan.routes[self.route].senders[rank]
        givers = plan.routes[self.route].givers if live and self.route is not None else {}
        # names of the route's tensors that this rank sends whole, from its own parameters
        self._whole_here = {name for name, regions in givers.items() if {giver for _, giver in regions} == {rank}}

    def parts(self, bucket: Bucket, flat: Tensor) -> list[Tensor]:
        """Return the bytes (uint8) of each tensor in a bucket that was filled: views of its buffer `flat`, or of the
        parameter if that is sent without a copy.
        """
        return [
            flat[entry.offset : entry.offset + entry.nbytes] if at is None else at.view(-1).view(torch.uint8)
            for entry, at in ((entry, self._live(entry)) for entry in bucket.entries)
        ]

    def _live(self, entry: Entry) -> Tensor | None:
        """Return the parameter itself if it can be sent instead of a copy in the bucket, else None."""
        if entry.source not in self._whole_here:
            return None
        piece = self.held.get((entry.source, tuple((0, size) for size in entry.shape)))
        if piece is None or piece.dtype != self._dtype(entry) or piece.device != self.device:
            return None
        return piece if piece.is_contiguous() and piece.nbytes == entry.nbytes and entry.name == entry.source else None

    def _dtype(self, entry: Entry) -> torch.dtype:
        """Return the dtype in which pieces of a tensor are collected: that on the wire, or what FP8 is made from."""
        return self.dtype if ITEMSIZE[entry.dtype] == 1 else getattr(torch, entry.dtype)

    @torch.no_grad()
    def fill(self, number: int, routes: Sequence[int], out: Tensor | None, *, whole: bool = True) -> None:
        """Gather bucket `number` of each sender on `routes` from the ranks that hold its pieces. Collective over all of
        these ranks.

        Args:
            out: uint8 buffer for this rank's bucket in this round; None if it has no such bucket.
            whole: whether to fill frozen buckets too.

        Raises:
            WorkerError: another rank did not answer before the process group's deadline.
        """
        sending: deque[tuple[list[dist.Work], list[Tensor], Entry]] = deque()
        for route in routes:
            for entry, moves in self._moves[route].get(number, ()):
                beat()
                if not whole and entry.source in self._frozen:
                    continue
                if moves[0].sender == self.rank:
                    assert out is not None
                    if self._live(entry) is None:
                        self._take(entry, moves, out)
                else:
                    self._give(entry, moves, sending)
        while sending:
            self._wait_for_receiver(*sending.popleft())

    def _take(self, entry: Entry, moves: list[Move], out: Tensor) -> None:
        """Collect all slices of one tensor into the bucket's buffer `out`; quantise the tensor if it is sent as FP8.

        Args:
            moves: the slices, with the ranks that hold them.
        """
        plain = ITEMSIZE[entry.dtype] > 1
        if plain:
            whole = out[entry.offset : entry.offset + entry.nbytes].view(self._dtype(entry)).view(entry.shape)
        else:
            whole = torch.empty(entry.shape, dtype=self.dtype, device=out.device)
            self._count(whole.nbytes)
        arriving = list(self._receive(entry, moves, whole))
        for works in arriving:
            self._wait(works, f"for pieces of {entry.source}")
        if not plain:
            values, scale = quantize_blocks(whole)
            out[entry.offset : entry.offset + entry.nbytes].view(values.dtype).view(entry.shape).copy_(values)
            scales = next(e for b in self.buckets for e in b.entries if e.name == f"{entry.name}_scale_inv")
            out[scales.offset : scales.offset + scales.nbytes].view(scale.dtype).view(scales.shape).copy_(scale)
            self._count(-whole.nbytes)

    def _receive(self, entry: Entry, moves: list[Move], whole: Tensor) -> Iterator[list[dist.Work]]:
        """Copy this rank's own slices of a tensor into `whole`, and start to receive the others.

        Yields batches of receives for which the caller has to wait.
        """
        remote: list[tuple[Move, list[Tensor]]] = []
        for move in moves:
            target = whole[as_index(move.region)]
            if move.giver == self.rank:
                target.copy_(self.held[entry.source, move.region])
            else:
                remote.append((move, list(_slabs(target))))
        for number in range(max((len(slabs) for _, slabs in remote), default=0)):
            parts = [(move.giver, slabs[number]) for move, slabs in remote if number < len(slabs)]
            staged = {
                place: torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
                for place, (_, rows) in enumerate(parts)
                if not rows.is_contiguous()
            }
            works = self._batch(
                dist.irecv, [(giver, staged.get(place, rows)) for place, (giver, rows) in enumerate(parts)]
            )
            if not staged:
                yield works
                continue
            size = sum(slab.nbytes for slab in staged.values())
            self._count(size)
            self._wait(works, f"for pieces of {entry.source} from ranks {sorted({giver for giver, _ in parts})}")
            for place, slab in staged.items():
                parts[place][1].copy_(slab)
            self._count(-size)

    def _give(
        self, entry: Entry, moves: list[Move], sending: deque[tuple[list[dist.Work], list[Tensor], Entry]]
    ) -> None:
        """Send this rank's slices of a tensor to the rank that collects it."""
        dtype = self._dtype(entry)
        pieces = [list(_slabs(self.held[entry.source, move.region], dtype.itemsize)) for move in moves]
        for number in range(max(map(len, pieces))):
            ready = [slabs[number].to(self.device, dtype).contiguous() for slabs in pieces if number < len(slabs)]
            while len(sending) > 1:  # at most two batches in flight, because each needs copies of its slices
                self._wait_for_receiver(*sending.popleft())
            works = self._batch(dist.isend, [(moves[0].sender, slab) for slab in ready])
            sending.append((works, ready, entry))

    def _batch(self, operation: Callable[..., dist.Work | None], slabs: list[tuple[int, Tensor]]) -> list[dist.Work]:
        """Start one batch of sends or receives; `slabs`: (rank to send to or receive from, contiguous tensor)."""
        group, ranks = self.world.process_group, self.world.ranks
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, slab.view(-1).view(torch.uint8), ranks[rank], group) for rank, slab in slabs]
        )

    def _wait_for_receiver(self, works: list[dist.Work], _: list[Tensor], entry: Entry) -> None:
        self._wait(works, f"for another rank to receive pieces of {entry.source}")

    def _wait(self, works: list[dist.Work], purpose: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise WorkerError(
                f"weight synchronisation: rank {self.rank} waited {purpose}, and the transfer failed: {error}"
            ) from error

    def _count(self, nbytes: int) -> None:
        self._staged += nbytes
        self.peak_staged = max(self.peak_staged, self._staged)


def _slabs(region: Tensor, itemsize: int | None = None) -> Iterator[Tensor]:
    """Split a slice into row blocks of at most SLAB_BYTES, in the same way on the sending and the receiving rank."""
    row = max(region[0].numel() * (itemsize or region.element_size()), 1)
    yield from region.split(max(SLAB_BYTES // row, 1))


def _moves(route: Route, rank: int) -> dict[int, list[tuple[Entry, list[Move]]]]:
    """Return the moves of `rank` by round: tensors that it collects, and slices that it sends to other ranks."""
    moves_of_round: dict[int, list[tuple[Entry, list[Move]]]] = {}
    for sender in sorted(route.senders):
        for number, bucket in enumerate(route.senders[sender]):
            for entry in bucket.entries:
                if entry.name != entry.source:
                    continue  # an entry of FP8 scales, which is computed together with its weight
                regions = route.givers[entry.source]
                moves = [
                    Move(g, sender, entry, region)
                    for region, g in regions
                    if rank in (sender, g) and region_numel(region)
                ]
                if moves:
                    moves_of_round.setdefault(number, []).append((entry, moves))
    return moves_of_round


FP8_MAX = 448.0  # largest finite float8_e4m3fn


def quantize_blocks(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to FP8 by blocks of 128 x 128.

    Returns:
        float8_e4m3fn [R, C], and float32 [ceil(R / 128), ceil(C / 128)] with value = quantised * scale. The largest
        magnitude of a block becomes 448; a block of zeros has scale 1.
    """
    rows, columns = weight_RC.shape
    down, across = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = weight_RC.new_zeros(down * FP8_BLOCK, across * FP8_BLOCK, dtype=torch.float32)
    padded[:rows, :columns] = weight_RC
    blocks = padded.view(down, FP8_BLOCK, across, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    scaled = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    quantised = scaled.view(down * FP8_BLOCK, across * FP8_BLOCK)[:rows, :columns]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scale


def dequantize_blocks(values_RC: Tensor, scale: Tensor) -> Tensor:
    """Return float32 numbers [R, C] from the FP8 values and scales of `quantize_blocks`."""
    rows, columns = values_RC.shape
    spread = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return values_RC.float() * spread[:rows, :columns]
