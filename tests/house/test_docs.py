"""Code and commands in the documentation are those of this version."""

from __future__ import annotations

import json
import re
import shlex
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def code_with(text: str, page: str) -> str:
    """The one block of Python on a page that holds `text`."""
    (source,) = (block for block in blocks(ROOT / "docs" / page, "python") if text in block)
    return source


def commands(page: Path) -> list[str]:
    """Lines that call `megarl` with literal arguments; placeholders in brackets and comments do not count."""
    lines = [line.partition(" #")[0].strip() for text in blocks(page, "") for line in text.splitlines()]
    return [line for line in lines if line.startswith("megarl ") and not re.search(r"[\[\]|]", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for command in commands(page):
        _, rest = build_parser().parse_known_args(shlex.split(command)[1:])
        assert not [text for text in rest if text.startswith("-")], command


def example() -> types.ModuleType:
    """The worked example of docs/architecture.md, as the module it says it is."""
    (source,) = (text for text in blocks(ROOT / "docs/architecture.md", "python") if "def build_graph" in text)
    module = types.ModuleType("my_pipeline")
    exec(compile(source, "my_pipeline.py", "exec"), module.__dict__)
    return module


def test_example_pipeline_builds_the_graph_that_the_page_shows() -> None:
    from megarl.config.run import RunConfig

    graph = example().build_graph(RunConfig(name="example"))

    shown = (ROOT / "docs/architecture.md").read_text()
    assert f"  {' -> '.join(graph.order())}\n" in shown


def test_the_page_shows_how_a_role_that_does_not_exist_is_refused() -> None:
    from megarl.config.run import RunConfig
    from megarl.errors import UserError

    source, module = code_with("def surprise", "architecture.md"), types.ModuleType("my_pipeline")
    exec(compile(source.replace("actor: ActorRole", "aktor: ActorRole"), "my_pipeline.py", "exec"), module.__dict__)
    with pytest.raises(UserError) as caught:
        module.build_graph(RunConfig(name="example"))
    assert f"megarl: {caught.value}\n" in (ROOT / "docs/architecture.md").read_text()


def test_example_stage_takes_the_price_off_every_token() -> None:
    from megarl.data.batch import Batch, Jagged
    from megarl.metrics import Metrics

    worker = types.SimpleNamespace(metrics=Metrics())
    samples = Batch({"token_rewards": Jagged.from_list([[0.0, 1.0], [0.5]])})

    priced = example().token_price(worker, samples, price=0.25)

    assert priced["token_rewards"].values.tolist() == [-0.25, 0.75, 0.25]
    assert worker.metrics.result() == {"price/per_sample": 0.375}


def test_recipe_of_the_readme_is_valid(tmp_path: Path) -> None:
    from megarl.config.load import load_config

    (text,) = blocks(ROOT / "README.md", "yaml")
    path = tmp_path / "my_run.yaml"
    path.write_text(text)

    assert load_config(path).name == "my_run"


def test_the_site_has_every_page() -> None:
    named = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(["index.md", *(page.name for page in PAGES[1:])])


def test_the_reward_of_the_readme_scores_its_row() -> None:
    (row,), (source,) = blocks(ROOT / "README.md", "json"), blocks(ROOT / "README.md", "python")
    names: dict[str, Any] = {}
    exec(source, names)
    samples = [{"response": said, **json.loads(row)} for said in ("132", " 132\n", "133")]
    assert names["score"](samples) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_and_yaml_of_a_page_can_be_read(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")
    for text in blocks(page, "yaml"):
        yaml.safe_load(text.replace("!replace ", ""))
