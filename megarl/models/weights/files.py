"""Safetensors folders: read any box of any tensor, write tensors one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megarl.errors import ConfigError
from megarl.models.weights.plan import Box
from megarl.phase import keep_beating

INDEX = "model.safetensors.index.json"
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def resolve_folder(source: str | Path) -> Path:
    """`source` as a local folder, fetched from the hub when it is no folder but looks like a hub name."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        with keep_beating():
            return Path(snapshot_download(str(source), allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"]))
    except Exception as error:
        from megarl.config.hub import advice

        raise ConfigError(
            f"cannot find this model: {type(error).__name__}",
            where="model.path",
            found=str(source),
            allowed="a folder with config.json and *.safetensors, or a hub name",
            fix=advice("models", str(source), "check the name and the free space of the hub cache"),
        ) from error


class CheckpointReader:
    """Tensors of a folder of safetensors files by name; only what is asked for is read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = resolve_folder(folder)
        self._file_of = self._names()
        self._open: dict[str, Any] = {}

    def _names(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                "no *.safetensors files in this folder",
                where="model.path",
                found=str(self.folder),
                fix="save the model with save_pretrained (safetensors is its default form)",
            )
        names: dict[str, str] = {}
        for file in files:
            names |= dict.fromkeys(_open_file(file).keys(), file.name)
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """All tensor names."""
        return sorted(self._file_of)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConfigError(
                f"tensor {name!r} is missing",
                where=str(self.folder),
                allowed="a checkpoint whose tensors match its config.json",
                fix="check that config.json belongs to these files",
            )
        file = self._file_of[name]
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise ConfigError("this file is named by the index and is missing", where=str(path))
            self._open[file] = _open_file(path)
        return self._open[file].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of tensor `name` as its file spells it, such as BF16."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Tensor `name` or the part of it inside `box`, in the file's dtype."""
        found = self._slice(name)
        return found[tuple(slice(*span) for span in box)] if box is not None else found[...]


def _open_file(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(
            f"this is not a whole safetensors file ({error})", where=str(path), fix="copy or download it again"
        ) from error


class SafetensorsWriter:
    """One safetensors file whose tensors arrive one at a time, in the order announced."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._dtype, self._left, offset = dtype, list(shapes.items()), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, shape in shapes.items():
            size = dtype.itemsize * _count(shape)
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts on an 8-byte boundary
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor; `name` and shape must be the ones announced."""
        expected = self._left.pop(0)
        if expected != (name, tuple(tensor.shape)):
            raise ValueError(f"expected {expected}, got {name} {tuple(tensor.shape)}")
        data = tensor.detach().to("cpu", self._dtype).contiguous()
        self._file.write(memoryview(data.flatten().view(torch.uint8).numpy()))

    def close(self) -> None:
        """Make the file durable."""
        if self._left:
            raise ValueError(f"{len(self._left)} announced tensors were not written, first {self._left[0][0]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class FolderWriter:
    """Sharded safetensors in a folder that appears under its name only when it is complete."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int) -> None:
        self.folder, self.temporary = folder, folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.temporary.mkdir()
        self._dtype, self._groups = dtype, list(_group(shapes, dtype, max_bytes))
        self._sizes = sum(dtype.itemsize * _count(s) for s in shapes.values())
        self._shapes, self._done = shapes, 0
        self._writer: SafetensorsWriter | None = None
        self._in_group = 0

    def _file_name(self, number: int) -> str:
        total = len(self._groups)
        return "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor in the order of `shapes`."""
        names = self._groups[self._done]
        if self._writer is None:
            path = self.temporary / self._file_name(self._done)
            self._writer = SafetensorsWriter(path, {n: self._shapes[n] for n in names}, self._dtype)
        self._writer.add(name, tensor)
        self._in_group += 1
        if self._in_group == len(names):
            self._writer.close()
            self._writer, self._in_group, self._done = None, 0, self._done + 1

    def finish(self) -> None:
        """Write the index, then swap the folder into place; an older folder of that name goes away."""
        if self._done != len(self._groups):
            raise ValueError(f"{len(self._groups) - self._done} files are incomplete")
        if len(self._groups) > 1:
            weight_map = {name: self._file_name(i) for i, names in enumerate(self._groups) for name in names}
            index = {"metadata": {"total_size": self._sizes}, "weight_map": weight_map}
            (self.temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        replace_folder(self.temporary, self.folder)

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            _remove(self.temporary)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`; what was there is moved aside first and removed after."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    handle = os.open(folder.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    _remove(old)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _count(shape: Iterable[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _group(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int) -> Iterator[list[str]]:
    """Names per file: as many as fit, at least one."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        bytes_ = dtype.itemsize * _count(shape)
        if names and size + bytes_ > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_
    if names:
        yield names
