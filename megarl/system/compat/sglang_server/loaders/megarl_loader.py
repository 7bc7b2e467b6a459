"""Weight loaders for a running SGLang server: `--custom-weight-loader megarl_loader.load megarl_loader.patch`.

This file runs in the servers' own interpreter, without megarl. `load` receives a bucket of whole tensors, `patch`
changed elements. Both write directly to the places in the parameters that megarl_weight_map.py has found once, and
`load` passes tensors that have no such places to the model's `load_weights`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from megarl_weight_map import copy_mapped, derive, derive_if_written, map_of
from torch import Tensor

_OVERWRITTEN = "down_proj_bias"  # the end of names of tensors that SGLang's gpt_oss overwrites while it loads them
_MAPPED: dict[tuple[str, str], dict[int, Tensor]] = {}  # mapped buffers by address, for each (update, sender)


def _to_own_device(model: Any, flat: Tensor) -> Tensor:
    """Return the buffer on the model's device. With a memory saver no other device may write to the parameters, and a
    copy is made by the device that holds the source.
    """
    return flat.to(next(model.parameters()).device)


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load the tensors of a bucket.

    A sender's host memory stays mapped until the sender's last bucket, because mapping it again for each bucket would
    take a third as long as copying from it. Buffers of a dead sender are freed in the next update.

    Args:
        model: model of the server, as SGLang passes it to a loader.
        named_tensors: one entry, uint8 [bytes of the bucket]. Its name is a JSON header: `tensors`, a list of (name,
            shape, dtype, first byte, bytes); `update`, the update's name, equal for all its senders; `sender`; `last`,
            whether this is the sender's last bucket.
    """
    ((text, flat),) = named_tensors
    header = json.loads(text)
    for stale in [key for key in _MAPPED if key[0] != header["update"]]:
        del _MAPPED[stale]
    key = header["update"], header["sender"]
    # Keep host memory mapped for later buckets. A GPU buffer may be a copy, which later buckets do not reuse.
    if not flat.is_cuda:
        _MAPPED.setdefault(key, {})[flat.untyped_storage().data_ptr()] = flat
    flat = _to_own_device(model, flat)
    tensors = [
        (name, flat[start : start + nbytes].view(getattr(torch, dtype)).view(shape))
        for name, shape, dtype, start, nbytes in header["tensors"]
    ]
    rest = copy_mapped(model, tensors)
    if rest:
        # Copy tensors that the loading code overwrites, because other ranks read the same memory.
        model.load_weights([(name, part.clone() if name.endswith(_OVERWRITTEN) else part) for name, part in rest])
    if header["last"]:
        derive_if_written(model)
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)  # the sender refills its buffer after this call returns
    if header["last"]:
        _MAPPED.pop(key, None)


@torch.no_grad()
def patch(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Write the changed elements of some tensors into the model's parameters.

    Args:
        model: model of the server, as SGLang passes it to a loader.
        named_tensors: one entry, uint8: the distance of each element from the previous one (from -1 at the start of
            each tensor), then the elements. Its name is a JSON header: a list of (name, shape, dtype, number
            of elements).

    Raises:
        CannotPatch: a tensor cannot be changed in part. Other tensors may already have been changed.
    """
    ((text, flat),) = named_tensors
    header = json.loads(text)
    known = map_of(model, {name: (tuple(shape), dtype) for name, shape, dtype, _ in header})
    places = {name: known.places(name) for name, *_ in header}
    flat = _to_own_device(model, flat)
    steps, values = flat, flat[sum(count for *_, count in header) :]
    for name, _, dtype, count in header:
        kind = getattr(torch, dtype)
        elements = values[: count * kind.itemsize].clone().view(kind)  # the bytes may not be aligned at their place
        positions = steps[:count].to(torch.int64).cumsum(0) - 1
        for place in places[name]:
            place.write(positions, elements)
        steps, values = steps[count:], values[count * kind.itemsize :]
    derive(model)
