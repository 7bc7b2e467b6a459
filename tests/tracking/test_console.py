import io
import itertools
import json
import math

import pytest
from rich.console import Console

from megarl.tracking.console import ConsoleView, summary
from megarl.tracking.names import STEP_LINE

EVERYTHING = {shown.name: -1.23e-5 for shown in STEP_LINE} | {"timing_s/step": 12.34}


@pytest.fixture
def view(monkeypatch):
    """view(total) -> a view whose clock goes on by 30 s each time that it is read."""
    clock = itertools.count(0, 30)
    monkeypatch.setattr("megarl.tracking.console.time.monotonic", lambda: float(next(clock)))
    return lambda total, **more: ConsoleView(total, Console(file=io.StringIO(), width=200, highlight=False), **more)


@pytest.mark.parametrize("total", [3, 1000, 123_456, None])
def test_lines_have_80_columns_at_most(view, total):
    shown = view(total)
    many = {f"val/{kind}@{k}": 0.5 for kind in ("pass", "maj") for k in (1, 2, 4, 8, 16)}
    for step in (0, 1, 2):
        shown.step(step, EVERYTHING | {"val/acc": 0.5, "val/prompts": 512.0, "val/samples": 4096.0} | many)
    lines = shown.console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert all("12.3 s" in line for line in lines if line.startswith("step"))


def test_control_characters_of_foreign_texts_are_shown_as_escapes(view):
    shown = view(1)
    shown.note("WARNING: \x1b[2Ja\u202eb\nc")
    shown.final("\x1b]0;t\x07name", [{"step": 1, "critic/score/mean": 1.0}])
    lines = [line.rstrip() for line in shown.console.file.getvalue().splitlines()]
    assert lines[:3] == ["WARNING: \\x1b[2Ja\\u202eb", "c", "\\x1b]0;t\\x07name"]


def test_a_step_says_percent_units_and_time_left(view):
    shown = view(1000)
    for step in (9, 10):
        shown.step(step, {"critic/score/mean": 0.25, "response_length/mean": 3.5, "timing_s/step": 1.5})
    text = shown.console.file.getvalue().splitlines()[-1]
    # 990 steps of 30 s by the clock; what a step itself says leaves out what is between steps.
    assert text == "step   10/1000   1%  score    0.25      3.5 tok   1.5 s   8h15 left"


def test_the_words_of_a_step_line_are_explained_once(view):
    shown = view(1000)
    shown.step(0, {"timing_s/step": 1.0})
    for step in (1, 2):
        metrics = {"critic/score/mean": 0.25, "response_length/mean": 3.5, "actor/entropy": 1.0, "critic/vf_loss": 2.0}
        shown.step(step, metrics)
    lines = shown.console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["step", "step", "vf:", "step"]
    assert lines[2] == "  vf: value loss; tok: response length"  # there was no room for the entropy


def test_a_validation_says_counts_and_the_best_so_far(view):
    shown = view(100)
    shown.recall(10, {"val/acc": 0.25})  # before the run was continued
    for step, accuracy in ((20, 0.125), (30, 0.5), (40, 0.5)):
        shown.step(
            step, {"val/acc": accuracy, "val/prompts": 8.0, "val/samples": 16.0, "val/pass@2": 0.75, "val/loss": 0.5}
        )
    said = " ".join(shown.console.file.getvalue().split())
    counts = "75.0%, loss 0.5 of 8 prompts (16 samples)"
    assert f"validation: accuracy 12.5%, pass@2 {counts}; best 25.0% at step 10" in said
    assert f"validation: accuracy 50.0%, pass@2 {counts}; the best so far" in said
    assert f"validation: accuracy 50.0%, pass@2 {counts}; as good as the best, of step 30" in said


def test_the_mean_of_scores_other_than_0_and_1_is_called_no_accuracy(view):
    shown = view(100)
    shown.step(10, {"val/acc": 0.1, "val/graded": 2.0, "val/prompts": 8.0})
    assert "validation: mean score 0.1 of 8 prompts\n" in shown.console.file.getvalue()
    rows = summary([{"step": 10, "val/acc": 0.1, "val/graded": 2.0}])
    assert [row.short for row, _ in rows] == ["validation score"]


def test_a_validation_as_good_as_the_best_is_not_called_the_best_so_far(view):
    shown = view(100)
    for step in (0, 10):
        shown.step(step, {"val/acc": 0.0, "val/prompts": 8.0})
    said = shown.console.file.getvalue()
    assert said.count("validation: accuracy 0.0% of 8 prompts\n") == 2
    assert "best" not in said


def test_the_final_table_speaks_of_no_pairs_where_there_may_be_labels(view):
    shown = view(1)
    shown.final("kto", [{"step": 1, "rewards/accuracies": 0.5}])
    assert "preferences ranked right" in shown.console.file.getvalue()
    assert "pair" not in shown.console.file.getvalue()


def test_utilisation_is_in_percent_as_in_the_report(view):
    shown = view(3)
    shown.final("x", [{"step": 1, "perf/mfu": 0.111}])
    text = shown.console.file.getvalue()
    assert "MFU [%]" in text
    assert "11.1" in text


def test_modes_of_the_console(view):
    records = {"critic/score/mean": 0.25, "val/acc": 0.5, "timing_s/step": 1.5}
    said = {}
    for mode in ("plain", "quiet", "json"):
        shown = view(4, mode=mode)
        shown.step(1, records)
        shown.note("a note")
        shown.final("the end", [{"step": 1, **records}])
        said[mode] = shown.console.file.getvalue()
    assert "step 1/4" in said["plain"]
    assert "step 1/4" not in said["quiet"]
    assert all(word in said["quiet"] for word in ("validation: accuracy 50.0%", "a note", "the end"))
    assert [json.loads(line) for line in said["json"].splitlines()] == [{"step": 1, "stage": "train", **records}]


def test_what_json_cannot_hold_is_null(view):
    shown = view(4, mode="json")
    shown.step(1, {"a": math.nan, "b": -math.inf, "c": 0.5})
    line = json.loads(shown.console.file.getvalue(), parse_constant=pytest.fail)
    assert line == {"step": 1, "stage": "train", "a": None, "b": None, "c": 0.5}
