"""Demonstrations in LeRobot's format, of files that are written here as its versions lay them out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megarl.robots.data.demonstration_sources import find_demonstrations
from megarl.robots.simulators.protocol import TaskSpec
from megarl.system.errors import ConfigError, DataError

LENGTHS, TEXTS, FPS = (5, 3, 4), ("Push the disc", "open the door", "Push the disc"), 10
SIZE = 32
CAMERA = "observation.images.front"


def frames(episode: int) -> np.ndarray:
    """Plain pictures, one brightness a step, so that what a lossy video makes of one is not another's."""
    steps = np.arange(LENGTHS[episode]) * 30 + episode * 7 + 20
    return np.broadcast_to(steps[:, None, None, None], (len(steps), SIZE, SIZE, 3)).astype(np.uint8)


def numbers(episode: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(episode)
    return tuple(random.normal(size=(LENGTHS[episode], width)).astype(np.float32) for width in (4, 3))


def table(episode: int, *, images: bool) -> pa.Table:
    states, actions = numbers(episode)
    steps = LENGTHS[episode]
    columns = {
        "observation.state": states.tolist(),
        "action": actions.tolist(),
        "episode_index": [episode] * steps,
        "task_index": [TEXTS.index(TEXTS[episode])] * steps,
    }
    if images:
        encoded = []
        for frame in frames(episode):
            file = io.BytesIO()
            Image.fromarray(frame).save(file, "png")
            encoded.append({"bytes": file.getvalue(), "path": None})
        columns[CAMERA] = encoded
    return pa.table(columns)


def write_video(path: Path, shown: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=FPS, options={"g": "2"})
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        for frame in shown:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        video.mux(stream.encode())


def write_info(folder: Path, version: str, kind: str, data: str, video: str) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": [4]},
        "action": {"dtype": "float32", "shape": [3]},
        CAMERA: {"dtype": kind, "shape": [SIZE, SIZE, 3]},
        **{name: {"dtype": "int64", "shape": [1]} for name in ("episode_index", "task_index")},
    }
    info = {"codebase_version": version, "fps": FPS, "chunks_size": 2, "features": features}
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info | {"data_path": data, "video_path": video}))


def version_2(folder: Path, kind: str) -> Path:
    """A file for each episode."""
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    write_info(folder, "v2.1", kind, data, video)
    tasks = [{"task_index": TEXTS.index(text), "task": text} for text in dict.fromkeys(TEXTS)]
    rows = [{"episode_index": n, "tasks": [TEXTS[n]], "length": LENGTHS[n]} for n in range(3)]
    for name, lines in (("tasks", tasks), ("episodes", rows)):
        (folder / f"meta/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for n in range(3):
        path = folder / data.format(episode_chunk=n // 2, episode_index=n)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(n, images=kind == "image"), path)
        if kind == "video":
            write_video(folder / video.format(episode_chunk=n // 2, video_key=CAMERA, episode_index=n), frames(n))
    return folder


def version_3(folder: Path, kind: str) -> Path:
    """All episodes in one file, a row group each, and in one video."""
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    write_info(folder, "v3.0", kind, data, video)
    import pandas as pd

    names = list(dict.fromkeys(TEXTS))
    pd.DataFrame({"task_index": [TEXTS.index(text) for text in names]}, index=names).to_parquet(
        folder / "meta/tasks.parquet"
    )
    starts = np.cumsum([0, *LENGTHS])
    place = {f"{what}/{name}": 0 for what in ("data", f"videos/{CAMERA}") for name in ("chunk_index", "file_index")}
    rows = [
        {"episode_index": n, "tasks": [TEXTS[n]], **place, f"videos/{CAMERA}/from_timestamp": float(starts[n]) / FPS}
        for n in range(3)
    ]
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    tables = [table(n, images=kind == "image") for n in range(3)]
    path = folder / data.format(chunk_index=0, file_index=0)
    path.parent.mkdir(parents=True)
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for one in tables:
            writer.write_table(one)
    if kind == "video":
        every = np.concatenate([frames(n) for n in range(3)])
        write_video(folder / video.format(video_key=CAMERA, chunk_index=0, file_index=0), every)
    return folder


def task(name: str, instruction: str, camera: str = "front") -> TaskSpec:
    return TaskSpec(name, instruction, 10, 10, 3, 4, {camera: (SIZE, SIZE)})


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("write", [version_2, version_3])
def test_episodes_are_those_of_the_task_with_their_instruction(tmp_path, write, kind):
    folder = write(tmp_path / "data", kind)
    found = find_demonstrations([str(folder)], {"push": task("push", "push the disc")})
    assert [one.where for one in found] == [f"{folder}: episode {n}" for n in (0, 2)]
    for one, n in zip(found, (0, 2), strict=True):
        states, actions = numbers(n)
        np.testing.assert_array_equal(one.states, states)
        np.testing.assert_array_equal(one.actions, actions)
        for step in (LENGTHS[n] - 1, 0, 1):  # not only one after the other
            # A video loses a little of each colour; pictures of neighbouring steps are 30 apart.
            apart = np.abs(one.frame("front", step).astype(int) - frames(n)[step])
            assert apart.max() <= (0 if kind == "image" else 6)


def test_a_named_task_takes_every_episode_and_a_camera_may_have_another_name(tmp_path):
    folder = version_2(tmp_path / "data", "image")
    spec = task("push", "another wording", camera="agentview")
    found = find_demonstrations([f"push={folder}"], {"push": spec}, {"agentview": "front"})
    assert [one.task for one in found] == ["push"] * 3
    np.testing.assert_array_equal(found[1].frame("agentview", 2), frames(1)[2])


def test_files_may_be_links_as_in_a_hubs_cache(tmp_path):
    folder = version_3(tmp_path / "data", "image")
    for number, file in enumerate([path for path in folder.rglob("*") if path.is_file()]):
        file.rename(tmp_path / f"blob-{number}")
        file.symlink_to(tmp_path / f"blob-{number}")
    (one,) = find_demonstrations([str(folder)], {"door": task("door", "open the door")})
    np.testing.assert_array_equal(one.frame("front", 1), frames(1)[1])


def test_what_does_not_fit_is_refused_with_its_place(tmp_path):
    folder = version_2(tmp_path / "data", "image")
    with pytest.raises(DataError, match="no demonstration of any of the tasks"):
        find_demonstrations([str(folder)], {"push": task("push", "another wording")})
    with pytest.raises(ConfigError, match=r"robot.recorded_cameras.wrist: .* has no such camera"):
        find_demonstrations([str(folder)], {"push": task("push", "push the disc", camera="wrist")})
    with pytest.raises(ConfigError, match=r"robot.recorded_cameras: the task has no such camera"):
        find_demonstrations([str(folder)], {"push": task("push", "push the disc")}, {"wrist": "front"})
    info = folder / "meta/info.json"
    whole = info.read_text()
    info.write_text(whole.replace("v2.1", "v1.6"))
    with pytest.raises(DataError, match=r"format is not supported(.|\n)*v1.6"):
        find_demonstrations([str(folder)], {"push": task("push", "push the disc")})
    info.write_text(whole.replace("data/chunk", "../other/chunk"))
    with pytest.raises(DataError, match="outside of the data set"):
        find_demonstrations([str(folder)], {"push": task("push", "push the disc")})
    info.write_text(whole.replace('"chunks_size": 2, ', ""))
    with pytest.raises(DataError, match=r"info.json: the file lacks the key 'chunks_size'"):
        find_demonstrations([str(folder)], {"push": task("push", "push the disc")})
    info.write_text(whole)
    file = next(folder.glob("data/chunk-000/*0.parquet"))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="parquet file cannot be read"):
        find_demonstrations([str(folder)], {"push": task("push", "push the disc")})
