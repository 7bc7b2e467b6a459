"""Which checkpoint is the best, and where the reference of a resumed run is."""

from __future__ import annotations

import pytest

from megarl.errors import ConfigError
from megarl.runtime.checkpoints import changed_keys, check_best_metric
from megarl.runtime.reference import kept_reference, put_aside


def test_a_misspelt_best_metric_names_those_that_exist():
    numbers = {"val/acc": 0.5, "val/prompts": 8.0}
    check_best_metric(None, numbers)
    check_best_metric("val/acc", numbers)
    with pytest.raises(ConfigError, match=r"trainer.best_metric(?s:.*)val/acc, val/prompts(?s:.*)mean val/acc"):
        check_best_metric("val/ac", numbers)


def test_the_reference_is_beside_the_checkpoints(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"kept no reference model(?s:.*)set reference.path"):
        kept_reference(checkpoint)
    (tmp_path / "run" / "reference").mkdir()
    (tmp_path / "run" / "reference" / "config.json").write_text("{}")
    assert kept_reference(checkpoint) == tmp_path / "run" / "reference"


def test_a_run_that_starts_anew_leaves_the_reference_with_its_old_checkpoints(tmp_path):
    def model(folder):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    old = [tmp_path / f"checkpoints.old-{k}" for k in (1, 2, 3)]
    for folder in old:
        folder.mkdir()
    model(tmp_path / "reference")
    put_aside(tmp_path, old[1])  # the first time the run only went back to an earlier step
    newest = model(tmp_path / "reference")
    assert [kept_reference(folder / "step_1") for folder in old] == [old[1] / "reference"] * 2 + [newest]
    assert kept_reference(tmp_path / "checkpoints" / "step_1") == newest


def test_changed_settings_are_named():
    before = {"name": "a", "trainer": {"steps": 3, "resume": "auto"}, "data": {"files": ["x"]}, "gone": 1}
    now = {"name": "a", "trainer": {"steps": 5, "resume": "never"}, "data": {"files": ["y"]}, "new": 1}
    assert list(changed_keys(before, now)) == ["trainer.steps: 3 -> 5", "data.files: ['x'] -> ['y']"]
