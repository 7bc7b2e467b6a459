"""Decides when a replica calls the buffer in a run with `async.order=as_ready`.

    groups are finished, or prompts are missing    a slot is empty, or soon will be     call at once
                                                   else                                 delay the call

A call costs the buffer's process about a millisecond, however many groups it has. A step may wait for a delayed group,
so the delay is short compared with a segment (the time between two weight versions). No slot stays empty meanwhile: a
replica keeps some prompts in reserve, and begins one as soon as a slot is free. It requests this reserve after its
first call of a segment, when the other replicas have filled their slots too.
"""

from __future__ import annotations

_PART = 8  # a replica keeps one prompt in reserve for this many groups that it can generate at the same time
_SHARE = 32  # a call is delayed by at most 1 / _SHARE of the previous segment
_LONGEST_S = 2.0  # longest delay of a call


class CallBatcher:
    """Decides when one replica calls the buffer, and how many prompts it requests.

    Args:
        places: how many groups the replica can generate at the same time.
        most: how many groups it may hold, waiting prompts included; a limit leaves prompts to other replicas.

    Attributes:
        in_hand: how many prompts it keeps in reserve.
    """

    def __init__(self, places: int, most: int) -> None:
        self.in_hand = max(0, min(places // _PART, most - places))
        self._delay_s = 0.0
        self._is_first = True  # whether this segment has had no call yet
        self._began: float | None = None
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Begin a segment (the time between two weight updates of this replica) at time `now` in seconds.

        From the second segment on, the replica delays its calls of the buffer, in order to combine several into one.
        The longest delay is a small fraction of the previous segment's length.
        """
        if self._began is not None:
            self._delay_s = min(_LONGEST_S, (now - self._began) / _SHARE)
        self._began, self._is_first = now, True

    def missing(self, room: int, waiting: int) -> int:
        """Return how many prompts to request: `room` for new groups plus the reserve, minus the `waiting` prompts,
        which the replica has not begun."""
        return max(0, room + (0 if self._is_first else self.in_hand) - waiting)

    def is_due(self, now: float, missing: int, *, finished: bool, empty: bool) -> bool:
        """Return whether to call the buffer now.

        Args:
            now: seconds of a monotonic clock.
            missing: prompts that the call would request.
            finished: some finished groups are not handed over yet.
            empty: no group is in flight, or some of the requested prompts could begin at once.
        """
        if not (missing or finished):
            return False
        if self._since is None:
            self._since = now
        # no prompt is in reserve for the next group that finishes
        lacks_reserve = finished and 0 < self.in_hand <= missing
        return empty or lacks_reserve or now - self._since >= self._delay_s

    def left_s(self, now: float) -> float:
        """Return the seconds until the replica must call the buffer, after which a call is not delayed further."""
        return self._delay_s if self._since is None else max(0.0, self._delay_s - (now - self._since))

    def called(self) -> None:
        """Record that the replica has called the buffer."""
        self._since, self._is_first = None, False
