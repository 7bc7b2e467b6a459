"""`trainer.early_stop`: when a run needs no further step, and that it stays so when the run is started again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megarl.artifacts.jsonl import read_jsonl
from megarl.config.run import EarlyStopConfig
from megarl.runtime.early_stop import EarlyStop
from megarl.system.errors import ConfigError
from tests.runtime import harness


def ends_at(values: list[float], **settings: Any) -> tuple[int | None, str | None]:
    """The first step after which the run ends, and why."""
    stop = EarlyStop(EarlyStopConfig(metric="m", **settings))
    for step, value in enumerate(values, 1):
        stop.record(step, {"m": value})
        if (reason := stop.reason()) is not None:
            return step, reason
    return None, None


@pytest.mark.parametrize(
    ("settings", "values", "step"),
    [
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.3, 0.3, 0.2, 0.9], 6),
        ({"patience": 2, "min_delta": 0.1}, [0.1, 0.15, 0.25, 0.3, 0.35], 5),
        ({"patience": 2, "mode": "min"}, [3.0, 2.0, 2.5, 2.0, 1.0], 4),
        ({"patience": 1}, [0.1, math.nan, 0.2], 2),
        ({"patience": 2}, [math.nan, math.inf, 0.2], 2),
        ({"target": 0.8}, [0.9], 1),
        ({"target": 0.8, "mode": "min"}, [0.9, 0.8], 2),
        ({"target": 0.8, "patience": 3}, [0.1, 0.2, 0.3], None),
    ],
)
def test_a_run_ends_after_so_many_measurements_without_an_improvement_or_at_its_target(settings, values, step):
    assert ends_at(values, **settings)[0] == step


def test_the_reason_names_the_best_measurement():
    reason = ends_at([0.5, 0.75, 0.75], patience=1, min_delta=0.01)[1]
    assert reason == ("m was 0.75 at best, at step 2, and 1 measurements in a row did not improve it by more than 0.01")


def test_the_end_is_known_before_the_step_is_over():
    stop = EarlyStop(EarlyStopConfig(metric="m", patience=2))
    for step, (value, end) in enumerate([(0.5, False), (0.4, False), (0.6, False), (0.6, False), (0.6, True)], 1):
        assert stop.would_end(step, {"m": value}) == end
        assert not stop.would_end(step, {})
        assert stop.reason() is None
        stop.record(step, {"m": value})
    assert stop.reason() is not None


def test_what_another_metric_left_says_nothing_of_this_one():
    old = EarlyStop(EarlyStopConfig(metric="m", patience=1))
    for step in (1, 2):
        old.record(step, {"m": 1.0})
    same, other = (EarlyStop(EarlyStopConfig(metric=name, patience=1)) for name in ("m", "n"))
    for stop in (same, other):
        stop.load_state_dict(old.state_dict())
    assert same.reason() == old.reason()
    assert other.reason() is None


def test_a_metric_that_is_not_there_where_it_should_be_is_refused():
    stop = EarlyStop(EarlyStopConfig(metric="actor/entrop", patience=1))
    with pytest.raises(ConfigError, match=r"trainer\.early_stop\.metric(?s:.*)did you mean actor/entropy\?"):
        stop.refuse_unknown({"actor/entropy": 1.0, "actor/lr": 1.0})
    stop.record(1, {"actor/entrop": 1.0})
    stop.refuse_unknown({"actor/lr": 1.0})  # it was there before


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"patience": 3}, [0.1, 0.1, 0.2, 0.1, 0.1, 0.1], [False, False, False, False, False, True]),
        ({"patience": 1}, [0.2, 0.1], [True, True]),
        ({"patience": 3, "target": 0.5}, [0.1, 0.5], [True, True]),
    ],
)
def test_only_a_step_that_can_be_the_last_one_may_end_the_run(settings, values, expected):
    stop = EarlyStop(EarlyStopConfig(metric="m", **settings))
    found = []
    for step, value in enumerate(values, 1):
        found.append(stop.may_end(validated=False))
        stop.record(step, {"m": value})
        assert found[-1] or stop.reason() is None
    assert found == expected
    assert stop.reason() is not None


def test_a_metric_of_validation_ends_no_run_between_validations():
    stop = EarlyStop(EarlyStopConfig(metric="val/acc", target=0.5))
    assert (stop.may_end(validated=False), stop.may_end(validated=True)) == (False, True)


@pytest.mark.procs
@pytest.mark.timeout(600)
def test_a_run_that_ended_early_is_finished_until_its_settings_say_otherwise(tmp_path: Path) -> None:
    recipe = harness.write_recipe(tmp_path)
    settings = ("sft.steps=0", "cluster.nproc=1", "trainer.steps=5", "trainer.save_every=0", "validation.every=0")
    settings += ("algorithm.kl.use=none", "trainer.best_metric=null", "actor.optim.lr=1.0e-9")
    run_dir = tmp_path / "run"

    def last_step(patience: int) -> int:
        watched = f"trainer.early_stop={{metric: actor/entropy, patience: {patience}, min_delta: 5.0}}"
        steps = harness.train(recipe, run_dir, *settings, watched)
        validated.append([step for step, numbers in steps.items() if "val/acc" in numbers])
        return max(steps)

    validated: list[list[int]] = []
    assert last_step(patience=1) == 2
    assert read_jsonl(run_dir / "training_samples.jsonl")[-1]["step"] == 2
    assert (run_dir / "hf").is_dir()
    assert '"status": "finished"' in (run_dir / "run.json").read_text()
    assert last_step(patience=1) == 2
    assert last_step(patience=2) == 3
    assert validated == [[0, 2], [0, 2], [0, 2, 3]]
