"""Demonstrations for the cold start of a robot's policy, from LIBERO's HDF5 files or files in megarl's own format.

`open_...` functions read states and actions at once, and a frame when it is used. megarl's own format is a folder of
safetensors files, one per demonstration; the demonstrations of scripted experts are written in it. Frames are uint8 as
the simulator renders them, states and actions are not normalised.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megarl.system.errors import DataError, UnavailableError

FORM = "megarl.demonstration/1"
#: Camera of the LIBERO simulator -> its name in LIBERO's files.
LIBERO_CAMERAS = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
LIBERO_STATE = ("ee_pos", "ee_ori", "gripper_states")
#: The arm stands still if the norm of an action, without the gripper's value, is below this.
STILL = 1e-4
_FRAMES = "frames."
_AGAIN = "check the path, or download the file again"
_ONE_EACH = "one entry per environment step in every part"


@dataclass(frozen=True)
class Demonstration:
    """One successful episode."""

    task: str
    frames: Mapping[str, NDArray[np.uint8]]  # uint8 [T, H, W, 3] by camera: the observation before each action
    states: NDArray[np.float32]  # float32 [T, S]: the robot's own state before each action; S may be 0
    actions: NDArray[np.float32]  # float32 [T, D]

    def __post_init__(self) -> None:
        steps = {name: len(value) for name, value in self._arrays().items()}
        if len(set(steps.values())) != 1:
            raise DataError(
                "the parts of a demonstration differ in length", where=self.task, found=steps, allowed=_ONE_EACH
            )
        wrong = {name: (v.dtype.name, v.shape) for name, v in self.frames.items() if v.dtype != np.uint8 or v.ndim != 4}
        if wrong:
            raise DataError(
                "frames of a demonstration have a wrong dtype or shape",
                where=self.task,
                found=wrong,
                allowed="uint8 [T, H, W, 3]",
            )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        frames = {f"{_FRAMES}{camera}": frame for camera, frame in self.frames.items()}
        return {"states": self.states, "actions": self.actions, **frames}

    def __len__(self) -> int:
        """Return the number of environment steps, T."""
        return len(self.actions)


@dataclass(frozen=True)
class OpenDemonstration:
    """A demonstration whose frames are read on demand; its states and actions are in memory."""

    task: str
    where: str  # file or folder, for messages
    cameras: tuple[str, ...]  # cameras with frames
    states: NDArray[np.float32]  # float32 [T, S]: S numbers per environment step; S may be 0
    actions: NDArray[np.float32]  # float32 [T, D]: D numbers per environment step
    # returns the frame uint8 [H, W, 3] of a camera at an environment step
    frame: Callable[[str, int], NDArray[np.uint8]]

    def __post_init__(self) -> None:
        steps = {"states": len(self.states), "actions": len(self.actions)}
        if len(set(steps.values())) != 1:
            raise DataError(
                "the parts of a demonstration differ in length", where=self.where, found=steps, allowed=_ONE_EACH
            )
        for name, table in (("states", self.states), ("actions", self.actions)):
            wrong = np.argwhere(~np.isfinite(table))
            if len(wrong):
                step, number = (int(place) for place in wrong[0])
                place = f"{self.where}: {name}[{step}, {number}]"
                raise DataError(
                    "a value is not a finite number",
                    where=place,
                    found=float(table[step, number]),
                    fix="correct this number, or leave the demonstration out",
                )

    def __len__(self) -> int:
        """Return the number of environment steps, T."""
        return len(self.actions)


def moves(actions: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Return a mask [T] of the actions that are not no-ops, as OpenVLA's script for LIBERO's data defines them.

    A no-op moves the arm by less than 1e-4, and has the gripper value (the last one) of the previous action that is not
    a no-op. The first action is a no-op if it does not move the arm.

    Args:
        actions: [T, D].
    """
    mask = np.zeros(len(actions), bool)
    still = np.linalg.norm(actions[:, :-1], axis=1) < STILL
    gripper = None
    for step, action in enumerate(actions):
        if still[step] and (gripper is None or action[-1] == gripper):
            continue
        mask[step], gripper = True, action[-1]
    return mask


def open_libero(
    path: str | Path, task: str, *, cameras: Iterable[str] = tuple(LIBERO_CAMERAS)
) -> Iterator[OpenDemonstration]:
    """Yield the demonstrations of one of LIBERO's files, in order; a step's frame is read from the file on demand.

    Steps with no-ops are left out. OpenVLA's script also replays the demonstrations at 256 pixels and drops those that
    fail; this function returns the recorded frames (128 pixels) and states.

    Args:
        path: an HDF5 file with data/demo_0, data/demo_1, ...
        task: name of the file's task; the file does not contain it.
        cameras: one or both of `agentview` and `wrist`.
    """
    cameras = tuple(cameras)
    with _libero_file(path) as file:
        episodes = sorted(_part(file, "data", path), key=lambda name: int(name.removeprefix("demo_")))
    for episode in episodes:
        with _libero_file(path) as file:
            observed = _part(file["data"][episode], "obs", path)
            states = np.concatenate([_part(observed, name, path)[:] for name in LIBERO_STATE], axis=1, dtype=np.float32)
            actions = _part(file["data"][episode], "actions", path)[:].astype(np.float32)
            for camera in cameras:
                _part(observed, LIBERO_CAMERAS[camera], path)
        steps = np.flatnonzero(moves(actions))

        def frame(camera: str, step: int, episode: str = episode, steps: NDArray[Any] = steps) -> NDArray[np.uint8]:
            with _libero_file(path) as file:
                picture: NDArray[np.uint8] = file[f"data/{episode}/obs/{LIBERO_CAMERAS[camera]}"][int(steps[step])]
                return picture

        yield OpenDemonstration(task, f"{path}: {episode}", cameras, states[steps], actions[steps], frame)


@contextmanager
def _libero_file(path: str | Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise UnavailableError("LIBERO's demonstrations need h5py", fix="pip install h5py") from None
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"this HDF5 file cannot be read: {error}", where=str(path), fix=_AGAIN) from None
    with file:
        yield file


def _part(group: Any, name: str, path: str | Path) -> Any:
    if name not in group:
        raise DataError(
            f"the group {group.name} lacks {name!r}",
            where=str(path),
            found=sorted(group),
            fix="use files of LIBERO's demonstrations",
        )
    return group[name]


def write_demonstrations(folder: str | Path, demonstrations: Iterable[Demonstration]) -> int:
    """Write demonstrations into a folder, each under the next free number, and return how many were written.

    Files are renamed once they are complete. Only one process may write to a folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    first = max((int(path.stem) for path in _files(folder)), default=-1) + 1
    count = 0
    for number, demonstration in enumerate(demonstrations, first):
        partial = folder / f".{number:06d}.partial"
        arrays = {name: np.ascontiguousarray(value) for name, value in demonstration._arrays().items()}
        save_file(arrays, partial, metadata={"form": FORM, "task": demonstration.task})
        os.replace(partial, folder / f"{number:06d}.safetensors")
        count += 1
    return count


def open_demonstrations(folder: str | Path, tasks: Iterable[str] | None = None) -> Iterator[OpenDemonstration]:
    """Yield the demonstrations of a folder that `write_demonstrations` made, in order; frames are read on demand.

    Args:
        tasks: yield only demonstrations of these tasks; other files are not read.
    """
    for path, facts in _demonstrations(folder, tasks):
        with _opened(path) as (file, _):
            cameras = tuple(name.removeprefix(_FRAMES) for name in file.keys() if name.startswith(_FRAMES))  # noqa: SIM118
            states, actions = file.get_tensor("states"), file.get_tensor("actions")

        def frame(camera: str, step: int, path: Path = path) -> NDArray[np.uint8]:
            with _opened(path) as (file, _):
                picture: NDArray[np.uint8] = file.get_slice(_FRAMES + camera)[step : step + 1][0]
                return picture

        yield OpenDemonstration(facts["task"], str(path), cameras, states, actions, frame)


def _demonstrations(folder: str | Path, tasks: Iterable[str] | None) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield each file with a demonstration of these tasks, and its safetensors header."""
    wanted = None if tasks is None else set(tasks)
    files = _files(Path(folder))
    if not files:
        raise DataError(
            "the folder has no demonstrations",
            where=str(folder),
            allowed="files 000000.safetensors, ..., as `write_demonstrations` writes them",
            fix="check the path, or write demonstrations to this folder first (docs/embodied.md, Demonstrations)",
        )
    for path in files:
        with _opened(path) as (_, facts):
            pass
        if wanted is None or facts["task"] in wanted:
            yield path, facts


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    try:
        with safe_open(path, framework="np") as file:
            facts = file.metadata() or {}
            if facts.get("form") != FORM:
                raise DataError(
                    "this file is not a demonstration",
                    where=str(path),
                    found=facts.get("form"),
                    allowed=FORM,
                    fix="remove the file from the folder",
                )
            yield file, facts
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"this file cannot be read: {error}",
            where=str(path),
            fix="make the file readable, or write the demonstrations again",
        ) from None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.stem.isdigit())
