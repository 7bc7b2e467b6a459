"""Checks of a local model's weight files by their headers: files are complete, and have the tensors that config.json
implies.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header: JSON with dtype, shape
and place of every tensor. Reading the headers of a model of 100 files takes a fraction of a second and no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.architectures.decoders import canonical_name, is_left_out
from megarl.architectures.tensors import HEAD, VALUE_BIAS, VALUE_HEAD, WeightRule
from megarl.architectures.vision import LANGUAGE_MODEL, VisionShape
from megarl.artifacts.checkpoint_files import (
    file_names,
    quantized_block,
    read_config,
    refuse_unread,
    split_draft,
    weight_files,
)
from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.mxfp4 import BLOCKS, SCALES, has_stacks, packed_tensors
from megarl.artifacts.stacked_experts import cuts_of
from megarl.artifacts.vla_folder import VLA_TYPE, complete_config, projector_file, read_projector
from megarl.system.errors import ConfigError, count

_LONGEST_HEADER = 100_000_000  # bytes; safetensors itself refuses longer headers
_AGAIN = "copy or download it again"
_DTYPES, _CODES = ("F32", "BF16", "F16", "F64"), "F8_E4M3"
Shapes = dict[str, tuple[int, ...]]
Stored = tuple[Path, str, tuple[int, ...]]  # file, dtype, shape


def check_weights(folder: Path, facts: ModelFacts, *, value_head: bool = False) -> str:
    """Check the files of `folder` against the sizes in its config.json.

    Args:
        value_head: whether the model is a critic, which needs no vocabulary head, and whose value head starts at zero
            if it is missing.

    Returns:
        A short description of the checked files.

    Raises:
        ConfigError: no weights; a missing or truncated file; a tensor that is missing, unused, of another shape or
            quantised without scales.
    """
    raw, where = read_config(folder), str(folder / "config.json")
    files, block = weight_files(folder, raw), quantized_block(raw, where)
    place: dict[str, Stored] = {}
    for file in files:
        place |= {name: (file, dtype, shape) for name, (dtype, shape) in read_header(file).items()}
    kind, sees = raw.get("model_type"), {"vision": facts.encoder is not None}
    place = {
        canonical_name(kind, name, **sees): stored
        for name, stored in place.items()
        if not is_left_out(kind, name, **sees)
    }
    _replace_stacks(place, facts, folder)
    policy = kind == VLA_TYPE
    prefix = LANGUAGE_MODEL if policy else ""
    heads = (VALUE_HEAD, VALUE_BIAS) if value_head else ()
    read = {prefix + rule.sources[0].name for rule in heads}
    _refuse_other_kind(folder, facts, place)
    for alternatives in expected_tensors(facts, value_head=value_head):
        forms = [
            {prefix + canonical_name(kind, name, **sees): shape for name, shape in form.items()}
            for form in alternatives
        ]
        _check_tensors(folder, forms, place, block)
        read |= {name for form in forms for name in form}
    sight = None
    if policy:
        projector = projector_file(folder)
        if projector is not None:  # the robot's state projector is in a torch file of its own
            projected = read_projector(projector)
            place |= {name: (projector, _DTYPES[0], tuple(tensor.shape)) for name, tensor in projected.items()}
            files = [*files, projector]
        sight = VisionShape.from_config(complete_config(raw, folder), facts.hidden, where)
    for eyes in (facts.encoder, sight):
        if eyes is not None:
            tensors = dict(eyes.tensors.values())
            _check_tensors(folder, [tensors], place, block)
            read |= tensors.keys()
    names, draft = split_draft(raw, place)
    refuse_unread(names, read, sight, str(folder))
    further = f", and {count(len(draft), 'tensor')} of its draft head" if draft else ""
    return f"{len(names)} tensors in {file_names(files)}{further}"


def _replace_stacks(place: dict[str, Stored], facts: ModelFacts, folder: Path) -> None:
    """Replace tensors of all experts of a layer by the tensors that the model's rules name."""
    if has_stacks(facts.model_type):
        shapes = {name: stored[2] for name, stored in place.items()}
        for name, unpacked in packed_tensors(shapes, str(folder)).items():
            (file, *_), _ = (place.pop(name + part) for part in (BLOCKS, SCALES))
            place[name] = (file, _DTYPES[1], unpacked)
        return
    for name, (file, dtype, shape) in list(place.items()):
        if cuts := cuts_of(name, shape, facts.hidden):
            del place[name]
            place |= {matrix: (file, dtype, cut.shape) for matrix, cut in cuts.items()}


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the dtypes (as spelled in the file, such as BF16) and shapes of the tensors of a safetensors file. Raise
    ConfigError if it is not such a file, or it is truncated.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size  # size of the open file: NFS may report an older size for its name
        length = int.from_bytes(opened.read(8), "little")
        if length > min(_LONGEST_HEADER, size - 8):
            raise ConfigError(
                "this is not a safetensors file, or it is incomplete: it has no header of the length that it gives",
                where=str(file),
                fix=_AGAIN,
            )
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            entries = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in tensors.items()}
        except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise ConfigError(
                "this is not a safetensors file: its header cannot be read", where=str(file), fix=_AGAIN
            ) from error
    if size != end:
        last = max(tensors, key=lambda name: tensors[name]["data_offsets"][1])
        cut = f"is cut inside its tensors; the last of them is {last!r}" if size < end else "goes on after its tensors"
        raise ConfigError(
            f"this safetensors file is damaged: it {cut}",
            where=str(file),
            found=f"{size} bytes",
            allowed=f"{end} bytes",
            fix=_AGAIN,
        )
    return entries


def expected_tensors(facts: ModelFacts, *, value_head: bool = False) -> Iterator[list[Shapes]]:
    """Yield groups of tensors that the weights must contain; each group lists alternative forms."""
    head: Shapes = {HEAD: (facts.vocab, facts.hidden)}
    embedding = _of_parts(facts, ("embedding",))
    yield [embedding, head] if facts.tied else [embedding]
    yield [_of_parts(facts, ("final",))]
    if not facts.tied and not value_head:
        yield [head]
    for layer in range(facts.layers):
        yield [_of_parts(facts, ("layer", facts.mixers[layer].kind), layer)]
        yield [_feed_forward(facts, layer, facts.has_experts(layer))]


def _of_parts(facts: ModelFacts, parts: tuple[str, ...], layer: int = 0) -> Shapes:
    rules = [rule for rule in facts.rules if rule.part in parts]
    sizes = facts.dimensions
    return {name: shape for rule in rules for name, shape in _shapes(rule, layer, facts.experts, sizes)}


def _feed_forward(facts: ModelFacts, layer: int, sparse: bool) -> Shapes:
    """Return the tensors of a layer's router and experts, or of its dense feed-forward part."""
    return _of_parts(facts, ("moe", "shared", "expert") if sparse else ("dense",), layer)


def _refuse_other_kind(folder: Path, facts: ModelFacts, place: Mapping[str, Stored]) -> None:
    """Refuse files that have experts in different layers from the layers with experts in config.json."""
    wrong: dict[bool, list[int]] = {True: [], False: []}
    for layer in range(facts.layers) if facts.is_moe else ():
        sparse = facts.has_experts(layer)
        expected, other = (_feed_forward(facts, layer, kind) for kind in (sparse, not sparse))
        if other and not expected.keys() & place.keys() and other.keys() & place.keys():
            wrong[sparse].append(layer)
    for sparse, layers in wrong.items():
        if layers:
            kinds = ("mixtures of experts", "dense")
            raise ConfigError(
                "layers are {} by config.json, and {} in the files".format(*(kinds if sparse else kinds[::-1])),
                where=str(folder / "config.json"),
                found=f"layers {', '.join(map(str, layers))}",
                fix="correct mlp_only_layers and decoder_sparse_step, or take the config.json of these files",
            )


def _shapes(rule: WeightRule, layer: int, experts: int, sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that `rule` describes in `layer`."""
    for source in rule.sources:
        shape = tuple(sizes[name] for name in source.shape)
        if 0 in shape:
            continue  # a tensor that this model does not have
        if rule.stacked:
            yield source.name.format(i=layer), (experts, *shape)
            continue
        for expert in range(experts if rule.part == "expert" else 1):
            yield source.name.format(i=layer, e=expert), shape


def _check_tensors(folder: Path, forms: list[Shapes], place: dict[str, Stored], block: tuple[int, int] | None) -> None:
    """Check that the weight files have every tensor of the model, with the right shape and dtype.

    Args:
        forms: the sets of tensors (shapes by name) in which models of this type are published; the one of which most
            tensors are present counts.
    """
    shapes = max(forms, key=lambda form: sum(name in place for name in form) / len(form))
    for name, shape in shapes.items():
        if name not in place:
            raise ConfigError(
                f"tensor {name!r} is missing",
                where=str(folder),
                allowed="a checkpoint whose tensors match its config.json",
                fix="check that config.json belongs to these files",
            )
        file, dtype, stored = place[name]
        if stored != shape:
            raise ConfigError(
                f"tensor {name!r} has a different shape than config.json implies",
                where=str(file),
                found=stored,
                allowed=[shape],
                fix="check that config.json belongs to these files",
            )
        if dtype not in _DTYPES:
            _check_scales(name, place, block)


def _check_scales(name: str, place: dict[str, Stored], block: tuple[int, int] | None) -> None:
    """Check that the quantised values in tensor `name` have one scale per block, as `megarl.models.weights.files` reads
    them.
    """
    file, dtype, shape = place[name]
    scales = place.get(f"{name}_scale_inv")
    if dtype != _CODES or block is None or len(shape) != 2 or scales is None or scales[1] not in _DTYPES:
        raise ConfigError(
            f"tensor {name!r} is quantised in an unknown format",
            where=str(file),
            found=f"{dtype}, {f'scales in {scales[1]}' if scales is not None else f'no {name}_scale_inv'}",
            allowed=f"{', '.join(_DTYPES)}, or {_CODES} with scales per block and a quantization_config",
            fix="name the folder of the unquantised model",
        )
    wanted = tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
    if scales[2] != wanted:
        raise ConfigError(
            f"tensor {name + '_scale_inv'!r} does not have one scale per block",
            where=str(scales[0]),
            found=scales[2],
            allowed=[wanted],
            fix="check weight_block_size in config.json",
        )
