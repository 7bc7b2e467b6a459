"""The folder of a robot policy: its files other than config.json and the safetensors files.

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
from megarl.robots.artifacts.action_statistics import FILE, Bounds, DatasetStatistics, parse_statistics, read_statistics
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: `model_type` of OpenVLA's and OpenVLA-OFT's policies, whose language model is described by `text_config`.
ROBOT_POLICY = "openvla"
#: The file that describes how pictures become pixels.
PREPROCESSOR = "preprocessor_config.json"
#: Key of config.json with the content of dataset_statistics.json, which takes precedence where both exist.
NORM_STATS = "norm_stats"
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
            "config.json contradicts the projector of the robot's state in a file of its own",
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
    """Return the separate file of the robot state's projector, if there is one.

    Raises:
        ConfigError: there are several.
    """
    found = sorted(file for file in folder.glob("*proprio_projector*") if file.is_file())
    if len(found) > 1:
        raise ConfigError(
            "several projectors of the robot's state",
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
            f"the projector of the robot's state cannot be read ({type(error).__name__})",
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
            "not the projector of a robot's state",
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
    return _read_mapping(folder / PREPROCESSOR)


def _read_mapping(file: Path) -> dict[str, Any] | None:
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


def policy_statistics(folder: Path, bounds: Bounds = "q99") -> tuple[dict[str, DatasetStatistics], str] | None:
    """Return the statistics of the data sets that a policy learned, by name, and their source; None if there are none.

    They come from dataset_statistics.json, else from `norm_stats` of config.json, as in OpenVLA-OFT and SimpleVLA-RL.

    Raises:
        DataError: they cannot be read; the message names the place.
    """
    file, config = folder / FILE, folder / "config.json"
    if file.is_file():
        return read_statistics(file, bounds), str(file)
    raw = _read_mapping(config)
    if raw is None or not raw.get(NORM_STATS):
        return None
    where = f"{config}: {NORM_STATS}"
    return parse_statistics(raw[NORM_STATS], where, bounds), where


def refuse_other_state(data: DatasetStatistics, state: int) -> None:
    """Refuse statistics `data` that do not scale the `state` numbers of the robot's state (0: no state).

    Statistics of a new policy scale neither actions nor states.

    Raises:
        ConfigError: their state has another size, or they have only actions.
    """
    if not state:
        return
    if data.state is None and data.action.mask.any():
        raise ConfigError(
            "the model takes the robot's state, and its statistics are of actions only",
            where="robot.unnorm_key",
            found="no 'proprio'",
            allowed=f"a data set with 'proprio' of {state} numbers",
            fix="choose another data set, or set robot.statistics=demonstrations",
        )
    if data.state is not None and data.state.dim != state:
        raise ConfigError(
            "the model takes another robot's state than the statistics are of",
            where="model: proprio_dim or state_dim",
            found=state,
            allowed=str(data.state.dim),
        )


def no_statistics(path: object) -> ConfigError:
    """Return the error for a policy without statistics of its actions."""
    return ConfigError(
        "the statistics of its actions are not beside the model",
        where="model.path",
        found=path,
        allowed=f"a folder with {FILE}, or with {NORM_STATS} in config.json",
        fix="take the file from where the model comes from, or set robot.statistics=demonstrations",
    )


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
