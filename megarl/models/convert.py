"""Convert a Hugging Face folder to another dtype or file size, one tensor at a time."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from megarl.architectures.decoders import DECODERS
from megarl.architectures.tensors import is_of_value_head
from megarl.artifacts.action_statistics import FILE as STATISTICS
from megarl.artifacts.adapter_settings import CONFIG as ADAPTER_CONFIG
from megarl.artifacts.conversion import check_target
from megarl.artifacts.vla_folder import read_mapping
from megarl.config.model import ModelConfig
from megarl.models.hf import checkpoint_names, encoder_of, load_hf_config, stacks_experts, vision_of
from megarl.models.weight_table import WeightTable
from megarl.models.weights.draft import KeptDraft
from megarl.models.weights.files import CheckpointReader, FolderWriter, resolve_folder
from megarl.models.weights.metadata import copy_tokenizer, write_draft_layers, write_metadata
from megarl.models.weights.peft import AdapterReader
from megarl.system.device import DTYPES
from megarl.system.errors import ConfigError


def convert(source: Path | str, target: Path | str, *, dtype: str | None = None, max_shard_gb: float = 4.0) -> None:
    """Write the model in `source` to `target`, tensor by tensor.

    Args:
        source: folder or hub name of a Hugging Face model of a supported architecture, or the folder of a PEFT adapter,
            which is merged into its base model.
        target: new folder, which appears when it is complete.
        dtype: `fp32` or `bf16`; tensors that this architecture always stores as float32 remain float32. None keeps the
            dtype of each tensor; quantised tensors get the most frequent dtype of the others. Tensors of a draft head
            keep theirs in any case.
        max_shard_gb: largest size of a file (10**9 bytes).
    """
    target = Path(target)
    check_target(target)
    folder, adapter = resolve_folder(source), None
    if (folder / ADAPTER_CONFIG).is_file():
        adapter = AdapterReader(folder, str(folder))
        folder = _base_folder(adapter)
    # None: the base's config decides, because the adapter's tensor names do not show whether the base has a vision
    # encoder.
    vision = True if adapter is None or adapter.of_images else None
    hf = load_hf_config(ModelConfig(path=str(folder), vision=vision), str(folder / "config.json"))
    reader = CheckpointReader(folder, vision=encoder_of(hf) is not None)
    if adapter is not None:
        if encoder_of(hf) is None and (read_mapping(folder / "config.json") or {}).get("model_type") in DECODERS:
            print(f"vision encoder of {folder}: left out, as this adapter is one of the language model", flush=True)
        adapter.name_as(checkpoint_names(hf))
        adapter.check_base(WeightTable.of(hf).shapes())
    value_head = any(map(is_of_value_head, reader.names()))
    table = WeightTable.of(hf, value_head=value_head)
    shapes = table.shapes()
    reader.check(shapes, vision_of(hf))
    draft = None if value_head else KeptDraft.of(reader)
    if dtype is not None:
        dtypes = dict.fromkeys(shapes, DTYPES[dtype]) | dict.fromkeys(table.float32(), torch.float32)
    else:
        stored = {name: kind for name in shapes if (kind := reader.float_dtype(name)) is not None}
        dtypes = dict.fromkeys(shapes, _most_frequent(stored, shapes)) | stored
    most, every = _most_frequent(dtypes, shapes), dict(shapes)
    if draft is not None:
        every, dtypes = every | draft.shapes(), dtypes | draft.dtypes(most)
    with FolderWriter(target, every, dtypes, int(max_shard_gb * 1e9), stacked=stacks_experts(hf)) as writer:
        print(f"weights: {reader.describe()}", flush=True)
        for name in shapes:
            weight = reader.read(name)
            writer.add(name, weight if adapter is None else adapter.merged(name, weight))
        for name, tensor in () if draft is None else draft.tensors():
            writer.add(name, tensor)
        classifies = value_head and any("SequenceClassification" in name for name in hf.architectures or ())
        write_metadata(writer.temporary, hf, None, most, value_head=value_head, classifies=classifies, source=folder)
        write_draft_layers(writer.temporary, hf, 0 if draft is None else draft.layers)
        copy_tokenizer(folder, writer.temporary)
        if (folder / STATISTICS).is_file():
            shutil.copyfile(folder / STATISTICS, writer.temporary / STATISTICS)


def _most_frequent(dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]) -> torch.dtype:
    """Return the dtype of most parameters, for config.json, which has one dtype for the whole model."""
    counts = Counter[torch.dtype]()
    for name, dtype in dtypes.items():
        counts[dtype] += math.prod(shapes[name])
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _base_folder(adapter: AdapterReader) -> Path:
    """Return the folder of the adapter's base model."""
    base, file = adapter.base(), adapter.folder / ADAPTER_CONFIG
    correction = f"write the absolute path of its folder as base_model_name_or_path in {file}"
    try:
        return resolve_folder(base, revision=adapter.settings.get("revision"))
    except ConfigError as error:
        raise ConfigError(
            f"cannot find this adapter's base model: {error.what}",
            where=f"{file}: base_model_name_or_path",
            found=base,
            allowed=error.allowed,
            fix=f"{correction}; for a hub name: {error.fix}",
        ) from error
