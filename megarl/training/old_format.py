"""Reads the index of a checkpoint of format 2, so that a run that began with it goes on.

Megatron's writer made it: `.metadata` is a pickle, read with a short list of allowed classes, and a tensor lies in a
file as `torch.save` writes it, a zip archive with the plain numbers inside. Keys and places are those of format 3, so
once it is known where the numbers begin, the rest is the same.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megarl.phase import beat
from megarl.training.shards import NAMES, CheckpointError, Index

FORMAT = 2
_PLAIN = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its module since Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}


def read_old_index(folder: Path) -> Index:
    """Where every box is, as `megarl.training.shards.read_index` says it.

    Raises:
        CheckpointError: the index cannot be read, names another class, or lists objects other than tensors.
    """
    try:
        metadata = _PlainUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        index: Index = {
            key: {"whole": list(tensor.size), "boxes": []} for key, tensor in metadata.state_dict_metadata.items()
        }
        for place, stored in metadata.storage_data.items():
            tensor = metadata.state_dict_metadata[place.fqn]
            shape = next(chunk.sizes for chunk in tensor.chunks if chunk.offsets == place.offset)
            begin = stored.offset + _numbers_begin(folder / stored.relative_path, stored.offset, stored.length)
            name = NAMES[tensor.properties.dtype]
            index[place.fqn]["boxes"].append([stored.relative_path, begin, name, list(place.offset), list(shape)])
            beat()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"the index of this checkpoint, or a file it names, cannot be read: {error}",
            where=str(folder),
            fix="use another checkpoint",
        ) from error
    return index


def _numbers_begin(path: Path, start: int, length: int) -> int:
    """Where the numbers are in the archive of one tensor, which is a part of a file."""
    with path.open("rb") as file, zipfile.ZipFile(_Part(file, start, length)) as archive:
        (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{path} is compressed")
        file.seek(start + entry.header_offset + 26)  # lengths of name and extra field, in the local header
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        return entry.header_offset + 30 + name + extra


class _Part(io.RawIOBase, BinaryIO):
    """A part of an open file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise CheckpointError(
            f"the index of this checkpoint names {module}.{name}, which is not a part of any index",
            fix="do not use this checkpoint: loading it with other software could run what its maker wants",
        )
