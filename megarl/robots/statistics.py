"""The statistics of actions and states in a policy's folder, and the policies that they do not suit."""

from __future__ import annotations

from pathlib import Path

from megarl.artifacts.action_statistics import FILE, Bounds, DatasetStatistics, parse_statistics, read_statistics
from megarl.artifacts.vla_folder import read_mapping
from megarl.system.errors import ConfigError

#: Key of config.json with the content of dataset_statistics.json, which takes precedence where both exist.
NORM_STATS = "norm_stats"


def policy_statistics(folder: Path, bounds: Bounds = "q99") -> tuple[dict[str, DatasetStatistics], str] | None:
    """Return the statistics of a policy's training data sets by name, and their source; None if there are none.

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


def refuse_other_state(data: DatasetStatistics, state: int) -> None:
    """Check that statistics scale a robot's state of `state` numbers (0: no state).

    Statistics of a new policy scale neither actions nor states.
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
