"""The plan from regions of Hugging Face tensors to regions of local parameters: plain data without torch or Megatron.

Loading, random initialisation, export and weight synchronisation all use this plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.architectures import ARCHITECTURES
from megarl.architectures.tensors import TIED_HEAD, UNTIED_HEAD, VALUE_BIAS, VALUE_HEAD, part_of
from megarl.config.model import split_layers
from megarl.models.hf import (
    checkpoint_names,
    dimensions,
    draft_rules,
    mixers_of,
    moe_layers,
    value_bias,
    visual_tensors,
)
from megarl.models.layers.rules import COPY, Piece, Sources, TensorRegion, WeightRule, existing, layer_parts, of_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def as_index(region: TensorRegion) -> tuple[slice, ...]:
    """Return the index of a region in its tensor."""
    return tuple(slice(*span) for span in region)


def region_shape(region: TensorRegion) -> tuple[int, ...]:
    """Return the shape of a region of a tensor."""
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
class Shard:
    """A parameter of this process: the number of its chunk, its name in the chunk, its shape, and the regions of
    checkpoint tensors from which it is built."""

    chunk: int
    param: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


#: One parameter of a process: (rule, (chunk, parameter), names of its tensors in a checkpoint). A rule for experts has
#: the names of all experts of this rank.
Instance = tuple[WeightRule, tuple[int, str], tuple[str, ...]]


@dataclass(frozen=True)
class WeightTable:
    """The tensors of a model in a checkpoint, and the rules that turn them into parameters; read from its config."""

    rules: tuple[WeightRule, ...]  # rules of all parameters except those of the vision part and the draft head
    sizes: dict[str, int]  # sizes of the model by name, from which the rules compute shapes
    kinds: list[str]  # the kind of each layer's mixer
    sparse: list[bool]  # for each layer, whether its MLP is a mixture of experts
    # parameter of the vision part -> name and shape of its tensor in a checkpoint
    visual: dict[str, tuple[str, tuple[int, ...]]]
    in_checkpoint: Callable[[str], str]  # returns the name that a language model's tensor has in the checkpoint
    draft: tuple[WeightRule, ...] = ()  # rules of the draft head, if the model is trained with it

    @classmethod
    def of(cls, hf: PretrainedConfig, *, value_head: bool = False, draft: bool = False) -> WeightTable:
        """Return the table of this model, with its draft head if `draft`; a value head takes the place of the output
        embedding."""
        if value_head:
            head = [VALUE_HEAD, VALUE_BIAS] if value_bias(hf) else [VALUE_HEAD]
        else:
            head = [TIED_HEAD if hf.tie_word_embeddings else UNTIED_HEAD]
        rules = (*existing(ARCHITECTURES[hf.model_type].tensors, dimensions(hf)), *head)
        kinds = [mixer.kind for mixer in mixers_of(hf)]
        table = cls(rules, dimensions(hf), kinds, moe_layers(hf), visual_tensors(hf), checkpoint_names(hf))
        return replace(table, draft=draft_rules(hf, table.rules)) if draft else table

    @property
    def has_draft(self) -> bool:
        """Whether the table lists tensors of a draft head."""
        return bool(self.draft)

    def without_draft(self) -> WeightTable:
        """Return the weight table of the same model without its draft head."""
        return replace(self, draft=())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of the whole model in Hugging Face form, in export order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for rule, _, names in self.instances(Coordinate()):
            sources = sources_of(rule, names, self.sizes)
            shapes |= [(name, (self.sizes["experts"], *shape)) for name, shape in sources] if rule.stacked else sources
        return shapes | dict(self.visual.values())

    def float32(self) -> frozenset[str]:
        """Return the names in a checkpoint of the tensors that are float32 whatever the model's dtype."""
        return frozenset(name for rule, _, names in self.instances(Coordinate()) if rule.buffer for name in names)

    def names_of(self, parts: Collection[str]) -> frozenset[str]:
        """Return the names in a checkpoint of the tensors of the model's parts `parts` (`ModelPart`)."""
        visual = {name: part_of(parameter) for parameter, (name, _) in self.visual.items()}
        return frozenset(name for name in self.shapes() if visual.get(name, "language_model") in parts)

    def shards(self, at: Coordinate) -> list[Shard]:
        """Return every parameter of the process with coordinate `at`, and the regions it is filled from."""
        shards = []
        for rule, (chunk, param), names in self.instances(at):
            ways, rank = (at.etp, at.etp_rank) if rule.part == "expert" else (at.tp, at.tp_rank)
            cut = rule.split.cut(sources_of(rule, names, self.sizes), ways, rank, self.sizes)
            shards.append(Shard(chunk, param, *(of_experts(cut, self._experts(at)) if rule.stacked else cut)))
        visual = self.visual.items() if at.pp_rank == 0 else ()
        return shards + [Shard(0, param, *COPY.cut([source], 1, 0, self.sizes)) for param, source in visual]

    def instances(self, at: Coordinate) -> Iterator[Instance]:
        """Yield each rule once per layer that the process with coordinate `at` holds; skip tensors that the model
        lacks."""
        present = [rule for rule in self.rules if all(self.sizes[size] for s in rule.sources for size in s.shape)]
        if at.pp_rank == 0:
            yield from self._outer("embedding", 0)
        counts, local_experts = split_layers(len(self.sparse), at.pp * at.vpp, at.first, at.last), self._experts(at)
        for chunk in range(at.vpp):
            place = chunk * at.pp + at.pp_rank
            first = sum(counts[:place])
            for layer in range(first, first + counts[place]):
                parts = layer_parts(self.kinds[layer], sparse=self.sparse[layer])
                for rule in (rule for rule in present if rule.part in parts):
                    names = self._names(rule, layer, local_experts)
                    yield rule, (chunk, rule.param.format(i=layer - first)), names
        if at.pp_rank == at.pp - 1:
            yield from self._outer("final", at.vpp - 1)
            # A tied head has no parameter of its own if the embedding is in the same chunk.
            if not (TIED_HEAD in self.rules and at.pp * at.vpp == 1):
                yield from self._outer("head", at.vpp - 1)
            for rule in self.draft:
                yield rule, (at.vpp - 1, rule.param), self._names(rule, 0, local_experts)

    def _names(self, rule: WeightRule, layer: int, experts: range) -> tuple[str, ...]:
        """Return the names in a checkpoint of a rule's tensors in a layer, for each of the local `experts`."""
        numbers = experts if rule.part == "expert" and not rule.stacked else range(1)
        return tuple(self.in_checkpoint(s.name.format(i=layer, e=number)) for number in numbers for s in rule.sources)

    def _experts(self, at: Coordinate) -> range:
        """Return the numbers of the experts that the process with coordinate `at` holds."""
        per_rank = self.sizes["experts"] // at.ep
        return range(at.ep_rank * per_rank, (at.ep_rank + 1) * per_rank)

    def _outer(self, part: str, chunk: int) -> Iterator[Instance]:
        for rule in self.rules:
            if rule.part == part:
                yield rule, (chunk, rule.param), tuple(self.in_checkpoint(s.name) for s in rule.sources)


def sources_of(rule: WeightRule, names: Sequence[str], size: dict[str, int]) -> Sources:
    """Return the checkpoint's tensors of a parameter, with shapes; `names`: those of `rule`, for one or all experts."""
    shapes = [tuple(size[d] for d in source.shape) for source in rule.sources]
    return list(zip(names, shapes * (len(names) // len(shapes)), strict=True))
