"""The steps that bring one receiver from one weight version to the next, as a state machine.

           pause       begin       buckets ...      end         tag          flush        resume
    SERVING ---> PAUSED ---> OPEN ----------> OPEN ---> LOADED ---> TAGGED ---> FLUSHED ---> SERVING
                    |          |                |          |           |           |
                    '----------'----------------'----------'-----------'-----------'--> FAILED
                                    the receiver refuses, answers too late, or is gone

A receiver that fails stays paused, so it generates nothing with half-updated weights. It has a known version again
after a complete synchronisation, which can start from any state of the receiver, or when its engine loads weights that
it can read without the trainer (SGLang's servers: rollout/sglang/keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from megarl.sync.receiver import PauseMode, Receiver, UpdateStep
from megarl.system.errors import ServerError


class State(Enum):
    """The state of a receiver in an update."""

    SERVING = "serving"
    PAUSED = "paused"
    OPEN = "open"
    LOADED = "loaded"
    TAGGED = "tagged"
    FLUSHED = "flushed"
    FAILED = "failed"


class ReceiverUpdate:
    """One update of one receiver. Each method is one step with one deadline.

    Args:
        version: name of the new version (`version_tag`).
        session: True if tensors come in buckets between begin and end; False if the receiver loads them in one call.
        deadline_s: seconds for each step.

    Raises:
        ServerError: (every method) the step failed; the state is FAILED and no further step is possible.
        ValueError: the step is not possible in the current state: a defect of the caller.
    """

    def __init__(self, receiver: Receiver, version: str, *, session: bool, deadline_s: float) -> None:
        self.receiver, self.version, self.session = receiver, version, session
        self.step = UpdateStep(f"update to version {version}", deadline_s)
        self.state = State.SERVING

    def pause(self, mode: PauseMode) -> None:
        """Pause generation; with `abort`, running requests end with their tokens so far."""
        self._step(State.SERVING, State.PAUSED, lambda: self.receiver.pause(mode, self.step))

    def begin(self) -> None:
        """Open the receiver for tensors; a session that a dead trainer left open is closed first."""
        self._step(State.PAUSED, State.OPEN, self._begin)

    def load(self, send: Callable[[], None]) -> None:
        """Run `send`, which sends tensors to this receiver, as a step of this update."""
        self.receiver.loading(self.version, self.step)
        self._step(State.OPEN, State.OPEN, send)

    def end(self) -> None:
        """Make the receiver recompute the values that it derives from tensors; call it after all tensors have
        arrived."""
        self._step(State.OPEN, State.LOADED, lambda: self.receiver.end(self.step) if self.session else None)

    def tag(self) -> None:
        """Name the new version, and check that the receiver returns this name."""
        self._step(State.LOADED, State.TAGGED, self._tag)

    def flush(self, mode: PauseMode) -> None:
        """Drop the prefix cache that was computed with the old weights.

        With `in_place`, running requests keep their cache.
        """
        self._step(State.TAGGED, State.FLUSHED, lambda: self.receiver.flush(mode, self.step))

    def resume(self) -> None:
        """Resume generation."""
        self._step(State.FLUSHED, State.SERVING, lambda: self.receiver.resume(self.step))

    def _step(self, before: State, after: State, action: Callable[[], Any]) -> None:
        if self.state is not before:
            raise ValueError(f"{self.receiver.name}: {after.value} cannot follow {self.state.value}")
        try:
            action()
        except BaseException:
            self.state = State.FAILED
            raise
        self.state = after

    def _begin(self) -> None:
        if self.session:
            self.receiver.loading(self.version, self.step)
            self.receiver.begin(self.step)

    def _tag(self) -> None:
        self.receiver.set_version(self.version, self.step)
        tag = self.receiver.held_version(self.step)
        if tag != self.version:
            reason = f"the server reports version {tag!r}"
            raise ServerError(self.receiver.name, self.receiver.url, self.step.phase, reason)


def version_tag(number: int, run: str) -> str:
    """Return the tag of version `number` of a run; it names the run because every run counts from 0."""
    return f"{number}@{run}"


def read_tag(tag: object) -> tuple[int, str]:
    """Return the version and run of a tag.

    Raises:
        ValueError: no run has sent these weights.

    >>> read_tag("4@1f")
    (4, '1f')
    """
    number, _, run = tag.partition("@") if isinstance(tag, str) else ("", "", "")
    if not (number.isdecimal() and run):
        raise ValueError(f"the server's weight version {tag!r} was not sent by a run")
    return int(number), run
