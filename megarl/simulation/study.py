"""A table of simulated runs: a recipe and its `what if` variants, each with several numbers of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config.fields import fields_of
from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.planning.assumptions import assume, pairs
from megarl.planning.lengths import Lengths, refuse_longer
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.simulation.calibrate import Calibration, calibrate
from megarl.simulation.engine import Faults, Simulation
from megarl.simulation.outcome import Simulated
from megarl.simulation.planned import Assumptions, plan_seconds
from megarl.simulation.seconds import Seconds
from megarl.simulation.system import System, read_system
from megarl.system.errors import ConfigError

RECIPE, WHAT_IF = "unchanged", "--what-if"


@dataclass(frozen=True)
class StudyRow:
    """One simulated run with its settings and result."""

    what: str  # the overrides and assumptions of a `what if` row; `RECIPE`: the recipe as it is
    system: System
    outcome: Simulated
    wall_s: float  # seconds that the simulation took

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.outcome.tokens_per_s / self.system.devices


@dataclass(frozen=True)
class Study:
    """The settings of a study: simulations of a run's time and throughput, one per row of a table."""

    recipe: str  # name or file of a recipe, or a run folder
    overrides: tuple[str, ...] = ()  # overrides `key.path=value` for all rows
    # for each row after the recipe's own: overrides `key.path=value`, and assumptions `name=value`
    what_if: tuple[tuple[str, ...], ...] = ()
    assumed: tuple[str, ...] = ()  # assumptions `name=value` for all rows
    run_dir: Path | None = None  # run folder with measurements; None: times come from formulas
    devices: tuple[int, ...] = ()  # numbers of devices to simulate; empty: only that of the recipe
    grow: bool = False  # whether the batch grows with the devices
    steps: int = 100
    seed: int = 0  # seed of lengths and failures
    # raises an error if something is wrong with a recipe
    refuse: Callable[[RunConfig, TaskGraph], None] = lambda config, graph: None

    def rows(self) -> list[StudyRow]:
        """Return all rows, the recipe itself first, for every number of devices. Raise UserError for an invalid recipe,
        override, assumption or run folder.
        """
        return [row for changed in [(), *self.what_if] for row in self._of(changed, self.measured)]

    @cached_property
    def measured(self) -> Calibration | None:
        """The measurements of the run; None: formulas are used."""
        return None if self.run_dir is None else calibrate(self.run_dir)

    def other_model(self) -> str | None:
        """Return a warning if the measured run had a different model from the recipe's; None if it had the same, or if
        formulas give the times."""
        if self.run_dir is None:
            return None
        recipe_model, measured_model = (
            load_config(file, keys, components=COMPONENTS, check_own=False).model
            for file, keys in ((_file(self.recipe), self.overrides), (str(self.run_dir / "config.yaml"), ()))
        )
        same = (recipe_model.path, recipe_model.hf_config) == (measured_model.path, measured_model.hf_config)
        return None if same else "the seconds come from a run whose model differs from the recipe's"

    def as_measured(self) -> str | None:
        """Describe the parts of a step for which the simulation assumes the measured time on any number of devices.

        None without measurements, or for a single number of devices.
        """
        if self.measured is None or len(self.devices) < 2:
            return None
        nodes, step = self.measured.seconds.nodes, self.measured.step_s
        nodes_shown = [
            f"{id} ({line.fixed / step:.0%} of its step)"
            for id, line in nodes.items()
            if not line.per_token and line.fixed >= 0.01 * step
        ]
        return ", ".join(["a decoding step", *nodes_shown])

    def _of(self, changed: Sequence[str], measured: Calibration | None) -> list[StudyRow]:
        sections = fields_of(RunConfig)
        keys = [change for change in changed if "." in (name := change.partition("=")[0]) or name in sections]
        named = [change for change in changed if change not in keys]
        assumed, more = pairs(self.assumed), pairs(named, WHAT_IF)
        given = assume(assume(Assumptions(), assumed), more, WHAT_IF)
        config = load_config(_file(self.recipe), [*self.overrides, *keys], components=COMPONENTS)
        graph = build_task_graph(config)
        self.refuse(config, graph)
        system = read_system(config, graph)
        longest = config.rollout.sampling.max_new_tokens
        lengths = Lengths(given.mean_tokens or longest / 4, given.sigma, longest)
        allowed = f"up to rollout.sampling.max_new_tokens={longest}"
        refuse_longer(given.mean_tokens, longest, "mean_tokens", allowed)
        if measured is not None:
            _refuse_unused({"--assume": assumed, WHAT_IF: more})
            _refuse_other(graph, measured, self.run_dir)
            lengths = replace(measured.lengths, longest=longest)
            system = replace(system, prompt_tokens=measured.prompt_tokens)
        faults = Faults(
            given.device_hours or None, given.server_restart_s, given.train_restart_s, config.trainer.save_every or 20
        )
        rows = []
        for number in self.devices or (system.devices,):
            scaled = system.scaled(number, grow=self.grow)
            seconds: Seconds = (
                plan_seconds(config, graph, scaled, lengths, given)
                if measured is None
                else measured.seconds.slower_links(given.link_times)
            )
            began = time.perf_counter()
            outcome = Simulation(scaled, seconds, lengths, self.steps, seed=self.seed, faults=faults).run()
            rows.append(StudyRow(" ".join(changed) or RECIPE, scaled, outcome, time.perf_counter() - began))
        return rows


_WITH_A_RUN = ("link_times", "device_hours", "server_restart_s", "train_restart_s")
"""Assumptions that also count when seconds and lengths come from a run."""


def _refuse_unused(given: Mapping[str, Mapping[str, str]]) -> None:
    for where, values in given.items():
        for name in values:
            if name not in _WITH_A_RUN:
                raise ConfigError(
                    "this assumption is taken from the run with --run",
                    where=where,
                    found=name,
                    allowed=_WITH_A_RUN,
                    fix="leave the assumption out",
                )


def _refuse_other(graph: TaskGraph, measured: Calibration, run_dir: Path | None) -> None:
    """Raise ConfigError if the run did not measure all nodes of this task graph, as when it had another graph."""
    generating = {id for id in graph.order() if graph[id].declared.resamples}
    missing = [id for id in graph.order() if id not in measured.seconds.nodes and id not in generating]
    if missing:
        raise ConfigError(
            "this run has not measured all nodes of the recipe",
            where="--run",
            found=f"{run_dir}, without {', '.join(missing)}",
            allowed="a run of the same recipe",
            fix=f"simulate the recipe of this run: megarl simulate {run_dir} --run {run_dir}",
        )


def _file(recipe: str) -> str:
    config = Path(recipe) / "config.yaml"
    return str(config) if config.is_file() else recipe


def losses(first: StudyRow, row: StudyRow) -> dict[str, float]:
    """Return, by category, how many seconds longer a step of `row` takes than it would at the efficiency of `first`.
    The categories are parts of the actor team's time: its nodes, waiting for samples, new weights, and the rest.
    """
    ideal = (row.outcome.tokens_per_s * row.outcome.step_s / row.system.devices) / (
        first.outcome.tokens_per_s * first.outcome.step_s / first.system.devices
    )
    before, now = _parts(first), _parts(row)
    return {name: now[name] - before[name] * ideal for name in now}


def _parts(row: StudyRow) -> dict[str, float]:
    shares, step = row.outcome.shares, row.outcome.step_s
    parts = {"training": shares.training, "waiting for samples": shares.samples, "new weights": shares.push}
    return {name: share * step for name, share in parts.items()} | {"other": (1 - sum(parts.values())) * step}


def as_json(rows: Sequence[StudyRow]) -> list[dict[str, Any]]:
    """Return the rows as plain data."""
    return [
        {
            "what": row.what,
            "devices": row.system.devices,
            "servers": row.system.servers,
            "groups": row.system.groups,
            "step_s": row.outcome.step_s,
            "tokens_per_s": row.outcome.tokens_per_s,
            "shares": row.outcome.shares._asdict(),
            "nodes": dict(row.outcome.largest_nodes()),
            "staleness": row.outcome.staleness,
            "calls_per_step": row.outcome.calls / len(row.outcome.ends),
            "failures": {"servers": row.outcome.failures[0], "trainers": row.outcome.failures[1]},
            "system": {key: value for key, value in asdict(row.system).items() if key != "waits"},
            "wall_s": row.wall_s,
        }
        for row in rows
    ]
