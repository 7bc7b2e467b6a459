"""The part that the processes of all simulators share: the class, its settings and tasks, and errors."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from .batched import BatchedSimulator
from .checked import RefusedCall, complete_settings
from .protocol import SettingError, Simulator
from .registry import simulator_class
from .wire import pack, plain_spec

#: Maximum number of characters of an error's message, and of an instruction.
TEXT = 2000
Call = Callable[[dict[str, Any], dict[str, NDArray[Any]]], None]


class Work:
    """The base class of a simulator process's state: the class of simulators, their settings, and all tasks by name.

    Args:
        connection: a socket to the trainer.
        memory: descriptor of the shared memory for pictures.
        batched: whether a simulator is a `BatchedSimulator`.
    """

    def __init__(self, connection: socket.socket, memory: int, *, batched: bool) -> None:
        self._connection, self._file, self._batched = connection, memory, batched
        self._kind: type[Simulator] | type[BatchedSimulator] = Simulator
        self._settings: dict[str, Any] = {}
        self._specs: dict[str, dict[str, Any]] = {}
        self._limit = 1  # maximum number of constructed simulators, one per task, that are kept

    def calls(self) -> Mapping[str, Call]:
        """Return the functions that answer the calls other than `open`, by the call's name."""
        raise NotImplementedError

    def answer(self, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Send the answer to a call."""
        try:
            {"open": self._open, **self.calls()}[header["call"]](header, arrays)
        except RefusedCall as error:
            self._send({"error": error.kind, "text": str(error)[:TEXT], **error.parts})
        except Exception as error:
            traceback.print_exc()  # the trainer keeps the last lines of output
            self._send({"error": "raised", "text": f"{type(error).__name__}: {error}".rstrip(": ")[:TEXT]})

    def close(self) -> None:
        """Close all simulators."""
        raise NotImplementedError

    def _send(self, header: dict[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._connection.sendall(pack(header, arrays))

    def _open(self, header: dict[str, Any], _: Any) -> None:
        try:
            self._kind = simulator_class(header["name"], batched=self._batched)
        except LookupError as error:
            raise RefusedCall("settings", str(error), key="name", found=header["name"]) from error
        self._settings = complete_settings(self._kind.settings, header["settings"], header["tasks"])
        self._limit = header["kept"]
        try:
            specs = [plain_spec(spec) for spec in self._kind.tasks(self._settings)]
        except SettingError as error:
            details = {"key": error.key, "found": error.found, "allowed": error.allowed}
            raise RefusedCall("settings", str(error), **details) from error
        self._specs = {spec["name"]: spec for spec in specs}
        self._send({"call": "open", "tasks": specs})

    def _refuse_other_spec(self, task: str, spec: dict[str, Any]) -> None:
        """Raise RefusedCall if `spec`, a constructed simulator's description of its task, is not the one in the list of
        tasks that this process has sent."""
        if spec != self._specs[task]:
            raise RefusedCall(
                "raised", f"the simulator has the task {spec}, but its list of tasks has {self._specs[task]}"
            )
