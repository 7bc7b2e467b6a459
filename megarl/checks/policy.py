"""Checks of a robot policy's own files: the statistics of its actions, and whether a policy call fits the model."""

from __future__ import annotations

from megarl.architectures.vision import VisionShape
from megarl.artifacts.action_statistics import FILE, choose_statistics, read_statistics
from megarl.artifacts.facts import facts_from_config, local_folder, raw_config
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.data.demonstration_sources import EXPERTS
from megarl.errors import ConfigError, UserError

_LEAST_PROMPT = 2  # BOS, and the token that predicts the first action token


def check_policy(config: RunConfig, checks: Checklist) -> None:
    """What the folder of a policy that is on this machine says; a model that cannot be read is another check's."""
    try:
        _check_statistics(config)
    except UserError as error:
        checks.from_error("robot", error)
    try:
        found = raw_config(config.model)
        facts = None if found is None else facts_from_config(*found)
    except ConfigError:
        return
    if found is None or facts is None or "text_config" not in found[0]:
        return
    try:
        shape = VisionShape.from_config(found[0], facts.hidden, found[1])
        _check_columns(config, shape, facts.max_positions)
    except ConfigError as error:
        checks.from_error("robot", error)


def _check_statistics(config: RunConfig) -> None:
    """The file beside the model: there, readable, of `robot.unnorm_key`, and of actions of `robot.dim` numbers."""
    robot, path = config.robot, config.model.path
    assert robot is not None, "a recipe with the section `robot`"
    if robot.statistics == "demonstrations":
        _check_shown(config)
        return
    folder = None if path is None else local_folder(path)
    if folder is None:
        return
    file = folder / FILE
    if not file.is_file():
        raise ConfigError(
            "the statistics of its actions are not beside the model",
            where="model.path",
            found=path,
            allowed=f"a folder with {FILE}",
            fix="take the file from where the model comes from, or set robot.statistics=demonstrations",
        )
    dim = choose_statistics(read_statistics(file, robot.bounds), robot.unnorm_key, "robot.unnorm_key").action.dim
    if dim != robot.dim:
        raise ConfigError(
            "the statistics are of actions of another size",
            where="robot.dim",
            found=robot.dim,
            allowed=str(dim),
            fix=f"set robot.dim={dim}, or choose other statistics (robot.unnorm_key)",
        )


def _check_shown(config: RunConfig) -> None:
    """Statistics of demonstrations need files of them; what experts show is in the simulator's own numbers."""
    robot, files = config.robot, config.sft.train_files or []
    assert robot is not None, "a recipe with the section `robot`"
    if not files or EXPERTS in files:
        raise ConfigError(
            "statistics of demonstrations, and not only files of them",
            where="sft.train_files",
            found=files,
            allowed=f"folders and files of demonstrations, without {EXPERTS!r}",
            fix="name them, also for a run that goes on, or set robot.statistics=model",
        )
    if robot.unnorm_key is not None:
        raise ConfigError(
            "statistics of demonstrations have no such key",
            where="robot.unnorm_key",
            found=robot.unnorm_key,
            allowed="null with robot.statistics=demonstrations",
            fix="remove it",
        )


def _check_columns(config: RunConfig, shape: VisionShape, limit: int) -> None:
    """A call with the shortest prompt; how long the instructions are is known when the simulator has started."""
    robot = config.robot
    assert robot is not None, "a recipe with the section `robot`"
    pictures, actions = shape.patches * len(robot.cameras), robot.chunk * robot.dim
    columns = _LEAST_PROMPT + pictures + bool(shape.state) + actions + (robot.family != "openvla")
    if columns > limit:
        raise ConfigError(
            f"a policy call is longer than the model's max_position_embeddings = {limit}: {pictures} columns of "
            f"pictures, {actions} of actions, and the prompt",
            where="robot.chunk",
            found=f"at least {columns} columns",
            allowed=f"at most {limit}",
            fix="lower robot.chunk, name fewer robot.cameras, or take a model of more positions",
        )
