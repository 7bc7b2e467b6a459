"""Demonstrations in LeRobot's format (versions 2.0, 2.1 and 3.0): parquet files, with pictures inside or in videos.

    meta/info.json            features (actions, states, cameras), pictures per second, patterns of file paths
    meta/tasks.*              instruction of each task, by the task's number
    meta/episodes.*           number and length of each episode; in version 3 also its files and its place in them
    data/..., videos/...      version 2: one file per episode; version 3: many episodes per file
States and actions are read when a demonstration is opened, pictures on demand. Source of the layout: lerobot's
`datasets/dataset_metadata.py` and `utils.py` (0.4).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.data.images import readable
from megarl.robots.data.demonstrations import OpenDemonstration
from megarl.system.errors import DataError, UnavailableError, choose

if TYPE_CHECKING:
    import pyarrow as pa

INFO = "meta/info.json"
ACTION, STATE, PICTURES = "action", "observation.state", "observation.images."
VERSIONS = ("v2.0", "v2.1", "v3.0")
_AGAIN = "download the data set again, or write it again with LeRobot's own tools"
#: A step's picture is the one nearest in time. If it is further away than this fraction of the time between two
#: pictures, the video has no picture for the step.
_NEAR = 0.5


def is_lerobot(folder: Path) -> bool:
    """Return whether a folder is a data set in LeRobot's format."""
    return (folder / INFO).is_file()


@dataclass(frozen=True)
class _Episode:
    """An episode's number and its row in meta/episodes."""

    number: int
    row: Mapping[str, Any]


@dataclass(frozen=True)
class LeRobotFolder:
    """A data set in LeRobot's format."""

    folder: Path

    @cached_property
    def info(self) -> dict[str, Any]:
        """The contents of meta/info.json."""
        path = self.folder / INFO
        try:
            info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version, features = info["codebase_version"], info["features"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the description of the LeRobot data set cannot be read: {error!r}",
                where=str(path),
                fix=_AGAIN,
            ) from None
        if version not in VERSIONS:
            raise DataError(
                "this version of LeRobot's format is not supported", where=str(path), found=version, allowed=VERSIONS
            )
        missing = [name for name in (ACTION, "episode_index", "task_index") if name not in features]
        if missing:
            raise DataError(
                f"the data set has no feature {missing[0]!r}",
                where=str(path),
                found=sorted(features),
                fix="record the data set with LeRobot's own tools",
            )
        return info

    @property
    def _many(self) -> bool:
        """Whether a file contains many episodes (version 3)."""
        return bool(self.info["codebase_version"].startswith("v3"))

    @property
    def cameras(self) -> list[str]:
        """The names of the features that are pictures."""
        return [name for name, feature in self.info["features"].items() if feature.get("dtype") in ("image", "video")]

    @cached_property
    def instructions(self) -> dict[int, str]:
        """The instruction of each task, by the task's number."""
        if self._many:
            table = _table(self.folder / "meta/tasks.parquet").to_pandas()
            return {int(number): str(text) for text, number in table["task_index"].items()}
        rows = _lines(self.folder / "meta/tasks.jsonl")
        return {int(row["task_index"]): str(row["task"]) for row in rows}

    def instruction(self, task: int) -> str:
        """Return the instruction of a task by its number."""
        if task not in self.instructions:
            problem = "an episode's task is not in meta/tasks"
            known = sorted(self.instructions)
            raise DataError(problem, where=str(self.folder / "meta"), found=task, allowed=known, fix=_AGAIN)
        return self.instructions[task]

    def episodes(self) -> list[_Episode]:
        """Return the episodes in the order of their numbers."""
        if self._many:
            files = sorted((self.folder / "meta/episodes").glob("chunk-*/file-*.parquet"))
            rows = [row for file in files for row in _table(file).to_pylist()]
        else:
            rows = _lines(self.folder / "meta/episodes.jsonl")
        if not rows:
            raise DataError("the data set has no episodes", where=str(self.folder / "meta"), fix=_AGAIN)
        episodes = [_Episode(int(row["episode_index"]), row) for row in rows]
        return sorted(episodes, key=lambda episode: episode.number)

    def data_file(self, episode: _Episode) -> Path:
        """Return the parquet file of an episode."""
        return self.folder / self._place("data_path", episode, "data")

    def video_file(self, episode: _Episode, camera: str) -> Path:
        """Return the video file of an episode's pictures from a camera."""
        return self.folder / self._place("video_path", episode, f"videos/{camera}", video_key=camera)

    def _place(self, key: str, episode: _Episode, column: str, **names: Any) -> str:
        if self._many:
            names |= {name: self._of(episode, f"{column}/{name}") for name in ("chunk_index", "file_index")}
        else:
            chunk = episode.number // int(self._info("chunks_size"))
            names |= {"episode_chunk": chunk, "episode_index": episode.number}
        form = self._info(key)
        try:
            place = PurePosixPath(str(form).format(**names))
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(
                f"the placeholders in the pattern of file paths cannot be filled: {error!r}",
                where=f"{self.folder / INFO}: {key}",
                found=form,
                allowed="a pattern as in LeRobot's own data sets",
                fix=_AGAIN,
            ) from None
        # symbolic links are allowed: the hub's cache consists of them
        if place.is_absolute() or ".." in place.parts:
            raise DataError(
                "the pattern of file paths leads outside of the data set",
                where=f"{self.folder / INFO}: {key}",
                found=str(place),
                allowed="a relative path without ..",
                fix=_AGAIN,
            )
        return str(place)

    def _info(self, key: str) -> Any:
        """Return the value of a key in meta/info.json."""
        if key not in self.info:
            raise DataError(
                f"the file lacks the key {key!r}", where=str(self.folder / INFO), found=sorted(self.info), fix=_AGAIN
            )
        return self.info[key]

    def _of(self, episode: _Episode, key: str) -> Any:
        """Return the value of column `key` of meta/episodes for an episode. Raise DataError if it is missing."""
        if key not in episode.row:
            where = f"{self.folder / 'meta/episodes'}: episode {episode.number}"
            raise DataError(f"the episode lacks the column {key!r}", where=where, found=sorted(episode.row), fix=_AGAIN)
        return episode.row[key]

    def numbers(self, episode: _Episode) -> tuple[pa.Table, list[int]]:
        """Return the episode's states and actions, one row per step, and the numbers of their parquet row groups."""
        import pyarrow as pa

        path = self.data_file(episode)
        columns = [name for name in (STATE, ACTION) if name in self.info["features"]]
        groups = _groups(path).get(episode.number)
        if groups is None:
            raise DataError(f"episode {episode.number} is not in its file", where=str(path), fix=_AGAIN)
        table = _groups_read(path, groups, [*columns, "episode_index", "task_index"])
        return table.filter(pa.array(np.asarray(table["episode_index"]) == episode.number)), groups

    def pictures(self, episode: _Episode, camera: str, groups: Sequence[int]) -> Callable[[int], NDArray[np.uint8]]:
        """Return a function that reads the camera's picture, uint8 [H, W, 3], at an environment step.

        Args:
            groups: the parquet row groups of the episode.
        """
        if self.info["features"][camera]["dtype"] == "video":
            path = self.video_file(episode, camera)
            if not path.is_file():
                raise DataError(
                    "the video file does not exist", where=str(path), fix="download the data set with its videos"
                )
            first = float(self._of(episode, f"videos/{camera}/from_timestamp")) if self._many else 0.0
            fps = float(self._info("fps"))
            return lambda step: _picture_at(path, first + step / fps, _NEAR / fps)
        path, chosen = self.data_file(episode), tuple(groups)
        return lambda step: _decoded(_encoded(path, chosen, camera, episode.number)[step]["bytes"], path)


def open_lerobot(
    folder: str | Path, tasks: Mapping[str, str], cameras: Mapping[str, str], task: str | None = None
) -> Iterator[OpenDemonstration]:
    """Yield the demonstrations of the wanted tasks in a data set, in order.

    Args:
        folder: the data set's folder, which contains meta/info.json.
        tasks: instruction of each wanted task, by the task's name. An episode belongs to the task whose name or
            instruction its own instruction equals, ignoring case.
        cameras: name of the data set's feature for each camera of the simulator; `observation.images.` may be left out.
        task: task of all episodes, whatever their instructions; None: the instructions decide.
    """
    data = LeRobotFolder(Path(folder))
    named = {camera: _feature(data, name, camera) for camera, name in cameras.items()}
    known = {_key(text): name for name, instruction in tasks.items() for text in (name, instruction)}
    for episode in data.episodes():
        if task is None and "tasks" in episode.row and not any(_key(text) in known for text in episode.row["tasks"]):
            continue  # skip reading an episode of another task
        table, groups = data.numbers(episode)
        instruction = data.instruction(table["task_index"][0].as_py())
        name = task if task is not None else known.get(_key(instruction))
        if name is None:
            continue
        frames = {camera: data.pictures(episode, feature, groups) for camera, feature in named.items()}
        where, states, actions = f"{folder}: episode {episode.number}", _matrix(table, STATE), _matrix(table, ACTION)
        yield OpenDemonstration(name, where, tuple(named), states, actions, partial(_frame, frames))


def _key(text: str) -> str:
    return text.casefold().strip()


def _frame(frames: Mapping[str, Callable[[int], NDArray[np.uint8]]], camera: str, step: int) -> NDArray[np.uint8]:
    return frames[camera](step)


def _feature(data: LeRobotFolder, name: str, camera: str) -> str:
    if PICTURES + name in data.cameras:
        return PICTURES + name
    problem = f"the data set {data.folder} has no such camera"
    choose(dict.fromkeys(data.cameras), name, problem, where=f"robot.recorded_cameras.{camera}")
    return name


def _matrix(table: pa.Table, name: str) -> NDArray[np.float32]:
    """Return a column of numbers or lists as float32 [T, D]; [T, 0] if the table lacks it."""
    if name not in table.column_names:
        return np.zeros((len(table), 0), np.float32)
    return np.asarray(table[name].to_pylist(), np.float32).reshape(len(table), -1)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"this file cannot be read: {error}", where=str(path), fix=_AGAIN) from None


@contextmanager
def _file(path: Path) -> Iterator[Any]:
    """Open a parquet file; raise errors of reading it as DataError with its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"this parquet file cannot be read: {error}", where=str(path), fix=_AGAIN) from None


def _table(path: Path) -> pa.Table:
    with _file(path) as file:
        return file.read()


def _groups_read(path: Path, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
    with _file(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise DataError(
                f"the parquet file lacks the column {missing[0]!r}",
                where=str(path),
                found=file.schema_arrow.names,
                fix=_AGAIN,
            )
        return file.read_row_groups(list(groups), columns=list(columns))


@lru_cache(maxsize=64)
def _groups(path: Path) -> dict[int, list[int]]:
    """Return the numbers of the row groups that contain each episode of a parquet file."""
    with _file(path) as file:
        number = file.num_row_groups
    groups: dict[int, list[int]] = {}
    for group in range(number):
        for episode in np.unique(np.asarray(_groups_read(path, [group], ["episode_index"])["episode_index"])):
            groups.setdefault(int(episode), []).append(group)
    return groups


@lru_cache(maxsize=8)
def _encoded(path: Path, groups: tuple[int, ...], camera: str, episode: int) -> list[dict[str, Any]]:
    """Return an episode's pictures from a camera, each as {"bytes": encoded picture}."""
    import pyarrow as pa

    table = _groups_read(path, groups, [camera, "episode_index"])
    of_episode = pa.array(np.asarray(table["episode_index"]) == episode)
    pictures: list[dict[str, Any]] = table.filter(of_episode)[camera].to_pylist()
    return pictures


def _decoded(data: bytes | None, path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    if data is None:
        raise DataError("the parquet file lacks the bytes of a picture", where=str(path), fix=_AGAIN)
    with readable(str(path)):
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.uint8)


def _picture_at(path: Path, second: float, near: float) -> NDArray[np.uint8]:
    """Return the picture whose time in the video is nearest to `second`, within `near` seconds."""
    try:
        import av
    except ImportError:
        raise UnavailableError(
            "videos of demonstrations need PyAV", fix="pip install av, or megarl[embodied]"
        ) from None
    try:
        with av.open(str(path)) as video:
            if not video.streams.video:
                raise DataError("the file contains no video", where=str(path), fix=_AGAIN)
            stream = video.streams.video[0]
            assert stream.time_base is not None, "every video stream has a time base"
            # seeks to the last key frame that is not after this time
            video.seek(max(0, round((second - near) / stream.time_base)), stream=stream)
            best, apart = None, float("inf")
            for frame in video.decode(stream):
                if frame.time is None:
                    continue
                if abs(frame.time - second) < apart:
                    best, apart = frame, abs(frame.time - second)
                if frame.time >= second:
                    break
            if best is None or apart > near:
                raise DataError(f"the video has no picture at {second:.3f} s", where=str(path), fix=_AGAIN)
            return np.asarray(best.to_ndarray(format="rgb24"), np.uint8)
    except av.FFmpegError as error:
        raise DataError(f"this video cannot be read: {error}", where=str(path), fix=_AGAIN) from None


def cameras_of(spec_cameras: Sequence[str], recorded: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the data set's name for each camera of a task: the one in `recorded`, else the camera's own name."""
    for camera in recorded:
        choose(dict.fromkeys(spec_cameras), camera, "the task has no such camera", where=where)
    return {camera: recorded.get(camera, camera) for camera in spec_cameras}
