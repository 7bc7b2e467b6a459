"""Chooses the server of each sample: the server of its prompt, or the least loaded one. This module does no I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass
class _Lane:
    """The samples in flight on one server, and the prompts that are routed to it."""

    in_flight: int = 0
    prompts: set[Hashable] = field(default_factory=set)


class NoServerError(Exception):
    """Every server was dropped."""


class Router(Generic[Name]):
    """Routes samples to servers.

    All samples of a prompt go to one server, whose prefix cache then contains the prompt. If this server is full, a
    sample has to wait, because another server would have to prefill the prompt again. A new prompt goes to the least
    loaded server that is not full.

    Args:
        capacity: maximum number of samples in flight per server.
    """

    def __init__(self, names: Iterable[Name], capacity: int) -> None:
        self._lanes = {name: _Lane() for name in names}
        self._capacity = capacity
        self._home: dict[Hashable, Name] = {}

    def take(self, prompt: Hashable) -> Name | None:
        """Take a slot for a sample of `prompt`, and return the name of its server. None: the sample must wait, because
        the server with this prompt is full, or for a new prompt all servers are.

        Raises:
            NoServerError: no server is left.
        """
        if not self._lanes:
            raise NoServerError
        name = self._home.get(prompt)
        if name is None:
            # Prompts count more than samples in flight, because further samples of a new prompt follow.
            lanes = self._lanes
            name = min(lanes, key=lambda n: (not self.has_room(n), len(lanes[n].prompts), lanes[n].in_flight))
        lane = self._lanes[name]
        if not self.has_room(name):
            return None
        self._home[prompt] = name
        lane.prompts.add(prompt)
        lane.in_flight += 1
        return name

    def home(self, prompt: Hashable) -> Name | None:
        """Return the name of the server to which samples of `prompt` go; None: the prompt is new."""
        return self._home.get(prompt)

    def give_back(self, name: Name) -> None:
        """Record that a sample on server `name` has ended; the server may have been dropped meanwhile."""
        if name in self._lanes:
            self._lanes[name].in_flight -= 1

    def add(self, name: Name) -> None:
        """Route samples to server `name` as well; it is new, or was dropped before."""
        self._lanes[name] = _Lane()

    def forget(self, prompt: Hashable) -> None:
        """Forget the server of `prompt`, whose samples have all finished."""
        name = self._home.pop(prompt, None)
        if name is not None:
            self._lanes[name].prompts.discard(prompt)

    def drop(self, name: Name) -> None:
        """Stop routing samples to server `name`; its prompts are assigned to other servers."""
        lane = self._lanes.pop(name, None)
        for prompt in lane.prompts if lane is not None else ():
            self._home.pop(prompt, None)

    def has_room(self, name: Name) -> bool:
        """Return whether server `name` can take another sample: it was not dropped and is not full."""
        return name in self._lanes and self._lanes[name].in_flight < self._capacity

    @property
    def names(self) -> list[Name]:
        """The servers that were not dropped."""
        return list(self._lanes)
