"""Checks of a robot policy's folder: action statistics, image normalisation, and the length of a policy call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.architectures.vision import VisionShape
from megarl.artifacts.action_statistics import DatasetStatistics
from megarl.artifacts.facts import facts_from_config, local_folder, raw_config
from megarl.artifacts.vla_folder import PREPROCESSOR, read_preprocessor
from megarl.config.run import RunConfig
from megarl.robots.config import RobotConfig, robot_of
from megarl.robots.data.demonstration_sources import EXPERTS
from megarl.robots.models.vla.calls import FLOW
from megarl.robots.planning import action_columns
from megarl.robots.statistics import (
    chosen_statistics,
    refuse_other_dim,
    refuse_other_family,
    refuse_other_state,
    state_numbers,
)
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.checks.checklist import Checklist

_LEAST_PROMPT = 2  # BOS and one more token, such as the one that predicts the first action token


def check_policy(config: RunConfig, checks: Checklist) -> None:
    """Check a policy's folder on this machine; if its config cannot be read, another check reports that."""
    checks = checks.of("robot")
    robot, data = robot_of(config), None
    with checks.recorded():
        data = _check_statistics(config, robot)
    try:
        content = raw_config(config.model)
        facts = None if content is None else facts_from_config(*content)
    except ConfigError:
        return
    if content is None or facts is None or "text_config" not in content[0]:
        return
    with checks.recorded():
        shape = VisionShape.from_config(content[0], facts.hidden, content[1])
        refuse_other_family(robot, shape)
        _check_columns(robot, shape, facts.max_positions)
        _check_pictures(config, shape)
        if data is not None:
            refuse_other_state(data, state_numbers(shape))


def _check_pictures(config: RunConfig, shape: VisionShape) -> None:
    """Check that the image normalisation of a checkpoint on this machine fits its vision towers."""
    folder = None if config.model.path is None else local_folder(config.model.path)
    preprocessor = None if folder is None else read_preprocessor(folder)
    if folder is None or preprocessor is None:
        return
    from megarl.robots.data.pictures import policy_normalisation  # imports torch

    policy_normalisation(preprocessor, len(shape.towers), shape.towers[0].image, str(folder / PREPROCESSOR))


def _check_statistics(config: RunConfig, robot: RobotConfig) -> DatasetStatistics | None:
    """Check that the model's folder has action statistics for `robot.unnorm_key` and `robot.dim`, and return them.

    None: they are not known yet, because they come from demonstrations or the folder is not on this machine.
    """
    path = config.model.path
    if robot.statistics == "demonstrations":
        _check_shown(config.sft.train_files or [], robot)
        return None
    if path is None or (folder := local_folder(path)) is None:
        return None
    _, data = chosen_statistics(folder, robot, path)
    refuse_other_dim(data, robot.dim)
    return data


def _check_shown(files: list[str], robot: RobotConfig) -> None:
    """Check that `files` are only demonstrations, from which `robot.statistics=demonstrations` computes statistics."""
    if not files or EXPERTS in files:
        raise ConfigError(
            "robot.statistics=demonstrations needs files of demonstrations, and no experts",
            where="sft.train_files",
            found=files,
            allowed=f"folders and files of demonstrations, without {EXPERTS!r}",
            fix="list the files, also in a run that resumes, or set robot.statistics=model",
        )
    if robot.unnorm_key is not None:
        raise ConfigError(
            "robot.unnorm_key chooses among the model's statistics, but robot.statistics is demonstrations",
            where="robot.unnorm_key",
            found=robot.unnorm_key,
            allowed="null with robot.statistics=demonstrations",
            fix="remove it",
        )


def _check_columns(robot: RobotConfig, shape: VisionShape, limit: int) -> None:
    """Check that a policy call with the shortest prompt fits `limit` positions; instructions are not known yet."""
    pictures = shape.patches * len(robot.cameras)
    # An action expert reads the state and `chunk` actions. They count once, because every denoising step has them at
    # the same positions.
    actions = 1 + robot.chunk if robot.family == FLOW else action_columns(robot)
    columns = _LEAST_PROMPT + pictures + bool(shape.state) + actions
    if columns > limit:
        raise ConfigError(
            f"a policy call is longer than the model's max_position_embeddings = {limit}: {pictures} columns of "
            f"pictures, {actions} of actions, and the prompt",
            where="robot.chunk",
            found=f"at least {columns} columns",
            allowed=f"at most {limit}",
            fix="lower robot.chunk, use fewer robot.cameras, or a model with more positions",
        )
