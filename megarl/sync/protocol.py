"""One receiver's way from one weight version to the next, as a state machine.

           pause       begin       buckets ...      end         tag          flush        resume
    SERVING ---> PAUSED ---> OPEN ----------> OPEN ---> LOADED ---> TAGGED ---> FLUSHED ---> SERVING
                    |          |                |          |           |           |
                    '----------'----------------'----------'-----------'-----------'--> FAILED
                                    refused, no answer before the deadline, gone

A receiver that fails stays paused: it answers nothing with half of its weights exchanged. It is on a known version
again after a whole synchronisation, which starts from any state the receiver may be found in, or when its engine brings
itself back to weights that it can read without the trainer (for SGLang's servers: rollout/sglang/keeper.py).
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
        version: the receiver's name of it (`version_tag`).
        session: True when tensors come in buckets between begin and end; False when the receiver loads them in one
            call.
        deadline_s: seconds for each step.

    Raises:
        ServerError: (every method) the step failed; the state is FAILED and no further step is possible.
        ValueError: the step does not follow from the present state, which is a defect of the caller.
    """

    def __init__(self, receiver: Receiver, version: str, *, session: bool, deadline_s: float) -> None:
        self.receiver, self.version, self.session = receiver, version, session
        self.step = UpdateStep(f"update to version {version}", deadline_s)
        self.state = State.SERVING

    def pause(self, mode: PauseMode) -> None:
        """Stop generation; `abort` ends running requests with what they have."""
        self._step(State.SERVING, State.PAUSED, lambda: self.receiver.pause(mode, self.step))

    def begin(self) -> None:
        """Open the receiver for tensors. A session that a dead trainer left open is closed first."""
        self._step(State.PAUSED, State.OPEN, self._begin)

    def load(self, send: Callable[[], None]) -> None:
        """Run `send`, which hands tensors to this receiver, as a step of this update."""
        self.receiver.loading(self.version, self.step)
        self._step(State.OPEN, State.OPEN, send)

    def end(self) -> None:
        """Make the receiver derive what depends on the tensors: all of them have arrived."""
        self._step(State.OPEN, State.LOADED, lambda: self.receiver.end(self.step) if self.session else None)

    def tag(self) -> None:
        """Name the new version and see that the receiver names it back."""
        self._step(State.LOADED, State.TAGGED, self._tag)

    def flush(self, mode: PauseMode) -> None:
        """Drop the prefix cache that the old weights filled.

        With `in_place` requests may be running, which keep their cache; such a receiver has no other.
        """
        self._step(State.TAGGED, State.FLUSHED, lambda: self.receiver.flush(mode, self.step))

    def resume(self) -> None:
        """Generate again."""
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
        found = self.receiver.held_version(self.step)
        if found != self.version:
            reason = f"the server says its version is {found!r}"
            raise ServerError(self.receiver.name, self.receiver.url, self.step.phase, reason)


def version_tag(number: int, run: str) -> str:
    """Return the tag of version `number` of a run. Two runs may push to one receiver in turn, and both count from 0."""
    return f"{number}@{run}"


def read_tag(tag: object) -> tuple[int, str]:
    """Return the version and run of a tag.

    Raises:
        ValueError: no run has named these weights.

    >>> read_tag("4@1f")
    (4, '1f')
    """
    number, _, run = tag.partition("@") if isinstance(tag, str) else ("", "", "")
    if not (number.isdecimal() and run):
        raise ValueError(f"the server calls its weights {tag!r}, which is no version that a run has sent")
    return int(number), run
