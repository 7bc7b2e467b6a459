"""Scores batches in the background.

    handle = runner.submit(samples)      # returns at once
    ...                                  # compute log-probs
    results = runner.result(handle)      # waits, raises RewardError that names the sample

A failing sample stops the run, or scores `reward.on_error` if that is set; it never silently scores 0. A built-in
reward that cannot score with its configuration (a key is not set, for example) always stops the run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

from megarl.config.data import BY_MODEL
from megarl.rewards.pool import ScorerPool
from megarl.rewards.registry import REWARDS, Scorer, load_scorer, mode_of, time_limit_s
from megarl.rewards.scoring import ERROR_KEY, EXTRACTED_KEY, Outcome, Result, Sample, ScoringFailure, score
from megarl.system.errors import ConfigError, RewardError, printable, shortened
from megarl.system.metrics import Metrics
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from megarl.config.data import RewardConfig

log = logging.getLogger(__name__)
_POLL_S = 0.2
#: Reserved names of parts: the mark of a failed sample, and metrics `reward/<name>` that are not parts.
RESERVED_PARTS = frozenset({ERROR_KEY, "errors", "overlong_penalty"})
# The alarm inside the process counts CPU seconds. The process is killed after this factor times the alarm's limit, plus
# this many seconds of wall time, which even a busy machine must not reach; at the latest after `sample_timeout_s`.
_WALL_FACTOR, _WALL_GRACE_S = 4.0, 5.0


class RewardHandle:
    """One submitted batch.

    Args:
        limit_s: seconds after the start of scoring at which the batch is late; None: its processes have limits.
    """

    def __init__(self, samples: list[Sample], limit_s: float | None) -> None:
        self.samples, self._limit_s = samples, limit_s
        self.outcomes: Future[dict[int, Outcome]] = Future()
        self.started: float | None = None
        self.progress = 0  # samples scored so far in this process

    def done(self) -> bool:
        """Return whether the runner's `result` returns, or raises an error, without waiting."""
        return self.outcomes.done() or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether scoring takes longer than allowed."""
        if self._limit_s is None or self.started is None:
            return False
        return time.monotonic() > self.started + self._limit_s


class RewardRunner:
    """Scores batches with one reward function, in submission order, in the background.

    `megarl.rewards.parts.Rewards` has one runner for each function of a recipe.

    A user's function runs in separate processes, which it may crash. A built-in function runs in a thread of this
    process, unless it uses alarms or asks for a process, or the recipe sets several processes.

    Args:
        cfg: the `reward` section, without `parts`.

    Raises:
        ConfigError: the function cannot be found or loaded, or does not accept its arguments.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._cfg = cfg
        self._scorer: Scorer | None = None
        self._pool: ScorerPool | None = None
        alarm_s = time_limit_s(cfg.name, cfg.kwargs)
        mode = mode_of(cfg.name, cfg.mode)
        if processes := reward_processes(cfg):
            limit_s = cfg.sample_timeout_s if mode == "sequential" else None
            limit_result = None
            if alarm_s is not None:
                limit_s = min(_WALL_FACTOR * alarm_s + _WALL_GRACE_S, cfg.sample_timeout_s)
                limit_result = {"overall": 0.0, "timeout": 1.0, EXTRACTED_KEY: ""}
            self._pool = ScorerPool(
                cfg.name,
                mode,
                cfg.kwargs,
                processes,
                sample_limit_s=limit_s,
                limit_result=limit_result,
            )
        else:
            self._scorer = load_scorer(cfg.name, cfg.mode, cfg.kwargs)
        self._stuck: str | None = None
        self._jobs: queue.SimpleQueue[RewardHandle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="megarl-rewards", daemon=True)
        self._thread.start()

    @property
    def uses_images(self) -> bool:
        """Whether the function uses the images of samples."""
        return self._pool is not None and self._pool.uses_images

    def submit(self, samples: list[Sample]) -> RewardHandle:
        """Start scoring. Every sample has `prompt`, `response`, `answer`, ... and `uid`; the list must not change."""
        if self._stuck:
            raise RewardError(self._stuck)
        handle = RewardHandle(samples, None if self._scorer is None else self._cfg.timeout_s)
        self._jobs.put(handle)
        return handle

    def result(self, handle: RewardHandle) -> list[Result]:
        """Wait for a batch; return one dict per sample with finite `overall` and parts, and possibly text `extracted`.
        Raise RewardError for a failed sample with `reward.on_error=raise` or a call past its deadline, and ConfigError
        for a reserved part name."""
        while True:
            try:
                outcomes = handle.outcomes.result(timeout=_POLL_S)
                break
            except FutureTimeout:
                beat()  # report progress, as the wait has its own deadline
                if handle.is_late:
                    index = min(handle.progress, len(handle.samples) - 1)
                    failure = ScoringFailure(
                        f"the function did not finish within reward.timeout_s = {self._cfg.timeout_s:g}"
                    )
                    fix = "raise reward.timeout_s, or set reward.workers: 2 for processes that score at the same time"
                    self._stuck = _describe(self._cfg.name, handle.samples, index, failure, fix)
                    raise RewardError(self._stuck) from None
        return self._settle(handle.samples, outcomes)

    def close(self) -> None:
        """Stop the background thread and the processes."""
        self._jobs.put(None)
        if not self._stuck:
            self._thread.join(timeout=1.0)
        if self._pool is not None:
            self._pool.close()

    def _serve(self) -> None:
        while (handle := self._jobs.get()) is not None:
            handle.started = time.monotonic()
            try:
                handle.outcomes.set_result(self._score(handle))
            except BaseException as error:  # the caller of result() must see every error
                handle.outcomes.set_exception(error)

    def _score(self, handle: RewardHandle) -> dict[int, Outcome]:
        stop = self._cfg.on_error == "raise"
        if self._pool is not None:
            return self._pool.score(handle.samples, self._cfg.timeout_s, stop)
        assert self._scorer is not None
        outcomes: dict[int, Outcome] = {}
        for index, outcome in score(self._scorer, handle.samples, stop):
            outcomes[index] = outcome
            handle.progress = len(outcomes)
        return outcomes

    def _settle(self, samples: list[Sample], outcomes: dict[int, Outcome]) -> list[Result]:
        failures = {i: o for i, o in outcomes.items() if isinstance(o, ScoringFailure)}
        if failures:
            first = min(failures, key=lambda i: (failures[i].collateral, i))
            message = _describe(self._cfg.name, samples, first, failures[first])
            if self._cfg.on_error == "raise":
                raise RewardError(message)
            log.warning(
                "%d of %d rewards failed and were scored %s; the first:\n%s",
                len(failures), len(samples), self._cfg.on_error, message,
            )  # fmt: skip
        return [self._result(outcomes[i]) for i in range(len(samples))]

    def _result(self, outcome: Outcome) -> Result:
        if isinstance(outcome, ScoringFailure):
            assert self._cfg.on_error != "raise"
            return {"overall": float(self._cfg.on_error), ERROR_KEY: 1.0}
        reserved = RESERVED_PARTS & outcome.keys()
        if reserved:
            raise ConfigError(
                f"the reward function returns a part called {min(reserved)!r}, which is a reserved name",
                where=f"reward.name {self._cfg.name}",
                found=sorted(outcome),
                allowed=f"any name except {', '.join(sorted(RESERVED_PARTS))}",
                fix="give the part another name",
            )
        return outcome


def reward_processes(cfg: RewardConfig) -> int:
    """Return the number of scoring processes per data-parallel rank; 0: a thread of the rank scores. A built-in reward
    that sets no alarm and asks for no process cannot harm its process, and costs less in a thread."""
    if cfg.parts:
        return sum(map(reward_processes, cfg.functions.values()))
    if cfg.name == BY_MODEL:
        return 0
    spec = REWARDS.spec(cfg.name) if cfg.name in REWARDS.names() else None
    pure = spec is not None and spec.limit is None and not spec.process
    return 0 if pure and cfg.workers == 1 else cfg.workers


def reward_metrics(results: list[Result]) -> Metrics:
    """Return `reward/<part>` (the mean of every numeric part over the samples that have it) and `reward/errors`."""
    metrics = Metrics()
    metrics.sum("reward/errors", sum(result.get(ERROR_KEY, 0.0) for result in results))
    for result in results:
        for name, value in result.items():
            if name not in (ERROR_KEY, EXTRACTED_KEY):
                metrics.mean(f"reward/{name}", value, 1)
    return metrics


def _describe(name: str, samples: list[Sample], index: int, failure: ScoringFailure, fix: str | None = None) -> str:
    sample, reason = samples[index], failure.reason
    if reason.startswith("the "):
        reason = f"failed: {reason}"
    lines = [
        f"reward {name!r}: sample {index} of {len(samples)} {reason}",
        f"  uid:      {sample.get('uid')!r}",
        f"  prompt:   {shortened(repr(sample.get('prompt')))}",
        f"  response: {shortened(repr(sample.get('response')))}",
        f"  answer:   {shortened(repr(sample.get('answer')))}",
    ]
    if failure.where:
        lines.append(f"  at:       {failure.where}")
    usual = "correct the function or the data, or set reward.on_error to a score for such samples"
    lines.append(f"  fix:      {fix or failure.fix or usual}")
    return printable("\n".join(lines))
