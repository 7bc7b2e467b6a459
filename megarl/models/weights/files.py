"""Safetensors folders: read any region of a tensor, write tensors one at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor

from megarl.architectures.decoders import canonical_name, is_left_out, reads_vision
from megarl.architectures.tensors import EMBEDDINGS, HEAD, is_of_value_head
from megarl.architectures.vision import VisionShape
from megarl.artifacts.checkpoint_files import (
    INDEX,
    file_names,
    quantized_block,
    read_config,
    refuse_unread,
    split_draft,
    weight_files,
)
from megarl.artifacts.mxfp4 import BLOCKS, SCALES, PackedSlice, has_stacks, packed_tensors
from megarl.artifacts.stacked_experts import Cut, ExpertSlice, Stacks, cuts_of
from megarl.artifacts.vla_folder import VLA_TYPE, projector_file, read_projector
from megarl.models.layers.rules import TensorRegion
from megarl.models.weight_table import as_index
from megarl.system.errors import ConfigError, count
from megarl.system.tracing import keep_beating

_COMPARED_ROWS = 4096
#: `*_checkpoint.pt` are files with parts of VLA policies, see artifacts/vla_folder.py.
_FETCHED, _WEIGHTS = ("*.json", "*.txt", "*.model", "*_checkpoint.pt"), ("*.safetensors",)
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def resolve_folder(
    source: str | Path, where: str = "model.path", *, weights: bool = True, revision: str | None = None
) -> Path:
    """Return `source` as a local folder; a hub name is downloaded.

    Args:
        where: the recipe key that sets it, for errors.
        weights: also fetch the safetensors files.
        revision: branch, tag or commit of the hub's repository; None: its main branch.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        with keep_beating():
            patterns = [*_FETCHED, *(_WEIGHTS if weights else ())]
            return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    except Exception as error:
        from megarl.data.hub import advice

        raise ConfigError(
            f"cannot find or download this model ({type(error).__name__})",
            where=where,
            found=str(source),
            allowed="a folder with config.json and *.safetensors, or a hub name",
            fix=advice("models", str(source), "check the name and the free space of the hub cache"),
        ) from error


class CheckpointReader:
    """Reads tensors, or regions of them, of a Hugging Face folder by name.

    It uses the files that transformers would use (artifacts/checkpoint_files.py) and dequantises block-wise fp8 weights
    and stacks of experts in mxfp4. Tied embeddings that are stored only as `lm_head.weight` can be read under either
    name.

    Args:
        vision: whether to read the vision encoder (`model.vision`); None: the model type decides.

    Attributes:
        draft: the tensors of the draft head, with the number of their layer in it; `names` does not list them.
    """

    def __init__(self, folder: str | Path, *, vision: bool | None = None) -> None:
        self.folder = resolve_folder(folder)
        config = read_config(self.folder)
        self._block = quantized_block(config, str(self.folder / "config.json"))
        self.files = weight_files(self.folder, config)
        self._open = {file: _open_file(file) for file in self.files}
        kind = config.get("model_type")
        sees = reads_vision(kind, vision)
        stored = [(file, name) for file in self.files for name in self._open[file].keys()]  # noqa: SIM118
        read = [(file, name) for file, name in stored if not is_left_out(kind, name, vision=sees)]
        self._left_out = len(stored) - len(read)
        self._place = {canonical_name(kind, name, vision=sees): (file, name) for file, name in read}
        self._cuts: dict[str, Cut] = {}
        # slices of the two stored tensors, (blocks, scales), that each mxfp4 tensor is dequantised from
        self._packed: dict[str, tuple[Any, Any]] = {}
        if has_stacks(kind):
            self._find_packed()
        else:
            self._take_stacks_apart(config)
        self._add_projector(config)
        _, self.draft = split_draft(config, self._place)
        self._embeddings = canonical_name(kind, EMBEDDINGS, vision=sees)
        if config.get("tie_word_embeddings") and self._embeddings not in self and HEAD in self:
            self._place[self._embeddings] = self._place[HEAD]

    def _take_stacks_apart(self, config: Mapping[str, Any]) -> None:
        """Replace tensors that stack the matrices of all experts of a layer by one entry per expert."""
        hidden: int = (config.get("text_config") or config).get("hidden_size", 0)
        for name, (file, stored) in list(self._place.items()):
            cuts = cuts_of(name, tuple(self._open[file].get_slice(stored).get_shape()), hidden)
            if cuts:
                del self._place[name]
                self._place |= dict.fromkeys(cuts, (file, stored))
                self._cuts |= cuts

    def _find_packed(self) -> None:
        """Replace the blocks and scales of tensors in mxfp4 by one entry for each tensor."""
        slices = {name: self._open[file].get_slice(stored) for name, (file, stored) in self._place.items()}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        for name in packed_tensors(shapes, str(self.folder)):
            self._place[name], _ = (self._place.pop(name + part) for part in (BLOCKS, SCALES))
            self._packed[name] = slices[name + BLOCKS], slices[name + SCALES]

    def _add_projector(self, config: Mapping[str, Any]) -> None:
        """Add the tensors of a VLA policy that are in a separate torch file."""
        file = projector_file(self.folder) if config.get("model_type") == VLA_TYPE else None
        if file is None:
            return
        tensors = read_projector(file)
        if twice := sorted(tensors.keys() & self._place.keys()):
            raise ConfigError(
                "the projector of the proprioceptive state is stored twice",
                where=str(self.folder),
                found=f"{twice[0]} in {self._place[twice[0]][0].name} and in {file.name}",
                allowed="one of the two",
                fix=f"move {file.name} away if the weights were trained further, as SimpleVLA-RL does: it is then the "
                "older copy; otherwise download the folder again",
            )
        self.files = [*self.files, file]
        self._open[file] = SimpleNamespace(get_slice=lambda name: _LoadedSlice(tensors[name]))
        self._place |= {name: (file, name) for name in tensors}

    @staticmethod
    def has_weights(folder: Path) -> bool:
        """Return whether a folder has weight files or an adapter, not only a configuration."""
        return any(folder.glob("*.safetensors*")) or (folder / "adapter_config.json").is_file()

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint stores weights in fp8 blocks with scales."""
        return self._block is not None

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def names(self) -> list[str]:
        """Return the names of all tensors but those of the draft head."""
        return sorted(self._place.keys() - self.draft.keys())

    def describe(self) -> str:
        """Return the folder and its files, in one line for messages."""
        fp8 = ", weights dequantised from fp8" if self._block else ""
        fp8 += ", experts dequantised from mxfp4" if self._packed else ""
        if self._left_out:
            fp8 += f", {count(self._left_out, 'tensor')} of parts that are not used, neither read nor exported"
        if self.draft:
            fp8 += f", and {count(len(self.draft), 'tensor')} of its draft head"
        return f"{self.folder}: {len(self.names())} tensors in {file_names(self.files)}{fp8}"

    def _slice(self, name: str) -> Any:
        if name not in self._place:
            raise ConfigError(
                f"tensor {name!r} is missing",
                where=str(self.folder),
                found=self.describe(),
                allowed="a checkpoint whose tensors match its config.json",
                fix="check that config.json belongs to these files",
            )
        if name in self._packed:
            return PackedSlice(*self._packed[name])
        file, stored = self._place[name]
        part = self._open[file].get_slice(stored)
        return ExpertSlice(part, self._cuts[name]) if name in self._cuts else part

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype of tensor `name` as spelt in its file, such as BF16."""
        return str(self._slice(name).get_dtype())

    def float_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of tensor `name`; None if it is quantised."""
        return _DTYPES.get(self.dtype(name))

    def check(self, shapes: Mapping[str, tuple[int, ...]], sight: VisionShape | None) -> None:
        """Check that the folder's tensors are those of the model.

        Args:
            shapes: shapes of the model's tensors, by name. Tensors of a value head may be missing: it then starts at
                zero.
            sight: vision part of a VLA policy, whose towers have unused parts.
        """
        refuse_unread(self.names(), shapes, sight, str(self.folder))
        for name, shape in shapes.items():
            if is_of_value_head(name) and name not in self:
                continue
            if self.shape(name) != shape:
                raise ConfigError(
                    f"tensor {name!r} has a different shape than config.json implies",
                    where=str(self._place[name][0]),
                    found=self.shape(name),
                    allowed=[shape],
                    fix="check that config.json belongs to these files",
                )

    def read(self, name: str, region: TensorRegion | None = None) -> Tensor:
        """Return the tensor `name` or its `region`, in the file's dtype; dequantised tensors in float32 (from fp8) or
        bfloat16 (from mxfp4)."""
        stored = self._slice(name)
        part = stored[as_index(region)] if region is not None else stored[...]
        return part if part.dtype in _CODES else self._dequantized(name, part, region)

    def _dequantized(self, name: str, codes: Tensor, region: TensorRegion | None) -> Tensor:
        """Multiply each code by the scale of its block; the last blocks of a dimension may be incomplete."""
        scale_name, shape = f"{name}_scale_inv", self.shape(name)
        scales = self._slice(scale_name)[...] if scale_name in self else None
        in_blocks = codes.dtype == torch.float8_e4m3fn and len(shape) == 2
        if scales is None or self._block is None or scales.dtype not in _CODES or not in_blocks:
            beside = f"scales in {scales.dtype}" if scales is not None else f"no {scale_name}"
            raise ConfigError(
                f"tensor {name!r} is quantised in an unknown way",
                where=str(self._place[name][0]),
                found=f"{self.dtype(name)}, {beside}",
                allowed=f"{', '.join(_CODES.values())}, or F8_E4M3 with scales per block and a quantization_config",
                fix="use the unquantised model",
            )
        if tuple(scales.shape) != tuple(-(-n // size) for n, size in zip(shape, self._block, strict=True)):
            raise ConfigError(
                f"tensor {scale_name!r} does not have one scale per block",
                where=str(self._place[scale_name][0]),
                found=tuple(scales.shape),
                allowed=f"one scale per block of {shape} in blocks of {self._block}",
                fix="check weight_block_size in config.json",
            )
        spans = region or tuple((0, n) for n in shape)
        rows, columns = (torch.arange(*span) // size for span, size in zip(spans, self._block, strict=True))
        return codes.float() * scales.float()[rows][:, columns]

    def untied_head(self) -> bool:
        """Return whether the folder has both a head and embeddings, and they differ."""
        embeddings = self._embeddings
        if HEAD not in self or embeddings not in self or self._place[HEAD] == self._place[embeddings]:
            return False
        rows, columns = self.shape(embeddings)
        if self.shape(HEAD) != (rows, columns):
            return True
        for start in range(0, rows, _COMPARED_ROWS):
            region = ((start, min(start + _COMPARED_ROWS, rows)), (0, columns))
            if not torch.equal(self.read(HEAD, region).float(), self.read(embeddings, region).float()):
                return True
        return False


class _LoadedSlice:
    """A tensor in memory, with the interface of a slice of an opened safetensors file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _CODES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def _open_file(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(
            f"the safetensors file is damaged or incomplete: {error}", where=str(path), fix="copy or download it again"
        ) from error


#: One dtype for all tensors, or the dtype of each tensor by name.
Dtypes = torch.dtype | Mapping[str, torch.dtype]


def _of_each(dtypes: Dtypes, names: Iterable[str]) -> dict[str, torch.dtype]:
    return {name: dtypes if isinstance(dtypes, torch.dtype) else dtypes[name] for name in names}


class SafetensorsWriter:
    """Writes one safetensors file; tensors arrive one at a time, in the announced order."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]], dtypes: Dtypes) -> None:
        self._dtypes, self._left, offset = _of_each(dtypes, shapes), list(shapes.items()), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, shape in shapes.items():
            dtype = self._dtypes[name]
            size = dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts on an 8-byte boundary
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor; name and shape must be the announced ones."""
        expected = self._left.pop(0)
        if expected != (name, tuple(tensor.shape)):
            raise ValueError(f"the next tensor must be {expected}, not {name} {tuple(tensor.shape)}")
        data = tensor.detach().to("cpu", self._dtypes[name]).contiguous()
        self._file.write(data.flatten().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush the file to the disk and close it."""
        if self._left:
            raise ValueError(
                f"{len(self._left)} tensors of this file were never added; the first is {self._left[0][0]}"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class FolderWriter:
    """Writes sharded safetensors into a folder that appears under its name only when it is complete.

    Several processes may write the folder together: one process creates the temporary folder and calls `finish`, and
    each process adds all tensors of the files that it writes (`file_of`).

    Args:
        folder: the final folder; an existing one is replaced.
        shapes: all tensors by name, in the order in which they are added.
        dtypes: one dtype, or one per tensor. A stack of experts gets the widest dtype of its matrices.
        max_bytes: largest size of a file.
        stacked: write the matrices of all experts of a layer as one tensor (`megarl.artifacts.stacked_experts`).
        temporary: the temporary folder that another process has created; None: create it.
    """

    def __init__(
        self,
        folder: Path,
        shapes: dict[str, tuple[int, ...]],
        dtypes: Dtypes,
        max_bytes: int,
        *,
        stacked: bool = False,
        temporary: Path | None = None,
    ) -> None:
        self._stacks = Stacks(shapes) if stacked else None
        given = _of_each(dtypes, shapes)
        self._names = dict(zip(shapes, shapes, strict=True)) if self._stacks is None else self._stacks.names
        self._dtypes: dict[str, torch.dtype] = {}
        for name, stored in self._names.items():
            self._dtypes[stored] = torch.promote_types(given[name], self._dtypes.get(stored, given[name]))
        shapes = shapes if self._stacks is None else self._stacks.shapes
        self.folder, self.temporary = folder, temporary or folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        if temporary is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self.temporary.mkdir()
        self._groups = list(_group(shapes, self._dtypes, max_bytes))
        self._sizes = sum(self._dtypes[name].itemsize * math.prod(shape) for name, shape in shapes.items())
        self._files = {name: number for number, names in enumerate(self._groups) for name in names}
        self._shapes = shapes
        self._writer: SafetensorsWriter | None = None
        self._in_group = 0

    def _file_name(self, number: int) -> str:
        total = len(self._groups)
        return "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"

    def file_of(self, name: str) -> int:
        """Return the number, from 0, of the file that holds the tensor `name`."""
        return self._files[self._names[name]]

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor to its file. A process adds the tensors of its files in the order of `shapes`."""
        tensor = tensor.to(self._dtypes[self._names[name]])
        for whole in [(name, tensor)] if self._stacks is None else self._stacks.add(name, tensor):
            self._write(*whole)

    def _write(self, name: str, tensor: Tensor) -> None:
        number = self._files[name]
        names = self._groups[number]
        if self._writer is None:
            path = self.temporary / self._file_name(number)
            self._writer = SafetensorsWriter(path, {n: self._shapes[n] for n in names}, self._dtypes)
        self._writer.add(name, tensor)
        self._in_group += 1
        if self._in_group == len(names):
            self._writer.close()
            self._writer, self._in_group = None, 0

    def finish(self) -> None:
        """Write the index file and rename the temporary folder to `folder`, replacing an older folder.

        Raises:
            ValueError: a file is missing or incomplete.
        """
        written = [self._file_name(number) for number in range(len(self._groups))]
        missing = [name for name in written if not (self.temporary / name).is_file()]
        if missing or self._writer is not None:
            raise ValueError(f"{len(missing) or 1} files of the checkpoint are incomplete: add all tensors first")
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
            shutil.rmtree(self.temporary, ignore_errors=True)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`; an existing folder is moved aside first and removed after the rename."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)  # a killed process with this number may have left it
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    handle = os.open(folder.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    shutil.rmtree(old, ignore_errors=True)


def _group(
    shapes: dict[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], max_bytes: int
) -> Iterator[list[str]]:
    """Yield the tensor names of each file: as many tensors as fit into `max_bytes`, at least one."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        bytes_ = dtypes[name].itemsize * math.prod(shape)
        if names and size + bytes_ > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_
    if names:
        yield names
