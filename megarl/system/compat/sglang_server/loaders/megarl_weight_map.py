"""Finds the places in a server's parameters to which a model's loading code copies each Hugging Face tensor.

This file runs in the servers' own interpreter, without megarl. Only the model's `load_weights` determines where an
element of a Hugging Face tensor lies in the server's parameters (fused projections, tensor-parallel parts, experts). So
`WeightMap` calls `load_weights` once with probes, tensors without data. Slices of a probe are probes as well, and where
a probe would be copied into a parameter, it records the place, and nothing is written. Tensors that loading does not
merely slice, join and copy (but pads, packs or quantises) have no places.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}


class CannotPatch(Exception):
    """The model's loading code does more than slice, join and copy a tensor, so the tensor's places are unknown."""


@dataclass(frozen=True)
class CopyTarget:
    """A place: a part of a sent tensor, and the memory of the parameter into which the model's loading code copies it.

    Attributes:
        offset, strides: offset and strides of the part, in elements of the whole tensor.
        target: view of the parameter, in the part's shape.
    """

    offset: int
    strides: tuple[int, ...]
    target: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of `tensor`, a whole contiguous tensor, that has to be copied to `target`."""
        return tensor.as_strided(self.target.shape, self.strides, tensor.storage_offset() + self.offset)

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
            args[1].record(args[0])
            return args[0]
        if func is torch.ops.aten.fill_.Tensor and isinstance(args[1], cls) and args[0].numel() == 1:
            args[1].record(args[0].view(args[1].shape))
            return args[0]
        if func is torch.ops.aten.cat.default and all(isinstance(part, cls) for part in args[0]):
            return JoinedProbe(args[0], *args[1:], **(kwargs or {}))
        probe = next((arg for arg in args if isinstance(arg, cls)), None)
        # On this rank the loading code replaces the tensor by zeros, whatever weights are sent.
        if func is torch.ops.aten.zero_.default and probe is not None:
            probe.places = []
            return probe
        if probe is None:
            raise _cannot(func)
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (None, probe.dtype):
            return probe
        if not (func.is_view or func in _SAME):
            raise _cannot(func)
        views = func(*tree_map_only(cls, lambda arg: arg.meta, args), **(kwargs or {}))
        return tree_map_only(Tensor, lambda meta: cls(meta, probe.device, probe.places), views)

    def item(self) -> ProbeTensor:  # type: ignore[override]  # a probe has no number
        """Return this probe, with which SGLang fills a parameter of one number; it loads such a number by `item()`.

        Raises:
            CannotPatch: the probe has several elements.
        """
        if self.numel() != 1:
            raise _cannot(torch.ops.aten._local_scalar_dense.default)
        return self

    def record(self, target: Tensor) -> None:
        """Record that the model's loading code copies the elements of this probe to `target`.

        Raises:
            CannotPatch: the loading code repeats elements (broadcasts them to another shape).
        """
        if target.shape != self.shape or 0 in self.meta.stride():
            raise CannotPatch(
                "the model's load_weights repeats values of this tensor, or copies values of shape "
                f"{tuple(self.shape)} to memory of shape {tuple(target.shape)}"
            )
        self.places.append(CopyTarget(int(self.meta.storage_offset()), self.meta.stride(), target))


class JoinedProbe(Tensor):
    """Several probes (tensors that record where they are copied) joined along one dimension, as models join projections
    that share one parameter."""

    parts: Sequence[ProbeTensor]
    axis: int

    @staticmethod
    def __new__(cls, parts: Sequence[ProbeTensor], dim: int = 0) -> JoinedProbe:
        """Join `parts` along dimension `dim`."""
        meta = torch.cat([part.meta for part in parts], dim)
        made = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=parts[0].device
        )
        made.parts, made.axis = parts, dim
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a function that belongs to no class
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls) and args[0].shape == args[1].shape:
            target, joined = args[:2]
            sizes = [part.shape[joined.axis] for part in joined.parts]
            for part, place in zip(joined.parts, target.split(sizes, joined.axis), strict=True):
                part.record(place)
            return target
        if func in _SAME:
            return args[0]
        raise _cannot(func)


def _cannot(func: Any) -> CannotPatch:
    return CannotPatch(f"the model's load_weights calls {func} on this tensor, which is neither a slice nor a copy")


TensorKind = tuple[tuple[int, ...], str]  # shape and dtype, such as "bfloat16"
Places = list[CopyTarget] | CannotPatch


class WeightMap:
    """A cache of the places in a model's parameters to which its loading code copies each tensor. A change of a
    parameter's address, or of a tensor's shape or dtype, clears the cache.
    """

    def __init__(self) -> None:
        self._parameters: tuple[int, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._places: dict[str, Places] = {}
        self._kinds: dict[str, TensorKind] = {}
        self._starts: list[int] = []  # addresses of the parameters, ascending
        self._ends: dict[int, int] = {}  # address after each parameter, by its address
        self._missing: dict[int, int] = {}  # by address, how many elements of a parameter no known tensor fills
        self._untouched: set[int] = set()  # addresses of parameters of which no known tensor fills any element
        self._replayed: set[str] = set()  # tensors for which `replays` has returned True

    def add(self, model: Any, tensors: dict[str, TensorKind]) -> None:
        """Find the places of those `tensors` that the map does not have yet."""
        parameters = tuple(parameter.data_ptr() for parameter in model.parameters())
        if parameters != self._parameters or any(self._kinds.get(name, kind) != kind for name, kind in tensors.items()):
            self._clear()
            self._parameters = parameters
            filled = [each for each in model.parameters() if each.numel()]
            self._missing = {each.data_ptr(): each.numel() for each in filled}
            self._ends = {each.data_ptr(): each.data_ptr() + each.nbytes for each in filled}
            self._starts, self._untouched = sorted(self._missing), set(self._missing)
        new = {name: kind for name, kind in tensors.items() if name not in self._places}
        if not new:
            return
        self._kinds |= new
        probed = _probed(model, new)
        self._places |= probed
        for places in probed.values():
            for place in places if isinstance(places, list) else ():
                address = self._parameter(place)
                if address is not None:
                    self._missing[address] -= place.target.numel()
                    self._untouched.discard(address)

    def _parameter(self, place: CopyTarget) -> int | None:
        """Return the address of the parameter that contains a place; None if no parameter does."""
        number = bisect_right(self._starts, place.target.data_ptr())
        start = self._starts[number - 1] if number else 0
        return start if number and place.target.data_ptr() < self._ends[start] else None

    def places(self, name: str) -> list[CopyTarget]:
        """Return the places of a tensor in the map; an empty list if this rank does not store the tensor.

        Raises:
            CannotPatch: loading does more than slice, join and copy the tensor.
        """
        places = self._places[name]
        if isinstance(places, CannotPatch):
            raise places
        return places

    def replays(self, name: str) -> bool:
        """Return whether copying a tensor to its places has the same effect as the model's loading code.

        The loading code may also fill the rest of a parameter, such as padding with zeros, so the result is True only
        if known tensors fill every parameter that has a place of this tensor. If the tensor has no places, the code may
        keep it until another tensor arrives, so then the result is True only if known tensors fill a part of every
        parameter.
        """
        if name not in self._replayed and self._does_all(self._places[name]):
            self._replayed.add(name)
        return name in self._replayed

    def _does_all(self, places: Places) -> bool:
        if isinstance(places, CannotPatch):
            return False
        if not places:
            return not self._untouched
        owners = {self._parameter(place) for place in places}
        return None not in owners and all(self._missing[owner] == 0 for owner in owners if owner is not None)


def _probed(model: Any, tensors: dict[str, TensorKind]) -> dict[str, Places]:
    """Return for each tensor its places in the model's parameters, or the error that explains why they are unknown."""
    device = next(model.parameters()).device
    places: dict[str, list[CopyTarget]] = {name: [] for name in tensors}
    metas = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (shape, dtype) in tensors.items()
    }
    try:
        model.load_weights([(name, ProbeTensor(meta, device, places[name])) for name, meta in metas.items()])
    except CannotPatch as error:
        if len(tensors) == 1:
            return dict.fromkeys(tensors, error)
    else:
        return {name: [place for place in targets if place.target.numel()] for name, targets in places.items()}
    # One unsuitable tensor stops the loading of all, so load both halves by themselves until it is found.
    pairs = list(tensors.items())
    middle = len(pairs) // 2
    return _probed(model, dict(pairs[:middle])) | _probed(model, dict(pairs[middle:]))


#: The map of each model; a server with a draft model updates two models in turn.
_MAPS: WeakKeyDictionary[Any, WeightMap] = WeakKeyDictionary()
#: Models whose parameters `copy_mapped` has written since the last `derive`.
_WRITTEN: WeakSet[Any] = WeakSet()


def map_of(model: Any, tensors: dict[str, TensorKind]) -> WeightMap:
    """Return the model's `WeightMap` after adding the places of `tensors` (name -> shape and dtype) to it."""
    known = _MAPS.setdefault(model, WeightMap())
    known.add(model, tensors)
    return known


@torch.no_grad()
def copy_mapped(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copy tensors to their places in the model's parameters, and return the tensors that `load_weights` has to load.

    Copying is about 30 times as fast as `load_weights` for the tensors of experts. The caller has to call `derive`
    after the last tensor of an update.

    Args:
        tensors: names and whole contiguous tensors on the model's device.
    """
    known = map_of(model, {name: (tuple(part.shape), str(part.dtype).removeprefix("torch.")) for name, part in tensors})
    targets, parts, rest = [], [], []
    for name, tensor in tensors:
        if not known.replays(name):
            rest.append((name, tensor))
            continue
        for place in known.places(name):
            targets.append(place.target)
            parts.append(place.of(tensor))
    if targets:
        torch._foreach_copy_(targets, parts)
        _WRITTEN.add(model)
    return rest


@torch.no_grad()
def derive(model: Any) -> None:
    """Compute again the tensors that the model derives from its parameters and keeps in addition to them."""
    _WRITTEN.discard(model)
    # Latent attention also keeps its key-value projection split in two, which `post_load_weights` does again.
    if hasattr(model, "post_load_weights"):
        # A draft head's one layer is `decoder`; SGLang's class of glm4_moe_lite finds it only with `is_nextn`.
        of_draft = hasattr(getattr(model, "model", None), "decoder")
        model.post_load_weights(**({"is_nextn": True} if of_draft else {}))
    # Norms that store their factor minus 1 also keep a copy of the whole factor, which is computed again here.
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()


def derive_if_written(model: Any) -> None:
    """Recompute what the model derives from its weights, if parameters were written since it was last done."""
    if model in _WRITTEN:
        derive(model)
