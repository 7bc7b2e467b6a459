"""The process of a simulator that plays one episode at a time: constructs simulators, keeps them by task, and answers
the trainer's calls.

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
import mmap
import os
import signal
import socket
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megarl.system.parents import end_with_parents

from .batched_worker import BatchedWork
from .checked import RefusedCall, check_frames, check_outcome, checked_state
from .clip import ClipRecorder
from .protocol import Observation, Outcome, Recording, Simulator
from .wire import Inbox, clip_places, places, plain_spec
from .work import TEXT, Call, Work


class SingleWork(Work):
    """The state of a simulator's process that plays one episode at a time: the constructed simulators by task, least
    recently used first, and the current episode.

    Args:
        connection: a socket to the trainer.
        memory: descriptor of the shared memory for pictures.
    """

    def __init__(self, connection: socket.socket, memory: int) -> None:
        super().__init__(connection, memory, batched=False)
        self._memory: mmap.mmap | None = None
        self._kept: OrderedDict[str, Simulator] = OrderedDict()
        self._playing: Simulator | None = None
        self._recording: Recording | None = None
        self._recorder: ClipRecorder | None = None
        self._chunk = 0

    def calls(self) -> Mapping[str, Call]:
        """Return the functions that answer the calls `begin`, `step` and `expert`, by the call's name."""
        return {"begin": self._begin, "step": self._step, "expert": self._expert}

    def close(self) -> None:
        """Close all simulators."""
        while self._kept:
            self._kept.popitem()[1].close()

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
            check_frames(places(simulator.spec)[0], observation.frames)
            self._recorder.add(observation.frames)
        answer = {"call": "reset", "instruction": str(observation.instruction)[:TEXT]}
        self._observed(answer, observation, time.perf_counter() - began)

    def _construct(self, task: str) -> Simulator:
        while len(self._kept) >= self._limit:
            self._kept.popitem(last=False)[1].close()
        simulator = cast("type[Simulator]", self._kind)(task, self._settings)
        self._refuse_other_spec(task, plain_spec(simulator.spec))
        self._kept[task] = simulator
        return simulator

    def _step(self, _: Any, arrays: dict[str, NDArray[Any]]) -> None:
        assert self._playing is not None, "an episode begins with a reset"
        actions, began = arrays["actions"], time.perf_counter()
        outcome = self._playing.step(actions) if self._recorder is None else self._step_by_step(self._recorder, actions)
        seconds = time.perf_counter() - began
        check_outcome(outcome, len(actions))
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
            check_outcome(outcome, 1)
            check_frames(layout, outcome.observation.frames)
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
            raise RefusedCall(
                "raised", f"the expert returned the action {action.tolist()}; allowed: {size} finite numbers"
            )
        return self._send({"call": "expert"}, {"action": action})

    def _observed(self, header: dict[str, Any], observation: Observation, seconds: float) -> None:
        """Send an answer with an observation; pictures go to the shared memory."""
        assert self._playing is not None
        state = checked_state(self._playing.spec, observation.state)
        layout, size = places(self._playing.spec)
        check_frames(layout, observation.frames)
        sum_ = zlib.crc32(repr(sorted((key, header[key]) for key in header if key != "parts")).encode())
        sum_ = zlib.crc32(state.tobytes(), sum_)
        if size:
            assert self._memory is not None
            for camera, (offset, shape) in layout.items():
                np.ndarray(shape, np.uint8, self._memory, offset)[...] = observation.frames[camera]
            sum_ = zlib.crc32(memoryview(self._memory)[:size], sum_)
        self._send({**header, "seconds": seconds, "sum": sum_}, {"state": state})


def serve(connection: int, memory: int) -> None:
    """Answer calls until the trainer ends this process, or is gone.

    Args:
        connection: descriptor of a socket to the trainer.
        memory: descriptor of the shared memory for pictures.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a trainer that waits too long requests stack traces
    # This process ends when the trainer ends, even if a call hangs; its guardian ends the processes that it started.
    end_with_parents()
    with socket.socket(fileno=connection) as trainer:
        work: Work | None = None
        inbox = Inbox(trusted=True)
        while data := trainer.recv(1 << 16):
            inbox.feed(data)
            while (message := inbox.take()) is not None:
                if work is None:  # the first message is the call `open`, whose `rows` selects the class
                    rows = message[0]["rows"]
                    work = BatchedWork(trainer, memory, rows) if rows else SingleWork(trainer, memory)
                if message[0]["call"] == "close":
                    work.close()
                    sys.stdout.flush()
                    os._exit(0)  # no exit handlers: those of graphics libraries fail
                work.answer(*message)
    os._exit(0)
