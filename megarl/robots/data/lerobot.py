"""Demonstrations in LeRobot's format (versions 2.0, 2.1 and 3.0): parquet, and pictures there or in videos.

    meta/info.json            features (actions, states, cameras), pictures per second, where files are
    meta/tasks.*              number of a task to its instruction
    meta/episodes.*           2: number and length; 3: also the files that an episode is in, and where
    data/..., videos/...      2: a file for each episode; 3: files of many episodes

Numbers are read when a demonstration is opened, a picture when it is asked for. Source of the layout: lerobot's
`datasets/dataset_metadata.py` and `utils.py` (0.4).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.data.images import readable
from megarl.robots.data.demonstrations import OpenDemonstration
from megarl.system.errors import ConfigError, DataError, UnavailableError, choose

if TYPE_CHECKING:
    import pyarrow as pa

INFO = "meta/info.json"
ACTION, STATE, PICTURES = "action", "observation.state", "observation.images."
VERSIONS = ("v2.0", "v2.1", "v3.0")
#: A picture of a video is the one whose time is nearest; farther away than this part of the time between two pictures,
#: it is another one.
_NEAR = 0.5


def is_lerobot(folder: Path) -> bool:
    """Tell whether a folder is a data set of this format."""
    return (folder / INFO).is_file()


@dataclass(frozen=True)
class _Episode:
    """The place of an episode in the files."""

    number: int
    row: Mapping[str, Any]


@dataclass(frozen=True)
class LeRobotFolder:
    """One data set.

    Raises:
        DataError: a file is missing or not of this format; it is named.
    """

    folder: Path

    @cached_property
    def info(self) -> dict[str, Any]:
        """meta/info.json."""
        path = self.folder / INFO
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version, features = found["codebase_version"], found["features"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"this is no data set of LeRobot: {error!r}", where=str(path)) from None
        if version not in VERSIONS:
            raise DataError("LeRobot's format of another version", where=str(path), found=version, allowed=VERSIONS)
        missing = [name for name in (ACTION, "episode_index", "task_index") if name not in features]
        if missing:
            raise DataError(f"there is no {missing[0]!r}", where=str(path), found=sorted(features))
        return found

    @property
    def _many(self) -> bool:
        """True when a file holds many episodes."""
        return bool(self.info["codebase_version"].startswith("v3"))

    @property
    def cameras(self) -> list[str]:
        """Features that are pictures."""
        return [name for name, one in self.info["features"].items() if one.get("dtype") in ("image", "video")]

    @cached_property
    def instructions(self) -> dict[int, str]:
        """Instruction of each task, by its number."""
        if self._many:
            table = _table(self.folder / "meta/tasks.parquet").to_pandas()
            return {int(number): str(text) for text, number in table["task_index"].items()}
        rows = _lines(self.folder / "meta/tasks.jsonl")
        return {int(row["task_index"]): str(row["task"]) for row in rows}

    def instruction(self, task: int) -> str:
        """Return the instruction of the task of this number."""
        if task not in self.instructions:
            what = "episodes are of a task that meta/tasks does not have"
            raise DataError(what, where=str(self.folder / "meta"), found=task, allowed=sorted(self.instructions))
        return self.instructions[task]

    def episodes(self) -> list[_Episode]:
        """Return the episodes in the order of their numbers."""
        if self._many:
            files = sorted((self.folder / "meta/episodes").glob("chunk-*/file-*.parquet"))
            rows = [row for file in files for row in _table(file).to_pylist()]
        else:
            rows = _lines(self.folder / "meta/episodes.jsonl")
        if not rows:
            raise DataError("there are no episodes", where=str(self.folder / "meta"))
        found = [_Episode(int(row["episode_index"]), row) for row in rows]
        return sorted(found, key=lambda one: one.number)

    def data_file(self, episode: _Episode) -> Path:
        """Return the file with the numbers of an episode."""
        return self.folder / self._place("data_path", episode, "data")

    def video_file(self, episode: _Episode, camera: str) -> Path:
        """Return the file with its pictures of a camera."""
        return self.folder / self._place("video_path", episode, f"videos/{camera}", video_key=camera)

    def _place(self, key: str, episode: _Episode, column: str, **names: Any) -> str:
        if self._many:
            names |= {name: self._of(episode, f"{column}/{name}") for name in ("chunk_index", "file_index")}
        else:
            chunk = episode.number // int(self._said("chunks_size"))
            names |= {"episode_chunk": chunk, "episode_index": episode.number}
        form = self._said(key)
        try:
            place = PurePosixPath(str(form).format(**names))
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(f"no place of files: {error!r}", where=f"{self.folder / INFO}: {key}", found=form) from None
        if place.is_absolute() or ".." in place.parts:  # links to elsewhere are fine: a hub's cache consists of them
            raise DataError("a file outside of the data set", where=f"{self.folder / INFO}: {key}", found=str(place))
        return str(place)

    def _said(self, key: str) -> Any:
        """Return a key of meta/info.json."""
        if key not in self.info:
            raise DataError(f"there is no {key!r}", where=str(self.folder / INFO), found=sorted(self.info))
        return self.info[key]

    def _of(self, episode: _Episode, key: str) -> Any:
        """Return the entry of the table of episodes for one."""
        if key not in episode.row:
            where = f"{self.folder / 'meta/episodes'}: episode {episode.number}"
            raise DataError(f"there is no {key!r}", where=where, found=sorted(episode.row))
        return episode.row[key]

    def numbers(self, episode: _Episode) -> tuple[pa.Table, list[int]]:
        """Return (columns that are no pictures, the row groups of its file that have it), in the order of time."""
        import pyarrow as pa

        path = self.data_file(episode)
        columns = [name for name in (STATE, ACTION) if name in self.info["features"]]
        groups = _groups(path).get(episode.number)
        if groups is None:
            raise DataError(f"episode {episode.number} is not in its file", where=str(path))
        table = _groups_read(path, groups, [*columns, "episode_index", "task_index"])
        return table.filter(pa.array(np.asarray(table["episode_index"]) == episode.number)), groups

    def pictures(self, episode: _Episode, camera: str, groups: Sequence[int]) -> Callable[[int], NDArray[np.uint8]]:
        """Return a function that gives the picture uint8 [H, W, 3] of an environment step."""
        if self.info["features"][camera]["dtype"] == "video":
            path = self.video_file(episode, camera)
            if not path.is_file():
                raise DataError("this video is missing", where=str(path))
            first = float(self._of(episode, f"videos/{camera}/from_timestamp")) if self._many else 0.0
            fps = float(self._said("fps"))
            return lambda step: _picture_at(path, first + step / fps, _NEAR / fps)
        path, chosen = self.data_file(episode), tuple(groups)
        return lambda step: _decoded(_encoded(path, chosen, camera, episode.number)[step]["bytes"], path)


def open_lerobot(
    folder: str | Path, tasks: Mapping[str, str], cameras: Mapping[str, str], task: str | None = None
) -> Iterator[OpenDemonstration]:
    """Yield the demonstrations of a data set, in order, those of other tasks left out.

    Args:
        folder: with meta/info.json.
        tasks: instruction of each task that is wanted, by its name. An episode is of the task whose instruction or
            name is its own, whatever the case.
        cameras: name of a feature by the simulator's name of the camera, `observation.images.` may be left out.
        task: all episodes are of this one, whatever they say.

    Raises:
        ConfigError: the data set has no such camera.
        DataError: a file is missing or damaged; it is named.
    """
    data = LeRobotFolder(Path(folder))
    named = {camera: _feature(data, name, camera) for camera, name in cameras.items()}
    known = {text.casefold().strip(): name for name, one in tasks.items() for text in (name, one)}
    for episode in data.episodes():
        if task is None and "tasks" in episode.row and not any(_key(one) in known for one in episode.row["tasks"]):
            continue  # its numbers need not be read
        table, groups = data.numbers(episode)
        instruction = data.instruction(table["task_index"][0].as_py())
        name = task if task is not None else known.get(_key(instruction))
        if name is None:
            continue
        yield OpenDemonstration(
            name,
            f"{folder}: episode {episode.number}",
            tuple(named),
            _matrix(table, STATE),
            _matrix(table, ACTION),
            _by_camera({camera: data.pictures(episode, feature, groups) for camera, feature in named.items()}),
        )


def _key(text: str) -> str:
    return text.casefold().strip()


def _by_camera(
    found: Mapping[str, Callable[[int], NDArray[np.uint8]]],
) -> Callable[[str, int], NDArray[np.uint8]]:
    return lambda camera, step: found[camera](step)


def _feature(data: LeRobotFolder, name: str, camera: str) -> str:
    there = data.cameras
    if PICTURES + name in there:
        return PICTURES + name
    choose(
        dict.fromkeys(there),
        name,
        f"the data set {data.folder} has no such camera",
        where=f"robot.recorded_cameras.{camera}",
    )
    return name


def _matrix(table: pa.Table, name: str) -> NDArray[np.float32]:
    """Return float32 [T, D]; a column of lists, or of numbers. [T, 0] where there is none."""
    if name not in table.column_names:
        return np.zeros((len(table), 0), np.float32)
    return np.asarray(table[name].to_pylist(), np.float32).reshape(len(table), -1)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"this file cannot be read: {error}", where=str(path)) from None


@contextmanager
def _file(path: Path) -> Iterator[Any]:
    """Open the parquet file; errors of reading inside the block name it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"this parquet file cannot be read: {error}", where=str(path)) from None


def _table(path: Path) -> pa.Table:
    with _file(path) as file:
        return file.read()


def _groups_read(path: Path, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
    with _file(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise DataError(f"there is no column {missing[0]!r}", where=str(path), found=file.schema_arrow.names)
        return file.read_row_groups(list(groups), columns=list(columns))


@lru_cache(maxsize=64)
def _groups(path: Path) -> dict[int, list[int]]:
    """Return the row groups that each episode of a file is in."""
    with _file(path) as file:
        number = file.num_row_groups
    found: dict[int, list[int]] = {}
    for group in range(number):
        for episode in np.unique(np.asarray(_groups_read(path, [group], ["episode_index"])["episode_index"])):
            found.setdefault(int(episode), []).append(group)
    return found


@lru_cache(maxsize=8)
def _encoded(path: Path, groups: tuple[int, ...], camera: str, episode: int) -> list[dict[str, Any]]:
    """Return the encoded pictures of an episode, {"bytes": ...} each."""
    import pyarrow as pa

    table = _groups_read(path, groups, [camera, "episode_index"])
    mine = pa.array(np.asarray(table["episode_index"]) == episode)
    found: list[dict[str, Any]] = table.filter(mine)[camera].to_pylist()
    return found


def _decoded(data: bytes | None, path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    if data is None:
        raise DataError("a picture that is not in its parquet file", where=str(path))
    with readable(str(path)):
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.uint8)


def _picture_at(path: Path, second: float, near: float) -> NDArray[np.uint8]:
    """Return the picture of a video whose time is nearest to `second`."""
    try:
        import av
    except ImportError:
        raise UnavailableError(
            "videos of demonstrations need PyAV", fix="pip install av, or megarl[embodied]"
        ) from None
    try:
        with av.open(str(path)) as video:
            if not video.streams.video:
                raise DataError("there is no video in this file", where=str(path))
            stream = video.streams.video[0]
            assert stream.time_base is not None, "videos have a unit of time"
            video.seek(max(0, round((second - near) / stream.time_base)), stream=stream)  # the key frame before it
            best, apart = None, float("inf")
            for frame in video.decode(stream):
                if frame.time is None:
                    continue
                if abs(frame.time - second) < apart:
                    best, apart = frame, abs(frame.time - second)
                if frame.time >= second:
                    break
            if best is None or apart > near:
                raise DataError(f"no picture at {second:.3f} s", where=str(path))
            return np.asarray(best.to_ndarray(format="rgb24"), np.uint8)
    except av.FFmpegError as error:
        raise DataError(f"this video cannot be read: {error}", where=str(path)) from None


def cameras_of(spec_cameras: Sequence[str], recorded: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the names in a data set, by those of a task's cameras; the same ones where a recipe says nothing.

    Raises:
        ConfigError: the recipe names a camera that the task does not have.
    """
    for camera in recorded:
        if camera not in spec_cameras:
            raise ConfigError("the task has no such camera", where=where, found=camera, allowed=list(spec_cameras))
    return {camera: recorded.get(camera, camera) for camera in spec_cameras}
