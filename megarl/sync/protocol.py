"""One server's way from one weight version to the next, as a state machine.

           pause       begin       buckets ...      end         tag          flush        resume
    SERVING ---> PAUSED ---> OPEN ----------> OPEN ---> LOADED ---> TAGGED ---> FLUSHED ---> SERVING
                    |          |                |          |           |           |
                    '----------'----------------'----------'-----------'-----------'--> FAILED
                                    refused, no answer before the deadline, gone

A server that fails stays paused: it answers nothing with half of its weights exchanged. It is on a known version again
after a whole synchronisation, which starts from any state the server may be found in, or when the trainer ends and its
keeper (keeper.py) brings the server back to weights that it can read by itself. An update does not begin before the
keeper of an earlier trainer is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

from megarl.errors import ServerError
from megarl.rollout.sglang.api import ServerApi
from megarl.sync.keeper import RESTORING

_POLL_S = 0.5


class State(Enum):
    """Where a server is in an update."""

    SERVING = "serving"
    PAUSED = "paused"
    OPEN = "open"
    LOADED = "loaded"
    TAGGED = "tagged"
    FLUSHED = "flushed"
    FAILED = "failed"


class ServerUpdate:
    """Drives one server through one update. Each method is one step: one or two calls, one deadline.

    Args:
        version: what the server is to call it (`version_tag`).
        session: True when tensors come in buckets between begin and end; False when the server loads them in one call.
        deadline_s: seconds for each step.

    Raises:
        ServerError: (every method) the step failed; the state is FAILED and no further step is possible.
        ValueError: the step does not follow from the present state, which is a defect of the caller.
    """

    def __init__(self, api: ServerApi, version: str, *, session: bool, deadline_s: float) -> None:
        self.api, self.version, self.session, self.deadline_s = api, version, session, deadline_s
        self.state = State.SERVING

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop generation; `abort` ends running requests with what they have."""
        self._step(State.SERVING, State.PAUSED, lambda: self._pause(mode))

    def begin(self) -> None:
        """Open the server for tensors. A session that a dead trainer left open is closed first."""
        self._step(State.PAUSED, State.OPEN, self._begin)

    def load(self, send: Callable[[], None]) -> None:
        """Run `send`, which hands tensors to this server, as a step of this update."""
        self._step(State.OPEN, State.OPEN, send)

    def end(self) -> None:
        """All tensors are there: let the server finish what it derives from them."""
        self._step(State.OPEN, State.LOADED, lambda: self._call("/end_weight_update", {}) if self.session else None)

    def tag(self) -> None:
        """Name the new version and see that the server names it back."""
        self._step(State.LOADED, State.TAGGED, self._tag)

    def flush(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Drop the prefix cache that the old weights filled.

        With `in_place` requests may be running, which keep their cache; such a server has no other (sglang).
        """
        self._step(State.TAGGED, State.FLUSHED, lambda: self._flush(mode))

    def resume(self) -> None:
        """Generate again."""
        # Emptying the allocator's cache calls CUDA in the server whatever device it runs on.
        payload = {"torch_empty_cache": False}
        self._step(State.FLUSHED, State.SERVING, lambda: self._call("/continue_generation", payload))

    def _step(self, before: State, after: State, action: Callable[[], Any]) -> None:
        if self.state is not before:
            raise ValueError(f"{self.api.name}: {after.value} cannot follow {self.state.value}")
        try:
            action()
        except BaseException:
            self.state = State.FAILED
            raise
        self.state = after

    def _call(self, path: str, payload: dict[str, Any] | None, method: str = "POST") -> dict[str, Any]:
        phase = f"update to version {self.version}"
        return self.api.call(path, payload, deadline_s=self.deadline_s, phase=phase, method=method)

    def _pause(self, mode: str) -> None:
        end = time.monotonic() + self.deadline_s
        while self._found_version().startswith(RESTORING):
            if time.monotonic() > end:
                self._name("taken over")  # the keeper is gone, or sees that the server is no longer its own
                break
            time.sleep(_POLL_S)
        self._call("/pause_generation", {"mode": mode})

    def _begin(self) -> None:
        if not self.session:
            return
        try:
            self._call("/begin_weight_update", {})
        except ServerError as error:
            if "already open" not in error.reason:
                raise
            self._call("/end_weight_update", {})
            self._call("/begin_weight_update", {})

    def _tag(self) -> None:
        self._name(self.version)
        found = self._found_version()
        if found != self.version:
            where = f"update to version {self.version}"
            raise ServerError(self.api.name, self.api.url, where, f"the server says its version is {found!r}")

    def _name(self, version: str) -> None:
        self._call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _found_version(self) -> str:
        return str(self._call("/model_info", None, "GET").get("weight_version"))

    def _flush(self, mode: str) -> None:
        try:
            self._call("/flush_cache", {})
        except ServerError as error:
            if mode != "in_place" or error.status is None:
                raise
