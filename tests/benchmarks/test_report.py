"""What the benchmark makes of the numbers of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.benchmarks.measure import floor_of, steps_of
from megarl.benchmarks.peers.compare import ratios, sides
from megarl.benchmarks.report import host_class, save, summary, table
from megarl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "benchmarks" / "cases"


def line(time: float, rollout: float, train: float) -> dict[str, Any]:
    return {
        "time": time,
        "timing_s/step": rollout + train,
        "timing_s/rollout": rollout,
        "timing_s/actor_train": train,
        "perf/cpu_s": 1.5,
        "perf/generated_tokens": 80.0,
        "perf/total_tokens": 100.0,
        "perf/flops": 4e9,
    }


def result() -> dict[str, Any]:
    from dataclasses import asdict

    lines = [line(10.0, 9.0, 9.0), line(12.0, 0.5, 1.0), line(16.0, 1.5, 2.0), line(19.0, 1.0, 1.5)]
    return {
        "case": "x",
        "dtype": "fp32",
        "overrides": [],
        "layout": {"nproc": 2, "threads": 1},
        "steps": [asdict(step) for step in steps_of(lines)],
        "others_share": 0.0,
        "memory_gb": 1.5,
        "floor": {"gflops": 4.0, "rollout_s": 0.25, "actor_train_s": 0.75, "total_s": 1.0},
    }


def test_a_step_lasts_until_the_next_line_and_the_warm_up_is_left_out() -> None:
    steps = result()["steps"]

    assert [step["wall_s"] for step in steps] == [2.0, 4.0, 3.0]
    assert [step["phases"]["other"] for step in steps] == pytest.approx([0.5, 0.5, 0.5])


def test_moves_of_a_phase_are_not_taken_from_the_step_again() -> None:
    moved = [one | {"timing_s/residency": 0.4} for one in (line(10.0, 9.0, 9.0), line(12.0, 0.5, 1.0))]
    (step,) = steps_of(moved)

    assert step.phases == pytest.approx({"rollout": 0.5, "actor_train": 1.0, "residency": 0.4, "other": 0.5})


def test_summary_is_the_median_step_against_the_floor() -> None:
    numbers = summary(result())

    assert numbers["wall_s"] == 3.0
    assert numbers["tokens_per_s"] == pytest.approx(100 / 3)
    assert numbers["times_floor"] == 3.0
    assert numbers["mfu"] == pytest.approx(1 / 3)


def test_the_table_sets_each_phase_beside_its_floor() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(table(result()))
    rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    rollout = next(row for row in rows if "rollout" in row)
    assert [cell.strip() for cell in rollout.strip("│").split("│")] == ["rollout", "1.000", "33%", "0.250", "4.00"]


def test_the_floor_of_case_m_is_that_of_its_parameters_and_its_attention() -> None:
    config = load_config(CASES / "M.yaml")
    lengths = {"prompt_length/mean": 6.0, "response_length/mean": 256.0, "perf/flops": 5e12}
    floor = floor_of(config, lengths, gflops=100.0)

    parameters, tokens, layers, width = 18.9e6, 128 * 262, 8, 512
    pairs = 128 * 262 * 263 / 2
    assert floor.actor_train_s * 1e11 == pytest.approx(6 * parameters * tokens + 12 * pairs * layers * width, rel=0.01)
    assert floor.rollout_s * 1e11 == pytest.approx(2 * parameters * 128 * 256 + 4 * pairs * layers * width, rel=0.01)
    assert floor.total_s == 50.0


@pytest.mark.parametrize(("case", "millions", "samples"), [("S", 2.4, 256), ("M", 19, 128)])
def test_the_cases_are_as_large_as_they_say(case: str, millions: float, samples: int) -> None:
    config = load_config(CASES / f"{case}.yaml")
    hf = config.model.hf_config
    assert hf is not None
    attention = hf["hidden_size"] * hf["head_dim"] * 2 * (hf["num_attention_heads"] + hf["num_key_value_heads"])
    mlp = 3 * hf["hidden_size"] * hf["intermediate_size"]

    assert hf["num_hidden_layers"] * (attention + mlp) / 1e6 == pytest.approx(millions, rel=0.03)
    assert config.data.batch_size * config.rollout.sampling.n == samples


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ({"processor": "AMD EPYC 9B45 96-Core Processor", "cores": 2, "gpus": []}, "2x-amd-epyc-9b45"),
        ({"processor": "x", "cores": 64, "gpus": ["NVIDIA H100 80GB HBM3"] * 8}, "8x-nvidia-h100-80gb-hbm3"),
    ],
)
def test_hosts_of_one_kind_share_a_name(machine: dict[str, Any], name: str) -> None:
    assert host_class(machine) == name


def test_ratios_hold_ours_against_the_best_setting_of_the_other() -> None:
    def run(wall: float, cpu: float) -> list[dict[str, Any]]:
        steps = [{"wall_s": wall * f, "cpu_s": cpu, "generation_s": 0.1} for f in (0.9, 1.0, 1.1)]
        return [{"steps": steps, "memory_gb": 1.0, "others_share": 0.0}]

    runs = {
        "megarl fp32+malloc": run(6.0, 9.0),
        "megarl bf16+malloc": run(3.0, 5.0),
        "trl fp32": run(10.0, 12.0),
        "trl fp32+malloc": run(8.0, 15.0),
        "trl bf16": run(5.0, 20.0),
    }
    found = ratios(sides(runs), "bf16")

    assert found["default"]["wall_s"] == pytest.approx(3 / 5)
    assert found["default"]["wall_s_against"] == "trl bf16"
    assert found["default"]["cpu_s"] == pytest.approx(5 / 12)
    assert found["fp32"]["wall_s"] == pytest.approx(6 / 8)
    assert found["fp32"]["cpu_s_against"] == "trl fp32"


def test_a_saved_result_has_a_line_for_each_record(tmp_path: Path) -> None:
    """What contains no other object or list takes one line; numbers, keys and order stay."""
    saved = {"case": "x", "steps": [{"s": 0.1, "of": [1, 2]}, {"s": 1 / 3, "of": []}], "rates": (1.5, None), 4: {}}
    save(saved, tmp_path / "new" / "file.json")
    text = (tmp_path / "new" / "file.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(saved))
    assert '\n   "s": 0.1,\n   "of": [1, 2]\n' in text
    assert '\n "rates": [1.5, null],\n' in text
