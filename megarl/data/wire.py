"""Fields and columns as one block of bytes, a safetensors file with the columns as JSON inside. No pickle.

Written with one copy of every tensor, and read with none.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

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


def pack(parts: Parts) -> np.ndarray:
    """uint8 [n]; jagged fields over the same tokens store their offsets once.

    Raises:
        ValueError: a column holds something that JSON would not give back unchanged, or a field has a dtype that the
            format does not have.
    """
    fields, columns, size = parts
    tensors: dict[str, Tensor] = {}
    cuts: list[Tensor] = []
    layout: dict[str, int | None] = {}
    for name, value in fields.items():
        layout[name] = _number_of(value.offsets.cpu(), cuts) if isinstance(value, Jagged) else None
        tensors[_FIELD + name] = value.values if isinstance(value, Jagged) else value
    tensors |= {f"{_OFFSETS}{number}": offsets for number, offsets in enumerate(cuts)}
    for name, column in columns.items():
        _check_plain(name, column)
    head = {"size": size, "layout": layout, "columns": columns}
    # surrogatepass: half of a surrogate pair (a cut emoji in decoded text) must survive the trip.
    text = json.dumps(head, ensure_ascii=False).encode("utf-8", "surrogatepass")
    tensors[_COLUMNS] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return _write(tensors)


def _write(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """The file: widest elements first, so that each tensor begins at a multiple of its element's size."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise ValueError(f"{name.removeprefix(_FIELD)!r} is {tensor.dtype}; allowed: {', '.join(map(str, _CODES))}")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    block = np.empty(first + end, dtype=np.uint8)
    block[:first] = np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)
    for name in order:
        start, stop = (first + place for place in header[name]["data_offsets"])
        if stop > start:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            block[start:stop] = flat.view(torch.uint8).numpy()
    return block


def unpack(block: np.ndarray) -> Parts:
    """Inverse of `pack`; the fields are views of `block`, not to be written to.

    Raises:
        ValueError: it is no such block.
    """
    length = int.from_bytes(block[:8].tobytes(), "little")
    if not 0 < length <= len(block) - 8:
        raise ValueError(f"{len(block)} bytes are no batch: a header of {length} bytes does not fit in")
    header = json.loads(block[8 : 8 + length].tobytes())
    with warnings.catch_warnings():  # that a view of memory that is not ours could be written to
        warnings.simplefilter("ignore")
        body = torch.from_numpy(block[8 + length :])
    tensors = {name: _view(body, entry) for name, entry in header.items() if name != "__metadata__"}
    head: dict[str, Any] = json.loads(tensors[_COLUMNS].numpy().tobytes().decode("utf-8", "surrogatepass"))
    fields = {
        name: tensors[_FIELD + name] if cut is None else Jagged(tensors[_FIELD + name], tensors[f"{_OFFSETS}{cut}"])
        for name, cut in head["layout"].items()
    }
    return fields, head["columns"], head["size"]


def _view(body: Tensor, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    start, stop = entry["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or stop > len(body):
        raise ValueError(f"a tensor of shape {shape} cannot lie at bytes {start} to {stop} of {len(body)}")
    return body[start:stop].view(dtype).view(shape) if stop > start else torch.empty(shape, dtype=dtype)


def _number_of(offsets: Tensor, known: list[Tensor]) -> int:
    """Place of `offsets` among `known`, appended when new: fields over the same tokens store them once."""
    for number, old in enumerate(known):
        if old is offsets or torch.equal(old, offsets):
            return number
    known.append(offsets)
    return len(known) - 1


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
