"""Validates the answers of a simulator's process, which runs code that is not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.robots.simulators.protocol import TaskSpec
from megarl.system.plain import Malformed, flag, number, short, text, whole

_NAME, _TEXT = 1000, 4000  # maximum characters of a name, and of a longer text, in a simulator's messages
_TASKS, _PARTS, _CAMERAS = 100_000, 64, 64
_PIXELS = 1 << 14  # maximum width and height of a picture in pixels
_COUNT = range(1 << 31)
_SUM = range(1 << 32)
#: Kinds of errors that a simulator's process may report; its first answer may also report `settings`.
_REFUSALS = ("raised", "state", "frames")


def check_answer(
    expected: str, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], task: TaskSpec | None, actions: int
) -> None:
    """Check an answer to a call.

    Args:
        expected: the kind of answer: open, construct, reset, step or expert.
        header, arrays: the answer's message.
        task: the episode's task; None: no episode.
        actions: number of actions of the chunk, for a step.

    Raises:
        Malformed: the answer is invalid.
    """
    if "error" in header:
        check_refusal(header, opening=expected == "open")
        return
    _check_call(header, expected)
    if expected == "open":
        _check_tasks(header.get("tasks"))
    elif expected == "construct":
        flag(header.get("fresh"), "the field `fresh` of an answer")
        _texts(header.get("kept"), "the names of tasks")
    if expected in ("construct", "reset", "step"):
        number(header.get("seconds"), "the field `seconds` of an answer")
    if expected in ("reset", "step"):
        whole(header.get("sum"), _SUM, "a checksum")
        _check_array(arrays.get("state"), "state", None if task is None else task.state_dim)
    if expected == "reset":
        text(header.get("instruction"), _TEXT, "an instruction")
    if expected == "step":
        _check_result(header, actions)
        _check_seconds(header.get("parts"), "parts")
    if expected == "expert" and "action" in arrays:
        _check_array(arrays["action"], "action", None if task is None else task.action_dim)


def check_construct(header: Mapping[str, Any]) -> None:
    """Check the answer with which a process with many environments reports that its simulators are constructed.

    Raises:
        Malformed: the answer is invalid.
    """
    _check_call(header, "construct")
    _texts(header.get("fresh"), "the names of tasks")
    number(header.get("seconds"), "the field `seconds` of an answer")


@dataclass(frozen=True)
class TurnAnswers:
    """The answer of a process with many environments to one turn, a message with the calls of several slots."""

    entries: list[dict[str, Any]]  # the answer to each call, in the order of the calls
    states: dict[int, NDArray[np.float32]]  # the robots' states [state_dim], by slot
    advice: dict[int, NDArray[np.float32]]  # the scripted experts' actions [D], by slot; empty: there is no expert
    seconds: dict[str, float]  # seconds that the turn took, by kind of work


def check_turn(
    header: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    asked: Sequence[tuple[int, str]],
    tasks: Mapping[int, TaskSpec],
    chunks: Mapping[int, int],
) -> TurnAnswers:
    """Check the answer to one turn, a message with the calls of several slots.

    Args:
        header, arrays: the parts of the answer's message.
        asked: slot and kind (step, reset or expert) of each call of the turn, in their order.
        tasks: by slot, the task of its episode.
        chunks: by slot with a call `step`, the number of actions in its chunk.

    Raises:
        Malformed: the answer is invalid.
    """
    _check_call(header, "turn")
    entries = header.get("entries")
    if not isinstance(entries, list) or len(entries) != len(asked):
        raise Malformed(f"the answer to {len(asked)} calls must have a list of as many entries, not {_sized(entries)}")
    for entry, (slot, kind) in zip(entries, asked, strict=True):
        allowed = (kind,) if kind == "expert" else (kind, "failed")
        if not isinstance(entry, dict) or entry.get("slot") != slot or entry.get("kind") not in allowed:
            shown = short(entry)
            if isinstance(entry, dict):
                shown = f"slot {short(entry.get('slot'))} and kind {short(entry.get('kind'))}"
            raise Malformed(f"an entry must have slot {slot} and kind {' or '.join(allowed)}, not {shown}")
        if entry["kind"] == "failed":
            if entry.get("problem") != "state":
                raise Malformed(
                    f"the field `problem` of a failed slot must be 'state', not {short(entry.get('problem'))}"
                )
            text(entry.get("text"), _TEXT, "the text of an error")
        elif kind != "expert":
            whole(entry.get("sum"), _SUM, "a checksum")
        if entry["kind"] == "reset":
            text(entry.get("instruction"), _TEXT, "an instruction")
        elif entry["kind"] == "step":
            _check_result(entry, chunks[slot])
    seen = [entry["slot"] for entry in entries if entry["kind"] in ("reset", "step")]
    states = _parts(arrays, "states", {slot: tasks[slot].state_dim for slot in seen})
    advised = [slot for slot, kind in asked if kind == "expert"]
    advice = {}
    if "advice" in arrays:
        advice = _parts(arrays, "advice", {slot: tasks[slot].action_dim for slot in advised})
    _check_seconds(header.get("seconds"), "seconds")
    return TurnAnswers(entries, states, advice, header["seconds"])


def _parts(arrays: Mapping[str, NDArray[Any]], name: str, sizes: Mapping[int, int]) -> dict[int, NDArray[np.float32]]:
    """Cut the array `name` into the parts of the slots, with the sizes `sizes`; return them by slot."""
    _check_array(arrays.get(name), name, sum(sizes.values()))
    ends = np.cumsum([0, *sizes.values()])
    return {slot: arrays[name][start:end] for slot, start, end in zip(sizes, ends, ends[1:], strict=False)}


def _check_call(header: Mapping[str, Any], expected: str) -> None:
    if header.get("call") != expected:
        raise Malformed(f"the process answered the call {short(header.get('call'))}, but {expected} was called")


def check_refusal(header: Mapping[str, Any], *, opening: bool) -> None:
    """Check an answer that reports an error; `opening`: whether it is a process's first answer, which may also refuse
    a setting.

    Raises:
        Malformed: the answer is invalid.
    """
    allowed = ("settings", *_REFUSALS) if opening else _REFUSALS
    if header["error"] not in allowed:
        raise Malformed(f"the error has the unknown kind {short(header['error'])}; allowed: {', '.join(allowed)}")
    text(header.get("text"), _TEXT, "the text of an error")
    if header["error"] == "settings":
        text(header.get("key"), _NAME, "the key of an error")
        if "found" not in header:
            raise Malformed("the simulator reported an invalid setting without the field `found`, the setting's value")
        if isinstance(header.get("allowed"), list):
            _texts(header["allowed"], "the names of settings")


def _check_result(header: Mapping[str, Any], actions: int) -> None:
    whole(header.get("executed"), range(1, actions + 1), "the number of actions executed")
    success, over = (flag(header.get(name), f"the field `{name}` of an answer") for name in ("success", "over"))
    if success and not over:
        raise Malformed("an episode has succeeded but is not over")
    if header.get("progress", 0) is not None:
        number(header.get("progress"), "the progress")


def _check_seconds(parts: Any, field: str) -> None:
    if not isinstance(parts, dict) or len(parts) > _PARTS:
        raise Malformed(f"the field `{field}` must map at most {_PARTS} kinds of work to seconds, not {_sized(parts)}")
    for name, seconds in parts.items():
        text(name, _NAME, f"a kind of work in the field `{field}`")
        number(seconds, f"the seconds of {short(name)} in the field `{field}`")


def _check_tasks(tasks: Any) -> None:
    if not isinstance(tasks, list) or len(tasks) > _TASKS:
        raise Malformed(f"the tasks must be a list of at most {_TASKS}, not {_sized(tasks)}")
    fields = set(TaskSpec.__dataclass_fields__)
    for task in tasks:
        if not isinstance(task, dict) or set(task) != fields:
            names = ", ".join(sorted(task)) if isinstance(task, dict) else short(task)
            raise Malformed(f"a task must have exactly the fields {', '.join(sorted(fields))}; found: {names[:_TEXT]}")
        text(task["name"], _NAME, "the name of a task")
        text(task["instruction"], _TEXT, "an instruction")
        for name in ("source", "part"):
            text(task[name], _NAME, f"the field `{name}` of a task")
        for name in ("trials", "max_steps", "action_dim", "state_dim"):
            whole(task[name], _COUNT, f"the field `{name}` of a task")
        whole(task["evaluation"], range(task["trials"] + 1), "the field `evaluation` of a task")
        _check_cameras(task["cameras"])


def _check_cameras(cameras: Any) -> None:
    if not isinstance(cameras, dict) or len(cameras) > _CAMERAS:
        raise Malformed(f"the cameras must be a mapping of at most {_CAMERAS} names, not {_sized(cameras)}")
    for camera, size in cameras.items():
        text(camera, _NAME, "the name of a camera")
        if not isinstance(size, list) or len(size) != 2:
            raise Malformed(f"the picture size of a camera must be a list of two numbers, not {_sized(size)}")
        for side in size:
            whole(side, range(1, _PIXELS + 1), "a side of a camera's picture")


def _check_array(array: NDArray[Any] | None, name: str, size: int | None) -> None:
    if array is None or array.dtype != np.float32 or array.ndim != 1 or size not in (None, len(array)):
        shown = "none" if array is None else f"{array.dtype} {list(array.shape)}"
        raise Malformed(f"the array {name!r} must be float32 [{'D' if size is None else size}], not {shown}")
    if not np.isfinite(array).all():
        raise Malformed(f"the array {name!r} has numbers that are not finite")


def _sized(value: Any) -> str:
    """Return a value for an error text, a list or mapping with its length."""
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else short(value)


def _texts(value: Any, what: str) -> None:
    if not isinstance(value, list) or len(value) > _TASKS:
        raise Malformed(f"{what} must be a list of at most {_TASKS} texts, not {_sized(value)}")
    for item in value:
        text(item, _NAME, f"an item of {what}")
