"""A replica that decodes samples at the same time, each token by token; the speed depends on how many run."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from megarl.simulation.seconds import Seconds

_EPSILON = 1e-9  # seconds within which two moments count as the same


_Sample: TypeAlias = tuple[float, int, int]  # (end on the clock of tokens, group, tokens)


class ReplicaClock:
    """The simulated clock of one replica. Time passes only in `advance`. Speed changes only when a sample ends.

    Args:
        seconds: durations of decoding steps and prefills.
        slots: maximum number of samples decoded at the same time; other samples wait in order.
    """

    def __init__(self, seconds: Seconds, slots: int, prompt: int) -> None:
        self._seconds, self._slots, self._prompt = seconds, slots, prompt
        self._prompt_s = seconds.prefill(prompt)
        # seconds per token, by number of running samples
        self._pace = [seconds.token(running) for running in range(slots + 1)]
        self._running: list[_Sample] = []  # running samples, ordered by their end
        self._queue: deque[tuple[int, int]] = deque()  # waiting samples: (group, tokens)
        self._left: dict[int, int] = {}  # number of unfinished samples per group
        self._clock = 0.0  # tokens that a sample running since the start would have
        self._debt = 0.0  # seconds to spend before decoding continues
        self.busy_s = 0.0
        self.sample_s = 0.0  # seconds that samples ran, summed over samples

    @property
    def busy(self) -> bool:
        """Whether any sample is running."""
        return bool(self._running)

    @property
    def load(self) -> int:
        """Number of samples that run or wait for a slot."""
        return len(self._running) + len(self._queue)

    @property
    def free(self) -> int:
        """Number of free slots without waiting samples."""
        return max(0, self._slots - len(self._running) - len(self._queue))

    def add(self, group: int, tokens: Sequence[int]) -> None:
        """Begin a group whose samples will have these numbers of tokens. The replica prefills the group's prompt
        once."""
        self._left[group] = len(tokens)
        self._debt += self._prompt_s
        self._queue.extend((group, length) for length in tokens)
        self._fill()

    def reread(self) -> None:
        """Add the time to prefill all running samples (prompt and tokens) again with new weights."""
        read = sum(self._prompt + tokens - (end - self._clock) for end, _, tokens in self._running)
        self._debt += self._seconds.prefill(round(read)) if self._running else 0.0

    def fail(self, restart_s: float) -> None:
        """Kill the engine: running samples begin again after `restart_s` seconds."""
        self._running = sorted((self._clock + tokens, group, tokens) for _, group, tokens in self._running)
        self._debt += restart_s

    def until_event(self, wanted: int) -> float | None:
        """Return the seconds until a group ends, or until `wanted` slots are free; None when nothing runs."""
        if not self._running:
            return None
        total, clock, running = self._debt, self._clock, len(self._running)
        pace, over, left = self._pace, dict[int, int](), self._left
        # Number of samples that must end: until `wanted` slots are free, or 1 if samples in the queue wait for a slot.
        last = 1 if self._queue else wanted - self.free
        for number, (end, group, _) in enumerate(self._running, 1):
            if end != clock:
                total += (end - clock) * pace[running]
                clock = end
            running -= 1
            over[group] = gone = over.get(group, 0) + 1
            if number == last or gone == left[group]:
                break
        return total

    def advance(self, seconds: float) -> list[int]:
        """Advance time, and return the groups that ended."""
        over: list[int] = []
        if self._running:
            self.busy_s += seconds
        pause = min(self._debt, seconds)
        self._debt -= pause
        seconds -= pause
        ended, count, running = 0, len(self._running), self._running
        while ended < count:
            end, group, _ = running[ended]
            needed = (end - self._clock) * self._pace[count - ended]
            if needed > seconds + _EPSILON:
                break
            seconds -= needed
            self.sample_s += needed * (count - ended)
            self._clock, ended = end, ended + 1
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group]
                over.append(group)
            if self._queue:
                del running[:ended]
                self._fill()
                ended, count = 0, len(running)
        if ended < count and seconds > 0:
            self._clock += seconds / self._pace[count - ended]
            self.sample_s += seconds * (count - ended)
        del running[:ended]
        return over

    def finish(self) -> float:
        """Generate everything that remains, and return the seconds it takes."""
        total = 0.0
        while (seconds := self.until_event(0)) is not None:
            self.advance(seconds)
            total += seconds
        return total

    def _fill(self) -> None:
        while self._queue and len(self._running) < self._slots:
            group, tokens = self._queue.popleft()
            insort(self._running, (self._clock + tokens, group, tokens))
