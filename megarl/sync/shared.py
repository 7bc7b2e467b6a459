"""Memory that another process on this host maps: a buffer, and handles to find it.

A handle is plain data and can be sent in any message; the bytes stay where they are. A handle of host memory can be
opened once: it holds a reference to the buffer, which the process that opens it releases. Device memory is shared once,
and its handle can be opened any number of times.
"""

from __future__ import annotations

import base64
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

Handle = dict[str, Any]  # a JSON object
_CUDA = ("offset", "device", "handle", "bytes", "start", "counter", "counter_offset", "event", "wait")
_BINARY = ("handle", "counter", "event")
# Handles are cached: each call of torch's `_share_cuda_` wraps the storage once more, and freeing many nested wrappers
# recurses too deeply.
_shared: weakref.WeakKeyDictionary[torch.UntypedStorage, Handle] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()


def shared_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return a uint8 [nbytes] buffer that other processes on this host can map: shared memory on a CPU, else device
    memory.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))


def handle_of(flat: Tensor) -> Handle:
    """Return a handle of `flat`, uint8 [n], a contiguous part of a `shared_buffer`.

    Opening a handle of device memory does not wait for writes to it; the caller must synchronise before it sends the
    handle.
    """
    storage = flat.untyped_storage()
    place = {"offset": flat.storage_offset(), "length": flat.numel()}
    if flat.is_cuda:
        with _sharing:
            if storage not in _shared:
                _shared[storage] = _share_on_device(flat)
            return _shared[storage] | place
    manager, name, size = storage._share_filename_cpu_()
    storage._shared_incref()  # a reference for the process that maps the storage; closing the mapping drops it
    return {"manager": manager.decode(), "name": name.decode(), "bytes": size} | place


def _share_on_device(flat: Tensor) -> Handle:
    """Return those fields of a handle that are the same for all handles of this buffer."""
    _, (_, _, _, _, _, _, _, *shared) = reductions.reduce_tensor(flat)
    handle, nbytes, start, _, counter, counter_offset, event, _ = shared
    # Use the UUID: device numbers differ between processes with different visible devices.
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    # False: do not wait for `event`. It was recorded when the buffer was shared, and each handle would open it again.
    values = dict(zip(_CUDA[1:], (uuid, handle, nbytes, start, counter, counter_offset, event, False), strict=True))
    return values | {key: base64.b64encode(values[key]).decode() for key in _BINARY}


def cuda_arguments(handle: Handle) -> tuple[Any, ...]:
    """Return the arguments of torch's `rebuild_cuda_tensor`, with the handle's device, which is a UUID or a number."""
    values = handle | {key: base64.b64decode(handle[key]) for key in _BINARY}
    offset, device, memory, nbytes, start, *counting = (values[key] for key in _CUDA)
    size = torch.Size((handle["length"],))
    kind = (Tensor, size, (1,), offset, torch.storage.TypedStorage, torch.uint8)
    return (*kind, device, memory, nbytes, start, False, *counting)


def open_handle(handle: Handle) -> Tensor:
    """Map the buffer of a handle, uint8 [length]; it stays mapped while the result exists."""
    if "device" in handle:
        uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
        number = uuids.index(handle["device"])
        return reductions.rebuild_cuda_tensor(*cuda_arguments(handle | {"device": number}))
    storage = reductions.rebuild_storage_filename(
        torch.UntypedStorage, handle["manager"].encode(), handle["name"].encode(), handle["bytes"]
    )
    return torch.empty(0, dtype=torch.uint8).set_(storage, handle["offset"], (handle["length"],), (1,))
