"""The plan from regions of Hugging Face tensors to regions of local parameters: plain data without torch or Megatron.

A region is one (start, stop) per dimension. The target regions of its pieces cover a local parameter, except for
padding rows of the vocabulary. Loading, random initialisation, export and weight synchronisation all use this plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.architectures import ARCHITECTURES
from megarl.architectures.tensors import TIED_HEAD, UNTIED_HEAD, VALUE_BIAS, VALUE_HEAD, WeightRule, part_of
from megarl.config.model import split_layers
from megarl.models.hf import checkpoint_names, dimensions, moe_layers, value_bias, visual_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: A region of a tensor: (start, stop) of each dimension. It has no data, unlike a checkpoint's `TensorSlice`.
TensorRegion = tuple[tuple[int, int], ...]


def as_index(region: TensorRegion) -> tuple[slice, ...]:
    """Return the index of a region in its tensor."""
    return tuple(slice(*span) for span in region)


def region_shape(region: TensorRegion) -> tuple[int, ...]:
    """Return the sizes of a region."""
    return tuple(stop - start for start, stop in region)


def region_numel(region: TensorRegion) -> int:
    """Return the number of elements of a region."""
    return math.prod(region_shape(region))


@dataclass(frozen=True)
class Coordinate:
    """The place of one process in the layout: size and own rank of each kind of parallelism."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    vpp: int = 1
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    first: int = 0
    """Layers of the first pipeline chunk if the recipe sets them, else 0; `last` those of the last one."""
    last: int = 0


@dataclass(frozen=True)
class Piece:
    """One region of a checkpoint's tensor and its place: hf[source][source_region] is local[target_region]."""

    source: str
    source_region: TensorRegion
    target_region: TensorRegion


@dataclass(frozen=True)
class Shard:
    """One local parameter: number of its chunk, name in the chunk, shape, and the pieces it consists of."""

    chunk: int
    param: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


#: A rule for one layer: (rule, (chunk, parameter), names of its tensors in a checkpoint). A rule for experts has the
#: names of all experts of this rank.
Instance = tuple[WeightRule, tuple[int, str], tuple[str, ...]]


@dataclass(frozen=True)
class WeightTable:
    """The tensors of a model in a checkpoint, and the rules that turn them into parameters; read from its config."""

    rules: tuple[WeightRule, ...]  # rules of all parameters except those of the vision part
    sizes: dict[str, int]  # sizes of the model by name, from which the rules compute shapes
    sparse: list[bool]  # for each layer, whether its MLP is a mixture of experts
    # parameter of the vision part -> name and shape of its tensor in a checkpoint
    visual: dict[str, tuple[str, tuple[int, ...]]]
    in_checkpoint: Callable[[str], str]  # returns the name that a language model's tensor has in the checkpoint

    @classmethod
    def of(cls, hf: PretrainedConfig, *, value_head: bool = False) -> WeightTable:
        """Return the table of this model; a value head takes the place of the output embedding."""
        if value_head:
            head = [VALUE_HEAD, VALUE_BIAS] if value_bias(hf) else [VALUE_HEAD]
        else:
            head = [TIED_HEAD if hf.tie_word_embeddings else UNTIED_HEAD]
        rules = (*ARCHITECTURES[hf.model_type].tensors, *head)
        return cls(rules, dimensions(hf), moe_layers(hf), visual_tensors(hf), checkpoint_names(hf))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of the whole model in Hugging Face form, in export order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for rule, _, names in self.instances(Coordinate()):
            shapes |= sources_of(rule, names, self.sizes)
        return shapes | dict(self.visual.values())

    def names_of(self, parts: Collection[str]) -> frozenset[str]:
        """Return the names in a checkpoint of the tensors of the model's parts `parts` (`ModelPart`)."""
        visual = {name: part_of(parameter) for parameter, (name, _) in self.visual.items()}
        return frozenset(name for name in self.shapes() if visual.get(name, "language_model") in parts)

    def shards(self, at: Coordinate) -> list[Shard]:
        """Return every parameter of the process at `at`, and the regions it is filled from."""
        shards = []
        for rule, (chunk, param), names in self.instances(at):
            sources = sources_of(rule, names, self.sizes)
            ways, rank = (at.etp, at.etp_rank) if rule.part == "expert" else (at.tp, at.tp_rank)
            shards.append(Shard(chunk, param, *_SPLITS[rule.split](sources, ways, rank, self.sizes)))
        visual = self.visual.items() if at.pp_rank == 0 else ()
        return shards + [Shard(0, param, *_copy([source], 1, 0, self.sizes)) for param, source in visual]

    def instances(self, at: Coordinate) -> Iterator[Instance]:
        """Yield every rule for every layer that lives at `at`."""
        if at.pp_rank == 0:
            yield from self._outer("embedding", 0)
        counts, per_rank = (
            split_layers(len(self.sparse), at.pp * at.vpp, at.first, at.last),
            self.sizes["experts"] // at.ep,
        )
        local_experts = range(at.ep_rank * per_rank, (at.ep_rank + 1) * per_rank)
        for chunk in range(at.vpp):
            place = chunk * at.pp + at.pp_rank
            first = sum(counts[:place])
            for layer in range(first, first + counts[place]):
                parts = ("layer", "moe", "expert") if self.sparse[layer] else ("layer", "dense")
                for rule in (rule for rule in self.rules if rule.part in parts):
                    experts = local_experts if rule.part == "expert" else range(1)
                    sources = (s.name.format(i=layer, e=expert) for expert in experts for s in rule.sources)
                    yield rule, (chunk, rule.param.format(i=layer - first)), tuple(map(self.in_checkpoint, sources))
        if at.pp_rank == at.pp - 1:
            yield from self._outer("final", at.vpp - 1)
            if not (TIED_HEAD in self.rules and at.pp * at.vpp == 1):  # otherwise the head is the embedding
                yield from self._outer("head", at.vpp - 1)

    def _outer(self, part: str, chunk: int) -> Iterator[Instance]:
        for rule in self.rules:
            if rule.part == part:
                yield rule, (chunk, rule.param), tuple(self.in_checkpoint(s.name) for s in rule.sources)


Sources = list[tuple[str, tuple[int, ...]]]
_Cut = tuple[tuple[int, ...], tuple[Piece, ...]]


def sources_of(rule: WeightRule, names: Sequence[str], size: dict[str, int]) -> Sources:
    """Return the tensors of a parameter with their shapes; `names`: tensors of `rule`, for one or all experts."""
    shapes = [tuple(size[d] for d in source.shape) for source in rule.sources]
    return list(zip(names, shapes * (len(names) // len(shapes)), strict=True))


def _whole(shape: tuple[int, ...]) -> TensorRegion:
    return tuple((0, n) for n in shape)


def _copy(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> _Cut:
    ((name, shape),) = sources
    return shape, (Piece(name, _whole(shape), _whole(shape)),)


def _vocab(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> _Cut:
    ((name, (total, *rest)),) = sources
    rows = -(-total // ways)
    start, stop = min(rank * rows, total), min((rank + 1) * rows, total)
    tail = _whole(tuple(rest))
    pieces = (Piece(name, ((start, stop), *tail), ((0, stop - start), *tail)),) if stop > start else ()
    return (rows, *rest), pieces


def _gate_up(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> _Cut:
    """Take an equal block of rows of each source, and concatenate the blocks by rows."""
    shape, pieces, offset = sources[0][1], [], 0
    for name, (total, *rest) in sources:
        rows, tail = total // ways, _whole(tuple(rest))
        pieces.append(Piece(name, ((rank * rows, (rank + 1) * rows), *tail), ((offset, offset + rows), *tail)))
        offset += rows
    return (offset, *shape[1:]), tuple(pieces)


def _stack(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> _Cut:
    return _gate_up(sources, 1, 0, size)


def _row(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> _Cut:
    """Take an equal block of columns of each source, and concatenate the blocks by rows."""
    pieces, offset = [], 0
    for name, (rows, total) in sources:
        columns = total // ways
        source_region = ((0, rows), (rank * columns, (rank + 1) * columns))
        pieces.append(Piece(name, source_region, ((offset, offset + rows), (0, columns))))
        offset += rows
    return (offset, columns), tuple(pieces)


def _qkv(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> _Cut:
    """For each key/value group, concatenate its query heads, its key and its value by rows."""
    groups = size["groups"] // ways
    heights = [shape[0] // size["groups"] for _, shape in sources]
    tail = _whole(sources[0][1][1:])
    pieces, offset = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        for (name, _), height in zip(sources, heights, strict=True):
            source_rows = (group * height, (group + 1) * height)
            pieces.append(Piece(name, (source_rows, *tail), ((offset, offset + height), *tail)))
            offset += height
    return (offset, *sources[0][1][1:]), tuple(pieces)


_SPLITS = {"copy": _copy, "stack": _stack, "vocab": _vocab, "gate_up": _gate_up, "row": _row, "qkv": _qkv}
