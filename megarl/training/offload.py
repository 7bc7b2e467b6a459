"""Frees a part of a model's device memory for another role and restores it later, without replacing tensor objects.

Only the storage is emptied and filled again, so every tensor that shares it (a DDP buffer and the parameters and
gradients that are views into it) stays valid. Gradients are dropped: a training step starts by clearing them.
Parameters and optimizer state are copied to host memory (`HostArena`). On a CPU they are already there, so only the
gradient buffers are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.system.device import empty_cache, synchronize
from megarl.system.offload_schedule import GRADIENTS, PARAMETERS
from megarl.training.host_memory import HostArena
from megarl.training.optimizer import parts


@dataclass(frozen=True)
class OffloadedBlock:
    """A storage whose device memory `OffloadedPart` frees."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None  # uint8 copy on the host; None if the contents are dropped


class OffloadedPart:
    """Frees the device memory of storages on construction; `restore` allocates and fills it again.

    All copies are complete before the first storage is freed, so an error before that leaves the model intact."""

    def __init__(self, blocks: list[OffloadedBlock]) -> None:
        self._blocks = blocks
        synchronize()
        for block in blocks:
            block.storage.resize_(0)
        empty_cache()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that offloading freed."""
        return sum(block.nbytes for block in self._blocks)

    def restore(self) -> None:
        """Allocate every storage again, with its copied contents or, for gradients, zeros.

        After an error, for example if the device is full, call it again.
        """
        for block in self._blocks:
            block.storage.resize_(block.nbytes)
            view = torch.empty(0, dtype=torch.uint8, device=block.storage.device).set_(block.storage)
            if block.copy is None:
                view.zero_()
            else:
                view.copy_(block.copy, non_blocking=True)
        synchronize()
        self._blocks = []


def offload_part(wrapped: Iterable[Any], optimizer: Any | None, part: str, arena: HostArena) -> OffloadedPart:
    """Free the device memory of one part (see `offload_schedule`) of model chunks, which may be wrapped in DDP.

    The parameters must be on the device when another part is offloaded. `arena` holds the copies until they are put
    back.
    """
    wrapped = list(wrapped)
    if part == GRADIENTS:
        both = [b for c in wrapped for b in (*getattr(c, "buffers", ()), *getattr(c, "expert_parallel_buffers", ()))]
        return OffloadedPart(unkept([buffer.grad_data for buffer in (both if optimizer is not None else [])]))
    storages = {p.untyped_storage().data_ptr(): p for c in wrapped for p in c.parameters()}
    # Leave out master weights that share storage with the parameters: they move with the parameters.
    if part != PARAMETERS:
        state = {tensor.untyped_storage().data_ptr(): tensor for tensor in _optimizer_tensors(optimizer)}
        storages = {pointer: tensor for pointer, tensor in state.items() if pointer not in storages}
    return OffloadedPart(kept_in(arena, [tensor for tensor in storages.values() if tensor.is_cuda]))


def _optimizer_tensors(optimizer: Any | None) -> Iterable[Tensor]:
    for part in parts(optimizer) if optimizer is not None else ():
        for group in part.param_groups:
            for parameter in group["params"]:
                yield parameter.data
                yield from (v for v in part.optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))


def kept_in(arena: HostArena, tensors: Sequence[Tensor]) -> list[OffloadedBlock]:
    """Start copying the storages of `tensors` to the host memory of `arena`; return each storage with its copy."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    copies = arena.take([storage.nbytes() for storage in storages])
    for storage, copy in zip(storages, copies, strict=True):
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy.copy_(view, non_blocking=True)
    return [OffloadedBlock(storage, copy.nbytes, copy) for storage, copy in zip(storages, copies, strict=True)]


def unkept(tensors: Sequence[Tensor]) -> list[OffloadedBlock]:
    """Return the storages of `tensors` as blocks whose contents are lost when they are freed."""
    return [
        OffloadedBlock(storage, storage.nbytes(), None) for storage in (tensor.untyped_storage() for tensor in tensors)
    ]
