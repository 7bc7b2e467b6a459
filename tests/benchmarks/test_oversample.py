"""What `megarl bench oversample` measures: the same Pareto times in every run."""

from __future__ import annotations

import statistics

import pytest
import yaml

from megarl.benchmarks import oversample
from megarl.checks.recipe import check_config
from megarl.config.load import load_config


def test_response_times_are_pareto_and_the_same_in_every_run():
    """The median of a Pareto distribution is least x 2^(1 / shape); 4,000 of them, within 5%."""
    times = [oversample.response_s(number) for number in range(4000)]
    assert times == [oversample.response_s(number) for number in range(4000)]
    assert (min(times) >= oversample.LEAST_S, max(times)) == (True, oversample.MOST_S)
    assert statistics.median(times) == pytest.approx(oversample.LEAST_S * 2 ** (1 / oversample.SHAPE), rel=0.05)


@pytest.mark.parametrize("name", oversample.RUNS)
def test_its_recipes_are_good(name, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(oversample.RECIPE))
    keys = [f"rollout.{key}={value}" for key, value in oversample.RUNS[name].items()]
    assert [check for check in check_config(load_config(file, keys)).items if check.status == "fail"] == []
