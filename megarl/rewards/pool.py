"""A pool of reward processes that is watched: a dead one is replaced, a hanging one is killed, and the sample is named.

(`concurrent.futures` gives neither: a killed worker breaks the whole pool, and a running call cannot be stopped.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.errors import ConfigError, RewardError
from megarl.rewards.registry import Mode
from megarl.rewards.scoring import Outcome, Result, Sample, ScoringFailure

START_TIMEOUT_S = 120.0  # a user's file may import heavy packages
_EXIT_S = 5.0  # from a broken connection to the end of the process
_CHUNKS_PER_WORKER = 4  # small enough to balance, large enough to amortise a message


class _Worker:
    """One process and the chunk it is busy with: positions in the batch, those not yet scored first."""

    def __init__(self, program: str, setup: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # one group of its own, ended as a whole with what a function started
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self.conn = Connection(ours.detach())
        self.ready = False
        self.chunk: list[int] = []
        self.done: set[int] = set()
        self.since = time.monotonic()
        with contextlib.suppress(OSError):  # dead already: the first wait for a message says so, and how it ended
            self.conn.send(setup)

    @property
    def left(self) -> list[int]:
        return [i for i in self.chunk if i not in self.done]

    def give(self, chunk: list[int], samples: list[Sample], stop_at_failure: bool) -> None:
        self.chunk, self.done, self.since = chunk, set(), time.monotonic()
        self.conn.send(([samples[i] for i in chunk], stop_at_failure))

    def kill(self) -> None:
        """End the process and what it started, whatever they do."""
        self.conn.close()
        with contextlib.suppress(OSError):  # nothing of its group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def how_it_ended(self) -> str:
        """Exit code or signal of a process whose connection broke; it may need a moment to be gone."""
        try:
            code = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        hint = ", out of memory?" if code == -signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{hint}"


class ScorerPool:
    """`size` processes that score with one reward function.

    Args:
        name, mode, kwargs: the function, see `load_scorer`; it is loaded in every process.
        size: number of processes.
        sample_limit_s: the process of a sample that takes longer is killed; None: no such limit. For functions that
            get one sample at a time only.
        limit_result: result of a sample over its limit; None: it has failed.
        program: what the processes run, and `noun`, what messages call it.

    Raises:
        ConfigError: the processes could not load the function.
    """

    def __init__(
        self,
        name: str,
        mode: Mode,
        kwargs: dict[str, Any],
        size: int,
        *,
        sample_limit_s: float | None = None,
        limit_result: Result | None = None,
        program: str = "megarl.rewards.pool_worker",
        noun: str = "reward",
    ) -> None:
        self._program, self._noun = program, noun
        self._setup = {"name": name, "mode": mode, "kwargs": kwargs, "sys_path": [p or os.getcwd() for p in sys.path]}
        self._mode, self._size = mode, size
        self._sample_limit_s, self._limit_result = sample_limit_s, limit_result
        self._workers: list[_Worker] = []
        self._start_missing()
        try:
            self._await_ready(time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def score(self, samples: list[Sample], timeout_s: float, stop_at_failure: bool) -> dict[int, Outcome]:
        """Outcome by position. Every position has one, unless `stop_at_failure` cut the work short after a failure."""
        deadline = time.monotonic() + timeout_s
        pending, outcomes = deque(self._chunks(samples)), dict[int, Outcome]()
        self._start_missing()
        while pending or any(w.chunk for w in self._workers):
            for worker in list(self._workers):
                if worker.ready and not worker.chunk and pending:
                    self._give(worker, pending, samples, stop_at_failure)
            self._collect(outcomes, pending, deadline)
            failed = any(isinstance(o, ScoringFailure) for o in outcomes.values())
            if time.monotonic() >= deadline:
                self._expire(outcomes, pending, timeout_s)
                break
            if failed and stop_at_failure:
                break
        for worker in [w for w in self._workers if w.chunk]:
            self._drop(worker)
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._workers):
            self._drop(worker)

    def _chunks(self, samples: list[Sample]) -> list[list[int]]:
        """Sequential mode: short runs of positions. Batch mode: a chunk per process, groups (uid) kept whole."""
        if self._mode == "sequential":
            size = max(1, len(samples) // (self._size * _CHUNKS_PER_WORKER))
            return [list(range(a, min(a + size, len(samples)))) for a in range(0, len(samples), size)]
        groups: dict[Any, list[int]] = {}
        for i, sample in enumerate(samples):
            groups.setdefault(sample.get("uid", i), []).append(i)
        chunks: list[list[int]] = [[] for _ in range(self._size)]
        for members in sorted(groups.values(), key=len, reverse=True):
            min(chunks, key=len).extend(members)
        return [sorted(chunk) for chunk in chunks if chunk]

    def _give(self, worker: _Worker, pending: deque[list[int]], samples: list[Sample], stop_at_failure: bool) -> None:
        chunk = pending.popleft()
        try:
            worker.give(chunk, samples, stop_at_failure)
        except OSError:  # it died idle: no sample is to blame
            self._requeue(worker, chunk, pending)

    def _collect(self, outcomes: dict[int, Outcome], pending: deque[list[int]], deadline: float) -> None:
        """Wait for messages until something happens or a limit is reached, and act on it."""
        now = time.monotonic()
        until = deadline
        if self._sample_limit_s is not None:
            until = min([until, *(w.since + self._sample_limit_s for w in self._workers if w.chunk)])
        ready = wait([w.conn for w in self._workers], timeout=max(0.0, until - now))
        for worker in [w for w in self._workers if w.conn in ready]:
            try:
                self._on_message(worker, worker.conn.recv(), outcomes)
            except (EOFError, OSError):  # EOFError between two messages, OSError inside one
                self._on_death(worker, outcomes, pending)
        if self._sample_limit_s is not None:
            for worker in [w for w in self._workers if w.chunk and time.monotonic() > w.since + self._sample_limit_s]:
                left = worker.left  # none where the last message of a chunk is missing
                late = ScoringFailure(f"did not finish within reward.sample_timeout_s = {self._sample_limit_s:g}")
                for blamed in left[:1]:
                    outcomes[blamed] = late if self._limit_result is None else dict(self._limit_result)
                self._requeue(worker, left[1:], pending)

    def _on_message(self, worker: _Worker, message: tuple[Any, ...], outcomes: dict[int, Outcome]) -> None:
        if message[0] == "scored":
            position = worker.chunk[message[1]]
            outcomes[position] = message[2]
            worker.done.add(position)
            worker.since = time.monotonic()
        elif message[0] == "idle":
            worker.chunk = []
        elif message[0] == "ready":
            worker.ready = True
        else:
            raise ConfigError(str(message[1]))

    def _on_death(self, worker: _Worker, outcomes: dict[int, Outcome], pending: deque[list[int]]) -> None:
        left, how = worker.left, worker.how_it_ended()
        self._drop(worker)
        if not worker.ready:
            raise RewardError(f"a process of {self._noun} {self._setup['name']!r} died while it started ({how})")
        reason = f"died with its {self._noun} process ({how})"
        self._start_missing()
        if not left:  # it died idle
            return
        if self._mode == "sequential":
            outcomes[left[0]] = ScoringFailure(reason)
            pending.extendleft([left[1:]] if left[1:] else [])
        else:
            reason += f" while that scored a batch of {len(left)}"
            outcomes.update({i: ScoringFailure(reason, collateral=k > 0) for k, i in enumerate(left)})

    def _requeue(self, worker: _Worker, rest: list[int], pending: deque[list[int]]) -> None:
        self._drop(worker)
        if rest:
            pending.appendleft(rest)
        self._start_missing()

    def _expire(self, outcomes: dict[int, Outcome], pending: deque[list[int]], timeout_s: float) -> None:
        """The deadline passed: the samples in work are to blame, those that waited are not."""
        for worker in self._workers:
            for k, i in enumerate(worker.left):
                at_work = k == 0 or self._mode == "batch"
                outcomes[i] = ScoringFailure(_late(timeout_s, at_work), collateral=k > 0)
        for i in (i for chunk in pending for i in chunk):
            outcomes[i] = ScoringFailure(_late(timeout_s, False), collateral=True)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.kill()

    def _start_missing(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(_Worker(self._program, self._setup))

    def _await_ready(self, deadline: float) -> None:
        while not all(worker.ready for worker in self._workers):
            if time.monotonic() >= deadline:
                raise RewardError(
                    f"processes of {self._noun} {self._setup['name']!r} did not start within {START_TIMEOUT_S:g} s: "
                    "does importing it hang?"
                )
            self._collect({}, deque(), min(deadline, time.monotonic() + 1.0))


def _late(timeout_s: float, at_work: bool) -> str:
    state = "was still being scored" if at_work else "was still waiting"
    return f"{state} when reward.timeout_s = {timeout_s:g} passed"
