"""Serialise batches to blocks: safetensors files that contain the columns as JSON. No pickle.

parts    0 1 2|3 4|5 6 7 8    samples of each receiver; `Packer` packs them
blocks  |0 1 2 3 4|5 6 7 8|   views of each tensor; small tensors are copied
spans    0-3   3-5|0-4        the samples of its block that each part is
                              `gather` copies all spans once, into new memory per field
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain
from pickle import PickleBuffer
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megarl.data.jagged import Jagged

#: Fields by name, columns by name, number of samples.
Parts: TypeAlias = tuple[Mapping[str, Tensor | Jagged], Mapping[str, list], int]

_COLUMNS = "columns.json"
_OFFSETS = "offsets."
_FIELD = "field."
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_SCALARS = (str, int, float, bool, type(None))
_ALONE = 32 << 10  # a tensor of at least so many bytes is a separate part; copying a smaller one is faster
_WHOLE = 1 << 20  # maximum bytes of a part: Ray copies larger ones with six threads, which start slowly
_BLOCK_BYTES = 256 << 20  # size from which a block is full; smaller blocks cost more, as Ray needs 1 ms per block
_ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True, eq=False)
class Block:
    """A serialised batch: a safetensors file as consecutive parts, uint8 [n] each; the first contains the header.

    Parts may be views of the batch; they are copied when the block is sent.
    """

    parts: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return self.tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray copies a PickleBuffer once, into shared memory; pickling an array is slower.
        return Block.of, tuple(PickleBuffer(part.data) for part in self.parts)

    @classmethod
    def of(cls, *buffers: Any) -> Block:
        """Return a block of samples whose parts are the bytes of `buffers`, not copied."""
        return cls(tuple(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers))

    def tobytes(self) -> bytes:
        """Return the whole safetensors file as bytes."""
        return b"".join(part.tobytes() for part in self.parts) if len(self.parts) > 1 else self.parts[0].tobytes()


class Span(NamedTuple):
    """The samples `start` to `stop` (exclusive) of a block."""

    block: Block
    start: int
    stop: int


class _Piece(NamedTuple):
    """One tensor of a block: its bytes in parts, with its name, dtype code and shape for the header."""

    name: str
    code: str
    shape: list[int]
    parts: list[np.ndarray]


class _Field(NamedTuple):
    """A batch field as bytes, uint8 [rows * width]; an element has `size` bytes.

    `cut` is the index of the offsets that assign rows to samples; None: one row per sample.
    """

    name: str
    code: str
    size: int
    inner: list[int]
    bytes: np.ndarray
    width: int
    cut: int | None

    def piece(self, rows: np.ndarray) -> _Piece:
        """Return one tensor with the field's rows of several ranges (start, stop), `rows` int64 [ranges, 2]."""
        parts = [self.bytes[low:high] for low, high in (rows * self.width).tolist()]
        return _Piece(_FIELD + self.name, self.code, [int((rows[:, 1] - rows[:, 0]).sum()), *self.inner], parts)


class Packer:
    """Writes blocks of a batch's samples. The batch must not change meanwhile.

    Raises:
        ValueError: a column has a value that JSON would change, or a field has a dtype that safetensors lacks.
    """

    def __init__(self, parts: Parts) -> None:
        fields, self._columns, size = parts
        self._cuts: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._fields: list[_Field] = []
        known: dict[int, int] = {}  # id of an offsets tensor -> its index; several fields may share one tensor
        for name, value in fields.items():
            cut = None
            if isinstance(value, Jagged):
                cut = known.setdefault(id(value.offsets), len(known))
                if cut == len(self._cuts):
                    self._cuts.append(value.offsets.cpu().numpy())
                    self._lengths.append(np.diff(self._cuts[cut]))
            self._fields.append(_field(name, value.values if isinstance(value, Jagged) else value, cut))
        self._sizes = np.zeros(size, np.int64)  # bytes of each sample's fields
        for field in self._fields:
            self._sizes += field.width if field.cut is None else field.width * self._lengths[field.cut]
        for name, column in self._columns.items():
            _check_plain(name, column)

    def spans(self, parts: Sequence[Sequence[int]], together: Sequence[int] = ()) -> Iterator[Span]:
        """Write the samples of each part to a block, and yield the part's span in the block; see `Batch.to_blocks` for
        the arguments."""
        owners = _owners([int(self._sizes[part].sum()) for part in parts], together)
        members: dict[int, list[int]] = {}
        for number, owner in enumerate(owners):
            members.setdefault(owner, []).append(number)
        opened: dict[int, tuple[Block, int]] = {}
        for number, owner in enumerate(owners):
            if number == owner:
                places = [place for member in members[owner] for place in parts[member]]
                opened[owner] = self.block(places), 0
            block, start = opened.pop(owner)
            stop = start + len(parts[number])
            if number != members[owner][-1]:
                opened[owner] = block, stop
            yield Span(block, start, stop)

    def block(self, places: Sequence[int]) -> Block:
        """Return the samples at `places` as a block of bytes, whose fields are views of the batch and not copies.

        Fields whose samples have equal lengths share one table of offsets.
        """
        where = np.asarray(places, dtype=np.int64)
        runs = _runs(where)
        numbers: dict[bytes, int] = {}
        cuts: list[int] = []
        for lengths in self._lengths:
            offsets = np.concatenate([_ZERO, np.cumsum(lengths[where])]).tobytes()
            cuts.append(numbers.setdefault(offsets, len(numbers)))
        pieces = [field.piece(runs if field.cut is None else self._cuts[field.cut][runs]) for field in self._fields]
        for offsets, number in numbers.items():
            memory = np.frombuffer(offsets, np.uint8)
            pieces.append(_Piece(f"{_OFFSETS}{number}", "I64", [len(offsets) // 8], [memory]))
        head = {
            "size": len(where),
            "layout": {field.name: None if field.cut is None else cuts[field.cut] for field in self._fields},
            "columns": {name: [column[place] for place in places] for name, column in self._columns.items()},
        }
        # surrogatepass: half of a surrogate pair (a cut emoji in decoded text) must survive the trip.
        text = json.dumps(head, ensure_ascii=False).encode("utf-8", "surrogatepass")
        pieces.append(_Piece(_COLUMNS, "U8", [len(text)], [np.frombuffer(text, np.uint8)]))
        return _write(pieces)


def pack(parts: Parts) -> Block:
    """Write all samples of a batch to one block; raises the errors of `Packer`."""
    return Packer(parts).block(range(parts[2]))


def _owners(sizes: Sequence[int], together: Sequence[int]) -> list[int]:
    """Assign parts to blocks: return, for each part, the index of the first part of its block.

    A block takes no more parts once it has `_BLOCK_BYTES`.

    Args:
        sizes: bytes of each part.
        together: a label per part; parts with the same label share blocks. Empty: one block per part.
    """
    if not together:
        return list(range(len(sizes)))
    owners: list[int] = []
    open_: dict[int, int] = {}  # label -> number of the first part in the label's block that has room
    filled = [0] * len(sizes)  # bytes of each block, by the number of its first part; 0 for other parts
    for number, (size, label) in enumerate(zip(sizes, together, strict=True)):
        owner = open_.setdefault(label, number)
        owners.append(owner)
        filled[owner] += size
        if filled[owner] >= _BLOCK_BYTES:
            del open_[label]
    return owners


def _runs(places: np.ndarray) -> np.ndarray:
    """Merge consecutive places into ranges (start, stop), int64 [runs, 2]; without places, return one empty range.

    >>> _runs(np.array([4, 5, 6, 2, 9, 10])).tolist()
    [[4, 7], [2, 3], [9, 11]]
    """
    if not len(places):
        return np.zeros((1, 2), np.int64)
    breaks = np.flatnonzero(np.diff(places) != 1)
    first, last = np.append(0, breaks + 1), np.append(breaks, len(places) - 1)
    return np.stack([places[first], places[last] + 1], axis=1)


def _field(name: str, values: Tensor, cut: int | None) -> _Field:
    if values.dtype not in _CODES:
        raise ValueError(f"{name!r} is {values.dtype}; allowed: {', '.join(map(str, _CODES))}")
    inner, size = list(values.shape[1:]), values.element_size()
    flat = values.detach().cpu().contiguous().reshape(-1)
    memory = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)
    return _Field(name, _CODES[values.dtype], size, inner, memory, math.prod(inner) * size, cut)


_quoted = lru_cache(maxsize=1024)(partial(json.dumps, ensure_ascii=False))  # every block repeats the same few names
_SIZES = {code: dtype.itemsize for code, dtype in _DTYPES.items()}


def _write(pieces: Iterable[_Piece]) -> Block:
    """Return a safetensors file of these tensors. Tensors with the widest elements come first, so that each tensor is
    aligned to its elements."""
    order = sorted(pieces, key=lambda piece: -_SIZES[piece.code])
    header: list[str] = []
    end = 0
    for piece in order:
        start, end = end, end + sum(map(len, piece.parts))
        place = f'"dtype": "{piece.code}", "shape": {piece.shape}, "data_offsets": [{start}, {end}]'
        header.append(f"{_quoted(piece.name)}: {{{place}}}")
    text = ("{" + ", ".join(header) + "}").encode()
    text += b" " * (-len(text) % 8)
    parts: list[np.ndarray] = []
    small = [np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)]
    for memory in chain.from_iterable(piece.parts for piece in order):
        if len(memory) < _ALONE:
            small.append(memory)
            continue
        if small:
            parts.append(np.concatenate(small))
        parts += [memory[start : start + _WHOLE] for start in range(0, len(memory), _WHOLE)]
        small = []
    return Block((*parts, np.concatenate(small)) if small else tuple(parts))


class Opened(NamedTuple):
    """A block of serialised samples with parsed header, columns and offsets; its tensors are bytes in `parts`."""

    entries: dict[str, Any]  # the safetensors header: dtype, shape and byte range of each tensor
    parts: list[np.ndarray]  # bytes of the tensors; part k has bytes `places[k]` to `places[k + 1]`
    places: list[int]
    head: dict[str, Any]  # size, layout (field -> index of its offsets) and columns of the samples
    cuts: dict[int, np.ndarray]  # offsets by index, int64 [samples + 1]

    @property
    def kinds(self) -> tuple[list[tuple[str, bool, str, list[int]]], list[str]]:
        """For each field its name, whether it is dense, its dtype and inner shape; and the names of the columns.

        They are equal for all blocks of one batch.
        """
        layout = [(name, cut is None, self.entries[_FIELD + name]) for name, cut in self.head["layout"].items()]
        fields = [(name, dense, entry["dtype"], entry["shape"][1:]) for name, dense, entry in layout]
        return sorted(fields, key=lambda field: field[0]), sorted(self.head["columns"])

    def rows(self, field: str, start: int, stop: int) -> list[np.ndarray]:
        """Return in parts the bytes of a field for the samples `start` to `stop` (exclusive)."""
        cut, entry = self.head["layout"][field], self.entries[_FIELD + field]
        if cut is not None:
            start, stop = self.cuts[cut][[start, stop]].tolist()
        width, begin = math.prod(entry["shape"][1:]) * _SIZES[entry["dtype"]], entry["data_offsets"][0]
        return self.memory(begin + start * width, begin + stop * width)

    def memory(self, start: int, stop: int) -> list[np.ndarray]:
        """Return bytes `start` to `stop` (exclusive) of the block's data as views of its parts."""
        memory = []
        place = bisect_right(self.places, start) - 1
        while start < stop:
            before, after = self.places[place : place + 2]
            memory.append(self.parts[place][start - before : stop - before])
            start, place = after, place + 1
        return memory


#: A block and the range (start, stop) of its samples.
Range: TypeAlias = tuple[Opened, int, int]


def open_block(block: Block) -> Opened:
    """Parse the header, columns and offsets of a block.

    Raises:
        ValueError: the bytes are not a block of `Packer`, or the header has a wrong byte range.
    """
    first = block.parts[0]
    length = int.from_bytes(first[:8].tobytes(), "little")
    if not 0 < length <= len(first) - 8:
        raise ValueError(f"the bytes are not a batch: {len(block)} bytes cannot begin with a header of {length} bytes")
    entries = json.loads(first[8 : 8 + length].tobytes())
    parts = [first[8 + length :], *block.parts[1:]]
    bare = Opened(entries, parts, [0, *accumulate(map(len, parts))], {}, {})
    for entry in entries.values():
        start, stop = entry["data_offsets"]
        if stop - start != math.prod(entry["shape"]) * _SIZES[entry["dtype"]] or stop > bare.places[-1]:
            place = f"bytes {start} to {stop} of {bare.places[-1]}"
            raise ValueError(
                f"the bytes of a batch are damaged: a tensor of shape {entry['shape']} does not fit {place}"
            )
    text = np.concatenate(bare.memory(*entries[_COLUMNS]["data_offsets"])).tobytes()
    head = json.loads(text.decode("utf-8", "surrogatepass"))
    numbers = {cut for cut in head["layout"].values() if cut is not None}
    offsets = {cut: bare.memory(*entries[f"{_OFFSETS}{cut}"]["data_offsets"]) for cut in numbers}
    return bare._replace(
        head=head, cuts={cut: np.concatenate(memory).view(np.int64) for cut, memory in offsets.items()}
    )


def gather(ranges: Sequence[Range]) -> Parts:
    """Copy the samples of all ranges, in order, into new memory; return fields, columns and size of the batch.

    Args:
        ranges: ranges of samples, at least one, of blocks with equal `Opened.kinds`.
    """
    ranges = _merged(ranges)
    first, size = ranges[0][0], sum(stop - start for _, start, stop in ranges)
    offsets: dict[tuple[int, ...], Tensor] = {}
    fields: dict[str, Tensor | Jagged] = {}
    for name, cut in first.head["layout"].items():
        parts = list(chain.from_iterable(block.rows(name, start, stop) for block, start, stop in ranges))
        memory, entry = np.empty(sum(map(len, parts)), dtype=np.uint8), first.entries[_FIELD + name]
        if parts:
            np.concatenate(parts, out=memory)
        cuts = tuple(block.head["layout"][name] for block, _, _ in ranges)
        if cut is not None and cuts not in offsets:
            every = zip(ranges, cuts, strict=True)
            lengths = [np.diff(block.cuts[index][start : stop + 1]) for (block, start, stop), index in every]
            offsets[cuts] = torch.from_numpy(np.cumsum(np.concatenate([_ZERO, *lengths])))
        shape = (size if cut is None else int(offsets[cuts][-1]), *entry["shape"][1:])
        dtype = _DTYPES[entry["dtype"]]
        values = torch.from_numpy(memory).view(dtype).view(shape) if len(memory) else torch.empty(shape, dtype=dtype)
        fields[name] = values if cut is None else Jagged(values, offsets[cuts])
    columns = {
        name: [item for block, start, stop in ranges for item in block.head["columns"][name][start:stop]]
        for name in first.head["columns"]
    }
    return fields, columns, size


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """Merge ranges of samples that follow one another in the same block."""
    merged: list[Range] = []
    for block, start, stop in ranges:
        if merged and merged[-1][0] is block and merged[-1][2] == start:
            start = merged.pop()[1]
        merged.append((block, start, stop))
    return merged


def _check_plain(name: str, value: Any) -> None:
    """Raise an error for a value that JSON would change silently: a tuple becomes a list, a number key a string."""
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind is list:
        for item in value:
            if type(item) not in _SCALARS:
                _check_plain(name, item)
        return
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"dictionary key {key!r} in column {name!r} is not a string")
            if type(item) not in _SCALARS:
                _check_plain(name, item)
        return
    raise ValueError(
        f"column {name!r} holds a value of type {kind.__name__}, which cannot be sent: {value!r:.80}; "
        "allowed: str, int, float, bool, None, list, dict"
    )
