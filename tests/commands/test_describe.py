from pathlib import Path

import pytest

from megarl.algorithms.registry import Settings
from megarl.commands.describe import reference, write_reference
from megarl.config.fields import iter_keys
from megarl.recipes.components import COMPONENTS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["keys.md", "models.md"])
def test_generated_parts_of_pages_are_up_to_date(tmp_path, page):
    copy = tmp_path / page
    copy.write_text((DOCS / page).read_text())
    assert not write_reference(copy), f"run python -m megarl.commands.describe docs/{page}"


def test_every_key_has_a_description():
    assert [key.path for key in iter_keys() if not key.info.description] == []


def test_the_key_that_names_a_component_is_that_of_its_section(monkeypatch):
    class Own(Settings):
        most: float = 1.0

    monkeypatch.setattr(type(COMPONENTS), "settings_of", lambda *_: Own)
    text = reference()
    for key in ("algorithm.kl.estimator", "algorithm.distillation.estimator", "algorithm.filter.name", "reward.name"):
        assert f"components that `{key}` may choose" in text
    assert "algorithm.kl.name" not in text


def test_sections_of_one_class_share_a_table_and_name_their_own_defaults():
    text = reference()
    assert "## `actor.optim`" in text
    assert "## `critic.optim`" not in text
    assert "| [`optim`](#actoroptim) | section |  | optimizer; default of `lr` 1e-05 |" in text
