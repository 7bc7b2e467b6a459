"""When a replica calls the buffer, where groups go to training as they get ready.

    something is finished, or prompts are missing    a place is empty, or would soon be    call at once
                                                     else                                  put it off

A call costs the buffer's process about a millisecond, whatever it carries. What is put off comes later to a step that
waits for it, so the time is short beside that from one version of the weights to the next one. Nothing stands still
meanwhile: a replica has some prompts in hand, which begin as soon as there is room. It takes these only after its first
call of a segment: by then the others have called, too, and no place of theirs is empty for what waits here.
"""

from __future__ import annotations

_PART = 8  # of a replica's places: prompts in hand
_SHARE = 32  # of a segment that a call is put off
_LONGEST_S = 2.0  # that a call is put off


class Pace:
    """Of one replica.

    Args:
        places: groups that it generates at a time.
        most: groups that it may hold, those in hand included, so that there is as much for the others.

    Attributes:
        in_hand: prompts that it holds and does not generate yet.
    """

    def __init__(self, places: int, most: int) -> None:
        self.in_hand = max(0, min(places // _PART, most - places))
        self._delay_s = 0.0
        self._is_first = True  # nothing has been asked for in this segment
        self._began: float | None = None
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Begin a segment with one version of the weights; until the second one nothing is put off."""
        if self._began is not None:
            self._delay_s = min(_LONGEST_S, (now - self._began) / _SHARE)
        self._began, self._is_first = now, True

    def missing(self, room: int, held: int) -> int:
        """Prompts to ask for: so many as there is `room` for, and some to have in hand, less those that are `held`."""
        return max(0, room + (0 if self._is_first else self.in_hand) - held)

    def is_due(self, now: float, missing: int, *, finished: bool, empty: bool) -> bool:
        """Say whether to call the buffer now.

        Args:
            now: seconds, of a clock that never goes back.
            missing: prompts that it would ask for.
            finished: there are groups that the buffer has not been told of.
            empty: nothing is being generated, or some of the prompts could begin at once.
        """
        if not (missing or finished):
            return False
        if self._since is None:
            self._since = now
        soon = finished and 0 < self.in_hand <= missing  # none is in hand for the next place
        return empty or soon or now - self._since >= self._delay_s

    def left_s(self, now: float) -> float:
        """Seconds until what has been put off is due."""
        return self._delay_s if self._since is None else max(0.0, self._delay_s - (now - self._since))

    def called(self) -> None:
        """Note that the buffer knows everything."""
        self._since, self._is_first = None, False
