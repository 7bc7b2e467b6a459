"""Replay of an episode from its trial and its recorded actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from megarl.robots.envs.answers import Answer, Failure
from megarl.robots.envs.pool import SimulatorPool
from megarl.robots.simulators.protocol import Outcome, Recording


def play(
    pool: SimulatorPool,
    task: str,
    trial: int,
    chunks: Iterable[NDArray[Any]],
    slot: int = 0,
    record: Recording | None = None,
) -> list[Answer]:
    """Return the first observation of an episode, and the outcome of each chunk of actions [K, D]; deterministic.

    With `record` the last outcome has a clip. The replay stops when the episode is over, or with a Failure. All slots
    of the pool must be idle.
    """
    assert not pool.busy, f"slots {pool.busy} are at work"
    pool.begin(slot, task, trial, record)
    found = [_answer(pool, slot)]
    for chunk in chunks:
        last = found[-1]
        if isinstance(last, Failure) or (isinstance(last, Outcome) and last.over):
            break
        pool.act(slot, chunk)
        found.append(_answer(pool, slot))
    return found


def _answer(pool: SimulatorPool, slot: int) -> Answer:
    while True:  # the pool enforces the limits
        if (answers := pool.answers(1.0)) and slot in answers:
            return answers[slot]
