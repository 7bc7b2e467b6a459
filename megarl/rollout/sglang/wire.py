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
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.sync.plan import Entry
from megarl.sync.shared import Handle, cuda_arguments


def bucket_payload(handle: Handle, entries: Iterable[Entry]) -> str:
    """Return the base64 of the pickle that hands `entries` of a shared buffer to one server rank."""
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
    return _pickled({"flattened_tensor": _tensor(handle), "metadata": metadata})


def loader_payload(handle: Handle, header: Any) -> str:
    """Return the base64 of the pickle that hands a buffer to one of our loaders in the server, which reads `header`
    first."""
    return _pickled([(json.dumps(header), _tensor(handle))])


def _pickled(found: Any) -> str:
    out = io.BytesIO()
    ForkingPickler(out).dump(found)
    return base64.b64encode(out.getvalue()).decode()


def _tensor(handle: Handle) -> _Call:
    """Make the call that is unpickled as the flat tensor of the handle."""
    if "device" in handle:  # the server also takes the device's UUID for its number
        return _Call(reductions.rebuild_cuda_tensor, cuda_arguments(handle))
    named = (torch.UntypedStorage, handle["manager"].encode(), handle["name"].encode(), handle["bytes"])
    typed = _Call(reductions.rebuild_typed_storage, (_Call(reductions.rebuild_storage_filename, named), torch.uint8))
    layout = (handle["offset"], torch.Size((handle["length"],)), (1,), False)
    return _Call(reductions.rebuild_tensor, (Tensor, typed, layout))


class _Call:
    """An object that is pickled as the call `function(*arguments)`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call
