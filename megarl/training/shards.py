"""Files of tensor slices: each rank writes one file, and any rank reads the slices that it needs from all of them.

The format is safetensors, so any tool can open a file. A tensor in it is one slice, named KEY@OFFSET (such as
`actor.decoder.layers.0.mlp.linear_fc2.weight@0,64`); the metadata has the shapes of the whole tensors and a label that
identifies the checkpoint. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor

from megarl.system.device import synchronize
from megarl.system.errors import UserError
from megarl.system.tracing import beat
from megarl.training.checksums import FileChecksum, opened_size, size_at
from megarl.training.host_memory import HostArena
from megarl.training.tensor_slices import TensorSlice, overlap

#: Names of dtypes in safetensors files.
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_CHUNK = 16 << 20
_FLUSHED = 256 << 20  # flush to disk after this many bytes, so that progress counts bytes on disk
_ALIGNED = 64

#: key -> {"whole": shape, "slices": [[file, first byte, dtype, offset, shape], ...]}
Index: TypeAlias = dict[str, dict[str, Any]]


class CheckpointError(UserError):
    """A checkpoint is incomplete or damaged, belongs to another model, or cannot be written."""


class FormatError(CheckpointError):
    """A checkpoint has a format that this version does not read."""


class Snapshot:
    """Copies of slices in one block of host memory, ready to be written to a file.

    Args:
        slices: the slices to copy. Their tensors may change after construction.
        label: identifies the checkpoint that the file belongs to.
        arena: provides the memory; the previous snapshot in the arena must have been written.
    """

    def __init__(self, slices: Iterable[TensorSlice], label: dict[str, Any], arena: HostArena) -> None:
        # The widest dtypes come first, which aligns every tensor without gaps: the format forbids gaps.
        ordered = sorted(slices, key=lambda part: -part.data.element_size())
        (self._memory,) = arena.take([sum(part.data.nbytes for part in ordered)])
        header: dict[str, Any] = {}
        end = 0
        for part in ordered:
            start, end = end, end + part.data.nbytes
            copy = self._memory[start:end].view(part.data.dtype).view(part.data.shape)
            copy.copy_(part.data, non_blocking=True)
            header[f"{part.key}@{','.join(map(str, part.offset))}"] = {
                "dtype": NAMES[part.data.dtype],
                "shape": list(part.data.shape),
                "data_offsets": [start, end],
            }
            beat()
        synchronize()
        wholes = {part.key: part.whole for part in ordered}
        text = json.dumps({"__metadata__": {"label": json.dumps(label), "wholes": json.dumps(wholes)}, **header})
        padded = -(-(len(text.encode()) + 8) // _ALIGNED) * _ALIGNED - 8
        self._header = padded.to_bytes(8, "little") + text.encode().ljust(padded)

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self._header) + self._memory.nbytes

    def write(self, path: Path, progress: Callable[[int], None]) -> FileChecksum:
        """Write the file; `progress(bytes)` is called as it grows and may raise an error to stop."""
        return write_file(path, (self._header, self._memory.numpy().data), progress)


def write_file(path: Path, parts: Sequence[bytes | memoryview], progress: Callable[[int], None]) -> FileChecksum:
    """Write `parts` to a file, flush it to disk, and return its size and checksum."""
    checksum, size = xxhash.xxh3_64(), 0
    try:
        with path.open("wb") as file:
            for part in parts:
                for start in range(0, len(part), _CHUNK):
                    chunk = part[start : start + _CHUNK]
                    file.write(chunk)
                    checksum.update(chunk)
                    size += len(chunk)
                    if size % _FLUSHED < len(chunk):
                        os.fdatasync(file.fileno())
                    progress(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk lacks the file name
        raise
    return [size, checksum.hexdigest()]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and the offset of its data.

    Raises:
        CheckpointError: the file is damaged or has another format.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > opened_size(file):
                raise ValueError(f"the file ends before its header of {length} bytes, so it is probably truncated")
            return json.loads(file.read(length)), 8 + length
    except (OSError, ValueError) as error:
        raise _no_header(path, error) from error


def _no_header(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the header of this file cannot be read: {error}", where=str(path), fix="use another checkpoint"
    )


def label_of(path: Path) -> dict[str, Any]:
    """Return the label of the `Snapshot` that wrote the file.

    Raises:
        CheckpointError: the file is damaged or has another format.
    """
    header, _ = read_header(path)
    try:
        label = json.loads(header["__metadata__"]["label"])
        if not isinstance(label, dict):
            raise TypeError(f"the entry `label` is {label!r} instead of a JSON object")
    except (KeyError, ValueError, TypeError) as error:
        raise _no_header(path, error) from error
    return label


def read_index(folder: Path, names: Iterable[str]) -> Index:
    """Return the location in the files `names` of `folder` of every slice that they contain."""
    index: Index = {}
    for name in names:
        beat()
        header, begin = read_header(folder / name)
        for key, whole in json.loads(header.pop("__metadata__")["wholes"]).items():
            index.setdefault(key, {"whole": whole, "slices": []})
        for part, entry in header.items():
            key, _, offset = part.rpartition("@")
            at = [int(number) for number in offset.split(",") if number]
            index[key]["slices"].append([name, begin + entry["data_offsets"][0], entry["dtype"], at, entry["shape"]])
    return index


def foreign(slices: Iterable[TensorSlice], index: Index) -> list[str]:
    """List the tensors of `slices` that the checkpoint lacks or has in another shape."""
    lines = []
    for part in slices:
        entry = index.get(part.key)
        if entry is None:
            lines.append(f"no {part.key}")
        elif tuple(entry["whole"]) != part.whole and not (part.padded and tuple(entry["whole"][1:]) == part.whole[1:]):
            lines.append(f"{part.key} has shape {entry['whole']}, expected {list(part.whole)}")
    return list(dict.fromkeys(lines))


def fill(slices: Sequence[TensorSlice], index: Index, folder: Path) -> None:
    """Copy the elements of `slices` from the files of `folder` into their tensors, and read no other bytes.

    Raises:
        CheckpointError: some elements are in no file.
    """
    files: dict[str, Tensor] = {}
    for part in slices:
        filled = 0
        for name, begin, dtype, offset, shape in index[part.key]["slices"]:
            common = overlap(part.offset, tuple(part.data.shape), tuple(offset), tuple(shape))
            if common is None:
                continue
            if name not in files:  # mapped, so that only the pages that are used are read
                path = folder / name
                files[name] = torch.from_file(str(path), size=size_at(path), dtype=torch.uint8)
            inside, stored = common
            target = part.data[inside]
            end = begin + math.prod(shape) * _DTYPES[dtype].itemsize
            target.copy_(files[name][begin:end].view(_DTYPES[dtype]).view(shape)[stored])
            filled += target.numel()
        missing = part.data.numel() - filled
        if missing and not part.padded:
            raise CheckpointError(
                f"{missing} of {part.data.numel()} elements of {part.key} are missing from the files",
                where=str(folder),
                fix="use another checkpoint",
            )
        beat()
