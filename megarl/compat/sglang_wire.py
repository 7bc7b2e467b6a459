"""The form in which an SGLang server takes a bucket of tensors through shared memory, made without importing SGLang.

The server unpickles a dictionary with a flat uint8 tensor and a list of objects that have `name`, `shape`, `dtype`,
`start_idx`, `end_idx`, `numel`; its unpickler admits `types.SimpleNamespace`, torch's shapes, dtypes and storages. Only
handles travel in the pickle; the bytes stay in shared memory or on the GPU. Checked against SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import io
import json
import types
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_CUDA_DEVICE = 6  # place of the device number among the arguments of rebuild_cuda_tensor


class Placed(Protocol):
    """A tensor inside a flat buffer: `nbytes` bytes from byte `offset`; `dtype` without `torch.`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102


def shared_buffer(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] that other processes of this host can map: named shared memory on the CPU, device memory else."""
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,))


def bucket_payload(flat: Tensor, entries: Iterable[Placed]) -> str:
    """Base64 of the pickle that hands `entries` of the buffer `flat` (see `shared_buffer`) to one server rank."""
    metadata = [
        types.SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=getattr(torch, entry.dtype),
            start_idx=entry.offset,
            end_idx=entry.offset + entry.nbytes,
            numel=entry.nbytes,
        )
        for entry in entries
    ]
    return _pickled({"flattened_tensor": flat, "metadata": metadata})


def loader_payload(flat: Tensor, header: Any) -> str:
    """Base64 of the pickle that hands a buffer to one of our loaders in the server, which reads `header` first."""
    return _pickled([(json.dumps(header), flat)])


def _pickled(found: Any) -> str:
    out = io.BytesIO()
    pickler = ForkingPickler(out)
    pickler.dispatch_table = {**pickler.dispatch_table, Tensor: _reduce_shared}
    pickler.dump(found)
    return base64.b64encode(out.getvalue()).decode()


def _reduce_shared(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_cuda:
        # Device numbers differ between processes that see different devices; the server also takes the device's UUID.
        rebuild, arguments = reductions.reduce_tensor(tensor)
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        return rebuild, (*arguments[:_CUDA_DEVICE], uuid, *arguments[_CUDA_DEVICE + 1 :])
    storage = tensor.untyped_storage()
    manager, handle, size = storage._share_filename_cpu_()
    storage._shared_incref()  # the server's mapping gives this reference back
    mapped = _Call(reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, handle, size))
    typed = _Call(reductions.rebuild_typed_storage, (mapped, tensor.dtype))
    layout = (tensor.storage_offset(), tensor.size(), tensor.stride(), False)
    return reductions.rebuild_tensor, (Tensor, typed, layout)


class _Call:
    """Is pickled as the call `function(*arguments)`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call
