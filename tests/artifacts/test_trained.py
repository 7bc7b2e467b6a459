"""Which model of a run folder a command takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.artifacts.trained import (
    BEST,
    LAST,
    Exported,
    exported,
    forget_exported,
    overrides_for_model,
    untrained_best_note,
    write_exported,
)
from megarl.system.errors import UserError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").touch()
    return tmp_path


def save(run_dir: Path, *steps: int, best: int | None = None) -> None:
    for step in steps:
        folder = run_dir / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "meta.json").touch()
    if best is not None:
        (run_dir / "checkpoints" / "best.json").write_text(json.dumps({"step": best}))


def export(run_dir: Path, *models: Exported) -> None:
    for model in models:
        (run_dir / model.folder).mkdir()
        (run_dir / model.folder / "config.json").touch()
    write_exported(run_dir, list(models))


def test_the_exported_models_come_first(run_dir: Path) -> None:
    save(run_dir, 3, 6, best=3)
    export(run_dir, Exported(LAST, 6, "last"), Exported(BEST, 3, "best"))
    settings, what = overrides_for_model(run_dir, "best")
    assert settings == [
        f"model.path={run_dir / 'hf_best'}",
        "model.hf_config=null",
        "model.lora=null",
        "trainer.resume=auto",
    ]
    assert what.endswith("hf_best (best, step 3)")
    assert overrides_for_model(run_dir, "last")[1].endswith("hf (last, step 6)")


def test_the_last_is_the_best_where_no_other_is_known(run_dir: Path) -> None:
    export(run_dir, Exported(LAST, 6, "last"))
    assert overrides_for_model(run_dir, "best")[1].endswith("hf (last, step 6; no best model is known)")
    save(run_dir, 6, best=6)
    assert overrides_for_model(run_dir, "best")[1].endswith("hf (last, step 6, which is the best)")
    (run_dir / "checkpoints" / "best.json").write_text('{"step": 3}')
    assert overrides_for_model(run_dir, "best")[1].endswith("hf (last, step 6; the best model, of step 3, is missing)")
    assert overrides_for_model(run_dir, "last")[1].endswith("hf (last, step 6)")


@pytest.mark.parametrize(("which", "step"), [("best", 3), ("last", 9)])
def test_a_run_under_way_has_checkpoints(run_dir: Path, which: str, step: int) -> None:
    save(run_dir, 3, 9, best=3)
    settings, what = overrides_for_model(run_dir, which)
    assert settings == [f"trainer.resume={run_dir / 'checkpoints' / f'step_{step}'}"]
    assert what.endswith(f"step_{step} ({which})")


def test_a_model_that_was_moved_away_is_not_named(run_dir: Path) -> None:
    export(run_dir, Exported(LAST, 6, "last"))
    (run_dir / LAST).rename(run_dir / "elsewhere")
    assert exported(run_dir) == []


def test_notes_that_were_cut_count_as_none_with_a_warning(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(run_dir, 3, 9, best=3)
    export(run_dir, Exported(LAST, 9, "last"))
    for note in (run_dir / "exported.json", run_dir / "checkpoints" / "best.json"):
        note.write_text(note.read_text()[:-4])
    assert overrides_for_model(run_dir, "best")[1].endswith("step_9 (last; no best model is known)")
    assert "exported.json cannot be read" in caplog.text
    assert "best.json cannot be read" in caplog.text


def test_what_was_exported_can_be_withdrawn(run_dir: Path) -> None:
    save(run_dir, 3)
    export(run_dir, Exported(LAST, 3, "last"))
    forget_exported(run_dir)
    forget_exported(run_dir)
    assert overrides_for_model(run_dir, "best")[1].endswith("step_3 (last; no best model is known)")


def test_folders_without_a_run_or_a_model_are_refused(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("{}")
    with pytest.raises(UserError, match="has no model yet"):
        overrides_for_model(run_dir, "best")
    (run_dir / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"this folder has no run(?s:.*)such as runs/my_run/20261122-142359"):
        overrides_for_model(run_dir, "best")


def test_of_a_folder_of_runs_the_newest_is_named(tmp_path: Path) -> None:
    for name in ("20260101-000000", "20260102-000000", "20260103-000000-eval", "notes"):
        (tmp_path / name).mkdir()
        if name != "notes":
            (tmp_path / name / "config.yaml").touch()
    with pytest.raises(UserError, match=r"did you mean .*/20260102-000000, the newest run in this folder"):
        overrides_for_model(tmp_path, "best")


def test_a_run_that_was_better_before_training_says_so(tmp_path):
    def record(*values: tuple[int, float]) -> str | None:
        lines = [json.dumps({"step": step, "stage": "train", "val/acc": value}) for step, value in values]
        half = '{"step": 3, "st'  # of a run that was killed
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, half]))
        return untrained_best_note(tmp_path)

    assert record((0, 0.4), (2, 0.1)) is None  # not a run's folder
    (tmp_path / "run.json").write_text('{"config": {"trainer": {"best_metric": "val/acc"}}}')
    assert "val/acc was 0.4 before training and 0.1 at best after it" in (record((0, 0.4), (2, 0.1)) or "")
    assert record((0, 0.4), (2, 0.4)) is None
    assert record((2, 0.1)) is None
    write_exported(tmp_path, [Exported("hf_best", 0, "best")])
    (tmp_path / "hf_best").mkdir()
    (tmp_path / "hf_best" / "config.json").touch()
    assert record((0, 0.4), (2, 0.1)) is None
