"""Pickles a bucket of tensors in shared memory for an SGLang server, without importing SGLang.

The server unpickles a dictionary of a flat uint8 tensor and a list of objects with the attributes `name`, `shape`,
`dtype`, `start_idx`, `end_idx` and `numel`. Its unpickler accepts `types.SimpleNamespace` and torch's shapes, dtypes
and storages. The pickle contains only handles; the bytes stay in shared memory or on the GPU. Checked against SGLang
0.5.23.
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
    """Return the base64 of a pickle from which a server rank maps the tensors `entries` of a shared buffer."""
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
    """Return the base64 of a pickle from which a loader (compat/sglang_server/loaders) in a server rank reads `header`
    and maps a shared buffer."""
    return _pickled([(json.dumps(header), _tensor(handle))])


def header_payload(header: Any) -> str:
    """Return the base64 of a pickle from which a loader in a server rank reads `header`. The pickle also contains an
    empty tensor, because SGLang expects one."""
    typed = _Call(reductions.rebuild_typed_storage, (_Call(torch.UntypedStorage, (0,)), torch.uint8))
    layout = (0, torch.Size((0,)), (1,), False)
    return _pickled([(json.dumps(header), _Call(reductions.rebuild_tensor, (Tensor, typed, layout)))])


def _pickled(value: Any) -> str:
    out = io.BytesIO()
    ForkingPickler(out).dump(value)
    return base64.b64encode(out.getvalue()).decode()


def _tensor(handle: Handle) -> _Call:
    """Return an object whose pickle the server loads as the flat tensor in the shared memory of `handle`."""
    if "device" in handle:  # the server accepts the device's UUID in the place of its number
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
