"""The simulator's side of a process: constructs simulators, keeps them by task, and answers the trainer's calls.

    call      answer
    open      `open`: all tasks
    begin     `construct`: the task's simulator is ready, `fresh` if it was constructed just now; then `reset`
    step      `step`: the outcome of a chunk of actions; with a clip at the end of a recorded episode
    expert    `expert`: the scripted expert's action, or none
    close     the process ends

An answer with `error` is a refusal. A simulator's results are validated here: finite numbers, and pictures of the
task's shapes. Pictures are written to shared memory; `sum` is a checksum of an answer's whole content about the
episode, with which a replayed call is compared.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import math
import mmap
import os
import signal
import socket
import sys
import time
import traceback
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.system.parents import end_with_parents

from .clip import ClipRecorder
from .protocol import Observation, Outcome, Recording, Simulator, TaskSpec
from .registry import simulator_class
from .wire import Inbox, clip_places, pack, places, plain_spec

_TEXT = 2000  # maximum number of characters of an error's message, and of an instruction


class _Refused(Exception):
    """An error that is sent to the trainer instead of an answer; `kind`: `settings`, or a kind of episode failure."""

    def __init__(self, kind: str, text: str, **parts: Any) -> None:
        super().__init__(text)
        self.kind, self.parts = kind, parts


class _Work:
    """The state of a simulator process: its simulators by task, least recently used first, and the current episode."""

    def __init__(self, connection: socket.socket, memory: int) -> None:
        self._connection, self._file = connection, memory
        self._memory: mmap.mmap | None = None
        self._kind: type[Simulator] = Simulator
        self._settings: dict[str, Any] = {}
        self._specs: dict[str, dict[str, Any]] = {}
        self._kept: OrderedDict[str, Simulator] = OrderedDict()
        self._limit = 1
        self._playing: Simulator | None = None
        self._recording: Recording | None = None
        self._recorder: ClipRecorder | None = None
        self._chunk = 0

    def answer(self, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Send the answer to a call."""
        calls = {"open": self._open, "begin": self._begin, "step": self._step, "expert": self._expert}
        try:
            calls[header["call"]](header, arrays)
        except _Refused as error:
            self._send({"error": error.kind, "text": str(error)[:_TEXT], **error.parts})
        except Exception as error:
            traceback.print_exc()  # the trainer keeps the last lines of output
            self._send({"error": "raised", "text": f"{type(error).__name__}: {error}".rstrip(": ")[:_TEXT]})

    def close(self) -> None:
        """Close all simulators."""
        while self._kept:
            self._kept.popitem()[1].close()

    def _send(self, header: dict[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._connection.sendall(pack(header, arrays))

    def _open(self, header: dict[str, Any], _: Any) -> None:
        try:
            self._kind = simulator_class(header["name"])
        except LookupError as error:
            raise _Refused("settings", str(error), key="name", found=header["name"]) from error
        given, known = dict(header["settings"]), self._kind.settings
        if header["tasks"] and ("tasks" in known or isinstance(header["tasks"], dict)):
            given["tasks"] = header["tasks"]  # without this setting the simulator would have no tasks
        for key, value in given.items():
            if key not in known:
                raise _Refused("settings", "unknown setting", key=key, found=value, allowed=list(known))
            if not _fits(value, known[key]):
                names = {
                    bool: "true or false",
                    int: "a whole number",
                    float: "a number",
                    str: "a text",
                    dict: "a mapping",
                }
                allowed = names.get(type(known[key]), "a list")
                raise _Refused("settings", "value of the wrong type", key=key, found=value, allowed=allowed)
        self._settings, self._limit = {**known, **given}, header["kept"]
        specs = [plain_spec(spec) for spec in self._kind.tasks(self._settings)]
        self._specs = {spec["name"]: spec for spec in specs}
        self._send({"call": "open", "tasks": specs})

    def _begin(self, header: dict[str, Any], _: Any) -> None:
        task, began = header["task"], time.perf_counter()
        fresh = task not in self._kept
        simulator = self._construct(task) if fresh else self._kept[task]
        self._kept.move_to_end(task)
        seconds = time.perf_counter() - began
        self._send({"call": "construct", "fresh": fresh, "seconds": seconds, "kept": list(self._kept)})
        wanted = header.get("record")
        self._recording = None if wanted is None else Recording(tuple(wanted["cameras"]), wanted["frames"])
        self._recorder = None if wanted is None else ClipRecorder(wanted["cameras"], wanted["frames"])
        size = clip_places(simulator.spec, self._recording)[1]
        if size > (0 if self._memory is None else len(self._memory)):
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        began = time.perf_counter()
        observation = simulator.reset(header["trial"])
        self._playing, self._chunk = simulator, 0
        if self._recorder is not None:
            _check_frames(places(simulator.spec)[0], observation.frames)
            self._recorder.add(observation.frames)
        answer = {"call": "reset", "instruction": str(observation.instruction)[:_TEXT]}
        self._observed(answer, observation, time.perf_counter() - began)

    def _construct(self, task: str) -> Simulator:
        while len(self._kept) >= self._limit:
            self._kept.popitem(last=False)[1].close()
        simulator = self._kind(task, self._settings)
        spec = plain_spec(simulator.spec)
        if spec != self._specs[task]:
            raise _Refused(
                "raised", f"the simulator has the task {spec}, but its list of tasks has {self._specs[task]}"
            )
        self._kept[task] = simulator
        return simulator

    def _step(self, _: Any, arrays: dict[str, NDArray[Any]]) -> None:
        assert self._playing is not None, "an episode begins with a reset"
        actions, began = arrays["actions"], time.perf_counter()
        outcome = self._playing.step(actions) if self._recorder is None else self._step_by_step(self._recorder, actions)
        seconds = time.perf_counter() - began
        _check_outcome(outcome, len(actions))
        result = {
            "executed": int(outcome.executed),
            "success": bool(outcome.success),
            "over": bool(outcome.over),
            "progress": None if outcome.progress is None else float(outcome.progress),
        }
        parts = {name: float(value) for name, value in outcome.seconds.items()}
        clip = self._hold_clip(self._recorder) if outcome.over and self._recorder is not None else {}
        self._observed({"call": "step", **result, "parts": parts, **clip}, outcome.observation, seconds)

    def _step_by_step(self, recorder: ClipRecorder, actions: NDArray[Any]) -> Outcome:
        """Execute a chunk action by action, so that every environment step is recorded."""
        assert self._playing is not None
        layout, executed, seconds = places(self._playing.spec)[0], 0, dict[str, float]()
        while True:
            outcome = self._playing.step(actions[executed : executed + 1])
            _check_outcome(outcome, 1)
            _check_frames(layout, outcome.observation.frames)
            recorder.add(outcome.observation.frames)
            executed += 1
            for name, spent in outcome.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + spent
            if outcome.over or executed == len(actions):
                return dataclasses.replace(outcome, executed=executed, seconds=seconds)

    def _hold_clip(self, recorder: ClipRecorder) -> dict[str, Any]:
        """Write the clip of a finished episode to the shared memory; return its part of the answer."""
        assert self._playing is not None and self._memory is not None  # noqa: PT018
        clip = recorder.clip()
        for camera, start in clip_places(self._playing.spec, self._recording)[0].items():
            frames = clip[camera]
            np.ndarray(frames.shape, np.uint8, self._memory, start)[...] = frames
        self._recorder = None  # releases the recorder's frames
        return {"clip": {camera: len(frames) for camera, frames in clip.items()}}

    def _expert(self, _: Any, __: Any) -> None:
        assert self._playing is not None, "an episode begins with a reset"
        action = self._playing.expert()
        if action is None:
            return self._send({"call": "expert"})
        action = np.asarray(action, np.float32)
        size = self._playing.spec.action_dim
        if action.shape != (size,) or not np.isfinite(action).all():
            raise _Refused(
                "raised", f"the expert returned the action {action.tolist()}; allowed: {size} finite numbers"
            )
        return self._send({"call": "expert"}, {"action": action})

    def _observed(self, header: dict[str, Any], observation: Observation, seconds: float) -> None:
        """Send an answer with an observation; pictures go to the shared memory."""
        assert self._playing is not None
        state = _checked_state(self._playing.spec, observation.state)
        layout, size = places(self._playing.spec)
        _check_frames(layout, observation.frames)
        sum_ = zlib.crc32(repr(sorted((key, header[key]) for key in header if key != "parts")).encode())
        sum_ = zlib.crc32(state.tobytes(), sum_)
        if size:
            assert self._memory is not None
            for camera, (offset, shape) in layout.items():
                np.ndarray(shape, np.uint8, self._memory, offset)[...] = observation.frames[camera]
            sum_ = zlib.crc32(memoryview(self._memory)[:size], sum_)
        self._send({**header, "seconds": seconds, "sum": sum_}, {"state": state})


def _check_outcome(outcome: Outcome, given: int) -> None:
    if not 0 < outcome.executed <= given:
        raise _Refused("raised", f"a step executed {outcome.executed} of {given} actions; allowed: 1 to {given}")
    if outcome.success and not outcome.over:
        raise _Refused("raised", "an episode has succeeded but is not over: set `over` with `success`")
    if outcome.progress is not None and not math.isfinite(outcome.progress):
        raise _Refused("state", f"a step returned the progress {outcome.progress}; allowed: a finite number or None")


def _checked_state(spec: TaskSpec, state: Any) -> NDArray[np.float32]:
    numbers = np.asarray(state, np.float32)
    if numbers.shape != (spec.state_dim,):
        raise _Refused("state", f"the state has the shape {list(numbers.shape)}; allowed: [{spec.state_dim}]")
    if not np.isfinite(numbers).all():
        where = np.flatnonzero(~np.isfinite(numbers)).tolist()
        raise _Refused("state", f"the state is not finite at {where} of {spec.state_dim} numbers")
    return numbers


def _check_frames(layout: Mapping[str, tuple[int, tuple[int, int, int]]], frames: Mapping[str, Any]) -> None:
    if set(frames) != set(layout):
        raise _Refused("frames", f"pictures of {sorted(frames)}; allowed: {sorted(layout)}")
    for camera, (_, shape) in layout.items():
        frame = np.asarray(frames[camera])
        if frame.dtype.kind == "f" and not np.isfinite(frame).all():
            raise _Refused("frames", f"the picture of camera {camera!r} is not finite")
        if frame.dtype != np.uint8 or frame.shape != shape:
            is_ = f"{frame.dtype} {list(frame.shape)}"
            raise _Refused("frames", f"the picture of camera {camera!r} is {is_}; allowed: uint8 {list(shape)}")


def _fits(value: Any, default: Any) -> bool:
    """Return whether a setting may have this value: of its default's type, or null; anything if the default is null."""
    if default is None or value is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, (list, tuple)):
        return isinstance(value, (list, tuple))
    return isinstance(value, type(default))


def serve(connection: int, memory: int) -> None:
    """Answer calls until the trainer ends this process, or is gone.

    Args:
        connection: descriptor of a socket to the trainer.
        memory: descriptor of the shared memory for pictures.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a trainer that waits too long requests stack traces
    # end with the trainer, whatever this process does; its guardian ends the processes that it started
    end_with_parents()
    with socket.socket(fileno=connection) as trainer:
        work, inbox = _Work(trainer, memory), Inbox(trusted=True)
        while data := trainer.recv(1 << 16):
            inbox.feed(data)
            while (message := inbox.take()) is not None:
                if message[0]["call"] == "close":
                    work.close()
                    sys.stdout.flush()
                    os._exit(0)  # no exit handlers: those of graphics libraries fail
                work.answer(*message)
    os._exit(0)
