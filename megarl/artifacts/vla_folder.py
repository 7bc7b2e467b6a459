"""The folder of a VLA policy: its files other than config.json and the safetensors files.

OpenVLA-OFT's training writes fully trained parts as separate torch files (`PART--STEP_checkpoint.pt`), from which
SimpleVLA-RL reads the state's projector; its own checkpoints have it among their tensors. torch is imported only for
such a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.architectures.vision import STATE_PROJECTOR, state_size
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: `model_type` of OpenVLA's and OpenVLA-OFT's policies, whose language model is described by `text_config`.
VLA_TYPE = "openvla"
#: The file that describes how pictures become pixels.
PREPROCESSOR = "preprocessor_config.json"
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"
#: The file in which a processor of transformers 5 saves the settings of its parts, by the part's name.
_PROCESSOR = "processor_config.json"
#: Separate files of OpenVLA-OFT; a policy that has one computes something that is not supported.
_OTHER_PARTS = {
    "action_head": "its actions come from a separate head, not from tokens",
    "noisy_action_projector": "its actions come from a diffusion process, not from tokens",
    "vision_backbone": "its images are conditioned on the instruction (FiLM)",
}
_PROJECTOR_TENSORS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def complete_config(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a policy's config.json `raw`, completed by the size of the state from the files next to it."""
    _refuse_other_parts(folder)
    file, where = projector_file(folder), str(folder / "config.json")
    if file is None:
        return dict(raw)
    size = read_projector(file)[f"{STATE_PROJECTOR}fc1.weight"].shape[1]
    declared = {key: raw[key] for key in ("use_proprio", "proprio_dim", "state_dim") if raw.get(key) is not None}
    # `proprio_dim` proves nothing: SimpleVLA-RL also writes it for policies without a state.
    if declared.keys() - {"proprio_dim"} and declared != {"use_proprio": True} and state_size(raw, where) != size:
        raise ConfigError(
            f"config.json contradicts {file.name}, which holds the projector of the proprioceptive state",
            where=where,
            found=declared,
            allowed=f"a state of {size} numbers, as in {file.name}",
            fix=f"set use_proprio to true and proprio_dim to {size}, without state_dim, or remove {file.name} if the "
            "policy has no state",
        )
    if "state_dim" in declared:
        return dict(raw)
    return {**raw, "use_proprio": True, "proprio_dim": size}


def projector_file(folder: Path) -> Path | None:
    """Return the file with the projector of the robot's proprioceptive state, if the folder has it apart."""
    files = sorted(file for file in folder.glob("*proprio_projector*") if file.is_file())
    if len(files) > 1:
        raise ConfigError(
            "the folder has several projectors of the proprioceptive state",
            where=str(folder),
            found=[file.name for file in files],
            allowed="one file",
            fix="keep the file that belongs to the weights, usually that of the latest step",
        )
    return files[0] if files else None


def read_projector(file: Path) -> dict[str, Tensor]:
    """Return the projector's tensors by their names in a policy, without running code from the file."""
    import torch

    allowed = f"a torch file of {', '.join(_PROJECTOR_TENSORS)}"
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive, or a pickle that holds more than tensors
        raise ConfigError(
            f"the file with the projector of the proprioceptive state cannot be read ({type(error).__name__})",
            where=str(file),
            found=str(error).split("\n", 1)[0][:200],
            allowed=allowed,
            fix="copy or download it again",
        ) from error
    # torch's DistributedDataParallel puts a prefix before each name.
    named = (
        {str(name).removeprefix("module."): tensor for name, tensor in content.items()}
        if isinstance(content, Mapping)
        else {}
    )
    tensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if sorted(named) != sorted(_PROJECTOR_TENSORS) or len(tensors) != len(named) or len(shapes["fc1.weight"]) != 2:
        raise ConfigError(
            "this file is not a projector of the proprioceptive state",
            where=str(file),
            found=shapes or type(content).__name__,
            allowed=allowed,
        )
    return {STATE_PROJECTOR + name: tensor for name, tensor in tensors.items()}


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """Return a policy's preprocessor_config.json; None if it has none."""
    return read_mapping(folder / PREPROCESSOR)


def read_video_preprocessor(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a model's video processor; None if the model has none.

    As in transformers, they are `video_processor` in processor_config.json, else the content of
    video_preprocessor_config.json, else of preprocessor_config.json.
    """
    nested = (read_mapping(folder / _PROCESSOR) or {}).get("video_processor")
    if nested is not None:
        if not isinstance(nested, dict):
            where = f"{folder / _PROCESSOR}: video_processor"
            raise ConfigError(
                "the settings of the video processor must be a mapping", where=where, found=nested, allowed="a mapping"
            )
        return nested
    videos = read_mapping(folder / VIDEO_PREPROCESSOR)
    return read_preprocessor(folder) if videos is None else videos


def read_mapping(file: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if the file does not exist."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read this file: {error}", where=str(file), allowed="JSON", fix="copy or download it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError("this file must hold a mapping", where=str(file), found=content, allowed="JSON: a mapping")
    return content


def _refuse_other_parts(folder: Path) -> None:
    for part, why in _OTHER_PARTS.items():
        files = sorted(file.name for file in folder.glob(f"*{part}*checkpoint*") if file.is_file())
        if files:
            raise ConfigError(
                f"this part of the policy is not supported: {why}",
                where=str(folder),
                found=files,
                allowed="a policy of discrete actions without FiLM, such as SimpleVLA-RL's",
                fix="use another checkpoint; the policy was not trained to act without this file",
            )
