"""Opens the sources of demonstrations that `sft.train_files` of a robot's recipe lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.robots.data.demonstrations import LIBERO_CAMERAS, OpenDemonstration, open_demonstrations, open_libero
from megarl.robots.data.lerobot import cameras_of, is_lerobot, open_lerobot
from megarl.robots.simulators.protocol import TaskSpec
from megarl.system.errors import ConfigError, DataError, choose, close_matches

#: The entry of `sft.train_files` for demonstrations that scripted experts play when the run starts.
EXPERTS = "experts"
HDF5 = (".hdf5", ".h5")


def find_demonstrations(
    sources: Iterable[str],
    tasks: Mapping[str, TaskSpec],
    cameras: Mapping[str, str] | None = None,
) -> list[OpenDemonstration]:
    """Return the demonstrations of `tasks` in all sources, in order.

    Args:
        sources: a folder that `write_demonstrations` made; a data set of LeRobot, by itself or as TASK=FOLDER; or
            TASK=FILE.hdf5, one of LIBERO's files.
        tasks: the tasks to learn, by name.
        cameras: the cameras' names in LeRobot's data, by their names in the tasks, where they differ.
    """
    demonstrations: list[OpenDemonstration] = []
    for place, source in enumerate(sources):
        key = f"sft.train_files[{place}]"
        fitting = [_fitting(shown, tasks[shown.task]) for shown in _opened(source, tasks, cameras or {}, key)]
        if not fitting:
            raise DataError(
                "the source has no demonstration of any of the tasks",
                where=key,
                found=source,
                allowed=tasks,
                fix="name a source with demonstrations of these tasks, or remove this one",
            )
        demonstrations += fitting
    return demonstrations


def _opened(
    source: str, tasks: Mapping[str, TaskSpec], cameras: Mapping[str, str], key: str
) -> Iterable[OpenDemonstration]:
    folder = Path(source).expanduser().is_dir()  # the name of a folder may contain `=`
    named, equals, file = (source, "", "") if folder else source.partition("=")
    task = named if equals else None
    path = Path(file if equals else source).expanduser()
    if equals and path.suffix in HDF5:
        spec = choose(tasks, named, "unknown task", where=key)
        for camera in spec.cameras:
            choose(LIBERO_CAMERAS, camera, f"LIBERO's files have no pictures of this camera of {spec.name}", where=key)
        return open_libero(path, named, cameras=list(spec.cameras))
    if path.is_dir() and is_lerobot(path):
        chosen = tasks if task is None else {task: choose(tasks, task, "unknown task", where=key)}
        spec = next(iter(chosen.values()))
        seen = cameras_of(list(spec.cameras), cameras, "robot.recorded_cameras")
        return open_lerobot(path, {name: spec.instruction for name, spec in chosen.items()}, seen, task)
    if path.is_dir() and not equals:
        return open_demonstrations(path, tasks)
    raise _no_source(source, key)


def _no_source(source: str, where: str) -> ConfigError:
    path = Path(source.rpartition("=")[2]).expanduser()
    fix = f"write TASK={source}: the file has no task name" if path.suffix in HDF5 and "=" not in source else None
    problem = "demonstrations cannot be named in this form" if path.exists() else "demonstrations not found"
    near = close_matches(source, [EXPERTS])
    if near:
        fix = f"did you mean {near[0]!r}?"
    allowed = (
        f"{EXPERTS}, a folder of demonstrations (also LeRobot's), TASK=FOLDER (LeRobot), or TASK=FILE{HDF5[0]} (LIBERO)"
    )
    return ConfigError(problem, where=where, found=source, allowed=allowed, fix=fix)


def _fitting(shown: OpenDemonstration, spec: TaskSpec) -> OpenDemonstration:
    """Return the demonstration unchanged; raise DataError if its shapes or cameras do not fit its task."""
    sizes = {"numbers of an action": shown.actions.shape[1], "numbers of a state": shown.states.shape[1]}
    expected = {"numbers of an action": spec.action_dim, "numbers of a state": spec.state_dim}
    if sizes != expected:
        raise DataError(
            f"this demonstration does not fit {spec.name}",
            where=shown.where,
            found=sizes,
            allowed=str(expected),
            fix="use demonstrations of the same robot",
        )
    missing = [camera for camera in spec.cameras if camera not in shown.cameras]
    if missing:
        raise DataError(
            f"this demonstration has no pictures of the camera {missing[0]!r} of {spec.name}",
            where=shown.where,
            found=list(shown.cameras),
            allowed=spec.cameras,
        )
    return shown
