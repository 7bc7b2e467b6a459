"""Whether mail has come, for whoever asks many times a second: a call to the store for each would keep that busy.

has_come  ->  is the call that is under way answered?  ->  no: False
              the store answers it when the mail comes, or after a few seconds without; then there is another one
"""

from __future__ import annotations

from typing import Any


class Notice:
    """A worker's look-out for mail, under one name at a time.

    Args:
        actor: the store's handle.
        team: of the worker.
        slice_s: seconds after which a call comes back without mail.
    """

    def __init__(self, actor: Any, team: str, slice_s: float) -> None:
        self._actor, self._team, self._slice_s = actor, team, slice_s
        self._name, self._call = "", None

    def has_come(self, name: str) -> bool:
        """Whether there is mail under this name, as far as the store has told."""
        import ray

        if self._call is None or self._name != name:
            self._name, self._call = name, self._actor.read.remote(self._team, name, self._slice_s)
        if not ray.wait([self._call], timeout=0)[0]:
            return False
        call, self._call = self._call, None
        try:
            found, _ = ray.get(call)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return False  # it may begin again; if not, the worker's next other call says so
        return found is not None
