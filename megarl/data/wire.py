"""Fields and columns as blocks of bytes: safetensors files with the columns as JSON inside. No pickle.

samples  0 1 2 3 4 5          Packer: what is the same for all blocks is found once
blocks  |0 1 2|3 4 5|         block(0, 3), block(3, 6): views of each tensor's part; what is small is copied
                              unpack: views of a block;  gather: one copy, from all blocks into a field's own memory
"""

from __future__ import annotations

import json
import math
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pickle import PickleBuffer
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megarl.data.jagged import Jagged
from megarl.data.room import rooms

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
_ALONE = 32 << 10  # bytes from which on a tensor is a part of its own: less is copied faster than it is kept apart


@dataclass(frozen=True, eq=False)
class Block:
    """A file in parts, uint8 [n] each, one after the other; no tensor is in two of them, the header is in the first.

    The parts may be views of a batch, which whoever sends the block copies to where they go.
    """

    parts: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return self.tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray copies buffers once, into shared memory; to describe an array takes longer.
        return Block.of, tuple(PickleBuffer(part.data) for part in self.parts)

    @classmethod
    def of(cls, *buffers: Any) -> Block:
        """Views of these bytes."""
        return cls(tuple(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers))

    def tobytes(self) -> bytes:
        """The file."""
        return b"".join(part.tobytes() for part in self.parts) if len(self.parts) > 1 else self.parts[0].tobytes()


class _Piece(NamedTuple):
    """One tensor of a block: its bytes, and what the header says of it."""

    name: str
    code: str
    shape: list[int]
    bytes: np.ndarray


class _Field(NamedTuple):
    """A field of a batch as its bytes, uint8 [rows * width], of elements of `size` bytes.

    `cut` is the number of the offsets that say which rows a sample has; None: each has one.
    """

    name: str
    code: str
    size: int
    inner: list[int]
    bytes: np.ndarray
    width: int
    cut: int | None

    def piece(self, low: int, high: int) -> _Piece:
        """Rows `low` to `high`."""
        part = self.bytes[low * self.width : high * self.width]
        return _Piece(_FIELD + self.name, self.code, [high - low, *self.inner], part)


class Packer:
    """Writes blocks of the samples of a batch, which does not change meanwhile.

    Raises:
        ValueError: a column holds something that JSON would not give back unchanged, or a field has a dtype that the
            format does not have.
    """

    def __init__(self, parts: Parts) -> None:
        fields, self._columns, _ = parts
        self._cuts: list[np.ndarray] = []
        self._fields: list[_Field] = []
        known: dict[int, int] = {}  # fields over the same tokens share one tensor of offsets
        for name, value in fields.items():
            cut = None
            if isinstance(value, Jagged):
                cut = known.setdefault(id(value.offsets), len(known))
                if cut == len(self._cuts):
                    self._cuts.append(value.offsets.cpu().numpy())
            self._fields.append(_field(name, value.values if isinstance(value, Jagged) else value, cut))
        for name, column in self._columns.items():
            _check_plain(name, column)

    def block(self, start: int, stop: int) -> Block:
        """Samples `start` to `stop`, in part views; jagged fields with the same offsets store them once."""
        numbers: dict[bytes, int] = {}
        cuts: list[int] = []
        for cut in self._cuts:
            own = (cut[start : stop + 1] - cut[start]).tobytes()
            cuts.append(numbers.setdefault(own, len(numbers)))
        pieces: list[_Piece] = []
        for field in self._fields:
            low, high = (start, stop) if field.cut is None else map(int, self._cuts[field.cut][[start, stop]])
            pieces.append(field.piece(low, high))
        for own, number in numbers.items():
            pieces.append(_Piece(f"{_OFFSETS}{number}", "I64", [len(own) // 8], np.frombuffer(own, np.uint8)))
        head = {
            "size": stop - start,
            "layout": {field.name: None if field.cut is None else cuts[field.cut] for field in self._fields},
            "columns": {name: column[start:stop] for name, column in self._columns.items()},
        }
        # surrogatepass: half of a surrogate pair (a cut emoji in decoded text) must survive the trip.
        text = json.dumps(head, ensure_ascii=False).encode("utf-8", "surrogatepass")
        pieces.append(_Piece(_COLUMNS, "U8", [len(text)], np.frombuffer(text, np.uint8)))
        return _write(pieces)


def pack(parts: Parts) -> Block:
    """All samples as one block; raises as `Packer`."""
    return Packer(parts).block(0, parts[2])


def _field(name: str, values: Tensor, cut: int | None) -> _Field:
    if values.dtype not in _CODES:
        raise ValueError(f"{name!r} is {values.dtype}; allowed: {', '.join(map(str, _CODES))}")
    inner, size = list(values.shape[1:]), values.element_size()
    flat = values.detach().cpu().contiguous().reshape(-1)
    memory = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)
    return _Field(name, _CODES[values.dtype], size, inner, memory, math.prod(inner) * size, cut)


_quoted = lru_cache(maxsize=1024)(partial(json.dumps, ensure_ascii=False))  # names of a few fields, in every block
_SIZES = {code: dtype.itemsize for code, dtype in _DTYPES.items()}


def _write(pieces: Iterable[_Piece]) -> Block:
    """The file: widest elements first, so that each tensor begins at a multiple of its element's size."""
    order = sorted(pieces, key=lambda piece: -_SIZES[piece.code])
    header: list[str] = []
    end = 0
    for piece in order:
        start, end = end, end + len(piece.bytes)
        place = f'"dtype": "{piece.code}", "shape": {piece.shape}, "data_offsets": [{start}, {end}]'
        header.append(f"{_quoted(piece.name)}: {{{place}}}")
    text = ("{" + ", ".join(header) + "}").encode()
    text += b" " * (-len(text) % 8)
    parts: list[np.ndarray] = []
    small = [np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)]
    for piece in order:
        if len(piece.bytes) < _ALONE:
            small.append(piece.bytes)
            continue
        if small:
            parts.append(np.concatenate(small))
        parts.append(piece.bytes)
        small = []
    return Block((*parts, np.concatenate(small)) if small else tuple(parts))


class Opened(NamedTuple):
    """A block that was read: its header, what is said of the samples, and the bytes of its tensors.

    `starts` says where in all these bytes each of `parts` begins.
    """

    entries: dict[str, Any]
    head: dict[str, Any]
    starts: list[int]
    parts: list[np.ndarray]

    @property
    def kinds(self) -> tuple[list[tuple[str, bool, str, list[int]]], list[str]]:
        """What blocks of one batch share: names, kinds, dtypes and inner shapes of fields; names of columns."""
        of = [(name, cut is None, self.entries[_FIELD + name]) for name, cut in self.head["layout"].items()]
        fields = [(name, dense, entry["dtype"], entry["shape"][1:]) for name, dense, entry in of]
        return sorted(fields, key=lambda field: field[0]), sorted(self.head["columns"])

    def bytes(self, name: str) -> np.ndarray:
        """Of the tensor `name` of the file.

        Raises:
            ValueError: it is not where the header says.
        """
        entry = self.entries[name]
        start, stop = entry["data_offsets"]
        size = math.prod(entry["shape"]) * _SIZES[entry["dtype"]]
        place = bisect_right(self.starts, start) - 1
        before, part = self.starts[place], self.parts[place]
        if stop - start != size or stop - before > len(part):
            raise ValueError(
                f"a tensor of shape {entry['shape']} cannot lie at bytes {start} to {stop} of "
                f"{self.starts[-1] + len(self.parts[-1])}"
            )
        return part[start - before : stop - before]


def open_block(block: Block) -> Opened:
    """Read what a block says of itself.

    Raises:
        ValueError: it is no block of `Packer`.
    """
    first = block.parts[0]
    length = int.from_bytes(first[:8].tobytes(), "little")
    if not 0 < length <= len(first) - 8:
        raise ValueError(f"{len(block)} bytes are no batch: a header of {length} bytes does not fit in")
    entries = json.loads(first[8 : 8 + length].tobytes())
    parts = [first[8 + length :], *block.parts[1:]]
    bare = Opened(entries, {}, [0, *accumulate(map(len, parts[:-1]))], parts)
    return bare._replace(head=json.loads(bare.bytes(_COLUMNS).tobytes().decode("utf-8", "surrogatepass")))


def unpack(block: Block) -> Parts:
    """Inverse of `pack`; the fields are views of `block`, not to be written to.

    Raises:
        ValueError: it is no such block.
    """
    opened = open_block(block)
    offsets = {cut: _view(opened, f"{_OFFSETS}{cut}") for cut in opened.head["layout"].values() if cut is not None}
    fields = {}
    for name, cut in opened.head["layout"].items():
        values = _view(opened, _FIELD + name)
        fields[name] = values if cut is None else Jagged(values, offsets[cut])
    return fields, opened.head["columns"], opened.head["size"]


def _view(opened: Opened, name: str) -> Tensor:
    entry, memory = opened.entries[name], opened.bytes(name)
    with warnings.catch_warnings():  # that a view of memory that is not ours could be written to
        warnings.simplefilter("ignore")
        return _as_tensor(memory, entry["dtype"], entry["shape"])


def _as_tensor(memory: np.ndarray, code: str, shape: Sequence[int]) -> Tensor:
    dtype = _DTYPES[code]
    return torch.from_numpy(memory).view(dtype).view(*shape) if len(memory) else torch.empty(*shape, dtype=dtype)


def gather(blocks: Sequence[Opened]) -> Parts:
    """The samples of all blocks, in order, in memory of their own: one copy. At least one block; all are of a kind."""
    first = blocks[0]
    fields: dict[str, Tensor | Jagged] = {}
    shared: dict[tuple[int, ...], Tensor] = {}
    for name, cut in first.head["layout"].items():
        values = _gathered(blocks, _FIELD + name)
        if cut is None:
            fields[name] = values
            continue
        cuts = tuple(block.head["layout"][name] for block in blocks)
        if cuts not in shared:
            shared[cuts] = _offsets(blocks, cuts)
        fields[name] = Jagged(values, shared[cuts])
    columns = {
        name: [item for block in blocks for item in block.head["columns"][name]] for name in first.head["columns"]
    }
    return fields, columns, sum(block.head["size"] for block in blocks)


def _gathered(blocks: Sequence[Opened], name: str) -> Tensor:
    """One tensor of all blocks, joined along its first dimension."""
    parts = [block.bytes(name) for block in blocks]
    memory = rooms.take(sum(map(len, parts)))
    np.concatenate(parts, out=memory)
    rows = sum(block.entries[name]["shape"][0] for block in blocks)
    entry = blocks[0].entries[name]
    return _as_tensor(memory, entry["dtype"], [rows, *entry["shape"][1:]])


def _offsets(blocks: Sequence[Opened], cuts: Sequence[int]) -> Tensor:
    """Of all sequences of the blocks, of each by the cut with that number."""
    parts = [block.bytes(f"{_OFFSETS}{cut}").view(np.int64) for block, cut in zip(blocks, cuts, strict=True)]
    steps = np.diff(np.concatenate(parts))
    between = np.cumsum([len(part) for part in parts[:-1]]) - 1  # from the end of one block to the start of the next
    ends = np.cumsum(np.delete(steps, between.astype(np.int64)))
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), ends]))


def _check_plain(name: str, value: Any) -> None:
    """Refuse what JSON would silently change: tuples become lists, number keys become strings."""
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
                raise ValueError(f"column {name!r}: dictionary key {key!r} is no string")
            if type(item) not in _SCALARS:
                _check_plain(name, item)
        return
    raise ValueError(
        f"column {name!r} holds {kind.__name__} {value!r:.80}; allowed: str, int, float, bool, None, list, dict"
    )
