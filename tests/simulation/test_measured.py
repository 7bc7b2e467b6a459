"""Simulated steps beside those of real runs of teams and buffer whose samples and updates were sleeps."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.artifacts.jsonl import read_jsonl
from megarl.config.load import load_config
from megarl.planning.lengths import Lengths
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.simulation.calibrate import calibrate
from megarl.simulation.engine import Faults, Simulation
from megarl.simulation.outcome import FIRST, LAST
from megarl.simulation.seconds import Line, Table
from megarl.simulation.study import Study
from megarl.simulation.system import read_system
from megarl.system.errors import ConfigError, DataError
from tests.simulation.ideal import CASES, synchronous
from tests.simulation.test_engine import TOKEN_S, OfWork, system

RUNS = Path(__file__).parent / "recorded"
SYNCHRONOUS = "synchronous"
SETTINGS = {
    SYNCHRONOUS: (0, False, False),
    "in_order, k=1": (1, False, False),
    "in_order, k=2": (2, False, False),
    "as_ready, k=2": (2, True, False),
    "as_ready, k=2, partial": (2, True, True),
}


FILES = {"balanced": "overlap", "tails": "overlap-tails", "drawing": "overlap-drawing"}


def recorded_modes(case: str) -> dict[str, dict[str, object]]:
    return json.loads((RUNS / f"{FILES[case]}.json").read_text())["modes"]


@pytest.mark.parametrize(("case", "mode"), [(case, mode) for case in FILES for mode in recorded_modes(case)])
def test_recorded_runs_within_a_tenth(case, mode):
    """Only the overhead of a step is taken from a run: the synchronous one of the case."""
    work, recorded = CASES[case], recorded_modes(case)
    ends, ideal = recorded[SYNCHRONOUS]["ends_s"], synchronous(work, len(recorded[SYNCHRONOUS]["ends_s"]))
    overhead = (ends[-1] - ends[0] - ideal[-1] + ideal[0]) / (len(ends) - 1) - recorded[SYNCHRONOUS]["push_s"]
    other = {"train": overhead / 2, "draw": overhead / 2}
    push = recorded[mode]["push_s"]
    table = Table(Line(TOKEN_S), nodes={"actor_train": Line(work.training_s)}, push_s=push, other_s=other)
    lengths, steps = OfWork(1, 1, 1, work), len(recorded[mode]["ends_s"])
    found = Simulation(system(work, *SETTINGS[mode]), table, lengths, steps, faults=Faults()).run()
    assert 60 / found.step_s == pytest.approx(recorded[mode]["steps_per_minute"], rel=0.1)


def config_of(run: str):
    return load_config(str(RUNS / run / "config.yaml"), [], components=COMPONENTS)


def measured_s(run: str) -> float:
    ends = [line["time"] for line in read_jsonl(RUNS / run / "metrics.jsonl") if line["step"]]
    counted = ends[FIRST - 1 : len(ends) - LAST]
    return (counted[-1] - counted[0]) / (len(counted) - 1)


@pytest.mark.parametrize(
    ("told_by", "run"),
    [
        ("synchronous", "synchronous"),
        ("synchronous", "in_order"),
        *(("drawing/synchronous", f"drawing/{run}") for run in ("synchronous", "in_order_1", "in_order_2")),
    ],
)
def test_one_run_tells_the_seconds_of_itself_and_of_others(told_by, run):
    """The first two on a machine that was busier than for the others: half a second of a step is overhead there."""
    told, config = calibrate(RUNS / told_by), config_of(run)
    of = replace(read_system(config, build_task_graph(config)), prompt_tokens=told.prompt_tokens)
    seeds = [Simulation(of, told.seconds, told.lengths, 24, seed=seed, faults=Faults()).run() for seed in range(10)]
    assert sum(one.step_s for one in seeds) / 10 == pytest.approx(measured_s(run), rel=0.1)


def test_what_is_measured_is_what_the_run_was_made_of():
    told = calibrate(RUNS / "synchronous")
    assert told.seconds.token(1) == pytest.approx(TOKEN_S, rel=0.15)
    assert told.seconds.node("actor_train", 0, 1) == pytest.approx(1.5, rel=0.1)
    assert told.lengths.sigma == pytest.approx(0.7, abs=0.2)
    without_trace = calibrate_without_trace(told)
    assert without_trace == pytest.approx(told.seconds.token(1), rel=0.05)


def calibrate_without_trace(told) -> float:
    from megarl.simulation.calibrate import _generation, _makespan

    lines = [line for line in read_jsonl(RUNS / "synchronous" / "metrics.jsonl") if line["step"] > 2]
    drawn = _generation(RUNS, lines, "rollout")
    units = sum(_makespan(told.system, told.lengths, trial) for trial in range(20)) / 20
    return sum(drawn) / len(drawn) / units


def test_lengths_are_found_again_from_mean_and_longest():
    made = Lengths(100.0, 0.8, 10**9)
    steps = made.sample((3,), 400, 64)
    mean = sum(map(sum, steps)) / 400 / 64
    found = Lengths.of(mean, sum(map(max, steps)) / 400, 64, 10**9)
    assert found.sigma == pytest.approx(0.8, abs=0.05)


def test_what_if_rows_change_the_recipe_and_assumptions():
    rows = Study(
        str(RUNS / "synchronous"),
        run_dir=RUNS / "synchronous",
        what_if=(("async={max_staleness: 1}",), ("link_times=50",)),
        steps=20,
    ).rows()
    as_is, ahead, slow = (row.outcome.step_s for row in rows)
    assert ahead < 0.8 * as_is < as_is < slow


@pytest.mark.parametrize(
    ("study", "said"),
    [
        (Study("grpo_quickstart", assumed=("lnk_gbit=3",)), "did you mean link_gbit"),
        (Study("grpo_quickstart", assumed=("link_gbit=fast",)), "a number above 0"),
        (Study("grpo_quickstart", what_if=(("lnk_gbit=3",),)), r"--what-if(?s:.*)did you mean link_gbit"),
        (
            Study("grpo_quickstart", what_if=(("placement.teams.draw.devices=3",),)),
            r"override 'placement.*roles is missing",
        ),
        (Study("grpo_quickstart", what_if=(("asinc={max_staleness: 1}",),)), r"--what-if(?s:.*)asinc"),
        (Study(str(RUNS / "in_order"), run_dir=RUNS / "in_order", devices=(3,)), "multiples of 2"),
    ],
)
def test_mistakes_are_told(study, said):
    with pytest.raises(ConfigError, match=said):
        study.rows()


def test_a_run_as_ready_does_not_tell_what_a_token_takes(tmp_path):
    for file in (RUNS / "in_order").iterdir():
        text = file.read_text().replace("order: in_order", "order: as_ready")
        (tmp_path / file.name).write_text(text)
    with pytest.raises(DataError, match="as_ready"):
        calibrate(tmp_path)


def test_steps_on_1024_devices_take_seconds():
    teams = "{train: {roles: [actor, reference], devices: 16}, draw: {roles: [rollout], devices: 16}}"
    overrides = [f"placement.teams={teams}", "cluster.nproc=32", "rollout.sglang.colocated=false"]
    overrides += ["rollout.sglang.servers=16", "data.batch_size=1024", "rollout.sampling.max_new_tokens=8192"]
    overrides += ["async={max_staleness: 2, order: as_ready, partial: true}", "actor.engine.offload=false"]
    began = time.process_time()
    (row,) = Study("grpo_qwen3_8b_8gpu", tuple(overrides), devices=(1024,), steps=10).rows()
    assert time.process_time() - began < 24  # 2 on two cores that others keep busy; slower ones take more
    assert row.system.devices == 1024
    assert len(row.outcome.ends) == 10
