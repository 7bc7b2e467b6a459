"""Derives seconds and lengths for a simulation from a real run: its metrics, its trace, and its configuration.

response_length/mean, /max   distribution of sample lengths (megarl.planning.lengths)
rollout in trace.json        seconds of a decoding step: seconds of the slowest rank / steps that these lengths take
timing_s/NODE                seconds of a node, as a line over the tokens of a replica if they depend on these
timing_s/weight_sync         seconds of a weight update
team/NAME/busy_s             minus the nodes of the team and its weight updates: its other work
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import STEP, read_jsonl
from megarl.artifacts.records import read_record
from megarl.artifacts.timings import WARM_UP, read_timings
from megarl.config.load import load_config
from megarl.planning.lengths import Lengths
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.simulation.replica import make_replicas
from megarl.simulation.seconds import Line, Table
from megarl.simulation.system import SimTeam, System, read_system
from megarl.system.errors import DataError

_TRIALS = 20  # steps whose samples are simulated to derive the seconds of a decoding step
# a node's time is taken to grow with its tokens only if they explain at least this share of its variance
_FOLLOWS = 0.25
_PUSH = "timing_s/weight_sync"


@dataclass(frozen=True)
class Calibration:
    """Durations measured in a real training run, from which a simulation can be calibrated."""

    seconds: Table
    lengths: Lengths
    system: System  # the system on which the run was measured
    prompt_tokens: int  # mean tokens of the run's prompts
    step_s: float  # mean seconds of the run's steps


def calibrate(run_dir: Path) -> Calibration:
    """Return the durations measured in a training run, without its first steps. Raise DataError if the folder holds no
    training run, if the run is too short, or if it used async.order=as_ready.
    """
    read_timings(run_dir)  # raises for folders without a run and for runs that are too short
    config = load_config(str(run_dir / "config.yaml"), [], components=COMPONENTS)
    system = read_system(config, build_task_graph(config))
    if not system.in_order:
        raise DataError(
            "the time of a decoding step cannot be derived from a run that uses samples as soon as they are ready",
            where=str(run_dir),
            found=f"async.order={system.order}",
            allowed="a run with async.order=in_order, whatever its staleness",
            fix="run the recipe for some steps with async='!replace {max_staleness: 0}', and name that run with --run",
        )
    steps = {
        line["step"]: line for line in read_jsonl(run_dir / "metrics.jsonl", needs=STEP) if line["stage"] == "train"
    }
    lines = [steps[step] for step in sorted(steps) if step > 0][WARM_UP:]
    ends = [line["time"] for line in lines]
    prompt = round(_mean(lines, "prompt_length/mean"))
    system = replace(system, prompt_tokens=prompt)
    samples = system.groups * system.samples
    longest = config.rollout.sampling.max_new_tokens
    seen = (_mean(lines, "response_length/mean"), _mean(lines, "response_length/max"))
    lengths = Lengths.of(*seen, samples, longest)
    generation = statistics.fmean(_generation(run_dir, lines, system.rollout_node))
    token = Line(generation / statistics.fmean(_makespan(system, lengths, trial) for trial in range(_TRIALS)))
    nodes = {id: _line(lines, id, team) for team in system.teams for id in team.nodes}
    other = {team.name: _other(lines, team, system) for team in system.teams}
    push = _mean(lines, _PUSH)
    step_s = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
    table = Table(token, nodes=nodes, push_s=push, other_s=other)
    return Calibration(table, lengths, system, prompt, step_s)


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.fmean(values) if values else 0.0


def _generation(run_dir: Path, lines: Sequence[dict[str, Any]], node: str) -> list[float]:
    """Return how many seconds the slowest rank generated in each step, from the trace if there is one, else metrics."""
    file = run_dir / "trace.json"
    counted = {line["step"] for line in lines}
    ranks: defaultdict[tuple[int, int], float] = defaultdict(float)
    for slice_ in read_record(file, {"traceEvents": list}).get("traceEvents", []):
        facts = slice_.get("args", {})
        if slice_["ph"] == "X" and facts.get("step") in counted and facts.get("path") == f"step/{node}":
            ranks[facts["step"], slice_["pid"]] += slice_["dur"] / 1e6
    slowest: defaultdict[int, float] = defaultdict(float)
    for (step, _), seconds in ranks.items():
        slowest[step] = max(slowest[step], seconds)
    return list(slowest.values()) or [line[f"timing_s/{node}"] for line in lines if f"timing_s/{node}" in line]


def _makespan(system: System, lengths: Lengths, trial: int) -> float:
    """Return how many decoding steps the slowest replica needs for a training step; `trial` seeds the lengths."""
    servers = make_replicas(Table(Line(1.0)), system.slots, system.prompt_tokens, system.servers)
    for number, tokens in enumerate(lengths.sample((trial,), system.groups, system.samples)):
        servers[number % system.servers].add(number, tokens)
    return max(server.finish() for server in servers)


def _line(lines: Sequence[dict[str, Any]], id: str, team: SimTeam) -> Line:
    name = f"timing_s/{id}"
    points = [(line["perf/total_tokens"] / team.replicas, line[name]) for line in lines if name in line]
    if not points:
        return Line(0.0)
    tokens, seconds = zip(*points, strict=True)
    mean = statistics.fmean(seconds)
    if len(points) < 3 or len(set(tokens)) == 1 or len(set(seconds)) == 1:
        return Line(mean)
    slope, fixed = statistics.linear_regression(tokens, seconds)
    if slope <= 0 or statistics.correlation(tokens, seconds) ** 2 < _FOLLOWS:
        return Line(mean)
    # No phase takes negative time: a line that is negative for few tokens is replaced by one through the origin.
    return Line(fixed, slope) if fixed >= 0 else Line(0.0, mean / statistics.fmean(tokens))


def _other(lines: Sequence[dict[str, Any]], team: SimTeam, system: System) -> float:
    """Return how many seconds per step a team works outside its graph nodes and its weight transfers."""
    trains = team is system.train
    generates = team is system.rollout or (trains and system.rollout is None)
    known = [*team.nodes, *([system.rollout_node] if generates else [])]
    names = [f"timing_s/{id}" for id in known] + ([_PUSH] if trains else [])

    busy = f"team/{team.name}/busy_s"
    waits = f"team/{team.name}/wait/metrics_s"

    def whole(line: dict[str, Any]) -> float:
        return line[busy] + (line.get(waits) or 0.0) if busy in line else line["timing_s/step"]

    return max(0.0, statistics.median(whole(line) - sum(line.get(name) or 0.0 for name in names) for line in lines))
