"""A shared folder with safetensors per version, written under another name and renamed when complete.

    FOLDER/.v00000012.partial/     being written; the next version removes it if the trainer dies
    FOLDER/v00000011/              complete: config.json, model-<sender>-<n>.safetensors, model.safetensors.index.json

A receiver reads the folder in one call, so it needs neither begin nor end, and keeps its weights if reading fails.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megarl.models.weights.files import INDEX, replace_folder
from megarl.sync.plan import Bucket
from megarl.sync.receiver import Receiver, UpdateStep
from megarl.sync.transports.base import Transport
from megarl.system.errors import WorkerError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KEPT = 1  # number of complete weight versions that are kept in addition to the newest one


class DiskTransport(Transport):
    """Sends weights through files: each bucket is a file; the first rank writes the index and renames the folder.

    Args:
        folder: folder that receivers can read under the same path.
        rank: rank of this sender, a part of its file names.
    """

    session = False
    one_replica = True
    in_parts = False  # servers load a folder, which must contain all tensors
    live = True

    def __init__(self, folder: Path, rank: int, hf: PretrainedConfig, deadline_s: float) -> None:
        self.folder, self.rank, self.hf, self.deadline_s = folder, rank, hf, deadline_s
        self._version, self._files, self._partial = 0, 0, folder
        if rank == 0:  # needs no barrier, because no rank writes before the first update
            remove_partial(folder)

    def start(self, version: int, receivers: Sequence[Receiver]) -> None:
        """Create the partial folder into which every sender writes."""
        self._version, self._files, self._partial = version, 0, self.folder / f".{version_folder(version)}.partial"
        self._partial.mkdir(parents=True, exist_ok=True)

    def put(self, number: int, bucket: Bucket, parts: Sequence[Tensor]) -> None:
        """Write the bucket to a file and flush it to disk."""
        path = self._partial / f"model-{self.rank:05d}-{self._files:05d}.safetensors"
        try:
            with path.open("wb") as file:
                file.write(_header(bucket))
                for part in parts:
                    file.write(part.numpy().data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WorkerError(
                f"cannot write weights of version {self._version} to {path}: {error}; correct this, for example free "
                "space there, or choose another sync.transport"
            ) from error
        self._files += 1

    def publish(self) -> None:
        """Write index and configuration, rename the folder, and remove older versions."""
        partial = self._partial
        files = sorted(partial.glob("model-*.safetensors"))
        names = {name: file.name for file in files for name in _names(file)}
        total = sum(file.stat().st_size for file in files)
        (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}))
        self.hf.save_pretrained(partial)
        replace_folder(partial, self.folder / version_folder(self._version))
        remove_old(self.folder, self._version)

    def commit(self, receiver: Receiver) -> None:
        """Make the receiver read the version's folder."""
        receiver.read_folder(self.folder_held(), UpdateStep("reading the weights", self.deadline_s))

    def folder_held(self) -> Path:
        """Return the folder with the weights of the version that is being sent."""
        return (self.folder / version_folder(self._version)).resolve()


def version_folder(version: int) -> str:
    """Return the name of the folder of a weight version."""
    return f"v{version:08d}"


def remove_partial(folder: Path) -> None:
    """Remove what interrupted writes have left: partial folders, and old folders that were moved aside."""
    for pattern in (".v*.partial*", ".v*.old-*"):
        for stale in folder.glob(pattern):
            shutil.rmtree(stale, ignore_errors=True)


def remove_old(folder: Path, version: int) -> None:
    """Remove partial folders, and all complete versions except `version` and the one before it.

    Higher versions were written before the run was resumed from an earlier step.
    """
    remove_partial(folder)
    complete = sorted(folder.glob("v????????"))
    older = [path for path in complete if path.name < version_folder(version)]
    newest = {folder / version_folder(version), *older[-_KEPT:]}
    for path in complete:
        if path not in newest:
            shutil.rmtree(path, ignore_errors=True)


def _header(bucket: Bucket) -> bytes:
    """Return the header of a safetensors file whose data is the bucket's bytes."""
    codes = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in bucket.entries:
        span = [entry.offset, entry.offset + entry.nbytes]
        table[entry.name] = {"dtype": codes[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _names(file: Path) -> list[str]:
    """Return the tensor names of a safetensors file."""
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        table = json.loads(handle.read(size))
        size_now = os.fstat(handle.fileno()).st_size  # size of the open file: NFS may cache an older size for its name
    if size_now < 8 + size + max(e["data_offsets"][1] for n, e in table.items() if n != "__metadata__"):
        raise WorkerError(
            f"{file} is shorter than its header declares, so it was not written completely; check that its disk is not "
            "full and that all machines see the same folder, or choose another sync.transport"
        )
    return [name for name in table if name != "__metadata__"]
