"""Chooses the server of each sample, and a group of the server's ranks: those of its prompt, or the least loaded ones.
This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
_UNBOUNDED = 1 << 30


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


class AttentionGroups:
    """Chooses which of a server's attention groups (`rollout.sglang.attention_dp`) generates each sample.

    All samples of a prompt go to one group, because every group has a prefix cache of its own. A new prompt goes to the
    least loaded group. The server's own choice is the next group for each request, whatever its prompt.

    Args:
        count: number of groups of a server.
        first: group of the first prompt; clients that share a server begin with different groups.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        self._order = [(first + step) % count for step in range(count)]
        self._routers: dict[int, Router[int]] = {}

    def take(self, server: int, prompt: Hashable) -> int | None:
        """Return the group of server number `server` for a sample of `prompt`; None: the server has only one."""
        if len(self._order) == 1:
            return None
        return self._routers.setdefault(server, Router(self._order, _UNBOUNDED)).take(prompt)

    def give_back(self, server: int, group: int | None) -> None:
        """Record that a sample of `group` has ended."""
        if group is not None:
            self._routers[server].give_back(group)

    def forget(self, prompt: Hashable) -> None:
        """Forget the groups of `prompt`, whose samples have all finished."""
        for router in self._routers.values():
            router.forget(prompt)

    def drop(self, server: int) -> None:
        """Forget what the groups of a server have, because the server was replaced."""
        self._routers.pop(server, None)
