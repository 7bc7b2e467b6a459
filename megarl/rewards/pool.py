"""A supervised pool of reward processes: dead processes are replaced, hanging ones killed, and the sample is named.

Packages do part of this. With `concurrent.futures` a killed worker breaks the whole pool, and a running call cannot be
stopped. `pebble.ProcessPool` replaces killed workers and stops calls at a deadline, but it unpickles the workers'
results, and it does not limit their output, end their children, or score the samples of a killed worker again.

A process that the kernel kills for lack of memory (SIGKILL) may be the victim of another process. Its samples are
scored again before they are blamed: prompt group by prompt group, while no other process scores.

A process's output is plain data that is validated here (`megarl.rewards.scoring`), because the process may run code
that the policy wrote. Invalid output fails its sample, and the process is replaced.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from megarl.rewards.pool_process import PoolProcess
from megarl.rewards.registry import REWARDS, Mode
from megarl.rewards.scoring import Outcome, Reading, Result, Sample, ScoringFailure, outcome_of, read_reward
from megarl.system.errors import ConfigError, RewardError, WorkerError
from megarl.system.plain import Malformed, cut, flag, short, whole
from megarl.system.processes import how_it_ended

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0  # a user's file may import large packages
_REFUSAL = 20_000  # maximum characters of an error from the function's file
_LESS_MEMORY = "use less memory: fewer reward.workers, a function that holds less, or a smaller data.batch_size"
_CHUNKS_PER_WORKER = 4  # chunks small enough to balance the load, and large enough to pay for a message


@dataclass
class _Batch:
    """A batch of samples that is being scored: the state of one call of the pool.

    Attributes:
        outcomes: outcome of each scored sample, by its position in the batch.
        pending: chunks that wait for a process, each a list of positions.
        again: chunks whose process was killed; they are scored again when no process scores other chunks.
        killed: positions of samples whose process was killed while it scored their chunk.
    """

    samples: list[Sample] = field(default_factory=list)
    pending: deque[list[int]] = field(default_factory=deque)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    again: deque[list[int]] = field(default_factory=deque)
    killed: set[int] = field(default_factory=set)

    def groups(self, positions: list[int]) -> list[list[int]]:
        """Split the samples at these positions of the batch into prompt groups (samples with equal uid)."""
        groups: dict[Any, list[int]] = {}
        for i in positions:
            groups.setdefault(self.samples[i].get("uid", i), []).append(i)
        return list(groups.values())


class ScorerPool:
    """A pool of `size` processes that score with one reward function.

    Args:
        name, mode, kwargs: the function, as for `load_scorer`; every process loads it.
        size: number of processes.
        sample_limit_s: seconds after which the process of a sample is killed; None: no limit. Only for functions that
            get one sample at a time.
        limit_result: result of a sample over its limit; None: the sample fails.
        program: module that the processes run; `noun`: its name in messages.
        read: validates the processes' results.
        repeats: whether samples of a killed process are scored again.
        quiet: drop the processes' standard output, and limit their error output for their whole life instead of per
            call.

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
        read: Reading = read_reward,
        repeats: bool = True,
        quiet: bool = False,
    ) -> None:
        self._program, self._noun, self._read = program, noun, read
        self._setup = {"name": name, "mode": mode, "kwargs": kwargs, "sys_path": [p or os.getcwd() for p in sys.path]}
        self._mode, self._size, self._repeats, self._quiet = mode, size, repeats, quiet
        self._sample_limit_s, self._limit_result = sample_limit_s, limit_result
        self._workers: list[PoolProcess] = []
        self.uses_images = False  # known once a process has loaded the function
        self._start_missing()
        try:
            self._await_ready(time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def score(self, samples: list[Sample], timeout_s: float, stop_at_failure: bool) -> dict[int, Outcome]:
        """Return the outcomes by position. Every position has one, unless `stop_at_failure` stopped after a failure.
        Raise ConfigError if a built-in reward cannot score with its configuration."""
        deadline = time.monotonic() + timeout_s
        batch = _Batch(samples)
        batch.pending.extend(self._chunks(batch))
        self._start_missing()
        for worker in self._workers if not self._quiet else ():
            worker.output.renew()
        while batch.pending or batch.again or any(w.chunk for w in self._workers):
            for worker in list(self._workers):
                if not batch.pending and not any(w.chunk for w in self._workers) and batch.again:
                    batch.pending.append(batch.again.popleft())
                if worker.ready and not worker.chunk and batch.pending:
                    worker.give(batch.pending.popleft(), samples, stop_at_failure)
            self._collect(batch, deadline)
            failed = any(isinstance(o, ScoringFailure) for o in batch.outcomes.values())
            if time.monotonic() >= deadline:
                self._expire(batch, timeout_s)
                break
            if failed and stop_at_failure:
                break
        for worker in [w for w in self._workers if w.chunk]:
            self._drop(worker)
        return batch.outcomes

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._workers):
            self._drop(worker)

    def _chunks(self, batch: _Batch) -> list[list[int]]:
        """Split the positions into short runs in sequential mode, and into whole prompt groups in batch mode."""
        number = len(batch.samples)
        if self._mode == "sequential":
            size = max(1, number // (self._size * _CHUNKS_PER_WORKER))
            return [list(range(a, min(a + size, number))) for a in range(0, number, size)]
        chunks: list[list[int]] = [[] for _ in range(self._size)]
        for members in sorted(batch.groups(list(range(number))), key=len, reverse=True):
            min(chunks, key=len).extend(members)
        return [sorted(chunk) for chunk in chunks if chunk]

    def _collect(self, batch: _Batch, deadline: float) -> None:
        """Wait until a process sends a message or ends, a sample exceeds its time limit, or `deadline` comes; record
        the outcomes."""
        until = deadline
        if self._sample_limit_s is not None:
            until = min([until, *(w.since + self._sample_limit_s for w in self._workers if w.chunk)])
        for worker in self._ready_processes(until - time.monotonic()):
            worker.flush()
            try:
                for message in worker.receive():
                    self._on_message(worker, message, batch.outcomes)
            except Malformed as error:
                self._on_loss(worker, batch, f"wrote an invalid message: {error}")
            except EOFError:
                self._on_loss(worker, batch, None)
        if self._sample_limit_s is not None:
            for worker in [w for w in self._workers if w.chunk and time.monotonic() > w.since + self._sample_limit_s]:
                left = worker.left  # samples without a score; empty if only the report of the chunk's end is missing
                late = ScoringFailure(
                    f"the function did not finish within reward.sample_timeout_s = {self._sample_limit_s:g}"
                )
                for blamed in left[:1]:
                    batch.outcomes[blamed] = late if self._limit_result is None else dict(self._limit_result)
                self._drop(worker)
                batch.pending.extendleft([left[1:]] if left[1:] else [])
                self._start_missing()

    def _ready_processes(self, wait_s: float) -> list[PoolProcess]:
        """Return the processes that wrote, ended or can receive more within `wait_s` seconds."""
        poll, by_handle = select.poll(), {worker.fileno(): worker for worker in self._workers}
        for handle, worker in by_handle.items():
            poll.register(handle, select.POLLIN | (select.POLLOUT if worker.unsent else 0))
        return [by_handle[handle] for handle, _ in poll.poll(max(0.0, wait_s) * 1000)]

    def _on_message(self, worker: PoolProcess, message: dict[str, Any], outcomes: dict[int, Outcome]) -> None:
        """Handle a message of a process. Raise ConfigError if a built-in reward cannot score with its configuration,
        or the process could not load the function; raise Malformed if the message is invalid in this state."""
        kind = message.get("kind")
        if kind == "scored" and worker.chunk:
            index = whole(message.get("index"), range(len(worker.chunk)), "the sample's index in an answer")
            position = worker.chunk[index]
            if position in worker.done and self._mode == "sequential":
                # The scored code wrote one of the two replies itself, so drop the outcomes from this sample on.
                for taken_over in worker.chunk[index:]:
                    outcomes.pop(taken_over, None)
                    worker.done.discard(taken_over)
                raise Malformed(f"the process answered twice for sample {index} of {len(worker.chunk)}")
            if position in worker.done or (self._mode == "sequential" and position != worker.left[0]):
                raise Malformed(
                    f"the process answered for sample {index} of {len(worker.chunk)}, which it is not scoring"
                )
            outcomes[position] = outcome_of(message, self._read)
            worker.done.add(position)
            worker.since = time.monotonic()
        elif kind == "idle" and worker.chunk and (not worker.left or self._stopped(worker, outcomes)):
            worker.chunk = []
        elif kind == "ready" and not worker.ready:
            self.uses_images = flag(message.get("images"), "the field `images` of an answer")
            worker.ready = True
        elif kind == "refused" and (not worker.ready or self._setup["name"] in REWARDS.names()):
            raise ConfigError(cut(str(message.get("text")), _REFUSAL))
        else:
            raise Malformed(f"the process sent a message of kind {short(kind)} that was not expected")

    def _stopped(self, worker: PoolProcess, outcomes: dict[int, Outcome]) -> bool:
        return worker.stops and any(isinstance(outcomes[i], ScoringFailure) for i in worker.done)

    def _on_loss(self, worker: PoolProcess, batch: _Batch, wrote: str | None) -> None:
        """Replace a process that died or sent an invalid message."""
        left = worker.left
        how = how_it_ended(worker.process) if wrote is None else ""
        killed = wrote is None and worker.process.returncode == -signal.SIGKILL
        self._drop(worker)
        name = f"{self._noun} {self._setup['name']!r}"
        if not worker.ready:
            text = f"a process of {name} {wrote or 'died'} while it started{how and f' ({how})'}"
            raise WorkerError(f"{text}\n  fix:     {_LESS_MEMORY}") if killed else RewardError(text)
        its = f"its {self._noun} process"
        reason = f"died with {its} ({how})" if wrote is None else f"lost {its}, which {wrote}"
        self._start_missing()
        # The process had nothing to score, or ended before it had received its samples, so no sample is to blame.
        if not left or worker.broken:
            log.warning("an idle process of %s %s; it is replaced", name, wrote or f"died ({how})")
            batch.pending.extendleft([left] if left else [])
            return
        at_work, rest = (left[:1], left[1:]) if self._mode == "sequential" else (left, [])
        batch.pending.extendleft([rest] if rest else [])
        if killed and self._repeats and at_work[0] not in batch.killed:
            log.warning("a process of %s was killed (%s); its samples are scored again, by themselves", name, how)
            batch.killed.update(at_work)
            batch.again.extend(batch.groups(at_work))
            return
        reason += ", for the second time" if at_work[0] in batch.killed else ""
        reason += f", while it scored a batch of {len(left)}" if self._mode == "batch" else ""
        fix = f"{_LESS_MEMORY}, or set reward.on_error to a score for such samples" if killed else None
        batch.outcomes.update({i: ScoringFailure(reason, None, k > 0, fix) for k, i in enumerate(at_work)})

    def _expire(self, batch: _Batch, timeout_s: float) -> None:
        """Fail all samples without an outcome, since the deadline has passed; blame only the first sample that each
        process was scoring."""
        for worker in self._workers:
            for k, i in enumerate(worker.left):
                at_work = k == 0 or self._mode == "batch"
                batch.outcomes[i] = ScoringFailure(_late(timeout_s, at_work), collateral=k > 0)
        for i in (i for chunk in (*batch.pending, *batch.again) for i in chunk):
            batch.outcomes[i] = ScoringFailure(_late(timeout_s, False), collateral=True)

    def _drop(self, worker: PoolProcess) -> None:
        self._workers.remove(worker)
        worker.kill()

    def _start_missing(self) -> None:
        while len(self._workers) < self._size:
            name = f"{self._noun} {self._setup['name']!r}"
            self._workers.append(PoolProcess(self._program, self._setup, name, quiet=self._quiet))

    def _await_ready(self, deadline: float) -> None:
        while not all(worker.ready for worker in self._workers):
            if time.monotonic() >= deadline:
                raise RewardError(
                    f"processes of {self._noun} {self._setup['name']!r} did not start within {START_TIMEOUT_S:g} s",
                    fix="import your own file in a Python shell: if that takes long or never ends, move the slow code "
                    "from the top of the file into the function; else start fewer processes on this machine",
                )
            self._collect(_Batch(), min(deadline, time.monotonic() + 1.0))


def _late(timeout_s: float, at_work: bool) -> str:
    state = "was still being scored" if at_work else "was still waiting"
    return f"{state} when reward.timeout_s = {timeout_s:g} passed"
