"""Reads the statistics of actions and states in a policy's folder, and checks that policy and recipe fit them."""

from __future__ import annotations

from pathlib import Path

from megarl.architectures.action_expert import SECTION
from megarl.architectures.vision import VisionShape
from megarl.artifacts.action_statistics import (
    FILE,
    Bounds,
    DatasetStatistics,
    choose_statistics,
    parse_statistics,
    read_statistics,
)
from megarl.artifacts.vla_folder import read_mapping
from megarl.robots.config import RobotConfig
from megarl.robots.models.vla.calls import FLOW
from megarl.system.errors import ConfigError

#: Key of config.json with the same content as dataset_statistics.json; if both exist, the file is used.
NORM_STATS = "norm_stats"


def policy_statistics(folder: Path, bounds: Bounds = "q99") -> tuple[dict[str, DatasetStatistics], str] | None:
    """Return the statistics of a policy's training data sets by name, and where they are; None if there are none.

    They come from dataset_statistics.json, else from `norm_stats` of config.json, as in OpenVLA-OFT and SimpleVLA-RL.
    """
    file, config = folder / FILE, folder / "config.json"
    if file.is_file():
        return read_statistics(file, bounds), str(file)
    raw = read_mapping(config)
    if raw is None or not raw.get(NORM_STATS):
        return None
    where = f"{config}: {NORM_STATS}"
    return parse_statistics(raw[NORM_STATS], where, bounds), where


def chosen_statistics(folder: Path, robot: RobotConfig, path: str) -> tuple[str, DatasetStatistics]:
    """Return the name and the statistics of the data set that `robot.unnorm_key` names, or of the only one.

    Args:
        folder: the policy's folder on this machine.
        path: `model.path`, for errors.

    Raises:
        ConfigError: the folder has no statistics, or none of this name.
    """
    stored = policy_statistics(folder, robot.bounds)
    if stored is None:
        raise no_statistics(path)
    data = choose_statistics(stored[0], robot.unnorm_key, "robot.unnorm_key")
    return next(name for name, entry in stored[0].items() if entry is data), data


def refuse_other_dim(data: DatasetStatistics, dim: int) -> None:
    """Raise ConfigError if actions in the statistics do not have `dim` numbers, the recipe's `robot.dim`."""
    if data.action.dim != dim:
        raise ConfigError(
            "the action statistics have a different number of action values",
            where="robot.dim",
            found=dim,
            allowed=str(data.action.dim),
            fix=f"set robot.dim={data.action.dim}, or choose other statistics (robot.unnorm_key)",
        )


def refuse_other_state(data: DatasetStatistics, state: int) -> None:
    """Check that the statistics fit a policy whose input has `state` numbers of the robot's state (0: no state).

    Statistics of a new policy scale neither actions nor states.
    """
    if not state:
        return
    if data.state is None and data.action.mask.any():
        raise ConfigError(
            "the model needs the robot's state, but the statistics cover only actions",
            where="robot.unnorm_key",
            found="no 'proprio'",
            allowed=f"a data set with 'proprio' of {state} numbers",
            fix="choose another data set, or set robot.statistics=demonstrations",
        )
    if data.state is not None and data.state.dim != state:
        raise ConfigError(
            "the model needs a robot state of a different size than the statistics have",
            where="model: proprio_dim or state_dim",
            found=state,
            allowed=str(data.state.dim),
            fix="name statistics of the policy's own robot in robot.unnorm_key, or set state_dim of a new policy",
        )


def refuse_other_family(robot: RobotConfig, shape: VisionShape) -> None:
    """Raise ConfigError if `robot.family` does not fit the model: the family pi0 needs an action expert, and the other
    families a model without one.

    The expert's sizes must match the recipe's actions, and the robot's state if the language model reads it, too.
    """
    expert = shape.expert
    if (expert is None) == (robot.family == FLOW):
        raise ConfigError(
            "the model has no action expert"
            if expert is None
            else "the model's actions come from an action expert, not from tokens",
            where="robot.family",
            found=robot.family,
            allowed=f"a family that predicts action tokens, or a model whose config.json has the section {SECTION}"
            if expert is None
            else FLOW,
            fix=f"set robot.family to the model's (openvla-oft, openvla or small), or add {SECTION} to a new model"
            if expert is None
            else f"set robot.family={FLOW}",
        )
    if expert is None:
        return
    if expert.action != robot.dim:
        raise ConfigError(
            "the model's action expert predicts actions with another number of values",
            where="robot.dim",
            found=robot.dim,
            allowed=str(expert.action),
            fix=f"set robot.dim={expert.action}, or {SECTION}.action_dim of a new policy",
        )
    if shape.state not in (0, expert.state):
        raise ConfigError(
            "the language model and the action expert read robot states of different sizes",
            where="model: state_dim",
            found=shape.state,
            allowed=f"0, or {expert.state} as {SECTION}.state_dim",
        )


def state_numbers(shape: VisionShape) -> int:
    """Return the length of the robot's state vector that the policy reads; 0: it reads none."""
    return shape.state if shape.expert is None else shape.expert.state


def no_statistics(path: object) -> ConfigError:
    """Return the error for a policy at `path` without action statistics."""
    return ConfigError(
        "the model's folder has no action statistics",
        where="model.path",
        found=path,
        allowed=f"a folder with {FILE}, or with {NORM_STATS} in config.json",
        fix=f"download {FILE} from the model's source, or set robot.statistics=demonstrations",
    )
