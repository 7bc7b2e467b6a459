"""YAML that is nested too deeply, or that a few aliases make enormous, is refused where it is read."""

import pytest
import yaml

from megarl.config.yamlio import parse_tagged, parse_texts, parse_value, read_yaml
from megarl.system.errors import ConfigError

LISTS = "[" * 400 + "]" * 400
MAPPINGS = "{a: " * 400 + "1" + "}" * 400
OF_LISTS = "\n".join([f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10 if i else ['x'] * 10)}]" for i in range(12)])
OF_MAPPINGS = "\n".join(
    [f"a{i}: &a{i} {{l: {f'*a{i - 1}' if i else 1}, r: {f'*a{i - 1}' if i else 2}}}" for i in range(40)]
)
CHAIN = "\n".join([f"a{i}: &a{i} [{f'*a{i - 1}' if i else 'x'}]" for i in range(200)])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"a: {LISTS}", "the file nests mappings and lists more than 64 levels deep"),
        (f"a: {MAPPINGS}", "the file nests mappings and lists more than 64 levels deep"),
        (CHAIN, "the file nests mappings and lists more than 64 levels deep"),
        (OF_LISTS, "the file with its aliases written out has more than 1,000,000 values"),
        (OF_MAPPINGS, "the file with its aliases written out has more than 1,000,000 values"),
        ("a: &a [1, *a]", "an alias leads back to the list that contains it"),
        ("a: &a {b: [*a]}", "an alias leads back to the mapping that contains it"),
    ],
    ids=["lists", "mappings", "chain", "bomb-lists", "bomb-mappings", "cycle", "cycle-of-both"],
)
def test_a_file_is_refused_at_its_line(tmp_path, text, problem):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="this is not valid YAML") as caught:
        read_yaml(file)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", [LISTS, MAPPINGS], ids=["lists", "mappings"])
@pytest.mark.parametrize("read", [parse_value, parse_texts, lambda text: parse_tagged(text, ("a",), "override")])
def test_an_override_is_refused(text, read):
    with pytest.raises(yaml.YAMLError, match="more than 64"):
        read(text)


def test_aliases_of_usual_size_are_read(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("base: &base {x: [1, 2]}\nother: {<<: *base, y: 3}\nboth: [*base, *base]\n")
    assert read_yaml(file).data["other"] == {"x": [1, 2], "y": 3}
