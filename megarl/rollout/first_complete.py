"""Generates groups until enough of them are complete over all replicas, and interrupts the others.

    replica 0   |-- window --|-- window --|-- window --|  interrupt
    replica 1   |-- window --|-- window --|-- window --|  interrupt
                             ^            ^            ^  meet: the numbers of the groups that became complete

An engine that decodes only inside `wait` decodes `WINDOW_STEPS` steps in a window, so which groups are complete first
does not depend on the speed of the machine: a second run of the same layout repeats it. On servers a window takes a few
tenths of a second, replicas do not meet but count in the run's store, and the clock decides.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from megarl.rollout.engine import ignore_progress

if TYPE_CHECKING:
    from megarl.data.trajectory import Trajectory
    from megarl.rollout.groups import GroupGenerator
    from megarl.training.parallel import Layout

#: Decode steps between two meetings of the replicas. A meeting costs about a millisecond.
WINDOW_STEPS = 16
_IDLE_S = 0.1  # seconds between two looks of a replica that has no groups in flight on servers
_rounds = itertools.count()  # every rank begins its rounds in the same order
_LOOK_STEPS = 8  # decode steps between two calls of the function that `GroupGenerator.wait` gets


class Complete(NamedTuple):
    """The groups that are complete.

    Attributes:
        trajectories: trajectories of this replica's groups, by number.
        windows: the window in which each group of any replica became complete, by number.
    """

    trajectories: dict[int, list[Trajectory]]
    windows: dict[int, int]

    def first(self, wanted: int, begun: Callable[[int], int]) -> list[int]:
        """Return the numbers of the `wanted` groups to train on, ascending: in the order in which they became complete.

        Groups of one window, and those that an earlier step left over, go by number.

        Args:
            begun: returns a value by which groups come first, whenever they became complete.
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
    """Generate until `wanted` groups over all replicas, and all `required` ones, are complete; return all complete
    groups. Every rank of all replicas calls this.

    Args:
        groups: the groups in flight of this replica; the generator is not open, before and after the call.
        required: numbers of this replica's groups that must be complete.
        ready: complete groups of this replica that no step has used, by number.
        by_steps: whether rounds of turns wait for all environments, see `GroupGenerator.wait`.
        advance: called with the number of samples that have just finished.

    Raises:
        EpisodeError: an environment failed, and `on_error` is `fail`.
    """
    complete = dict(ready)
    complete |= groups.wait()  # an interruption may have found a group complete
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
    """Counts complete groups over all replicas, which wait for each other after every window.

    Args:
        left: how many groups, and how many required ones, have to become complete.
    """

    def __init__(self, layout: Layout, left: tuple[int, int]) -> None:
        self._layout, self._left = layout, left

    def add(self, ended: int, required: int) -> bool:
        """Count groups, and required ones, that became complete on this replica; return whether enough are complete."""
        shares = self._layout.dp_group.all_gather_json([ended, required])
        groups, missing = self._left
        self._left = groups - sum(number for number, _ in shares), missing - sum(number for _, number in shares)
        return max(self._left) <= 0

    def close(self) -> None:
        """End the round. Every rank has read the counts for the last time."""


class _StoreTally(_Tally):
    """Counts complete groups in the run's store. Replicas on servers must not wait for each other while they generate,
    because any of them may have called a meeting of all ranks (`megarl.system.meetings`)."""

    def __init__(self, layout: Layout, left: tuple[int, int]) -> None:
        super().__init__(layout, left)
        self._store = layout.world.store()
        round_ = next(_rounds)
        self._keys = [f"complete/{round_}/{name}" for name in ("groups", "required")]

    def add(self, ended: int, required: int) -> bool:
        """Count this replica's groups; the counts of all replicas grow, so each of them sees enough at some time."""
        enough = None
        if self._layout.is_lead:
            counts = [self._store.add(key, n) for key, n in zip(self._keys, (ended, required), strict=True)]
            enough = all(number >= left for number, left in zip(counts, self._left, strict=True))
        return bool(self._layout.mp_group.broadcast_json(enough))

    def close(self) -> None:
        """Delete the counts of this round."""
        if self._layout.rank == 0:
            for key in self._keys:
                self._store.delete_key(key)


def _window(groups: GroupGenerator, *, by_steps: bool) -> dict[int, list[Trajectory]]:
    """Generate for one window, and return the groups that became complete."""
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
