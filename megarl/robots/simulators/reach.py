"""Reach and push: a gripper over a table, seen from above. numpy only, thousands of environment steps a second.

    reach_red, reach_green, reach_blue              lower the gripper on the square of that colour
    push_left, push_right, push_down, push_up       push the orange disc into that edge of the table

Tasks of a kind share their scenes: trial 7 of reach_red and of reach_blue look the same, and only the instruction
differs. The table is the square from -1 to 1, x to the right and y up.

An action is 3 numbers: the gripper's motion in x and y, in parts of `speed`, and whether it is lowered (above 0).
Raised, it passes over everything. Lowered, it pushes discs along the line from its centre to theirs, so a disc pushed
off-centre slips away sideways; it cannot be lowered on a disc. Discs push each other and stop at the rim; nothing has
momentum. The state is the gripper's x and y, and 1 if it is lowered, else -1.

`progress` is the completed part of the trial's path: a function of the trial and of the current positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .protocol import Frame, Numbers, Observation, Outcome, Simulator, TaskSpec

Point = tuple[float, float]

GRIPPER, DISC, SQUARE = 0.08, 0.14, 0.13  # radii of a gripper and a disc, and half the side of a square
EDGE = 0.7  # a disc is at the table's edge when its centre is beyond this coordinate
PARTS = 4  # number of parts of an environment step; in each of them a gripper moves less than its radius
HOLE = 0.55 * GRIPPER  # radius of the hole of a raised gripper's ring, which shows the objects inside
FAR = 0.35  # minimum distance between the centres of objects
COLORS = {"red": (214, 48, 49), "green": (39, 158, 82), "blue": (41, 98, 214)}
ORANGE, GREY, TABLE, RIM, BLACK = (240, 138, 24), (128, 128, 136), (236, 232, 222), (206, 200, 186), (24, 24, 28)
DIRECTIONS: Mapping[str, Point] = {"left": (-1, 0), "right": (1, 0), "down": (0, -1), "up": (0, 1)}
INSTRUCTIONS = {
    **{f"reach_{color}": f"lower the gripper on the {color} square" for color in COLORS},
    "push_left": "push the orange disc to the left edge",
    "push_right": "push the orange disc to the right edge",
    "push_down": "push the orange disc to the bottom edge",
    "push_up": "push the orange disc to the top edge",
}
#: Minimum and maximum of the settings.
RANGES = {"size": (16, 512), "max_steps": (1, 1000), "trials": (1, 1 << 32), "speed": (0.01, 0.2)}


class Reach(Simulator):
    """One task of the simulator `reach`: reaching or pushing."""

    settings: ClassVar[Mapping[str, Any]] = {
        "size": 32,  # height and width of the picture
        "max_steps": 32,  # environment steps of an episode
        "trials": 1000,
        "speed": 0.1,  # distance that a gripper moves along each axis in an environment step; the table's side is 2
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the simulator's seven tasks."""
        chosen = {**cls.settings, **settings}
        for key, (low, high) in RANGES.items():
            if not low <= chosen[key] <= high:
                raise ValueError(f"reach: invalid value of `{key}`: {chosen[key]}; allowed: {low} to {high}")
        return [
            TaskSpec(
                name=name,
                instruction=instruction,
                trials=chosen["trials"],
                max_steps=chosen["max_steps"],
                action_dim=3,
                state_dim=3,
                cameras={"top": (chosen["size"], chosen["size"])},
            )
            for name, instruction in INSTRUCTIONS.items()
        ]

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        self.spec = self.find_task(task, settings)
        self._speed = float({**self.settings, **settings}["speed"])
        self._kind, _, self._goal = task.partition("_")
        self._canvas = Canvas(self.spec.cameras["top"][0])
        self._squares: dict[str, Point] = {}
        self._discs: list[list[float]] = []  # centres of the discs, the orange one first
        self._x, self._y, self._lowered = 0.0, 0.0, False
        self._start = self._left = 0.0  # length of the path to the goal at the start, and now

    def reset(self, trial: int) -> Observation:
        """Begin an episode in the scene of `trial`."""
        self.begin(trial)
        scene = Scene.of_trial(self._kind, trial)
        self._squares = dict(zip(COLORS, scene.squares, strict=False))
        self._discs = [list(disc) for disc in scene.discs]
        self._x, self._y = scene.gripper
        self._lowered = False
        self._start = self._left = self._remaining()
        return self._observation()

    def step(self, actions: Numbers) -> Outcome:
        """Execute actions [K, 3]: up to K environment steps, fewer at success or the limit."""
        outcome = self.execute(np.clip(np.asarray(actions, np.float64), -1, 1), self._act, self._observation)
        return replace(outcome, progress=max(0.0, 1 - self._left / self._start))

    def _act(self, action: NDArray[np.float64]) -> bool:
        dx, dy, lower = action.tolist()
        self._move(dx * self._speed, dy * self._speed, lower > 0)
        self._left = self._remaining()
        return self._left == 0

    def expert(self) -> Numbers:
        """Return the action [3] of an expert that reads the positions of all objects."""
        if self._kind == "reach":
            x, y = self._squares[self._goal]
            dx, dy = self._towards(x, y)
            arrives = max(abs(self._x + dx * self._speed - x), abs(self._y + dy * self._speed - y)) < SQUARE
            return np.array([dx, dy, 1 if arrives else -1], np.float32)
        (ox, oy), (ux, uy) = self._discs[0], DIRECTIONS[self._goal]
        along = (self._x - ox) * ux + (self._y - oy) * uy
        across = (self._y - oy) * ux - (self._x - ox) * uy  # the gripper's distance to the left of the disc's path
        reach = DISC + GRIPPER
        if abs(across) < 0.05 and ((self._lowered and along < 0) or -along > reach):
            back = min(1.0, max(-1.0, -across / self._speed))
            forward = 1.0 if self._lowered else 0.0
            return np.array([forward * ux - back * uy, forward * uy + back * ux, 1], np.float32)
        off = reach + 0.02
        return np.array([*self._towards(ox - off * ux, oy - off * uy), -1], np.float32)

    def _towards(self, x: float, y: float) -> Point:
        dx, dy = (x - self._x) / self._speed, (y - self._y) / self._speed
        longest = max(1.0, abs(dx), abs(dy))
        return dx / longest, dy / longest

    def _remaining(self) -> float:
        """Return the length of the path that remains: the gripper's way, then the way of the disc, if one is pushed.

        A gripper that has to be lowered adds the way of one environment step.
        """
        lowering = 0.0 if self._lowered else self._speed
        if self._kind == "reach":
            x, y = self._squares[self._goal]
            beside = max(0.0, abs(self._x - x) - SQUARE), max(0.0, abs(self._y - y) - SQUARE)
            return length(*beside) + lowering
        (ox, oy), (ux, uy) = self._discs[0], DIRECTIONS[self._goal]
        push = EDGE - (ox * ux + oy * uy)
        if push <= 0:
            return 0.0
        reach = DISC + GRIPPER
        return push + length(self._x - ox + reach * ux, self._y - oy + reach * uy) + lowering

    def _move(self, dx: float, dy: float, lower: bool) -> None:
        """Execute one environment step: first the motion, with the gripper as it was, then raising or lowering."""
        pushes, rim = self._lowered and lower, 1 - GRIPPER
        for _ in range(PARTS):
            self._x = min(rim, max(-rim, self._x + dx / PARTS))
            self._y = min(rim, max(-rim, self._y + dy / PARTS))
            if pushes and self._discs:
                self._push()
        free = all(length(self._x - x, self._y - y) >= DISC + GRIPPER - 1e-9 for x, y in self._discs)
        self._lowered = lower and (pushes or free)

    def _push(self) -> None:
        """Let the gripper push discs, and discs push each other; an object at the rim stops whatever pushes it."""
        gripper = [self._x, self._y]
        rim, (first, second) = 1 - DISC, self._discs
        for disc in self._discs:
            _part(gripper, disc, DISC + GRIPPER, 0.0)
        # Each disc moves by half of their overlap, but not past the rim; each round halves the overlap that remains.
        for _ in range(4):
            _part(first, second, 2 * DISC, 0.5)
            for disc in self._discs:
                disc[:] = [min(rim, max(-rim, at)) for at in disc]
        for disc in self._discs:
            _part(disc, gripper, DISC + GRIPPER, 0.0)
        self._x, self._y = (min(1 - GRIPPER, max(GRIPPER - 1, at)) for at in gripper)

    def _observation(self) -> Observation:
        picture = self._canvas.begin()
        for color, (x, y) in self._squares.items():
            picture.square(x, y, SQUARE, COLORS[color])
        for (x, y), color_ in zip(self._discs, (ORANGE, GREY), strict=False):
            picture.disc(x, y, DISC, color_)
        if self._lowered:
            picture.disc(self._x, self._y, GRIPPER, BLACK)
        else:
            picture.disc(self._x, self._y, GRIPPER, BLACK, hole=HOLE)
        state = np.array([self._x, self._y, 1 if self._lowered else -1], np.float32)
        return Observation({"top": picture.end()}, state)


def length(x: float, y: float) -> float:
    """Return the length of a vector; the same formula gives the same bits with numpy arrays, unlike `math.hypot`."""
    return math.sqrt(x * x + y * y)


@dataclass(frozen=True)
class Scene:
    """The places of all objects in a start state."""

    squares: Sequence[Point]  # centres of the squares, in the order of `COLORS`; empty: a pushing task
    discs: Sequence[Point]  # centres of the orange and the grey disc; empty: a reaching task
    gripper: Point

    @classmethod
    def of_trial(cls, kind: str, trial: int) -> Scene:
        """Return the scene of start state `trial`, which all tasks of a kind (`reach` or `push`) share."""
        numbers = _random_numbers(kind, trial)
        if kind == "reach":
            *squares, gripper = _separate_places(numbers, len(COLORS) + 1)
            return cls(squares, [], gripper)
        x, y = next(numbers) * 0.7 - 0.35, next(numbers) * 0.7 - 0.35
        # Place the grey disc outside of the four paths along which the orange disc may have to move.
        u, v = (at + (0.36 + 0.14 * next(numbers)) * (1 if next(numbers) < 0.5 else -1) for at in (x, y))
        return cls([], [(x, y), (u, v)], (next(numbers) * 1.6 - 0.8, next(numbers) * 1.6 - 0.8))


def _random_numbers(kind: str, trial: int) -> Iterator[float]:
    """Yield numbers from 0 to 1 that depend only on the kind of task and the trial, with every version of numpy."""
    generator = np.random.Philox(key=[0x4D454741, ("reach", "push").index(kind)], counter=[0, 0, 0, trial])
    while True:
        for raw in generator.random_raw(16).tolist():
            yield raw / 2.0**64


def _separate_places(numbers: Iterator[float], count: int) -> list[Point]:
    """Draw places of `count` discs on the simulated table that do not touch, from random `numbers` in 0 to 1."""
    places: list[Point] = []
    while len(places) < count:
        x, y = next(numbers) * 1.6 - 0.8, next(numbers) * 1.6 - 0.8
        if all(math.hypot(x - a, y - b) >= FAR for a, b in places):
            places.append((x, y))
    return places


def _part(one: list[float], other: list[float], distance: float, share: float) -> None:
    """If two centres are closer than `distance`, move them apart along their line in place: `one` moves by `share` of
    the missing distance, `other` by the rest."""
    dx, dy = other[0] - one[0], other[1] - one[1]
    now = length(dx, dy)
    if now >= distance:
        return
    dx, dy = (dx / now, dy / now) if now > 0 else (1.0, 0.0)
    gap = distance - now
    one[:] = [one[0] - share * gap * dx, one[1] - share * gap * dy]
    other[:] = [other[0] + (1 - share) * gap * dx, other[1] + (1 - share) * gap * dy]


class Canvas:
    """A canvas of antialiased shapes: a shape's colour is blended into a pixel by the part that the shape covers.

    Attributes:
        pixel: side of a pixel, in the table's units.
        xs, ys: coordinates of the centres of columns and rows, float32 [size].
        table: a picture that shows only the table, float32 [size, size, 3].
    """

    def __init__(self, size: int) -> None:
        self.pixel = 2.0 / size
        centres = (np.arange(size) + 0.5) * self.pixel - 1
        self.xs = centres.astype(np.float32)
        self.ys = -self.xs  # row indices increase downwards
        self._picture = np.empty((size, size, 3), np.float32)
        self._picture[...] = RIM
        self.square(0, 0, EDGE, TABLE)
        self.table = self._picture.copy()

    def begin(self) -> Canvas:
        """Start a new picture that shows only the table, and return the canvas to draw the objects on."""
        self._picture = self.table.copy()
        return self

    def end(self) -> Frame:
        """Return the picture drawn since `begin`, uint8 [size, size, 3]."""
        return (self._picture + np.float32(0.5)).astype(np.uint8)

    def square(self, x: float, y: float, half: float, color: tuple[int, int, int]) -> None:
        """Paint a square around (x, y)."""
        columns, rows = self._box(x, y, half)
        across = self._covered(half - np.abs(self.xs[columns] - np.float32(x)))
        down = self._covered(half - np.abs(self.ys[rows] - np.float32(y)))
        self._paint(rows, columns, down[:, None] * across[None, :], color)

    def disc(self, x: float, y: float, radius: float, color: tuple[int, int, int], hole: float = 0.0) -> None:
        """Paint a disc around (x, y), or a ring."""
        columns, rows = self._box(x, y, radius)
        dx, dy = self.xs[columns] - np.float32(x), self.ys[rows] - np.float32(y)
        distance = np.sqrt(dx[None, :] ** 2 + dy[:, None] ** 2)
        coverage = self._covered(radius - distance)
        if hole:
            coverage *= self._covered(distance - hole)
        self._paint(rows, columns, coverage, color)

    def _covered(self, inside: NDArray[Any]) -> NDArray[Any]:
        """Return the covered part of each pixel, 0 to 1; `inside`: how far its centre is inside the shape's rim."""
        return np.clip(np.float32(0.5) + inside / np.float32(self.pixel), 0, 1)

    def _box(self, x: float, y: float, half: float) -> tuple[slice, slice]:
        """Return the columns and rows that a shape may touch."""
        reach, size = half + self.pixel, len(self.xs)

        def span(low: float) -> slice:
            return slice(max(0, int(low / self.pixel)), min(size, int((low + 2 * reach) / self.pixel) + 1))

        return span(x - reach + 1), span(1 - y - reach)

    def _paint(self, rows: slice, columns: slice, coverage: NDArray[Any], color: tuple[int, int, int]) -> None:
        part = self._picture[rows, columns]
        part += coverage[:, :, None] * (np.array(color, np.float32) - part)
