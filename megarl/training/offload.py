"""Gives a model's device memory to another role and takes it back, without a tensor changing its identity.

Every tensor that shares a storage (a DDP buffer and the parameters and gradients that are views into it) stays valid,
because only the storage is emptied and filled again. Gradients are not kept: a training step starts by clearing them.
Parameters and optimizer state are copied to pinned host memory. On a CPU they are there already, so that only the
gradient buffers are freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.device import empty_cache, synchronize
from megarl.training.optimizer import parts


@dataclass(frozen=True)
class _Emptied:
    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None  # uint8 on the host; None for storages whose contents are not kept


class Parked:
    """What `park` took away; `restore` brings it back."""

    def __init__(self, emptied: list[_Emptied]) -> None:
        self._emptied = emptied

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that were freed."""
        return sum(item.nbytes for item in self._emptied)

    def restore(self) -> None:
        """Allocate every storage again: kept ones with their contents, gradients with zeros."""
        for item in self._emptied:
            item.storage.resize_(item.nbytes)
            view = torch.empty(0, dtype=torch.uint8, device=item.storage.device).set_(item.storage)
            if item.copy is None:
                view.zero_()
            else:
                view.copy_(item.copy, non_blocking=True)
        synchronize()
        self._emptied = []


def park(wrapped: Iterable[Any], optimizer: Any | None, *, parameters: bool) -> Parked:
    """Empty the storages of gradients, optimizer state and, if asked, parameters of (DDP-wrapped) model chunks."""
    wrapped = list(wrapped)
    buffers = (
        [b for c in wrapped for b in (*getattr(c, "buffers", ()), *getattr(c, "expert_parallel_buffers", ()))]
        if optimizer is not None
        else []
    )
    emptied = [_empty(b.grad_data, keep=False) for b in buffers]
    kept: dict[int, Tensor] = {}
    weights = {p.untyped_storage().data_ptr(): p for c in wrapped for p in c.parameters()}
    if parameters:
        kept |= weights
    for tensor in _optimizer_tensors(optimizer):
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:  # float32 masters of float32 parameters are views of the parameters
            kept[pointer] = tensor
    emptied += [_empty(tensor, keep=True) for tensor in kept.values() if tensor.is_cuda]
    synchronize()
    empty_cache()
    return Parked(emptied)


def _optimizer_tensors(optimizer: Any | None) -> Iterable[Tensor]:
    for part in parts(optimizer) if optimizer is not None else ():
        for group in part.param_groups:
            for parameter in group["params"]:
                yield parameter.data
                yield from (v for v in part.optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))


def _empty(tensor: Tensor, keep: bool) -> _Emptied:
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    copy = None
    if keep:
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        copy.copy_(view, non_blocking=True)
        synchronize()
    storage.resize_(0)
    return _Emptied(storage, nbytes, copy)
