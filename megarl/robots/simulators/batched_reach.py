"""Reach and push for many grippers at once: the numbers, pictures and results of `reach`, row by row and bit by bit.

Every operation is that of `reach.py`, on arrays of rows in place of numbers, in float64 for positions and in float32
for pictures. A shape is painted into a box of pixels of one size in all rows; outside of the shape its coverage is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batched import BatchedSimulator, Rows, RowSteps, Views
from .protocol import TaskSpec
from .reach import (
    BLACK,
    COLORS,
    DIRECTIONS,
    DISC,
    EDGE,
    GREY,
    GRIPPER,
    HOLE,
    ORANGE,
    PARTS,
    SQUARE,
    Canvas,
    Reach,
    Scene,
)

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]


class BatchedReach(BatchedSimulator):
    """Many environments of one task of the simulator `reach`, computed together with numpy."""

    settings = Reach.settings

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the simulator's seven tasks."""
        return Reach.tasks(settings)

    def __init__(self, task: str, settings: Mapping[str, Any], rows: int) -> None:
        self.spec = Reach.find_task(task, settings)
        self._speed = float({**self.settings, **settings}["speed"])
        self._kind, _, self._goal = task.partition("_")
        self._brush = _Brush(self.spec.cameras["top"][0])
        squares, discs = (len(COLORS), 0) if self._kind == "reach" else (0, 2)
        self._squares = np.zeros((rows, squares, 2))
        self._discs = np.zeros((rows, discs, 2))  # centres of the discs, the orange one first
        self._gripper, self._lowered = np.zeros((rows, 2)), np.zeros(rows, np.bool_)
        self._start, self._left = np.ones(rows), np.ones(rows)  # length of the path to the goal at the start, and now

    def reset(self, rows: Rows, trials: NDArray[np.int64]) -> None:
        """Begin an episode in each of `rows`, in the start states `trials`."""
        for row, trial in zip(rows.tolist(), trials.tolist(), strict=True):
            if not 0 <= trial < self.spec.trials:
                raise ValueError(f"{self.spec.name} has no trial {trial}; allowed: 0 to {self.spec.trials - 1}")
            scene = Scene.of_trial(self._kind, trial)
            self._squares[row] = np.array(scene.squares).reshape(self._squares.shape[1:])
            self._discs[row] = np.array(scene.discs).reshape(self._discs.shape[1:])
            self._gripper[row] = scene.gripper
        self._lowered[rows] = False
        self._start[rows] = self._left[rows] = self._remaining(rows)

    def step(self, rows: Rows, actions: NDArray[np.float32]) -> RowSteps:
        """Execute one environment step in each of `rows`, with the actions [R, 3]: motion in x and y, and whether to
        lower the gripper (above 0)."""
        numbers = np.clip(np.asarray(actions, np.float64), -1, 1)
        self._move(rows, numbers[:, :2] * self._speed, numbers[:, 2] > 0)
        self._left[rows] = left = self._remaining(rows)
        done = left == 0
        return RowSteps(done, done)

    def observe(self, rows: Rows) -> Views:
        """Return the pictures and states of `rows`."""
        picture, gripper, lowered = self._brush.begin(len(rows)), self._gripper[rows], self._lowered[rows]
        for place, color in enumerate(COLORS.values() if self._kind == "reach" else ()):
            self._brush.square(picture, self._squares[rows, place], SQUARE, color)
        for place, color in enumerate((ORANGE, GREY) if self._kind == "push" else ()):
            self._brush.disc(picture, self._discs[rows, place], DISC, color)
        self._brush.disc(picture, gripper, GRIPPER, BLACK, ring=~lowered)
        states = np.concatenate([gripper, np.where(lowered, 1.0, -1.0)[:, None]], 1).astype(np.float32)
        return Views({"top": (picture + np.float32(0.5)).astype(np.uint8)}, states)

    def progress(self, rows: Rows) -> Doubles:
        """Return the completed part of the gripper's path in each row, 0 to 1, float64 [R]."""
        return np.maximum(0.0, 1 - self._left[rows] / self._start[rows])

    def expert(self, rows: Rows) -> Floats:
        """Return a scripted expert's next action in each row, float32 [R, 3]; it knows the positions of all objects."""
        if self._kind == "reach":
            goal = self._squares[rows, list(COLORS).index(self._goal)]
            way = self._towards(rows, goal)
            reached = np.abs(self._gripper[rows] + way * self._speed - goal).max(1) < SQUARE
            return np.concatenate([way, np.where(reached, 1.0, -1.0)[:, None]], 1).astype(np.float32)
        (ux, uy), disc, lowered = DIRECTIONS[self._goal], self._discs[rows, 0], self._lowered[rows]
        dx, dy = (self._gripper[rows] - disc).T
        along, across = dx * ux + dy * uy, dy * ux - dx * uy
        reach = DISC + GRIPPER
        pushes = (np.abs(across) < 0.05) & ((lowered & (along < 0)) | (-along > reach))
        back, forward = np.minimum(1.0, np.maximum(-1.0, -across / self._speed)), np.where(lowered, 1.0, 0.0)
        push = np.stack([forward * ux - back * uy, forward * uy + back * ux, np.ones(len(rows))], 1)
        off = reach + 0.02
        way = self._towards(rows, np.stack([disc[:, 0] - off * ux, disc[:, 1] - off * uy], 1))
        walk = np.concatenate([way, np.full((len(rows), 1), -1.0)], 1)
        return np.where(pushes[:, None], push, walk).astype(np.float32)

    def _towards(self, rows: Rows, goal: Doubles) -> Doubles:
        way = (goal - self._gripper[rows]) / self._speed
        return np.asarray(way / np.maximum(1.0, np.abs(way).max(1))[:, None])

    def _remaining(self, rows: Rows) -> Doubles:
        """Return the remaining length of the gripper's path to success in each row, float64 [R]; 0: success."""
        gripper, lowering = self._gripper[rows], np.where(self._lowered[rows], 0.0, self._speed)
        if self._kind == "reach":
            goal = self._squares[rows, list(COLORS).index(self._goal)]
            beside = np.maximum(0.0, np.abs(gripper - goal) - SQUARE)
            return _length(beside) + lowering
        (ux, uy), disc, reach = DIRECTIONS[self._goal], self._discs[rows, 0], DISC + GRIPPER
        push = EDGE - (disc[:, 0] * ux + disc[:, 1] * uy)
        way = np.stack([gripper[:, 0] - disc[:, 0] + reach * ux, gripper[:, 1] - disc[:, 1] + reach * uy], 1)
        return np.where(push <= 0, 0.0, push + _length(way) + lowering)

    def _move(self, rows: Rows, way: Doubles, lower: NDArray[np.bool_]) -> None:
        """Move the grippers by `way` [R, 2], then raise or lower them (`lower`, bool [R]). A gripper pushes discs if it
        is lowered and stays so; a raised one is lowered only where it touches no disc."""
        pushes, rim = self._lowered[rows] & lower, 1 - GRIPPER
        gripper, discs = self._gripper[rows], self._discs[rows]
        pushing = np.flatnonzero(pushes) if discs.shape[1] else np.zeros(0, np.int64)
        for _ in range(PARTS):
            gripper = np.clip(gripper + way / PARTS, -rim, rim)
            if len(pushing):
                gripper[pushing], discs[pushing] = _push(gripper[pushing], discs[pushing])
        apart = _length(gripper[:, None] - discs) >= DISC + GRIPPER - 1e-9
        self._gripper[rows], self._discs[rows] = gripper, discs
        self._lowered[rows] = lower & (pushes | apart.all(1))


def _length(vectors: Doubles) -> Doubles:
    """Return the lengths of vectors [..., 2], equal bit for bit to those of the function `length` in reach.py."""
    x, y = vectors[..., 0], vectors[..., 1]
    return np.asarray(np.sqrt(x * x + y * y))


def _push(gripper: Doubles, discs: Doubles) -> tuple[Doubles, Doubles]:
    """Let grippers [R, 2] push the two discs [R, 2, 2] of their rows, and discs push each other; return the new
    positions of grippers and discs."""
    rim, gap = 1 - DISC, DISC + GRIPPER
    first, second = discs[:, 0], discs[:, 1]
    gripper, first = _part(gripper, first, gap, 0.0)
    gripper, second = _part(gripper, second, gap, 0.0)
    for _ in range(4):
        first, second = _part(first, second, 2 * DISC, 0.5)
        first, second = np.clip(first, -rim, rim), np.clip(second, -rim, rim)
    first, gripper = _part(first, gripper, gap, 0.0)
    second, gripper = _part(second, gripper, gap, 0.0)
    return np.clip(gripper, GRIPPER - 1, 1 - GRIPPER), np.stack([first, second], 1)


def _part(one: Doubles, other: Doubles, distance: float, share: float) -> tuple[Doubles, Doubles]:
    """Move the centres `one` and `other` [R, 2] of two objects apart to `distance`, along the line through both, where
    they are closer: `one` by `share` of the missing distance, `other` by the rest. Return both."""
    way = other - one
    now = _length(way)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        way = np.where(now > 0, way / now, np.array([1.0, 0.0]))
    near, gap = now < distance, distance - now
    moved = one - share * gap * way, other + (1 - share) * gap * way
    return np.where(near, moved[0], one), np.where(near, moved[1], other)


class _Brush:
    """Paints antialiased shapes into R pictures at once, float32 [R, size, size, 3]: one shape per call and picture."""

    def __init__(self, size: int) -> None:
        canvas = Canvas(size)
        self._table, self._xs, self._ys, self._pixel = canvas.table, canvas.xs, canvas.ys, canvas.pixel
        self._size = size

    def begin(self, count: int) -> Floats:
        """Return `count` pictures that show only the table, to paint on."""
        return np.repeat(self._table[None], count, 0)

    def square(self, pictures: Floats, centres: Doubles, half: float, color: tuple[int, int, int]) -> None:
        """Paint a square into each picture; `centres` [R, 2], `half`: half of its side."""
        columns, rows, dx, dy = self._box(centres, half)
        inside = np.float32(half)
        across, down = self._covered(inside - np.abs(dx)), self._covered(inside - np.abs(dy))
        self._paint(pictures, rows, columns, down[:, :, None] * across[:, None, :], color)

    def disc(
        self,
        pictures: Floats,
        centres: Doubles,
        radius: float,
        color: tuple[int, int, int],
        ring: NDArray[np.bool_] | None = None,
    ) -> None:
        """Paint a disc into each picture; `centres` [R, 2]; with a hole in the pictures for which `ring`, bool [R], is
        true."""
        columns, rows, dx, dy = self._box(centres, radius)
        distance: Floats = np.sqrt(np.square(dx[:, None, :]) + np.square(dy[:, :, None]))
        coverage = self._covered(np.float32(radius) - distance)
        if ring is not None:
            coverage *= np.where(ring[:, None, None], self._covered(distance - np.float32(HOLE)), np.float32(1))
        self._paint(pictures, rows, columns, coverage, color)

    def _covered(self, inside: Floats) -> Floats:
        """Return the covered part of each pixel, 0 to 1; `inside`: how far its centre is inside the shape's rim."""
        return np.clip(np.float32(0.5) + inside / np.float32(self._pixel), 0, 1)

    def _box(self, centres: Doubles, half: float) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats, Floats]:
        """Return, for the shape in each picture, the pixels that it may cover and their distances from its centre.

        Args:
            centres: [R, 2], centres of the shapes.
            half: half of a shape's width and height.

        Returns:
            Columns and rows of B x B pixels, int64 [R, B] each, and the distances in x and in y, float32 [R, B] each.
        """
        reach = half + self._pixel
        count = min(self._size, int(2 * reach / self._pixel) + 2)
        x, y = centres.T

        def span(low: Doubles) -> NDArray[np.int64]:
            first = np.clip((low / self._pixel).astype(np.int64), 0, self._size - count)
            return first[:, None] + np.arange(count)

        columns, rows = span(x - reach + 1), span(1 - y - reach)
        dx = self._xs[columns] - x.astype(np.float32)[:, None]
        dy = self._ys[rows] - y.astype(np.float32)[:, None]
        return columns, rows, dx, dy

    def _paint(
        self,
        pictures: Floats,
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        coverage: Floats,
        color: tuple[int, int, int],
    ) -> None:
        """Blend `color` into the B x B pixels of `rows` and `columns` [R, B] in each picture; `coverage` [R, B, B]: the
        part of a pixel that the shape covers, 0 to 1."""
        places = (np.arange(len(pictures))[:, None, None], rows[:, :, None], columns[:, None, :])
        part = pictures[places]
        part += coverage[..., None] * (np.array(color, np.float32) - part)
        pictures[places] = part
