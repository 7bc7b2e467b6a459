"""Metrics of how long each team works and waits, for which team and for what, and which team is the bottleneck.

rank of the critic's team     phases that name another team      mean over the team's ranks, in team/critic/...
  step/take/wait     3 s      waits_for draw                     wait_for/draw_s 3, wait/samples_s 3
  await_checkpoint   1 s      waits_for train                    wait_for/train_s 1, wait/checkpoint_s 1
  all else           6 s                                         busy_s 6, busy 0.6
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.runtime.rank_state import TeamContext
    from megarl.system.metrics import Metrics
    from megarl.system.tracing import PhaseEvent

_AWAIT = "await_"  # prefix of the names of phases that wait for another team for something other than samples
SAMPLES, WEIGHTS = "samples", "weights"
FORMER_WAIT = "wait/drawn"  # former name of the metric `wait/generation`; both names are recorded


class TeamTime:
    """Measures how long one rank works and waits in each step of a run with several teams."""

    def __init__(self, team: TeamContext) -> None:
        self._team, self._name = team, f"team/{team.plan.name}"
        self._since: int | None = None
        self._tokens = 0
        # Names of metrics of waiting times. A rank's first wait for anything else adds a name, which later steps report
        # as well.
        self._kinds = {SAMPLES, WEIGHTS}

    def start_step(self) -> None:
        """Start the clock of a step. Outside the actor's team, a step starts when the previous step ends."""
        if self._since is None or self._team.leads:
            self._since = time.time_ns()

    def end_step(self, metrics: Metrics, events: Iterable[PhaseEvent], tokens: int | None) -> None:
        """Add the working and waiting times of the current step, which ends with this call, to `metrics`.

        Args:
            metrics: this rank's metrics.
            events: phases that have ended.
            tokens: number of tokens that this rank's replica has processed since the run began; None: another rank of
                the replica counts them.
        """
        assert self._since is not None, "a step has begun"
        now, since = time.time_ns(), self._since
        self._since = now
        seconds, waited = max(now - since, 1) / 1e9, 0.0
        whom = dict.fromkeys((team.name for team in self._team.others), 0.0)
        kinds = dict.fromkeys(self._kinds, 0.0)
        for event in events:
            if event.waits_for and event.start_ns >= since:
                name = event.path.rpartition("/")[2]
                kind = name.removeprefix(_AWAIT) if name.startswith(_AWAIT) else SAMPLES
                whom[event.waits_for] += event.seconds
                kinds[kind] = kinds.get(kind, 0.0) + event.seconds
                waited += event.seconds
        self._kinds.update(kinds)
        spent = {"wait_s": waited, "busy_s": max(0.0, seconds - waited)}
        spent |= {f"wait_for/{name}_s": s for name, s in whom.items()}
        spent |= {f"wait/{name}_s": s for name, s in kinds.items()}
        if "generation" in kinds:
            spent[f"{FORMER_WAIT}_s"] = kinds["generation"]
        # Add the seconds divided by the number of ranks: the sum over ranks is then their mean, and the calls of a step
        # add up.
        for name, s in spent.items():
            metrics.sum(f"{self._name}/{name}", s / self._team.plan.devices)
        metrics.mean(f"{self._name}/busy", max(0.0, seconds - waited), seconds)
        if self._team.begins_again:
            metrics.max(f"{self._name}/restarts", self._team.restarts)
        if tokens is not None:  # tokens of all replicas, divided by the mean of their seconds
            metrics.mean(f"{self._name}/tokens_per_s", tokens - self._tokens, seconds / self._team.plan.replicas)
            self._tokens = tokens


class AllTeams:
    """Finds the team that is the bottleneck from the metrics of all teams; runs in the actor's team."""

    def __init__(self, teams: Iterable[str]) -> None:
        self._busy: dict[str, float | None] = dict.fromkeys(teams)

    def bottleneck(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics `perf/bottleneck/NAME` (1: the busiest team, else 0), and times for teams that sent none.

        A rollout team that generates continuously may have sent no metrics of this step. Its times count as 0, and its
        busy share is the last known one. There is no bottleneck until every team has sent metrics once.
        """
        added: dict[str, float] = {}
        for name in self._busy:
            if f"team/{name}/busy" in numbers:
                self._busy[name] = numbers[f"team/{name}/busy"]
                continue
            others = [f"wait_for/{other}_s" for other in self._busy if other != name]
            added |= {f"team/{name}/{metric}": 0.0 for metric in ("busy_s", "wait_s", *others)}
        known = {name: busy for name, busy in self._busy.items() if busy is not None}
        if len(known) == len(self._busy):
            busiest = max(known, key=known.__getitem__)
            added |= {f"perf/bottleneck/{name}": float(name == busiest) for name in known}
        return added
