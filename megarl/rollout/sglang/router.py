"""The choice of the server for the next sample: bounded, sticky per prompt, else the least loaded. Pure bookkeeping, no
I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass
class _Lane:
    """One server: samples in flight, prompts that stick to it."""

    in_flight: int = 0
    prompts: set[Hashable] = field(default_factory=set)


class NoServerError(Exception):
    """The error when every server was dropped."""


class Router(Generic[Name]):
    """The router of the samples of one call.

    All samples of a prompt go to one server, whose prefix cache then holds the prompt. When that server is full, a
    sample waits for it rather than prefill the prompt somewhere else; prompts are spread by load in the first place.

    Args:
        capacity: samples in flight per server.
    """

    def __init__(self, names: Iterable[Name], capacity: int) -> None:
        self._lanes = {name: _Lane() for name in names}
        self._capacity = capacity
        self._home: dict[Hashable, Name] = {}

    def take(self, prompt: Hashable) -> Name | None:
        """Return a slot for a sample of `prompt`, or None when it has to wait for one.

        Raises:
            NoServerError: none is left.
        """
        if not self._lanes:
            raise NoServerError
        name = self._home.get(prompt)
        if name is None:
            # Prompts are counted before samples: samples of a prompt that has just found its home are still to come.
            name = min(self._lanes, key=lambda n: (len(self._lanes[n].prompts), self._lanes[n].in_flight))
        lane = self._lanes[name]
        if lane.in_flight >= self._capacity:
            return None
        self._home[prompt] = name
        lane.prompts.add(prompt)
        lane.in_flight += 1
        return name

    def give_back(self, name: Name) -> None:
        """End of one sample's stay at `name`, which may have been dropped meanwhile."""
        if name in self._lanes:
            self._lanes[name].in_flight -= 1

    def add(self, name: Name) -> None:
        """Route to `name`, too: a server that is new, or was dropped before."""
        self._lanes[name] = _Lane()

    def forget(self, prompt: Hashable) -> None:
        """Forget `prompt`: all its samples are done."""
        name = self._home.pop(prompt, None)
        if name is not None:
            self._lanes[name].prompts.discard(prompt)

    def drop(self, name: Name) -> None:
        """Route nothing to `name` any more; its prompts look for another server."""
        lane = self._lanes.pop(name, None)
        for prompt in lane.prompts if lane is not None else ():
            self._home.pop(prompt, None)

    @property
    def names(self) -> list[Name]:
        """Servers that are left."""
        return list(self._lanes)
