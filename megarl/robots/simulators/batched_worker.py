"""The process of a simulator of many environments: each slot of the trainer plays its episodes in one of them.

    call      answers
    open      `open`: all tasks
    turn      `construct`: the simulators of all tasks that begin are ready; then `turn`: one entry for each slot of the
              call, first of those that step, then of those that begin, then of those that request the expert's action
    close     the process ends

Environments of a task are rows of one simulator, and slot i is row i of each task's simulator. A chunk is executed step
by step in all of the turn's rows that are not over. The pictures of a row are taken after its last executed action and
lie at slot * stride of the shared memory; its clip follows them.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .batched import BatchedSimulator, Rows, as_numpy
from .checked import RefusedCall
from .clip import ClipRecorder
from .protocol import Recording
from .wire import clip_places, places, plain_spec
from .work import TEXT, Call, Work

if TYPE_CHECKING:
    import socket


@dataclass
class _Row:
    """The episode in a slot, one of the process's environments."""

    task: str
    recording: Recording | None
    recorder: ClipRecorder | None
    steps: int = 0  # number of executed environment steps
    state: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # the last observed state
    progress: float | None = None


class BatchedWork(Work):
    """The state of a simulator's process with many environments, of which each slot uses one of its episode's task.

    Args:
        connection: a socket to the trainer.
        memory: descriptor of the shared memory for pictures.
        rows: number of slots, and of environments of each task.
    """

    def __init__(self, connection: socket.socket, memory: int, rows: int) -> None:
        super().__init__(connection, memory, batched=True)
        self._count, self._stride = rows, 0
        self._memory: mmap.mmap | memoryview = memoryview(b"")
        self._kept: OrderedDict[str, BatchedSimulator] = OrderedDict()
        self._episodes: dict[int, _Row] = {}  # episodes in flight, by slot
        self._seconds: defaultdict[str, float] = defaultdict(float)  # seconds of the current turn, by kind of work

    def calls(self) -> Mapping[str, Call]:
        """Return the function that answers the call `turn`, by the call's name."""
        return {"turn": self._turn}

    def close(self) -> None:
        """Close all simulators."""
        while self._kept:
            self._kept.popitem()[1].close()

    def _turn(self, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        began = time.perf_counter()
        fresh = self._construct(header["begin"])
        self._send({"call": "construct", "fresh": fresh, "seconds": time.perf_counter() - began})
        self._seconds = defaultdict(float)
        size = self._count * header["stride"]
        if size > len(self._memory):
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        self._stride = header["stride"]
        entries: list[dict[str, Any]] = []
        states: list[NDArray[np.float32]] = []
        began = time.perf_counter()
        if header["step"]:
            entries += self._step(np.array(header["step"], np.int64), arrays["actions"])
        stepped = time.perf_counter()
        if header["begin"]:
            entries += self._reset(header["begin"])
        self._seconds |= {"step": stepped - began, "reset": time.perf_counter() - stepped}
        for entry in entries:
            self._complete(entry, states)
        advice = self._advise(header["expert"])
        entries += [{"kind": "expert", "slot": slot} for slot in header["expert"]]
        sent = {"states": np.concatenate([np.zeros(0, np.float32), *states])}
        if advice is not None:
            sent["advice"] = advice
        self._send({"call": "turn", "entries": entries, "seconds": dict(self._seconds)}, sent)

    def _construct(self, begins: Sequence[Any]) -> list[str]:
        """Construct a simulator for each task in `begins`, the episodes to begin, that has none; return the names of
        the tasks with new simulators. Simulators without episodes are closed to keep at most `_limit`."""
        tasks, slots = list(dict.fromkeys(task for _, task, _, _ in begins)), {slot for slot, _, _, _ in begins}
        used = {row.task for slot, row in self._episodes.items() if slot not in slots} | set(tasks)
        fresh = [task for task in tasks if task not in self._kept]
        idle = [task for task in self._kept if task not in used]
        while idle and len(self._kept) + len(fresh) > self._limit:
            self._kept.pop(idle.pop(0)).close()
        for task in fresh:
            assert issubclass(self._kind, BatchedSimulator)
            simulator = self._kind(task, self._settings, self._count)
            self._refuse_other_spec(task, plain_spec(simulator.spec))
            self._kept[task] = simulator
        for task in tasks:
            self._kept.move_to_end(task)
        return fresh

    def _by_task(self, slots: Rows) -> dict[str, NDArray[np.int64]]:
        """Return, by task, the positions in `slots` of the slots whose episodes are of this task."""
        tasks = np.array([self._episodes[slot].task for slot in slots.tolist()])
        return {str(task): np.flatnonzero(tasks == task) for task in dict.fromkeys(tasks.tolist())}

    def _step(self, slots: Rows, actions: NDArray[np.float32]) -> list[dict[str, Any]]:
        """Execute a chunk of actions in each of `slots`, from `actions` [R, K, D]; return each slot's entry in the
        answer."""
        entries: list[dict[str, Any]] = [{}] * len(slots)
        for task, chosen in self._by_task(slots).items():
            for place, entry in zip(chosen, self._step_task(task, slots[chosen], actions[chosen]), strict=True):
                entries[place] = entry
        return entries

    def _step_task(self, task: str, slots: Rows, actions: NDArray[np.float32]) -> list[dict[str, Any]]:
        simulator, rows = self._kept[task], [self._episodes[slot] for slot in slots.tolist()]
        success, over = np.zeros((2, len(slots)), np.bool_)
        left = simulator.spec.max_steps - np.array([row.steps for row in rows])
        recorded = np.array([row.recorder is not None for row in rows])
        executed = np.zeros(len(slots), np.int64)
        for place in range(actions.shape[1]):
            active = np.flatnonzero(~over)
            if not len(active):
                break
            began = time.perf_counter()
            result = simulator.step(slots[active], actions[active, place])
            success[active] = _flags(result.success, len(active))
            over[active] = _flags(result.terminated, len(active)) | success[active]
            executed[active] += 1
            over |= executed >= left
            self._seconds["physics"] += time.perf_counter() - began
            # The next step may move the scenes of rows whose episodes are over, so their pictures are taken now. Clips
            # need the pictures of every step.
            shown = active if place == actions.shape[1] - 1 else active[over[active] | recorded[active]]
            if len(shown):
                self._show(task, slots[shown])
        for row, steps in zip(rows, executed.tolist(), strict=True):
            row.steps += steps
        values = zip(slots.tolist(), executed.tolist(), success.tolist(), over.tolist(), strict=True)
        return [
            {"kind": "step", "slot": slot, "executed": number, "success": good, "over": end}
            for slot, number, good, end in values
        ]

    def _reset(self, begins: Sequence[tuple[int, str, int, Mapping[str, Any] | None]]) -> list[dict[str, Any]]:
        """Begin the episodes `begins`; return each slot's entry in the answer."""
        for slot, task, _, wanted in begins:
            recording = None if wanted is None else Recording(tuple(wanted["cameras"]), wanted["frames"])
            recorder = None if recording is None else ClipRecorder(recording.cameras, recording.frames)
            self._episodes[slot] = _Row(task, recording, recorder)
        slots = np.array([slot for slot, _, _, _ in begins], np.int64)
        trials = np.array([trial for _, _, trial, _ in begins], np.int64)
        texts = [""] * len(slots)
        for task, chosen in self._by_task(slots).items():
            simulator = self._kept[task]
            simulator.reset(slots[chosen], trials[chosen])
            self._show(task, slots[chosen])
            for place, text in zip(chosen, simulator.instructions(slots[chosen]), strict=True):
                texts[place] = str(text)[:TEXT]
        return [
            {"kind": "reset", "slot": slot, "instruction": text}
            for slot, text in zip(slots.tolist(), texts, strict=True)
        ]

    def _advise(self, slots: Sequence[int]) -> NDArray[np.float32] | None:
        """Return the scripted experts' next actions in `slots`, end to end, float32 [R * D]; None if there is no expert
        or `slots` is empty."""
        rows, advice = np.array(slots, np.int64), dict[int, NDArray[np.float32]]()
        for task, chosen in self._by_task(rows).items() if slots else ():
            actions = self._kept[task].expert(rows[chosen])
            if actions is None:
                return None
            numbers = np.asarray(as_numpy(actions), np.float32)
            size = self._kept[task].spec.action_dim
            if numbers.shape != (len(chosen), size) or not np.isfinite(numbers).all():
                actual = "not finite" if numbers.shape == (len(chosen), size) else f"of shape {list(numbers.shape)}"
                raise RefusedCall(
                    "raised",
                    f"the expert's actions are {actual}; allowed: {len(chosen)} times {size} finite numbers",
                )
            advice |= dict(zip(chosen.tolist(), numbers, strict=True))
        return np.concatenate([advice[place] for place in range(len(slots))]) if advice else None

    def _show(self, task: str, slots: Rows) -> None:
        """Observe the environments of `slots`, which have the same task: write their pictures to the shared memory and
        to recorded clips, and remember their states and progress."""
        began, simulator = time.perf_counter(), self._kept[task]
        spec = simulator.spec
        views, progress = simulator.observe(slots), simulator.progress(slots)
        states = np.asarray(as_numpy(views.states), np.float32)
        if states.shape != (len(slots), spec.state_dim):
            allowed = [len(slots), spec.state_dim]
            raise RefusedCall("state", f"the states have the shape {list(states.shape)}; allowed: {allowed}")
        layout = places(spec)[0]
        if set(views.frames) != set(layout):
            cameras = sorted(views.frames)
            raise RefusedCall("frames", f"the pictures are of the cameras {cameras}; allowed: {sorted(layout)}")
        for camera, (offset, shape) in layout.items():
            frames = as_numpy(views.frames[camera])
            if frames.dtype != np.uint8 or frames.shape != (len(slots), *shape):
                actual = f"{frames.dtype} {list(frames.shape)}"
                raise RefusedCall(
                    "frames", f"the pictures of camera {camera!r} are {actual}; allowed: uint8 {[len(slots), *shape]}"
                )
            strides = (self._stride, shape[1] * 3, 3, 1)
            np.ndarray((self._count, *shape), np.uint8, self._memory, offset, strides)[slots] = frames
        done = None if progress is None else np.asarray(as_numpy(progress), np.float64)
        for place, slot in enumerate(slots.tolist()):
            row = self._episodes[slot]
            row.state, row.progress = states[place], None if done is None else float(done[place])
            if row.recorder is not None:
                seen = {
                    camera: np.ndarray(shape, np.uint8, self._memory, slot * self._stride + offset)
                    for camera, (offset, shape) in layout.items()
                }
                row.recorder.add(seen)
        self._seconds["render"] += time.perf_counter() - began

    def _complete(self, entry: dict[str, Any], states: list[NDArray[np.float32]]) -> None:
        """Add checksum, progress and clip to a slot's entry in the answer, and the robot's state to `states`. If state
        or progress is not finite, mark this slot's episode as failed; the other episodes continue."""
        slot = entry["slot"]
        row = self._episodes[slot]
        if not np.isfinite(row.state).all():
            where = np.flatnonzero(~np.isfinite(row.state)).tolist()
            problem = f"the state is not finite at {where} of {len(row.state)} numbers"
        elif row.progress is not None and not np.isfinite(row.progress):
            problem = f"a step returned the progress {row.progress}; allowed: a finite number or None"
        else:
            problem = ""
        if problem:
            entry.clear()
            entry.update({"kind": "failed", "slot": slot, "problem": "state", "text": problem})
            del self._episodes[slot]
            return
        if entry["kind"] == "step":
            entry["progress"] = row.progress
        size = places(self._kept[row.task].spec)[1]
        sum_ = zlib.crc32(row.state.tobytes(), zlib.crc32(repr(sorted(entry.items())).encode()))
        if size:
            sum_ = zlib.crc32(memoryview(self._memory)[slot * self._stride :][:size], sum_)
        entry["sum"] = sum_
        states.append(row.state)
        if entry.get("over"):
            if row.recorder is not None:
                entry["clip"] = self._hold_clip(slot, row, row.recorder)
            del self._episodes[slot]

    def _hold_clip(self, slot: int, row: _Row, recorder: ClipRecorder) -> dict[str, int]:
        """Write the clip of a finished episode to the shared memory; return its number of frames by camera."""
        clip = recorder.clip()
        for camera, start in clip_places(self._kept[row.task].spec, row.recording)[0].items():
            at = slot * self._stride + start
            np.ndarray(clip[camera].shape, np.uint8, self._memory, at)[...] = clip[camera]
        return {camera: len(frames) for camera, frames in clip.items()}


def _flags(values: Any, count: int) -> NDArray[np.bool_]:
    flags = np.asarray(as_numpy(values))
    if flags.dtype != np.bool_ or flags.shape != (count,):
        raise RefusedCall(
            "raised",
            f"a step returned `success` or `terminated` as {flags.dtype} {list(flags.shape)}; allowed: bool [{count}]",
        )
    return flags
