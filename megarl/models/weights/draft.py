"""A draft head that is not trained: exports have its tensors as the checkpoint has them from which training began."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.architectures import ARCHITECTURES
from megarl.architectures.tensors import EMBEDDINGS, HEAD
from megarl.artifacts.checkpoint_files import REPEATED_EMBEDDINGS, REPEATED_HEAD
from megarl.artifacts.facts import local_folder
from megarl.models.hf import encoder_of
from megarl.models.weights.files import CheckpointReader
from megarl.system.errors import ConfigError, count

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SCALES = "_scale_inv"


@dataclass(frozen=True)
class KeptDraft:
    """The draft head in a checkpoint's files; its tensors are read one at a time."""

    reader: CheckpointReader
    names: tuple[str, ...]  # names of the head's tensors, without scales: quantised tensors are dequantised

    @classmethod
    def of(cls, reader: CheckpointReader | None) -> KeptDraft | None:
        """Return the draft head of a checkpoint; None if it has none."""
        if reader is None or not reader.draft:
            return None
        names = [name for name in reader.draft if not name.endswith(_SCALES)]
        # Numbers are compared as numbers: expert 2 precedes expert 10.
        names.sort(key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)])
        return cls(reader, tuple(names))

    @property
    def layers(self) -> int:
        """Number of layers of the draft head."""
        return 1 + max(self.reader.draft.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor."""
        return {name: self.reader.shape(name) for name in self.names}

    def dtypes(self, of_quantised: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype in which every tensor is read: the stored one; `of_quantised` for quantised tensors."""
        return {name: self.reader.float_dtype(name) or of_quantised for name in self.names}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name."""
        for name in self.names:
            yield name, self.reader.read(name)

    def describe(self) -> str:
        """Describe for the user which draft head is kept, and how training affects its use."""
        return (
            f"draft head: {count(len(self.names), 'tensor')} as in {self.reader.folder}; the head was not trained, so "
            "engines may accept fewer of its tokens"
        )


def find_draft(hf: PretrainedConfig, source: str | Path | None) -> KeptDraft | None:
    """Return the draft head of the model `hf` in its files at `source`, a folder or hub name; None if it has none.

    A model whose files are no longer on this machine has none, with a warning: its export is complete otherwise.
    """
    known = ARCHITECTURES.get(hf.model_type)
    if known is None or known.draft is None:
        return None
    return KeptDraft.of(_open(hf, source, "the export has no draft head"))


def repeated_tensors(hf: PretrainedConfig, source: str | Path | None) -> dict[str, list[str]]:
    """Return the tensors with which the draft head in the files at `source` repeats the embedding and the vocabulary
    head, by the name of what they repeat: some engines read them. The lists are empty, with a warning, if the files are
    no longer on this machine."""
    reader = _open(hf, source, "the export's draft head may lack its copies of the embedding and the vocabulary head")
    head = EMBEDDINGS if hf.tie_word_embeddings else HEAD
    repeats: dict[str, list[str]] = {}
    for end, of in ((REPEATED_EMBEDDINGS, EMBEDDINGS), (REPEATED_HEAD, head)):
        names = () if reader is None else sorted(reader.draft)
        repeats.setdefault(of, []).extend(name for name in names if name.endswith(end))
    return repeats


def _open(hf: PretrainedConfig, source: str | Path | None, loss: str) -> CheckpointReader | None:
    """Return a reader of the model's files at `source`, or None; a warning says what is missing then (`loss`)."""
    if source is None:
        return None
    folder = local_folder(str(source))
    if folder is None or not CheckpointReader.has_weights(folder):
        _warn_lost(loss, str(source), "its weights are not on this machine")
        return None
    try:
        return CheckpointReader(folder, vision=encoder_of(hf) is not None)
    except (ConfigError, OSError, ValueError) as error:  # ValueError: a config.json that is not JSON
        _warn_lost(loss, str(source), str(error))
        return None


def _warn_lost(loss: str, source: str, why: str) -> None:
    warnings.warn(
        f"{loss}, because model.path={source} cannot be read: {why}. Put its files back, and export a checkpoint of "
        "the run again with `megarl convert` if the model is to have a complete draft head",
        stacklevel=4,
    )
