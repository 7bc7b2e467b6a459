"""Reduces the metrics of all ranks to one line per step, with timings and throughput, and logs it on rank 0.

Each team reduces the metrics of its ranks. The actor's team adds the metrics of the other teams, and has the tracker:

    critic: step 7, its ranks -> StepMetrics("critic", 7) ---> actor: step 7, its ranks + critic's -> metrics.jsonl
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from megarl.artifacts.lock import refuse_if_taken
from megarl.dag.executor import NoChannel
from megarl.dag.messages import MetricsJson, StepMetrics
from megarl.dag.stage import Role
from megarl.runtime.alarms import Alarms
from megarl.runtime.context import no_progress
from megarl.runtime.health import report
from megarl.runtime.profiler import StepProfiler
from megarl.runtime.team_time import AllTeams, TeamTime
from megarl.runtime.training_samples import group_rows, shows_groups
from megarl.system import tracing
from megarl.system.device import peak_memory_gb
from megarl.system.machine import find_malloc_trim, resident_bytes
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import MEETING, MOVES
from megarl.system.processes import own_worker_name, worker_number
from megarl.tracking.perf import peak_flops, perf_metrics, remeasured_peak
from megarl.tracking.trace import TraceWriter

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.disaggregated.buffer.channel import GroupChannel, TeamChannel
    from megarl.runtime.rank_state import RankState
    from megarl.system.tracing import PhaseEvent
    from megarl.tracking.tracker import Part, Status, Tracker

log = logging.getLogger(__name__)
VALIDATE = "validate"  # the phase of held-out evaluation
# malloc keeps freed memory (`cluster.keep_freed_memory`), but fragments it: without a trim the resident set would grow
# by a quarter in 1,000 steps. After a trim the next step faults the pages in again, about 0.4 s per GB.
_TRIM_EVERY = 100
# seconds to write the run's files after an error: other ranks hang until this failed rank ends, and the launcher
# writes what is missing
_AFTER_FAILURE_S = 5.0


class Recorder:
    """Reduces the metrics of a team's ranks after each step and logs them; rank 0 of the actor's team has the tracker.

    Args:
        stage: `train`, `sft` or `eval`.
        resume_step: the step that a resumed run continues after.
        part: whether this stage is the whole run, its first phase, or its second.

    Attributes:
        status: status to record at the end of a stage without an error.
        channel: counter of the tokens that this replica has processed.
        segments: with async.order=as_ready, in the actor's team: returns the rollout team's metrics of a step.
    """

    def __init__(
        self, c: RankState, stage: str, total_steps: int, resume_step: int | None = None, part: Part = "whole"
    ) -> None:
        self._c = c
        # `trainer.profile` is about steps of the run: a cold start counts its own steps, and an evaluation has none.
        profile = None if part == "first" or stage == "eval" else c.config.trainer.profile
        self._profiler = StepProfiler(profile, c.run_dir, worker_number())
        self._tracker: Tracker | None = None
        if c.layout.rank == 0 and c.team.leads:
            from megarl.tracking.tracker import Tracker

            self._tracker = Tracker(
                c.run_dir,
                c.config.tracking,
                c.config.name,
                c.config.model_dump(mode="json"),
                stage=stage,
                total_steps=total_steps,
                resume_step=resume_step,
                part=part,
                restarts=c.config.cluster.max_restarts > 0,
                last=not c.team.others,
            )
        self.status: Status = "finished"
        self.channel: TeamChannel | GroupChannel | NoChannel = NoChannel()
        self.segments: Callable[[int], list[MetricsJson]] | None = None
        # Only the actor's team takes part in a cold start.
        self._others = c.team.others if stage == "train" else []
        self._measured_elsewhere: list[Metrics] | None = None  # other teams' metrics of the current step, once received
        self._team_time = TeamTime(c.team)
        self._all_teams = AllTeams(team.name for team in c.team.placement.teams)
        team = c.team.plan.name if c.team.others else ""
        self._trace = TraceWriter(c.run_dir, worker_number(), own_worker_name(), team)
        self._peak: float | None = None
        self._remeasured = False
        self._alarms = Alarms()
        self._start = (time.perf_counter(), time.process_time())

    def __enter__(self) -> Self:
        if self._tracker is not None:
            self._c.context.progress = self._tracker.progress
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._c.context.progress = no_progress
        if error is None:
            with tracing.phase("record"):
                self._finish(self.status)
            return
        report(self._c.run_dir, error, worker_number())  # first, because what follows takes time and may fail
        status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        thread = threading.Thread(target=self._finish_if_possible, args=(status,), name="finish", daemon=True)
        thread.start()
        thread.join(_AFTER_FAILURE_S)

    def _finish_if_possible(self, status: Status) -> None:
        try:
            self._finish(status)
        except Exception as error:
            log.warning("the record of the run is incomplete: %s: %s", type(error).__name__, error)

    def _finish(self, status: Status) -> None:
        refuse_if_taken(self._c.run_dir)
        self._profiler.close()
        self._trace.write(tracing.drain())
        self._trace.close()
        if self._tracker is not None:
            self._tracker.finish(status)

    def start_step(self, step: int = 0) -> None:
        """Start the clock of a step, and record it if `trainer.profile` names it."""
        self._profiler.start(step)
        self._start = (time.perf_counter(), time.process_time())
        self._team_time.start_step()

    def measured_elsewhere(self, step: int) -> list[Metrics]:
        """Wait for the other teams' metrics of the current step and return them.

        Only the actor's team waits; in other teams the list is empty.
        """
        if self._measured_elsewhere is None:
            parts: list[MetricsJson] = []
            for team in self._others if self._c.team.leads else ():
                with tracing.phase("await_metrics", waits_for=team.name):
                    if self.segments is not None and Role.ROLLOUT in team.roles:
                        parts += self.segments(step)
                    else:
                        parts.append(StepMetrics.read_together(self._c.mail, team.name, step).metrics)
            self._measured_elsewhere = [Metrics.from_json(part) for part in parts]
        return self._measured_elsewhere

    def end_step(self, step: int) -> dict[str, float]:
        """Reduce this step's metrics over the team's ranks, add timings and throughput, and log them.

        Returns:
            The step's metrics, equal on every rank of the team; in the actor's team they include all teams' metrics.

        Raises:
            FolderTaken: another attempt of the run uses the run folder.
        """
        c, leads = self._c, self._c.team.leads
        refuse_if_taken(c.run_dir)
        elsewhere, self._measured_elsewhere = self.measured_elsewhere(step), None
        wall, cpu = self._start
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        self._profiler.end()
        events = tracing.drain()
        self._trace.write(events)
        # All ranks of a replica have the same samples: only its first rank counts them.
        local = c.context.metrics if c.layout.is_lead else Metrics()
        c.context.metrics = Metrics()
        if leads:
            local.max("timing_s/step", seconds)
        for name, spent in _stage_seconds(events).items():
            if leads or name != VALIDATE:  # the rollout team sends the time of a validation with its results
                local.max(f"timing_s/{name}", spent)
        local.sum("perf/cpu_s", cpu_seconds)
        peak = peak_memory_gb()
        local.max("perf/max_memory_gb", peak)
        local.sum("perf/total_memory_gb", peak)
        local.max("perf/resident_gb", resident_bytes() / 1e9)
        if self._others:
            self._measure_team(local, events)
        with tracing.phase("reduce_metrics"):
            reduced = c.layout.world.reduce_metrics(local)
        for metrics in elsewhere:
            reduced.merge(metrics)
        if not leads and c.layout.rank == 0:
            StepMetrics(c.team.plan.name, step, reduced.to_json()).post(c.mail)
        numbers = reduced.result()
        if leads and "perf/total_tokens" in numbers:
            numbers |= self._perf(numbers)
        if self._others and leads and step:
            numbers |= self._all_teams.bottleneck(numbers)
        if self._tracker is not None:
            self._tracker.log(step, numbers)
            for warning in self._alarms.check(step, numbers):
                self._tracker.view.note(f"WARNING: {warning}")
        if step % _TRIM_EVERY == 0:
            find_malloc_trim()(0)
        return numbers

    def _measure_team(self, local: Metrics, events: Iterable[PhaseEvent]) -> None:
        """Add the team's busy and waiting time in this step, and the lengths of the buffer's queues, to `local`."""
        c = self._c
        self._team_time.end_step(local, events, self.channel.tokens if c.layout.is_lead else None)
        if c.team.leads and c.layout.rank == 0:
            for queue, groups in c.team.queues().items():
                local.max(f"store/queue/{queue}", groups)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write held-out samples of a step for the report."""
        if self._tracker is not None:
            self._tracker.samples(step, rows)

    def groups(self, step: int, samples: Batch, *, early: bool = False) -> None:
        """Write some groups of a training step for the report; `early`: whether the run ends early after this step."""
        if self._tracker is not None and shows_groups(self._c.config, step, early=early):
            self._tracker.groups(step, group_rows(self._c, samples))

    def _perf(self, numbers: dict[str, float]) -> dict[str, float]:
        dtype, stated = self._c.config.model.dtype, self._c.config.tracking.peak_tflops
        if self._peak is None:
            self._peak = peak_flops(dtype, stated)
        memory = numbers["perf/max_memory_gb"]  # peak of the rank with the highest peak, not of this rank
        validation = VALIDATE if self._c.team.holds(Role.ROLLOUT) else "await_validation"
        measure = partial(
            perf_metrics,
            tokens=numbers["perf/total_tokens"],
            seconds=numbers["timing_s/step"] - numbers.get(f"timing_s/{validation}", 0.0),
            devices=sum(team.devices for team in self._c.team.placement.teams),
            flops=numbers.get("perf/flops"),
        )
        metrics = measure(peak=self._peak)
        # With shared prefixes `perf/mfu` may be above 1 with a right peak, because FLOPs are those of whole samples.
        if metrics.get("perf/mfu", 0) > 1 and not self._remeasured and not self._c.config.actor.engine.share_prefixes:
            self._remeasured, self._peak = True, remeasured_peak(self._peak, dtype, stated)
            metrics = measure(peak=self._peak)
        return metrics | {"perf/max_memory_gb": memory}


def _stage_seconds(events: list[tracing.PhaseEvent]) -> dict[str, float]:
    """Return the seconds of a step's top-level phases by name, and the seconds of offloading under the name `MOVES`.

    Offloading at the start and around a checkpoint does not count, nor does waiting for other ranks during it.
    """
    spent: dict[str, float] = {}
    for event in events:
        parts = event.path.split("/")
        if MOVES in parts:
            if parts[0] in ("step", "sft"):
                waited = parts[-1] == MEETING
                spent[MOVES] = spent.get(MOVES, 0.0) + (-event.seconds if waited else event.seconds)
        elif len(parts) == 2:
            spent[parts[-1]] = spent.get(parts[-1], 0.0) + event.seconds
    return spent
