"""A metric that no validation writes is refused before the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megarl
from megarl.checks.recipe import check_config
from megarl.checks.step_metrics import is_known

VAL = "data.val_files=[good.jsonl]"


@pytest.fixture(autouse=True)
def rows(write) -> None:
    write('{"prompt": "1+1=", "answer": "2"}\n' * 4, "good.jsonl")


@pytest.mark.parametrize(
    ("name", "n", "words"),
    [
        ("val/ac", 1, "did you mean val/acc?"),
        ("acc", 1, "did you mean val/acc?"),
        ("val/gsm8k/ac", 1, "did you mean val/gsm8k/acc?"),
        ("val/best@8", 1, "name one of these"),
        ("val/best@16", 8, "did you mean val/best@8?"),
        ("val/reward_errors", 1, "name one of these"),
        ("reward", 1, "or null"),
    ],
)
def test_what_no_validation_writes(failures, name, n, words):
    sampling = f"validation.sampling={{n: {n}, temperature: 1.0}}"
    (check,) = failures(VAL, f"trainer.best_metric={name}", sampling)
    assert check.key == "trainer.best_metric"
    assert words in str(check.problem())


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.best_metric=val/pass@8", "validation.sampling={n: 8, temperature: 1.0}"),
        ("trainer.best_metric=val/gsm8k/acc",),
        ("trainer.best_metric=val/reward_errors", "reward.on_error=0.0"),
        ("trainer.best_metric=critic/score/mean",),
        ("trainer.best_metric=sync/seconds",),
        ("trainer.best_metric=reward/format",),
        ("trainer.best_metric=timing_s/load",),
        ("trainer.best_metric=actor/mine", "algorithm.loss.name=file.py:missing"),
        ("trainer.best_metric=null",),
    ],
)
def test_what_may_be_there_is_neither_refused_nor_warned_of(config_of, settings):
    checks = check_config(config_of(VAL, *settings)).items
    assert not [check for check in checks if check.status in ("warn", "fail") and check.name == "best metric"]


@pytest.mark.parametrize("key", ["trainer.best_metric", "trainer.early_stop.metric"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("critic/score/maen", "did you mean critic/score/mean"),
        ("actor/entropi", "did you mean actor/entropy"),
        ("nothing/like/it", "docs/tracking.md"),
    ],
)
def test_what_no_training_step_is_known_to_write_is_warned_of(config_of, key, name, words):
    setting = f"{key}={name}" if key.endswith("best_metric") else f"trainer.early_stop={{metric: {name}, patience: 3}}"
    checks = check_config(config_of(VAL, setting)).items
    (check,) = [check for check in checks if check.key == key]
    assert check.status == "warn"
    assert words in str(check.problem())


def test_metrics_that_the_source_writes_are_known():
    text = "\n".join(path.read_text() for path in sorted(Path(megarl.__file__).parent.rglob("*.py")))
    written = re.findall(r'\.(?:mean|sum|min|max)\(\s*"([a-z_]+/[^"]+)"', text)
    assert len(written) > 50
    assert [name for name in written if not name.startswith("val/") and not is_known(name)] == []


def test_without_held_out_prompts_no_metric_is_asked_for(failures):
    assert not failures("data.val_files=[]", "validation.every=0", "trainer.best_metric=val/ac")


@pytest.mark.parametrize(
    ("stop", "settings", "key", "words"),
    [
        ("{patience: 3}", ("validation.every=0",), "metric", "set data.val_files and validation.every"),
        ("{metric: val/ac, patience: 3}", ("validation.every=1",), "metric", "did you mean val/acc?"),
        ("{metric: critic/score/mean}", (), "patience", "or a target"),
    ],
)
def test_what_would_never_end_a_run_early(failures, stop, settings, key, words):
    (check,) = failures(VAL, f"trainer.early_stop={stop}", *settings)
    assert check.key == f"trainer.early_stop.{key}"
    assert words in str(check.problem())


def test_what_may_end_a_run_early_is_not_refused(failures):
    assert not failures(VAL, "validation.every=1", "trainer.early_stop={target: 0.9}")
    assert not failures("data.val_files=[]", "validation.every=0", "trainer.early_stop={metric: actor/kl, patience: 9}")
