"""Demonstrations of scripted experts, played on all slots of a pool at the same time.

    seen -> expert's action ------------------------------> recorded, with what was seen
                            \\-> + noise -> simulator -> seen

With noise the executed action differs from the expert's, and the expert's next action corrects this. The recorded
action is always the expert's (DART, Laskey et al. 2017). The demonstrations and their order depend only on the
episodes, the noise and the seed, not on which process is faster.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.robots.data.demonstrations import Demonstration
from megarl.robots.envs import Advice, Answer, Failure, Pool
from megarl.robots.simulators.protocol import Numbers, Observation, TaskSpec
from megarl.system.errors import ConfigError, count

_LOOK_S = 1.0  # seconds per wait for answers; the pool has its own deadlines
#: Maximum number of episodes per slot that may run ahead of the next one to yield; finished ones are kept in memory.
_AHEAD = 16


@dataclass
class ExpertCounts:
    """How many expert episodes one call of `demonstrate` played. `solved, unsolved`: episodes, by task."""

    solved: Counter[str] = field(default_factory=Counter)
    unsolved: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # episodes whose simulator failed, by kind
    steps: int = 0  # environment steps of the solved episodes

    def describe(self) -> str:
        """Return one line for the log.

        >>> ExpertCounts(Counter(push=2), Counter(push=1), Counter(crash=1), 31).describe()
        'experts solved 2 of 4 episodes in 31 environment steps; left out: 1 not solved (push 1), 1 failed (crash 1)'
        """
        solved, episodes = self.solved.total(), (self.solved + self.unsolved + self.failures).total()
        text = f"experts solved {solved} of {count(episodes, 'episode')} in {count(self.steps, 'environment step')}"
        parts = []
        for end, counts in (("not solved", self.unsolved), ("failed", self.failures)):
            listed = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
            parts += [f"{counts.total()} {end} ({listed})"] if counts else []
        return text + (f"; left out: {', '.join(parts)}" if parts else "")


@dataclass
class _Play:
    """An episode that a slot plays."""

    number: int
    spec: TaskSpec
    noise: Numbers  # [max_steps, D]
    seen: list[Observation] = field(default_factory=list)
    actions: list[Numbers] = field(default_factory=list)

    def shown(self) -> Demonstration:
        frames = {camera: np.stack([seen.frames[camera] for seen in self.seen]) for camera in self.spec.cameras}
        states = np.stack([seen.state for seen in self.seen])
        return Demonstration(self.spec.name, frames, states, np.stack(self.actions))


def demonstrate(
    pool: Pool,
    episodes: Sequence[tuple[str, int]],
    *,
    noise: float,
    seed: int,
    counts: ExpertCounts | None = None,
    advance: Callable[[int], None] = lambda number: None,
) -> Iterator[Demonstration]:
    """Yield the demonstrations of the episodes that their expert solved, in the order of `episodes`.

    Playing starts when the first demonstration is requested. While an episode takes long, up to 16 later ones per slot
    are played and kept in memory.

    Args:
        pool: a pool whose slots are all idle.
        episodes: task and trial of each episode.
        noise: standard deviation of the noise on every number of the executed actions, in the simulator's units.
        seed: seed of the noise, which depends only on the seed, the task, the trial and the environment step.
        counts: counts of the played episodes, which are increased here.
        advance: `advance(1)` is called when one more episode is over.
    """
    assert noise >= 0, f"a standard deviation of {noise}"
    yield from _Stage(pool, episodes, noise, seed, ExpertCounts() if counts is None else counts, advance).play()


@dataclass
class _Stage:
    """A run of the function `demonstrate`: its six arguments, the episodes that play, and what is finished."""

    _pool: Pool
    _episodes: Sequence[tuple[str, int]]
    _noise: float
    _seed: int
    _counts: ExpertCounts
    _advance: Callable[[int], None]
    _playing: dict[int, _Play] = field(default_factory=dict)
    _over: dict[int, Demonstration | None] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        self._waiting = deque(range(len(self._episodes)))
        # tasks whose simulators were constructed, by slot
        self._constructed: dict[int, set[str]] = {slot: set() for slot in self._pool.slots}

    def play(self) -> Iterator[Demonstration]:
        try:
            for number in range(len(self._episodes)):
                self._next = number
                while number not in self._over:
                    for slot in self._pool.slots:
                        self._begin(slot)
                    for slot, answer in self._pool.answers(_LOOK_S).items():
                        self._take(slot, answer)
                shown = self._over.pop(number)
                if shown is not None:
                    yield shown
        except (GeneratorExit, ConfigError):
            self._pool.abandon()  # the pool can be used again only without episodes in flight
            raise

    def _begin(self, slot: int) -> None:
        """Begin an episode in a free slot, preferably of a task that it has a simulator of."""
        end = self._next + _AHEAD * len(self._pool.slots)
        if slot in self._playing or not self._waiting or self._waiting[0] >= end:
            return
        near = [number for number in self._waiting if number < end]
        number = next((number for number in near if self._episodes[number][0] in self._constructed[slot]), near[0])
        self._waiting.remove(number)
        task, trial = self._episodes[number]
        spec = self._pool.tasks[task]
        self._constructed[slot].add(task)
        noise = noises(self._seed, task, trial, spec.max_steps, spec.action_dim)
        self._playing[slot] = _Play(number, spec, np.float32(self._noise) * noise)
        self._pool.begin(slot, task, trial)

    def _take(self, slot: int, answer: Answer) -> None:
        play = self._playing[slot]
        if isinstance(answer, Failure):
            self._counts.failures[answer.kind] += 1
            self._end(slot, None)
        elif isinstance(answer, Observation):
            play.seen.append(answer)
            self._pool.expert(slot)
        elif isinstance(answer, Advice):
            if answer.action is None:
                raise ConfigError(
                    f"the simulator {self._pool.settings.name!r} has no scripted expert",
                    where="sft.train_files",
                    found=f"experts, for the task {play.spec.name}",
                    fix="list files of demonstrations instead, or start from a trained policy and set sft.steps: 0",
                )
            self._pool.act(slot, (answer.action + play.noise[len(play.actions)])[None])
            play.actions.append(answer.action)
        elif not answer.over:
            play.seen.append(answer.observation)
            self._pool.expert(slot)
        elif answer.success:
            self._counts.solved[play.spec.name] += 1
            self._counts.steps += len(play.actions)
            self._end(slot, play.shown())
        else:
            self._counts.unsolved[play.spec.name] += 1
            self._end(slot, None)

    def _end(self, slot: int, shown: Demonstration | None) -> None:
        self._over[self._playing.pop(slot).number] = shown
        self._advance(1)


def noises(seed: int, task: str, trial: int, steps: int, dim: int) -> Numbers:
    """Return standard normal noise, float32 [steps, dim], that depends only on the arguments.

    The first k steps are the same whatever `steps` is.
    """
    name = int.from_bytes(hashlib.blake2b(task.encode(), digest_size=8).digest(), "little")
    generator = np.random.Philox(key=[seed % 2**64, name], counter=[0, 0, 0, trial])
    raw = generator.random_raw(2 * steps * dim).reshape(steps, dim, 2) >> np.uint64(11)
    # The Box-Muller transform, because numpy's own normal numbers may change between its versions.
    first, second = ((raw[..., place] + 0.5) * 2.0**-53 for place in (0, 1))
    return (np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)).astype(np.float32)
