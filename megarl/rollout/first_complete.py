"""Generates groups until enough of them are complete over all replicas, and interrupts the others.

    replica 0   |-- window --|-- window --|-- window --|  interrupt
    replica 1   |-- window --|-- window --|-- window --|  interrupt
                             ^            ^            ^  all replicas exchange how many groups became complete

A window is a period of generation between two such exchanges. An engine that decodes only inside `wait` decodes
`WINDOW_STEPS` steps in a window, so the speed of the machine does not decide which groups are complete first: a second
run of the same layout repeats the order. On servers a window takes a few tenths of a second, replicas add to counters
in the run's store instead of waiting for each other, and the order depends on time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from megarl.rollout.engine import ignore_progress
from megarl.system.progress_watch import ProgressWatch

if TYPE_CHECKING:
    from megarl.data.trajectory import Trajectory
    from megarl.rollout.groups import GroupGenerator
    from megarl.training.parallel import Layout

#: Decode steps after which the replicas exchange how many groups are complete, which takes about a millisecond.
WINDOW_STEPS = 16
_IDLE_S = 0.1  # seconds between two reads of the counters by a replica that has no groups in flight; only with servers
_rounds = itertools.count()  # round numbers for keys in the store; equal on all ranks, which begin the same rounds
_LOOK_STEPS = 8  # `GroupGenerator.wait` calls `enough` after every so many decode steps


class Complete(NamedTuple):
    """The prompt groups that are complete at the end of a round of generation.

    Attributes:
        trajectories: trajectories of this replica's complete groups, by the group's number.
        windows: for each complete group of all replicas, by its number, the window (period of generation, counted
            from 1) in which it became complete; 0: before this round.
    """

    trajectories: dict[int, list[Trajectory]]
    windows: dict[int, int]

    def first(self, wanted: int, begun: Callable[[int], int]) -> list[int]:
        """Return the numbers of the `wanted` groups to train on, ascending.

        Groups with a lower `begun` value are chosen first, then groups that became complete in an earlier window, then
        groups with lower numbers.

        Args:
            begun: called with a group's number, returns the step in which it began or a later one.
        """
        order = sorted(self.windows, key=lambda number: (begun(number), self.windows[number], number))
        return sorted(order[:wanted])


def first_complete(
    groups: GroupGenerator,
    layout: Layout,
    wanted: int,
    required: Collection[int],
    ready: dict[int, list[Trajectory]],
    *,
    by_steps: bool,
    advance: Callable[[int], None] = ignore_progress,
) -> Complete:
    """Generate until `wanted` groups over all replicas, and each replica's `required` groups, are complete; return all
    complete groups. Collective over all ranks of all replicas.

    Args:
        groups: has this replica's groups in flight; it must not be open before the call, and is not open after it.
        wanted: number of groups over all replicas.
        required: numbers of this replica's groups that must be complete.
        ready: this replica's groups that became complete in earlier rounds and were not used, by number.
        by_steps: whether rounds of turns wait for all environments, see `GroupGenerator.wait`.
        advance: called with the number of samples that have just finished.

    Raises:
        EpisodeError: an environment failed, and `on_error` is `fail`.
    """
    complete = dict(ready)
    complete |= groups.wait()  # groups that became complete when the last round was interrupted
    windows, missing = dict.fromkeys(complete, 0), set(required) - complete.keys()
    shares = layout.dp_group.all_gather_json([len(complete), len(missing)])
    left = wanted - sum(number for number, _ in shares), sum(number for _, number in shares)
    groups.open(whole=by_steps)
    tally = _StoreTally(layout, left) if groups.is_async and layout.dp_size > 1 else _Tally(layout, left)
    ended: dict[int, list[Trajectory]] = {}
    for window in itertools.count(1):
        if tally.add(len(ended), len(missing & ended.keys())):
            break
        ended = _window(groups, by_steps=by_steps)
        complete |= ended
        windows |= dict.fromkeys(ended, window)
        advance(sum(map(len, ended.values())))
    groups.interrupt()
    everywhere = layout.dp_group.all_gather_json(list(windows.items()))
    tally.close()
    return Complete(complete, {number: window for share in everywhere for number, window in share})


class _Tally:
    """Counts complete groups over all replicas by a collective after every window (period of generation).

    Args:
        left: how many groups have to become complete, and how many of the required groups.
    """

    def __init__(self, layout: Layout, left: tuple[int, int]) -> None:
        self._layout, self._left = layout, left

    def add(self, ended: int, required: int) -> bool:
        """Add how many groups, and how many required groups, became complete on this replica; return whether enough are
        complete over all replicas."""
        shares = self._layout.dp_group.all_gather_json([ended, required])
        groups, missing = self._left
        self._left = groups - sum(number for number, _ in shares), missing - sum(number for _, number in shares)
        return max(self._left) <= 0

    def close(self) -> None:
        """End the round; called when no rank will use the counts again."""


class _StoreTally(_Tally):
    """Counts complete groups by counters in the run's store. Replicas on servers must not wait for each other while
    they generate, because a replica may already be waiting for all ranks in a meeting (`megarl.system.meetings`)."""

    def __init__(self, layout: Layout, left: tuple[int, int]) -> None:
        super().__init__(layout, left)
        self._store = layout.world.store()
        round_ = next(_rounds)
        self._keys = [f"complete/{round_}/{name}" for name in ("groups", "required")]
        every_s = layout.world.deadline_s / 8
        self._watch = ProgressWatch(
            self._store, f"complete/{round_}", layout.world, layout.dp_rank, layout.dp_size, every_s
        )
        self._reported = -math.inf

    def add(self, ended: int, required: int) -> bool:
        """Add this replica's groups to the counters; return whether enough groups are complete over all replicas.

        Replicas may see this at different times, but all do, because the counters only grow.

        Raises:
            WorkerError: another replica has not called this for the world's deadline.
        """
        enough = None
        if self._layout.is_lead:
            counts = [self._store.add(key, n) for key, n in zip(self._keys, (ended, required), strict=True)]
            enough = all(number >= left for number, left in zip(counts, self._left, strict=True))
            self._look()
        return bool(self._layout.mp_group.broadcast_json(enough))

    def close(self) -> None:
        """Delete this round's counters from the store."""
        if self._layout.rank == 0:
            self._store.delete(*self._keys)
            self._watch.delete()

    def _look(self) -> None:
        """Report progress, and look for stuck replicas, a few times within the deadline."""
        now = time.monotonic()
        if now - self._reported >= self._watch.every_s:
            self._reported = now
            self._watch.report()
        self._watch.refuse_stuck()


def _window(groups: GroupGenerator, *, by_steps: bool) -> dict[int, list[Trajectory]]:
    """Generate for one window (a number of decode steps, or on servers a short time), and return the groups that became
    complete, by number."""
    looks = itertools.count(1)
    is_over = False

    def enough() -> bool:
        nonlocal is_over
        is_over = is_over or next(looks) * _LOOK_STEPS >= WINDOW_STEPS
        return is_over

    if groups.is_async:
        if not groups.busy:
            time.sleep(_IDLE_S)
        return dict(groups.wait())
    if groups.is_batched:
        return dict(groups.wait())
    ended: dict[int, list[Trajectory]] = {}
    while groups.busy and not is_over:
        ended |= groups.wait(enough, whole=by_steps)
    return ended
