"""A metric that no validation writes is refused before the run."""

from __future__ import annotations

import pytest

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
        ("trainer.best_metric=null",),
    ],
)
def test_what_may_be_there_is_not_refused(failures, settings):
    assert not failures(VAL, *settings)


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
