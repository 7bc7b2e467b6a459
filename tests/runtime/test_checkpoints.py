"""Which checkpoint is the best, and where the reference of a resumed run is."""

from __future__ import annotations

import pytest

from megarl.errors import ConfigError
from megarl.runtime.checkpoints import check_best_metric
from megarl.runtime.reference import kept_reference


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
