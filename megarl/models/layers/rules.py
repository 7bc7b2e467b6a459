"""The rules from tensors of a checkpoint to parameters of Megatron, and how tensor parallelism splits them.

Plain data without torch. A region is one (start, stop) per dimension. The target regions of a parameter's pieces cover
it, except for padding rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

#: A region of a tensor: (start, stop) of each dimension. It has no data, unlike a checkpoint's `TensorSlice`.
TensorRegion = tuple[tuple[int, int], ...]
#: Names of a checkpoint's tensors with their shapes.
Sources = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Piece:
    """One region of a checkpoint's tensor and its place: hf[source][source_region] is local[target_region]."""

    source: str
    source_region: TensorRegion
    target_region: TensorRegion


#: Shape of a process's parameter, and the pieces of checkpoint tensors that it consists of.
Cut = tuple[tuple[int, ...], tuple[Piece, ...]]


@dataclass(frozen=True)
class Split:
    """How tensor parallelism splits a parameter.

    name: its name. along: what is split: rows or columns of the weight, or neither; `None` with several sources still
    concatenates them by rows. cut: the function (sources, number of ranks, own rank, sizes of the model) -> `Cut`.
    """

    name: str
    along: Literal["rows", "columns"] | None
    cut: Callable[[Sources, int, int, dict[str, int]], Cut]


def layer_parts(mixer: str, *, sparse: bool) -> tuple[str, ...]:
    """Return the parts of a layer, as in `WeightRule.part`.

    Args:
        mixer: kind of its mixer.
        sparse: whether it has experts.
    """
    return ("layer", mixer, *(("moe", "shared", "expert") if sparse else ("dense",)))


@dataclass(frozen=True)
class WeightSource:
    """A Hugging Face tensor; `shape` has names of the model's sizes (`megarl.architectures.values.dimensions`)."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter and the tensors from which it is built.

    `{i}` in names is the layer number, global in Hugging Face names and local to the chunk in Megatron's; `{e}` is the
    expert.

    A tensor is absent from a model if any of its sizes, or any size named in `needs`, is 0 or unknown.

    Attributes:
        param: Megatron's name of the parameter.
        part: the layers and pipeline chunks that have the parameter. `embedding`: the first chunk; `final`, `head`: the
            last one; `layer`: every layer; the kind of a mixer (`megarl.models.layers.mixer`), such as `attention`:
            layers with this mixer; `dense`: layers without experts; `moe`, `shared` (the MLP that all tokens pass) and
            `expert`: layers with experts. An `expert` rule applies to each expert, and its `sources` are the tensors of
            one expert.
        split: how the ranks of a layout divide the parameter.
        sources: the tensors in the checkpoint.
        buffer: the tensor is float32 in every model, has no gradient, and is not counted as a parameter.
        stacked: one parameter, and one tensor in the checkpoint, hold all experts, with an additional dimension for
            them, which the shapes of `sources` omit; the tensor's name has no expert number.
    """

    param: str
    part: str
    split: Split
    sources: tuple[WeightSource, ...]
    buffer: bool = False
    needs: tuple[str, ...] = ()
    stacked: bool = False


def existing(rules: Iterable[WeightRule], size: Mapping[str, int]) -> tuple[WeightRule, ...]:
    """Return the rules of the tensors that a model has: all their sizes are known and above 0."""
    return tuple(
        rule
        for rule in rules
        if all(size.get(d) for d in (*rule.needs, *(d for source in rule.sources for d in source.shape)))
    )


#: The beginning of the names of a layer's tensors, in checkpoints and in Megatron.
HF, MCORE = "model.layers.{i}.", "decoder.layers.{i}."


def norm(param: str, source: str, size: str, part: str = "layer") -> WeightRule:
    """Return the rule for the weight of a norm in a layer."""
    return WeightRule(f"{MCORE}{param}.weight", part, COPY, (WeightSource(f"{HF}{source}.weight", (size,)),))


def whole(shape: tuple[int, ...]) -> TensorRegion:
    """Return the region that covers a whole tensor of this shape."""
    return tuple((0, n) for n in shape)


def _copy(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    ((name, shape),) = sources
    return shape, (Piece(name, whole(shape), whole(shape)),)


def _vocab(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    ((name, (total, *rest)),) = sources
    rows = -(-total // ways)
    start, stop = min(rank * rows, total), min((rank + 1) * rows, total)
    tail = whole(tuple(rest))
    pieces = (Piece(name, ((start, stop), *tail), ((0, stop - start), *tail)),) if stop > start else ()
    return (rows, *rest), pieces


def _rows(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    shape, pieces, offset = sources[0][1], [], 0
    for name, (total, *rest) in sources:
        rows, tail = total // ways, whole(tuple(rest))
        pieces.append(Piece(name, ((rank * rows, (rank + 1) * rows), *tail), ((offset, offset + rows), *tail)))
        offset += rows
    return (offset, *shape[1:]), tuple(pieces)


def _columns(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    pieces, offset = [], 0
    for name, (rows, total) in sources:
        columns = total // ways
        source_region = ((0, rows), (rank * columns, (rank + 1) * columns))
        pieces.append(Piece(name, source_region, ((offset, offset + rows), (0, columns))))
        offset += rows
    return (offset, columns), tuple(pieces)


def of_experts(cut: Cut, experts: range) -> Cut:
    """Return the slices for `experts` of a tensor that stacks all experts, from the slices `cut` of one expert's."""
    shape, pieces = cut
    count = len(experts)
    return (count, *shape), tuple(
        Piece(
            piece.source,
            ((experts.start, experts.stop), *piece.source_region),
            ((0, count), *piece.target_region),
        )
        for piece in pieces
    )


COPY = Split("copy", None, _copy)  # not split
# not split; the sources are concatenated by rows
STACK = Split("stack", None, lambda sources, ways, rank, size: _rows(sources, 1, 0, size))
VOCAB = Split("vocab", "rows", _vocab)  # blocks of rows of one size; the last ones may be padded
ROWS = Split("rows", "rows", _rows)  # an equal block of rows of each source; the blocks are concatenated by rows
COLUMNS = Split("columns", "columns", _columns)  # an equal block of columns of each source, concatenated by rows
