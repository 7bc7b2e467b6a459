from pathlib import Path

from megarl.config.fields import iter_keys
from megarl.describe import write_reference

DOC = Path(__file__).parents[1] / "docs" / "recipes.md"


def test_documentation_of_keys_is_up_to_date(tmp_path):
    copy = tmp_path / "recipes.md"
    copy.write_text(DOC.read_text())
    assert not write_reference(copy), "run python -m megarl.describe docs/recipes.md"


def test_every_key_has_a_description():
    assert [key.path for key in iter_keys() if not key.info.description] == []
