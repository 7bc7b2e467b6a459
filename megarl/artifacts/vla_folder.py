"""The folder of a VLA policy: its files other than config.json and the safetensors files.

OpenVLA-OFT's training writes fully trained parts as separate torch files (`PART--STEP_checkpoint.pt`). SimpleVLA-RL
reads the state's projector from there; its own checkpoints hold it among their tensors. torch is imported only for such
a file.
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
#: Parts of OpenVLA-OFT in separate files with which the rest is another policy.
_OTHER_PARTS = {
    "action_head": "its actions are numbers of a head of its own, not tokens",
    "noisy_action_projector": "its actions come of a diffusion process, not of tokens",
    "vision_backbone": "its pictures are seen by way of the instruction (FiLM)",
}
_PROJECTOR_TENSORS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def complete_config(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json of a policy, `raw`, completed from the files beside it: the size of the state.

    Raises:
        ConfigError: a part is not supported, or a projector cannot be read, exists twice, or contradicts config.json.
    """
    _refuse_other_parts(folder)
    file, where = projector_file(folder), str(folder / "config.json")
    if file is None:
        return dict(raw)
    size = read_projector(file)[f"{STATE_PROJECTOR}fc1.weight"].shape[1]
    declared = {key: raw[key] for key in ("use_proprio", "proprio_dim", "state_dim") if raw.get(key) is not None}
    # `proprio_dim` proves nothing: SimpleVLA-RL writes it for policies without a state, too.
    if declared.keys() - {"proprio_dim"} and declared != {"use_proprio": True} and state_size(raw, where) != size:
        raise ConfigError(
            "config.json contradicts the projector of the policy's state in a file of its own",
            where=where,
            found=declared,
            allowed=f"a state of {size} numbers, as {file.name} has it",
            fix=f"set use_proprio to true and proprio_dim to {size}, or take {file.name} away if the policy has no "
            "state",
        )
    if "state_dim" in declared:
        return dict(raw)
    return {**raw, "use_proprio": True, "proprio_dim": size}


def projector_file(folder: Path) -> Path | None:
    """Return the separate file of the state's projector, if there is one.

    Raises:
        ConfigError: there are several.
    """
    found = sorted(file for file in folder.glob("*proprio_projector*") if file.is_file())
    if len(found) > 1:
        raise ConfigError(
            "several projectors of the policy's state",
            where=str(folder),
            found=[file.name for file in found],
            allowed="one file",
            fix="keep the one that belongs to the weights, as a rule that of the latest step",
        )
    return found[0] if found else None


def read_projector(file: Path) -> dict[str, Tensor]:
    """Return the projector's tensors by their names in a policy. No code of the file is run.

    Raises:
        ConfigError: it cannot be read, or holds other tensors.
    """
    import torch

    allowed = f"a torch file of {', '.join(_PROJECTOR_TENSORS)}"
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive, or a pickle of more than tensors
        raise ConfigError(
            f"the projector of the policy's state cannot be read ({type(error).__name__})",
            where=str(file),
            found=str(error).split("\n", 1)[0][:200],
            allowed=allowed,
            fix="copy or download it again",
        ) from error
    # torch's DistributedDataParallel puts a prefix before each name.
    named = {str(name).removeprefix("module."): one for name, one in held.items()} if isinstance(held, Mapping) else {}
    tensors = {name: one for name, one in named.items() if isinstance(one, torch.Tensor)}
    shapes = {name: list(one.shape) for name, one in tensors.items()}
    if sorted(named) != sorted(_PROJECTOR_TENSORS) or len(tensors) != len(named) or len(shapes["fc1.weight"]) != 2:
        raise ConfigError(
            "not the projector of a policy's state",
            where=str(file),
            found=shapes or type(held).__name__,
            allowed=allowed,
        )
    return {STATE_PROJECTOR + name: one for name, one in tensors.items()}


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """Return preprocessor_config.json of a policy; None: it has none.

    Raises:
        ConfigError: it cannot be read.
    """
    return read_mapping(folder / PREPROCESSOR)


def read_mapping(file: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if there is none."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"this file cannot be read: {error}", where=str(file), allowed="JSON", fix="copy or download it again"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError("not a mapping", where=str(file), found=found, allowed="JSON: a mapping")
    return found


def _refuse_other_parts(folder: Path) -> None:
    for part, why in _OTHER_PARTS.items():
        found = sorted(file.name for file in folder.glob(f"*{part}*checkpoint*") if file.is_file())
        if found:
            raise ConfigError(
                f"this part of the policy is not supported: {why}",
                where=str(folder),
                found=found,
                allowed="a policy of discrete actions without FiLM, as SimpleVLA-RL's",
                fix="take another checkpoint; removing the file leaves a policy that was not trained to act without it",
            )
