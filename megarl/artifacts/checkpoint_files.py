"""The weight files of a Hugging Face folder and their storage format, chosen as by transformers, from plain JSON.

Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.architectures import ARCHITECTURES, standard_config
from megarl.architectures.decoders import DECODERS, decoder_config
from megarl.architectures.tensors import HEAD
from megarl.architectures.vision import STATE_PROJECTOR, VisionShape
from megarl.artifacts.mxfp4 import has_stacks
from megarl.system.errors import ConfigError, count

_SHOWN = ("quant_method", "fmt", "weight_block_size", "scale_fmt", "activation_scheme")
_NAMED = 5  # maximum number of tensors that a message lists
#: RoPE's frequencies, which older versions of transformers saved; they follow from config.json.
_COMPUTED = ".rotary_emb.inv_freq"
_SCALES = "_scale_inv"
_OWN_EMBEDDINGS = "mtp_use_dedicated_embeddings"
#: Ends of the names of tensors with which a draft head repeats the model's embedding and vocabulary head.
REPEATED_EMBEDDINGS, REPEATED_HEAD = ".embed_tokens.weight", ".shared_head.head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder as a dict; empty if there is none (a folder of tensors only)."""
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def file_names(files: Sequence[Path]) -> str:
    """Return the names of up to two files, or their number with the first and last name."""
    if len(files) <= 2:
        return " and ".join(file.name for file in files)
    return f"{len(files)} files, {files[0].name} to {files[-1].name}"


def weight_files(folder: Path, raw: Mapping[str, Any]) -> list[Path]:
    """Return the safetensors files that transformers reads in `folder`, in its order; other files are ignored.

    The files are `transformers_weights` of the folder's config.json `raw`, else model.safetensors, else the files in
    the index (`_get_resolved_checkpoint_files` in transformers 5.23). If two files of an index have a tensor of the
    same name, the later file counts.
    """
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            "this folder has an adapter_config.json, so it counts as an adapter, not a whole model",
            where=str(folder / "adapter_config.json"),
            allowed="a folder with a whole model",
            fix="merge the adapter into its model (peft: merge_and_unload), and use the merged model; if the folder "
            "has a whole model, remove this file",
        )
    named = raw.get("transformers_weights")
    first = (
        folder / str(named) if named else next((folder / n for n in (SINGLE, INDEX) if (folder / n).is_file()), None)
    )
    if first is None:
        others = sorted(
            file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".gguf")
        )
        raise ConfigError(
            f"this folder has neither {SINGLE} nor {INDEX}",
            where=str(folder),
            found=others[:5] or None,
            allowed=f"{SINGLE}, or {INDEX} and the files that it names",
            fix="save the model with save_pretrained (safetensors is its default format)",
        )
    files = _named_by_index(first) if first.name.endswith(".json") else [first]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                "this file of the model's weights is missing",
                where=str(file),
                found=f"listed in {first.name if file != first else 'config.json'}",
                fix="copy or download it again",
            )
    return files


def _named_by_index(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [index.parent / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read the index of the model's weights: {type(error).__name__}: {error}",
            where=str(index),
            allowed='JSON with a "weight_map" from tensor to file',
            fix="copy or download it again",
        ) from error


def quantized_block(raw: Mapping[str, Any], source: str) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale in block-wise fp8 (DeepSeek-V3, Qwen3-FP8); None: not quantised,
    or with experts in mxfp4. Such weights are dequantised when they are read.
    """
    section = raw.get("quantization_config") or raw.get("compression_config")
    if not section:
        return None
    settings = section if isinstance(section, Mapping) else {}
    method = settings.get("quant_method")
    if method == "mxfp4" and has_stacks(raw.get("model_type")):
        return None
    block: Any = settings.get("weight_block_size")
    exact = (
        method == "fp8"
        and isinstance(block, (list, tuple))
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
        and settings.get("fmt") in (None, "e4m3")
        and settings.get("scale_fmt") in (None, "float")
        and settings.get("activation_scheme", "dynamic") == "dynamic"
    )
    if not exact:
        raise ConfigError(
            "the model is quantised in a way that is not supported",
            where=f"{source}: {'quantization_config' if raw.get('quantization_config') else 'compression_config'}",
            found={key: settings[key] for key in _SHOWN if key in settings} or section,
            allowed="none; fp8 (e4m3) with weight_block_size [rows, columns], scale_fmt float or none, and "
            "dynamic activations; mxfp4 of gpt_oss",
            fix="use the unquantised model",
        )
    return int(block[0]), int(block[1])


def split_draft(raw: Mapping[str, Any], names: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Return the names of the model's tensors, and the names of its draft head's with the number of their layer.

    Args:
        raw: the checkpoint's config.json.
        names: names of all tensors in the checkpoint.
    """
    names, kind = list(names), raw.get("model_type")
    text = decoder_config(raw) if kind in DECODERS else standard_config(raw)
    known = ARCHITECTURES.get(text.get("model_type", ""))
    if known is None or known.draft is None:
        return names, {}
    layers = text.get("num_hidden_layers", known.keys["num_hidden_layers"])
    places = {name: known.draft.layer_of(name, layers) for name in names}
    return (
        [name for name, layer in places.items() if layer is None],
        {name: layer for name, layer in places.items() if layer is not None},
    )


def refuse_own_embeddings(raw: Mapping[str, Any], where: str) -> None:
    """Raise an error if a draft head that is to be trained has an embedding of its own.

    Args:
        raw: the model's config.json, which `where` names.
    """
    settings = raw.get("text_config") or raw
    if settings.get(_OWN_EMBEDDINGS):
        raise ConfigError(
            "a draft head with its own embedding cannot be trained: megarl computes it with the policy's embedding",
            where=f"{where}: {_OWN_EMBEDDINGS}",
            found=True,
            allowed="false with actor.mtp",
            fix="remove actor.mtp, which keeps the draft head as it is",
        )


def refuse_unread_draft(names: Iterable[str], read: Collection[str], where: str) -> None:
    """Raise an error if a draft head to be trained has tensors that training would drop.

    Args:
        names: names of the head's tensors in the checkpoint.
        read: names of the tensors that the model with its head uses.
        where: the checkpoint's folder.
    """
    repeats = (REPEATED_EMBEDDINGS, REPEATED_HEAD, _COMPUTED)
    unread = [
        name
        for name in sorted(set(names) - set(read))
        if not name.removesuffix(_SCALES).endswith(repeats) and name.removesuffix(_SCALES) not in read
    ]
    if unread:
        raise ConfigError(
            f"the checkpoint's draft head has {count(len(unread), 'tensor')} that its training would drop",
            where=where,
            found=", ".join(unread[:_NAMED]) + (", ..." if len(unread) > _NAMED else ""),
            allowed="with actor.mtp, the tensors of a draft head with one layer of the model's kind",
            fix="remove actor.mtp, which keeps the draft head as it is",
        )


def refuse_unread(names: Iterable[str], read: Collection[str], sight: VisionShape | None, where: str) -> None:
    """Raise an error if a checkpoint has tensors that the model does not use.

    A vocabulary head may exist twice (tied), and a critic built on a policy may omit it: other checks cover it.

    Args:
        names: names of all tensors in the checkpoint but those of its draft head.
        read: names of the tensors that the model uses.
        sight: vision part of a VLA policy, whose towers have unused parts.
        where: the checkpoint's folder.
    """
    unread = [
        name
        for name in sorted(set(names) - set(read))
        if not name.endswith((_COMPUTED, HEAD))
        and name.removesuffix(_SCALES) not in read
        and not (sight is not None and sight.is_unused_in_tower(name))
    ]
    if not unread:
        return
    fix = "check that config.json belongs to these files, and that the model is of a supported kind"
    if any(name.startswith(STATE_PROJECTOR) for name in unread):
        fix = "set use_proprio to true in config.json, and proprio_dim to the size of the proprioceptive state"
    raise ConfigError(
        f"the checkpoint has {count(len(unread), 'tensor')} that the model in config.json does not use",
        where=where,
        found=", ".join(unread[:_NAMED]) + (", ..." if len(unread) > _NAMED else ""),
        allowed="tensors of the model that config.json describes",
        fix=fix,
    )
