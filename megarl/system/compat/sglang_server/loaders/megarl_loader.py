"""Weight loaders for a running SGLang server: `--custom-weight-loader megarl_loader.load megarl_loader.patch`.

This file runs in the servers' own interpreter, without megarl. `load` receives a bucket of whole tensors, `patch`
changed elements. Only the model's `load_weights` knows where an element of a Hugging Face tensor lies in the server's
parameters (fused projections, tensor-parallel parts, experts). So `patch` calls it once with probes in place of
tensors: slices of probes are tracked, and where a probe would be copied into a parameter, the place is recorded and
nothing is written. Tensors that loading does not merely slice and copy (padding, packing, quantising) are refused, and
the trainer sends them whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_OVERWRITTEN = "down_proj_bias"  # the end of names of tensors that SGLang's gpt_oss overwrites while it loads them
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}


class CannotPatch(Exception):
    """The model's loading code does more than slice and copy this tensor, so single elements cannot be changed."""


@dataclass(frozen=True)
class CopyTarget:
    """A part of a sent tensor, and the memory of the parameter into which the model's loading code copies it.

    Attributes:
        offset, strides: offset and strides of the part, in elements of the whole tensor.
        target: view of the parameter, in the part's shape.
    """

    offset: int
    strides: tuple[int, ...]
    target: Tensor

    def write(self, positions: Tensor, values: Tensor) -> None:
        """Write the elements of `values` [n] whose `positions` in the tensor (int64 [n], ascending) are in
        this part."""
        word = _WORDS[self.target.itemsize]  # write integers of equal size: torch cannot index every dtype, such as FP8
        values, target = values.to(self.target.dtype).view(word), self.target.view(word)
        # The part is contiguous in the sent tensor and in the parameter.
        if self.target.is_contiguous() and self.target.stride() == self.strides:
            run = torch.tensor([self.offset, self.offset + self.target.numel()], device=positions.device)
            first, last = torch.searchsorted(positions, run).tolist()
            target.view(-1)[positions[first:last] - self.offset] = values[first:last]
            return
        left = positions - self.offset
        inside, where = left >= 0, [torch.zeros_like(left)] * self.target.dim()
        for dim in sorted(range(self.target.dim()), key=lambda d: -self.strides[d]):
            if self.target.shape[dim] > 1:
                where[dim] = left // self.strides[dim]
                left = left - where[dim] * self.strides[dim]
                inside &= where[dim] < self.target.shape[dim]
        inside &= left == 0
        target[tuple(index[inside] for index in where)] = values[inside]


class ProbeTensor(Tensor):
    """A tensor with a shape and no data that records into which memory it or a slice of it is copied."""

    meta: Tensor
    places: list[CopyTarget]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, places: list[CopyTarget]) -> ProbeTensor:
        """Create a probe for `meta`, a meta tensor: its shape, strides and offset define which elements of a whole
        checkpoint tensor the probe stands for. `places` collects where these elements are copied to."""
        offset, dtype = meta.storage_offset(), meta.dtype
        made = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=offset, dtype=dtype, device=device
        )
        made.meta, made.places = meta, places
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a function that belongs to no class
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls) and not isinstance(args[0], cls):
            target, source = args[:2]
            if target.shape != source.shape or 0 in source.meta.stride():
                raise CannotPatch(
                    f"load_weights copies a tensor of shape {tuple(source.shape)} to one of {tuple(target.shape)}"
                )
            source.places.append(CopyTarget(source.meta.storage_offset(), source.meta.stride(), target))
            return target
        probe = next(arg for arg in args if isinstance(arg, cls))
        if func is torch.ops.aten.zero_.default:  # zero on this rank, whatever weights are sent
            probe.places = []
            return probe
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (None, probe.dtype):
            return probe
        if not (func.is_view or func in _SAME):
            raise CannotPatch(
                f"the model's load_weights calls {func} on this tensor, which is neither a slice nor a copy"
            )
        views = func(*tree_map_only(cls, lambda arg: arg.meta, args), **(kwargs or {}))
        return tree_map_only(Tensor, lambda meta: cls(meta, probe.device, probe.places), views)


class _Map:
    """A cache of the places in memory to which a model's loading code copies each tensor; it is cleared when the
    parameters' addresses change.
    """

    def __init__(self) -> None:
        self.parameters: tuple[int, ...] = ()
        self.places: dict[str, list[CopyTarget]] = {}

    def of(self, model: Any, tensors: list[tuple[str, list[int], str]]) -> dict[str, list[CopyTarget]]:
        parameters = tuple(parameter.data_ptr() for parameter in model.parameters())
        if parameters != self.parameters:
            self.parameters, self.places = parameters, {}
        new = [tensor for tensor in tensors if tensor[0] not in self.places]
        if new:
            device = next(model.parameters()).device
            places: dict[str, list[CopyTarget]] = {name: [] for name, _, _ in new}
            empty = (
                (name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")) for name, shape, dtype in new
            )
            model.load_weights([(name, ProbeTensor(meta, device, places[name])) for name, meta in empty])
            self.places |= places
        return self.places


#: A map for each model: a server with a draft model patches both models alternately.
_MAPS: WeakKeyDictionary[Any, _Map] = WeakKeyDictionary()
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
    if not flat.is_cuda:  # keeps host memory mapped; a GPU buffer may be a copy, which later buckets do not reuse
        _MAPPED.setdefault(key, {})[flat.untyped_storage().data_ptr()] = flat
    flat = _to_own_device(model, flat)
    tensors = [
        (name, flat[start : start + nbytes].view(getattr(torch, dtype)).view(shape))
        for name, shape, dtype, start, nbytes in header["tensors"]
    ]
    # Copy tensors that the loading code overwrites, because other ranks read the same memory.
    model.load_weights([(name, part.clone() if name.endswith(_OVERWRITTEN) else part) for name, part in tensors])
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
    if hasattr(model, "post_load_weights"):
        raise CannotPatch("this model derives further weights from the loaded ones, so they cannot be changed in part")
    places = _MAPS.setdefault(model, _Map()).of(model, [(name, shape, dtype) for name, shape, dtype, _ in header])
    flat = _to_own_device(model, flat)
    steps, values = flat, flat[sum(count for *_, count in header) :]
    for name, _, dtype, count in header:
        kind = getattr(torch, dtype)
        elements = values[: count * kind.itemsize].clone().view(kind)  # the bytes may not be aligned at their place
        positions = steps[:count].to(torch.int64).cumsum(0) - 1
        for place in places[name]:
            place.write(positions, elements)
        steps, values = steps[count:], values[count * kind.itemsize :]
    for module in model.modules():  # norms whose factor is stored minus 1 keep a copy of the whole factor
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()
